"""Gathers frames into packs, before a pack is put or while it is. Moves no bytes."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator

from ckptlib.format.part import Pack
from ckptlib.writer.coder import Encoded
from ckptlib.writer.packs import Framed, Packer, PackShape
from ckptlib.writer.share import PutChunks

FRAMES_BYTES = 28 * 1024 * 1024
"""Most bytes of frames in one pack, two parts of an upload: they stay in memory until they are put."""

FIRST_FRAMES_BYTES = 4 * 1024 * 1024
"""Bytes of the first such pack: the store waits until it is gathered. Each next one has twice as much: if encoding is
twice as fast as the store, one is gathered before the last one is put."""


class FramePack:
    """Frames that become one pack, in the order in which they are taken."""

    def __init__(self, packer: Packer, head_nbytes: int = 0) -> None:
        """`head_nbytes`: of its header, if room is left for that before it is known."""
        self.head_nbytes = head_nbytes
        self._packer = packer
        self._taken: list[Encoded] = []
        self._closed: tuple[PackShape, list[int]] | None = None

    def take(self, frames: Iterable[Encoded], nbytes: float = math.inf) -> Iterator[bytes]:
        """Yields the bytes of these frames, up to the first that reaches `nbytes` in all; does not keep them."""
        for one in frames:
            assert one.frame is not None
            self._taken.append(one._replace(frame=b""))
            nbytes -= len(one.frame)
            yield one.frame
            if nbytes <= 0:
                return

    def close(self) -> PackShape:
        """Returns the shape of the pack, once all frames are taken."""
        if self._closed is None:
            framed = [Framed(e.chunk, e.coding.codec, e.coding.stored) for e in self._taken if e.coding is not None]
            self._closed = self._packer.pack_frames(framed, self.head_nbytes)
        return self._closed[0]

    def put(self, pack: Pack) -> PutChunks:
        """Returns the chunks that were put, once the pack is in the store."""
        assert self._closed is not None
        taken = self._taken
        return PutChunks(
            (pack,),
            tuple(e.chunk for e in taken),
            (0,) * len(taken),
            tuple(self._closed[1]),
            {e.chunk: e.coding for e in taken if e.coding is not None},
            {e.chunk: e.digest for e in taken if e.digest is not None},
        )


def frames_of(encoded: Iterable[Encoded], raw: list[int]) -> Iterator[Encoded]:
    """Yields those that are frames; adds the chunks of others to `raw`."""
    for one in encoded:
        if one.frame is None:
            raw.append(one.chunk)
        else:
            yield one


def in_packs(frames: Iterable[Encoded]) -> Iterator[list[Encoded]]:
    """Yields the frames of each pack."""
    some: list[Encoded] = []
    nbytes, enough = 0, FIRST_FRAMES_BYTES
    for one in frames:
        more = len(one.frame or b"")
        if some and nbytes + more > enough:
            yield some
            some, nbytes, enough = [], 0, min(2 * enough, FRAMES_BYTES)
        some.append(one)
        nbytes += more
    if some:
        yield some
