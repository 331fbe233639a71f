"""Decodes every frame again before it is put, and compares it with its chunk.

Otherwise only the load would find an encoder's bug, when the state is gone. Here a bug costs a few bytes: the chunk is
stored as it is. The memory to decode into is made once per thread, and filled with the complement of the expected
bytes: no byte that a decoder leaves out can be right by chance, or because it was right at the last save. No torch.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import NamedTuple

import numpy as np

from ckptlib.codecs.codec import Codec, Content, SummaryCodec
from ckptlib.format.digests import digester


class WrongFrame(Exception):
    """A frame does not decode to its chunk: a bug of its codec. The message says how."""


class Rounded(NamedTuple):
    """The digest of a decoded frame that differs from its chunk, and by how much it differs."""

    digest: str
    absolute: float
    relative: float
    """See `Loss`."""


class _Memory(threading.local):
    """A thread's memory for decoding, and for the bases of patches: as large as the largest chunk that it has met."""

    def __init__(self) -> None:
        self.decoded, self.base = bytearray(), bytearray()


_memory = _Memory()


def encode(codec: Codec, raw: memoryview, content: Content, algorithm: str) -> tuple[bytes, Rounded | None] | None:
    """Returns a frame that gives `raw` back, or with a lossy codec what it keeps of it; None if the chunk is better
    stored as it is, or there is no memory for anything else.

    Raises WrongFrame, and what else the encoder raises.
    """
    try:
        frame = codec.encode(raw, content)
        if frame is None:
            return None
        with _any_error_is_wrong():
            if not codec.lossless:
                return frame, _rounded(codec, raw, frame, algorithm)
            _check_same(_decoded(raw, frame, codec.decode), raw)
            return frame, None
    except MemoryError:
        return None


def check_patch(
    codec: SummaryCodec, raw: memoryview, frame: bytes, summary: memoryview, base_summary: memoryview, content: Content
) -> None:
    """Checks that a patch gives `raw` back from any base with `base_summary`. Raises WrongFrame, MemoryError."""
    with _any_error_is_wrong():
        if len(_memory.base) < len(raw):
            _memory.base = bytearray(len(raw))
        base = memoryview(_memory.base)[: len(raw)]
        codec.stand_in(raw, summary, base_summary, content, base)
        _check_same(_decoded(raw, frame, lambda frame, out: codec.decode(frame, base, out)), raw)


@contextmanager
def _any_error_is_wrong() -> Iterator[None]:
    """Raises any error but MemoryError as WrongFrame: a bug may raise anything, and there is no I/O here."""
    try:
        yield
    except (WrongFrame, MemoryError):
        raise
    except Exception as error:
        raise WrongFrame(f"it is refused: {type(error).__name__}: {error}") from error


def _decoded(raw: memoryview, frame: bytes, decode: Callable[[memoryview, memoryview], None]) -> bytearray:
    """Returns the decoded frame: its first bytes, as many as `raw` has. They stay until the thread decodes again."""
    if not 0 < len(frame) <= len(raw):
        raise WrongFrame(f"it has {len(frame)} bytes, for a chunk of {len(raw)}")
    if len(_memory.decoded) < len(raw):
        _memory.decoded = bytearray(len(raw))
    out = memoryview(_memory.decoded)[: len(raw)]
    np.invert(np.frombuffer(raw, np.uint8), out=np.frombuffer(out, np.uint8))
    decode(memoryview(frame), out)
    return _memory.decoded


def _check_same(decoded: bytearray, raw: memoryview) -> None:
    if decoded.startswith(raw):  # memcmp: 45 GB/s, and nothing is copied; memoryviews compare byte by byte, 0.4 GB/s
        return
    differs = np.frombuffer(decoded, np.uint8, len(raw)) != np.frombuffer(raw, np.uint8)
    raise WrongFrame(f"{differs.sum()} of {len(raw)} bytes come out wrong, the first at {differs.argmax()}")


def _rounded(codec: Codec, raw: memoryview, frame: bytes, algorithm: str) -> Rounded:
    from ckptlib.codecs.lossy_bound import first_beyond  # for the few who ask for it
    from ckptlib.codecs.lossy_codec import LossyCodec

    assert isinstance(codec, LossyCodec)
    out = memoryview(_decoded(raw, frame, codec.decode))[: len(raw)]
    bound = codec.bound(memoryview(frame))
    beyond = first_beyond(raw, out, bound)
    if beyond is not None:
        raise WrongFrame(f"number {beyond} of {len(raw) // 4} is off by more than it says ({bound})")
    return Rounded(digester(algorithm)(out), *bound)
