"""Digests of raw bytes, which name a chunk and prove that it is whole.

xxh3-128 runs at memory speed and detects every accident. It is no protection against forgery: whoever can write to the
store can forge it. If others can write, choose blake3 when the root is made.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

import xxhash
from typing_extensions import Buffer

from ckptlib.errors import FormatError

XXH3 = "xxh3"
BLAKE3 = "blake3"
ALGORITHMS = (XXH3, BLAKE3)

HEX_WIDTH = 32
"""Hex digits of every digest: 128 bits, for both algorithms."""


def digester(algorithm: str) -> Callable[[Buffer], str]:
    """Returns the function that maps bytes to their digest, 32 hex digits. It releases the GIL for large buffers.

    Raises FormatError for an unknown algorithm, ImportError with the remedy if blake3 is not installed.
    """
    if algorithm == XXH3:
        return _xxh3
    if algorithm == BLAKE3:
        return _blake3()
    raise _unknown(algorithm)


def digester_of_pieces(algorithm: str) -> Callable[[Iterable[Buffer]], str]:
    """Returns a function like `digester`'s for bytes in pieces. It digests each piece before it asks for the next."""
    if algorithm == XXH3:
        return _xxh3_of_pieces
    if algorithm == BLAKE3:
        return _blake3_of_pieces()
    raise _unknown(algorithm)


def _unknown(algorithm: str) -> FormatError:
    return FormatError(f"digest algorithm {algorithm!r} is not one of {', '.join(ALGORITHMS)}; update ckptlib")


def _xxh3(data: Buffer) -> str:
    return str(xxhash.xxh3_128_hexdigest(data))


def _xxh3_of_pieces(pieces: Iterable[Buffer]) -> str:
    hasher = xxhash.xxh3_128()
    for piece in pieces:
        hasher.update(piece)
    return str(hasher.hexdigest())


def _blake3() -> Callable[[Buffer], str]:
    of_pieces = _blake3_of_pieces()
    return lambda data: of_pieces([data])


def _blake3_of_pieces() -> Callable[[Iterable[Buffer]], str]:
    try:
        from blake3 import blake3
    except ImportError as error:
        raise ImportError("this root uses blake3 digests: pip install 'ckptlib[blake3]'") from error

    def hexdigest(pieces: Iterable[Buffer]) -> str:
        hasher = blake3()
        for piece in pieces:
            hasher.update(piece)
        return str(hasher.hexdigest(length=HEX_WIDTH // 2))

    return hexdigest
