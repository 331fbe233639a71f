"""Which chunks are stored as changes of their last whole copy, and what is kept for that from save to save.

The bytes of the whole copy, the keyframe, are gone when the next save comes. What is kept of it is a summary, about a
twentieth of it, in this process: in a file beside the slots it would take as much memory, and a writer that dies stores
such chunks whole once more.

Most tensors change as a whole at every save, and a summary of them is made for nothing. So a few chunks of each tensor
are tried first; where patches of them pay, the next whole copy of the tensor's other chunks is summarized, too. One
thread uses this, but for `Attempt`, which may be made by several. No torch, no I/O.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import NamedTuple

from ckptlib.codecs import registry
from ckptlib.codecs.codec import SummaryCodec
from ckptlib.codecs.keyframes import Cycle, Trials
from ckptlib.format.part import Part
from ckptlib.format.places import Base
from ckptlib.writer.contents import TensorChunk

PATCH = "patch"

PROBES = 4
"""Chunks of a shard that are tried first, evenly spread."""

KEYFRAMES_KEPT = 2
"""Of a chunk: the newest one, and the one before it while the step with the newest is not committed."""


class Attempt(NamedTuple):
    """What a thread found out about a chunk."""

    frame: bytes | None
    """None: a patch does not pay, or there is nothing to make it against. Else it is what is stored."""
    summary: bytes | None
    """Of the chunk, should it be stored whole; None: nobody asked for it."""


@dataclass(slots=True)
class _History:
    """What is known of one chunk."""

    keyframes: dict[str, tuple[bytes, Cycle]] = field(default_factory=dict)
    """By digest: the summary of a whole copy, and what it and the patches against it took; newest last."""


@dataclass(slots=True)
class _Tensor:
    """What is known of one tensor."""

    trials: Trials = field(default_factory=Trials)
    pays: bool = False


class Patches:
    """Of the chunks of one table."""

    def __init__(self) -> None:
        self._codec = registry.find(PATCH)
        assert isinstance(self._codec, SummaryCodec)
        self._chunks: dict[int, _History] = {}
        self._tensors: dict[str, _Tensor] = {}

    def base_of(self, parent: Part | None, chunk: int) -> Base | None:
        """The last whole copy of a chunk, as its parent knows it; its pack is counted as the parent's."""
        if parent is None:
            return None
        coding = parent.codings.get(chunk)
        if coding is not None and coding.base is not None:
            return coding.base
        if coding is not None and coding.loss is not None:
            return None  # what it decodes to is not what was summarized
        stored, codec = parent.stored[chunk], None if coding is None else coding.codec
        pack, offset = parent.table.packs[chunk], parent.table.offsets[chunk]
        return Base(pack, offset, stored, codec, parent.digests[chunk])

    def attempt(self, chunk: int, of: TensorChunk, base: Base | None) -> Callable[[memoryview], Attempt]:
        """What may be run in another thread, with the chunk's bytes."""
        codec, history = self._codec, self._chunks.get(chunk)
        known = None if base is None or history is None else history.keyframes.get(base.digest)
        tensor = self._tensors.setdefault(of.tensor, _Tensor())
        wanted = known is not None or ((tensor.pays or _is_probe(of)) and tensor.trials.due)
        assert isinstance(codec, SummaryCodec)

        def run(raw: memoryview) -> Attempt:
            summary = codec.summarize(raw, of.content) if wanted else None
            if summary is None or known is None:
                return Attempt(None, summary)
            frame = codec.encode_by_summaries(raw, memoryview(summary), memoryview(known[0]), of.content)
            return Attempt(None if frame is None or known[1].ends_before(len(frame)) else frame, summary)

        return run

    def note(self, chunk: int, of: TensorChunk, base: Base | None, found: Attempt) -> None:
        """What came of an attempt."""
        history = self._chunks.get(chunk)
        if base is None or history is None or base.digest not in history.keyframes:
            return
        summary, cycle = history.keyframes[base.digest]
        tensor = self._tensors[of.tensor]
        if found.frame is not None:
            history.keyframes[base.digest] = summary, cycle.then(len(found.frame))
            tensor.trials, tensor.pays = Trials(), True
        elif cycle.num_saves == 1 and of.position == 0:  # not even the first one pays; other chunks may say otherwise
            tensor.trials, tensor.pays = tensor.trials.failed(), False

    def stored_whole(self, chunk: int, of: TensorChunk, digest: str, nbytes: int, summary: bytes | None) -> None:
        """A chunk was stored whole, in so many bytes."""
        tensor = self._tensors.setdefault(of.tensor, _Tensor())
        history = self._chunks.setdefault(chunk, _History())
        history.keyframes.pop(digest, None)
        while len(history.keyframes) >= KEYFRAMES_KEPT:
            del history.keyframes[next(iter(history.keyframes))]
        if summary is not None and tensor.trials.due:
            history.keyframes[digest] = summary, Cycle(nbytes)
        elif not history.keyframes:
            del self._chunks[chunk]
        if summary is None and of.position == 0:
            tensor.trials = tensor.trials.skipped()


def _is_probe(of: TensorChunk) -> bool:
    return of.num <= PROBES or of.position % -(-of.num // PROBES) == 0
