"""Chunks into frames: with the codec that the user's rules and the store give each, in threads beside the upload.

What a save learns is kept for the next one: how fast the store takes bytes, how fast encoding is and what it saves on
each kind of tensor, and what patches need. Owned by the thread that persists. No torch.
"""

from __future__ import annotations

import logging
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import NamedTuple

from ckptlib.codecs import registry
from ckptlib.codecs.choice import Candidate, Measured, candidate, weigh
from ckptlib.codecs.codec import Codec
from ckptlib.codecs.registry import RAW
from ckptlib.format.digests import digester
from ckptlib.format.part import Part
from ckptlib.format.places import Coding, Loss
from ckptlib.policy.codec import CodecRules
from ckptlib.slots.snapshot import Snapshot
from ckptlib.writer.contents import TensorChunk, tensor_chunk
from ckptlib.writer.patches import PATCH, Attempt, Patches

log = logging.getLogger(__name__)

ENCODERS = 2
"""Threads. They run at the writer's low priority, and one core encodes about a gigabyte per second."""

AHEAD = 2 * ENCODERS
"""Chunks that are encoded before they are asked for; bounds the memory."""

HALF_LIFE = 0.5
"""What a new measurement counts for against those before it."""


class Encoded(NamedTuple):
    """What becomes of a chunk."""

    chunk: int
    frame: bytes | None
    """None: it is stored as it is."""
    coding: Coding | None
    digest: str | None = None
    """Of what the frame decodes to, where that is not the chunk itself."""


@dataclass(slots=True)
class _Kind:
    """What is known of tensors with names and dtypes alike."""

    ratio: float
    encode_bps: float
    why: str = ""


class _Rounded(NamedTuple):
    """What a frame decodes to, where that is not the chunk."""

    digest: str
    absolute: float
    relative: float
    """See `Loss`."""


class _Work(NamedTuple):
    """What one thread did with a chunk."""

    attempt: Attempt | None
    frame: bytes | None
    codec: str
    rounded: _Rounded | None
    seconds: float
    """Of encoding it whole."""


class Coder:
    """Encodes the chunks of one rank's snapshots."""

    def __init__(self, rules: CodecRules, is_local: bool) -> None:
        self._rules, self._is_local = rules, is_local
        self._store_bps: float | None = None
        self._kinds: dict[tuple[str, str], _Kind] = {}
        self._table: object = None
        self._chunks: dict[int, tuple[TensorChunk, Candidate] | None] = {}
        self._patches: Patches | None = None
        self._executor: ThreadPoolExecutor | None = None

    def note_upload(self, nbytes: int, seconds: float) -> None:
        """So many bytes went into the store, in a pack."""
        if nbytes and seconds > 0:
            bps = nbytes / seconds
            self._store_bps = bps if self._store_bps is None else _blend(self._store_bps, bps)

    def forget_patches(self) -> None:
        """What was saved was not what it said, or was not put: nothing is patched before the next whole copy."""
        self._patches = None

    def candidates(self, snapshot: Snapshot, chunks: Sequence[int]) -> tuple[list[int], list[int]]:
        """The chunks that a codec is to be tried on, and those that are stored as they are."""
        if self._table is not snapshot.table:
            self._table, self._chunks, self._patches = snapshot.table, {}, None
        coded: list[int] = []
        raw: list[int] = []
        for chunk in chunks:
            (coded if self._is_tried(snapshot, chunk) else raw).append(chunk)
        return coded, raw

    def _is_tried(self, snapshot: Snapshot, chunk: int) -> bool:
        if chunk not in self._chunks:
            self._chunks[chunk] = self._look_at(snapshot, chunk)
        found = self._chunks[chunk]
        if found is None or found[1].codec == RAW:
            return False
        of, wanted = found
        if not wanted.if_it_pays:
            return True
        return not self._is_local and self._store_bps is not None and self._pays(of)

    def _look_at(self, snapshot: Snapshot, chunk: int) -> tuple[TensorChunk, Candidate] | None:
        of = tensor_chunk(snapshot.table, snapshot.layout, chunk)
        return None if of is None else (of, candidate(self._rules, of.tensor, of.content.dtype))

    def _pays(self, of: TensorChunk) -> bool:
        """Whether encoding does, where nobody asked for it. What was never encoded is, once, to see."""
        kind = self._kinds.get(_kind_of(of))
        if kind is None:
            return True
        verdict = weigh(Measured(self._is_local, self._store_bps, ENCODERS * kind.encode_bps, kind.ratio))
        if verdict.why != kind.why:
            kind.why = verdict.why
            log.info("%s of %s: %s", *_kind_of(of), verdict.why)
        return verdict.encode

    def encode(
        self, body: memoryview, snapshot: Snapshot, chunks: Sequence[int], parent: Part | None
    ) -> Iterator[Encoded]:
        """What becomes of each of these, in their order. A base's pack is counted as the parent's."""
        if not chunks:
            return
        self._patches = self._patches or Patches()
        self._executor = self._executor or ThreadPoolExecutor(ENCODERS, "ckptlib-encode")
        waiting: deque[tuple[int, Future[_Work]]] = deque()
        for chunk in chunks:
            waiting.append((chunk, self._submit(self._executor, self._patches, body, snapshot, chunk, parent)))
            if len(waiting) > AHEAD:
                yield self._finish(self._patches, snapshot, parent, *waiting.popleft())
        while waiting:
            yield self._finish(self._patches, snapshot, parent, *waiting.popleft())

    def _submit(
        self,
        executor: ThreadPoolExecutor,
        patches: Patches,
        body: memoryview,
        snapshot: Snapshot,
        chunk: int,
        parent: Part | None,
    ) -> Future[_Work]:
        of, wanted = self._of(chunk)
        start = snapshot.table.offsets[chunk]
        raw = body[start : start + snapshot.table.nbytes[chunk]]
        codec = registry.find(wanted.codec)
        assert isinstance(codec, Codec)
        attempt = patches.attempt(chunk, of, patches.base_of(parent, chunk)) if codec.lossless else None
        return executor.submit(_work, raw, of, codec, snapshot.algorithm, attempt)

    def _of(self, chunk: int) -> tuple[TensorChunk, Candidate]:
        found = self._chunks[chunk]
        assert found is not None
        return found

    def _finish(
        self, patches: Patches, snapshot: Snapshot, parent: Part | None, chunk: int, work: Future[_Work]
    ) -> Encoded:
        of, _ = self._of(chunk)
        done, nbytes = work.result(), snapshot.table.nbytes[chunk]
        if done.attempt is not None:
            base = patches.base_of(parent, chunk)
            patches.note(chunk, of, base, done.attempt)
            if done.attempt.frame is not None:
                return Encoded(chunk, done.attempt.frame, Coding(PATCH, len(done.attempt.frame), base))
            stored = nbytes if done.frame is None else len(done.frame)
            patches.stored_whole(chunk, of, snapshot.digests[chunk], stored, done.attempt.summary)
        self._learn(of, nbytes, done)
        if done.frame is None:
            return Encoded(chunk, None, None)
        if done.rounded is None:
            return Encoded(chunk, done.frame, Coding(done.codec, len(done.frame)))
        digest, *bound = done.rounded
        loss = Loss(snapshot.digests[chunk], *bound)
        return Encoded(chunk, done.frame, Coding(done.codec, len(done.frame), None, loss), digest)

    def _learn(self, of: TensorChunk, nbytes: int, done: _Work) -> None:
        """How well and how fast this kind of tensor is encoded."""
        ratio = 1.0 if done.frame is None else len(done.frame) / nbytes
        bps = nbytes / max(done.seconds, 1e-9)
        kind = self._kinds.get(_kind_of(of))
        if kind is None:
            self._kinds[_kind_of(of)] = _Kind(ratio, bps)
        else:
            kind.ratio, kind.encode_bps = _blend(kind.ratio, ratio), _blend(kind.encode_bps, bps)


def _work(
    raw: memoryview, of: TensorChunk, codec: Codec, algorithm: str, attempt: Callable[[memoryview], Attempt] | None
) -> _Work:
    tried = None if attempt is None else attempt(raw)
    if tried is not None and tried.frame is not None:
        return _Work(tried, None, PATCH, None, 0.0)
    began = time.monotonic()
    frame = codec.encode(raw, of.content)
    seconds = time.monotonic() - began
    rounded = None if frame is None or codec.lossless else _rounded(codec, memoryview(frame), len(raw), algorithm)
    return _Work(tried, frame, codec.name, rounded, seconds)


def _rounded(codec: Codec, frame: memoryview, nbytes: int, algorithm: str) -> _Rounded:
    from ckptlib.codecs.lossy_codec import LossyCodec  # for the few who ask for it

    assert isinstance(codec, LossyCodec)
    out = memoryview(bytearray(nbytes))
    codec.decode(frame, out)
    return _Rounded(digester(algorithm)(out), *codec.bound(frame))


def _kind_of(of: TensorChunk) -> tuple[str, str]:
    """The last word of its name, and its dtype: what layers have in common."""
    return of.tensor.rpartition("/")[2].rpartition(".")[2], of.content.dtype


def _blend(before: float, now: float) -> float:
    return before * (1 - HALF_LIFE) + now * HALF_LIFE
