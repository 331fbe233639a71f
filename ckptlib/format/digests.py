"""Digests of raw bytes: what names a chunk and proves that it is whole.

xxh3-128 runs at memory speed and finds every accident. It is no authenticity: whoever can write to the store can
forge it. Where others can write, choose blake3 when the root is made.
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
    """The function that maps bytes to their digest, 32 hex digits. It releases the GIL for large buffers.

    Raises FormatError for an algorithm it does not know; ImportError with the remedy where blake3 is not installed.
    """
    if algorithm == XXH3:
        return _xxh3
    if algorithm == BLAKE3:
        return _blake3()
    raise _unknown(algorithm)


def digester_of_pieces(algorithm: str) -> Callable[[Iterable[Buffer]], str]:
    """As `digester`, for bytes that come in pieces: each is digested before the next one is asked for."""
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
