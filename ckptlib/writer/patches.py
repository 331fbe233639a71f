"""Chooses which chunks are stored as changes of their last whole copy, and keeps what that takes from save to save.

The bytes of the whole copy, the keyframe, are gone when the next save comes. A summary is kept, about a twentieth of
it, in this process: a file beside the slots would take as much memory, and a writer's death only makes the next save
store such chunks whole once more.

Most tensors change as a whole at every save, and a summary of them is made for nothing. So a few chunks of each tensor
are tried first; if a patch of one of them pays, the next whole copy of the tensor's other chunks is summarized, too. A
chunk whose first patch does not pay, such as the hot rows of a table, is tried more and more rarely.

A save is made against its parent, which may lie several saves back while commits are late. So a summary is kept for as
long as a save that may still become a parent needs it. One thread uses this, but for what `attempt` returns, which
other threads run. No torch, no I/O.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import NamedTuple

from ckptlib.codecs import registry
from ckptlib.codecs.codec import SummaryCodec
from ckptlib.codecs.keyframes import Cycle, Trials
from ckptlib.format.keys import SaveId
from ckptlib.format.part import Part
from ckptlib.format.places import Base
from ckptlib.writer import parents
from ckptlib.writer.contents import TensorChunk
from ckptlib.writer.frames import WrongFrame, check_patch

PATCH = "patch"

PROBES = 4
"""Chunks of a shard that are tried first, evenly spread."""

KEYFRAMES_KEPT = parents.KEPT + 1
"""Most keyframes of a chunk: each of the parts that may become a parent may need another one."""


class Attempt(NamedTuple):
    """What a thread found out about a chunk."""

    frame: bytes | None
    """The patch, which is what is stored. None: it does not pay, or there is nothing to make it against."""
    summary: bytes | None
    """Summary of the chunk, should it be stored whole; None: it is not to be kept."""
    wrong: str | None = None
    """Why a patch that would have paid was not taken: it does not give the chunk back."""


@dataclass(slots=True)
class _Keyframe:
    """A whole copy of a chunk."""

    summary: bytes
    cycle: Cycle
    """Counts the bytes of this copy and of the patches against it."""
    last: SaveId
    """The newest save that needs it."""


@dataclass(slots=True)
class _Chunk:
    """The state of one chunk."""

    keyframes: dict[str, _Keyframe] = field(default_factory=dict)
    """Keyframes by digest; newest last."""
    trials: Trials = field(default_factory=Trials)


class Patches:
    """Makes patches of the chunks of one table."""

    def __init__(self) -> None:
        codec = registry.find(PATCH)
        assert isinstance(codec, SummaryCodec)
        self._codec = codec
        self._chunks: dict[int, _Chunk] = {}
        self._paying: set[str] = set()
        """Tensors of which a patch has paid."""

    def attempt(self, chunk: int, of: TensorChunk, base: Base | None) -> Callable[[memoryview], Attempt]:
        """Returns a function of the chunk's bytes that tries a patch, for another thread."""
        known, codec = self._known(chunk, base), self._codec
        tried = self._chunks.get(chunk)
        is_due = (tried is None or tried.trials.due) and (of.tensor in self._paying or _is_probe(of))
        if known is None and not is_due:
            return lambda raw: Attempt(None, None)
        if known is None:
            return lambda raw: Attempt(None, codec.summarize(raw, of.content))
        before, cycle = known.summary, known.cycle

        def run(raw: memoryview) -> Attempt:
            summary = codec.summarize(raw, of.content)
            assert summary is not None, "its keyframe, of equal content, has one"
            frame = codec.encode_by_summaries(raw, memoryview(summary), memoryview(before), of.content)
            if frame is None or cycle.ends_before(len(frame)):
                return Attempt(None, summary)
            try:
                check_patch(codec, raw, frame, memoryview(summary), memoryview(before), of.content)
            except WrongFrame as error:
                return Attempt(None, None, str(error))
            return Attempt(frame, summary)

        return run

    def patched(self, save: SaveId, chunk: int, of: TensorChunk, base: Base, nbytes: int) -> None:
        """Notes that a save stores a chunk as a patch of `nbytes` bytes."""
        known = self._known(chunk, base)
        assert known is not None
        known.cycle, known.last = known.cycle.then(nbytes), save
        self._chunks[chunk].trials = Trials()
        self._paying.add(of.tensor)

    def stored_whole(
        self, save: SaveId, chunk: int, base: Base | None, digest: str, nbytes: int, summary: bytes | None
    ) -> None:
        """Notes that a save stores a chunk whole, in `nbytes` bytes. `base`: what a patch was tried against. `digest`:
        the chunk's."""
        known = self._known(chunk, base)
        if chunk not in self._chunks and summary is None:
            return
        found = self._chunks.setdefault(chunk, _Chunk())
        if known is not None and known.cycle.num_saves == 1:  # not even the first patch pays
            found.trials = found.trials.failed()
        elif summary is None:
            found.trials = found.trials.skipped()
        else:
            found.keyframes.pop(digest, None)
            found.keyframes[digest] = _Keyframe(summary, Cycle(nbytes), save)

    def drop_unneeded(self, chunk: int, base: Base | None, parent: SaveId | None) -> None:
        """Drops summaries of a chunk that no save from this parent on is made against. `base`: the parent's."""
        if chunk not in self._chunks:
            return
        kept = self._chunks[chunk].keyframes
        if parent is not None:
            for digest in [d for d, k in kept.items() if k.last < parent and (base is None or d != base.digest)]:
                del kept[digest]
        while len(kept) > KEYFRAMES_KEPT:
            del kept[next(iter(kept))]

    def _known(self, chunk: int, base: Base | None) -> _Keyframe | None:
        """Returns the keyframe that a base names, if there is a summary of it."""
        found = self._chunks.get(chunk)
        return None if base is None or found is None else found.keyframes.get(base.digest)


def base_of(parent: Part | None, chunk: int) -> Base | None:
    """Returns the last whole copy of a chunk, as its parent knows it; its pack is numbered as in the parent."""
    if parent is None:
        return None
    coding = parent.codings.get(chunk)
    if coding is not None and coding.base is not None:
        return coding.base
    if coding is not None and coding.loss is not None:
        return None  # its decoded bytes are not those that were summarized
    codec, table = None if coding is None else coding.codec, parent.table
    return Base(table.packs[chunk], table.offsets[chunk], parent.stored[chunk], codec, parent.digests[chunk])


def _is_probe(of: TensorChunk) -> bool:
    return of.num <= PROBES or of.position % -(-of.num // PROBES) == 0
