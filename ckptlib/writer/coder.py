"""Encodes chunks into frames by the codecs that the user's rules and the store call for, in a thread beside the upload.

It is one thread: numpy's operations end sooner than threads hand over the interpreter's lock, so that two of them
encode no faster than one (0.7 to 1.2 times, measured), and take time from the uploads.

Measurements of one save serve the next: how fast the store takes bytes, how fast encoding is and how much it saves on
each kind of tensor, and the bases of patches. The thread that persists owns them. No torch.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Generator, Sequence, Set
from concurrent.futures import Future, ThreadPoolExecutor, wait
from dataclasses import dataclass, field
from typing import NamedTuple

from ckptlib.codecs import registry
from ckptlib.codecs.choice import Candidate, Measured, candidate, weigh
from ckptlib.codecs.codec import Codec
from ckptlib.codecs.registry import RAW
from ckptlib.format.keys import SaveId
from ckptlib.format.part import Part
from ckptlib.format.places import Base, Coding, Loss
from ckptlib.policy.codec import AUTO, CodecRules
from ckptlib.slots.snapshot import Snapshot
from ckptlib.writer import frames
from ckptlib.writer.contents import TensorChunk, tensor_chunk
from ckptlib.writer.frames import Rounded, WrongFrame
from ckptlib.writer.patches import PATCH, Attempt, Patches, base_of
from ckptlib.writer.rates import Rate

log = logging.getLogger(__name__)

AHEAD_BYTES = 32 * 1024 * 1024
"""Bytes of chunks that are encoded before they are asked for: about one pack of frames, so that the next pack is
encoded while this one is put. Bounds the memory."""

MEASURED_FROM_BYTES = 4 * 1024 * 1024
"""Smaller packs are not measured: they say more of the time of a request than of the speed of the store."""

SAMPLES = 4
"""Chunks of a kind, evenly spread, that are encoded to see whether it pays; without patches, which are tried with few
of all chunks."""

SAMPLED_EVERY = 16
"""Most saves until the next samples of a kind that does not pay: the store and the load of the host may change."""

FIRST_PAUSE = 2
"""Saves until the first new samples of such a kind; the pause doubles each time. The first samples come while a job
begins, and may show a fraction of what encoding reaches later."""


class Encoded(NamedTuple):
    """The coding of a chunk."""

    chunk: int
    frame: bytes | None
    """None: the chunk is stored as it is."""
    coding: Coding | None
    digest: str | None = None
    """Digest of the decoded frame, if that is not the chunk itself."""


Kind = tuple[str, str]
"""A kind of tensor, which all layers share: the last word of its name, and its dtype."""


class _Plan(NamedTuple):
    """How to encode the chunks of one shard."""

    kind: Kind
    wanted: Candidate


@dataclass(slots=True)
class _Learned:
    """Measurements of a kind of tensor."""

    stored: Rate = field(default_factory=Rate)
    """Bytes of frames per byte of chunks."""
    pays: bool | None = None
    num_skipped: int = 0
    """Saves since samples last showed whether encoding pays."""
    pause: int = FIRST_PAUSE
    """Saves until the next samples."""


class _Work(NamedTuple):
    """What the encoder made of a chunk."""

    attempt: Attempt | None
    frame: bytes | None
    rounded: Rounded | None
    wrong: str | None
    """Why a frame was rejected: it does not give the chunk back."""
    ended: float
    """When the encoder ended, by the monotonic clock."""


class _Job(NamedTuple):
    """A chunk that is being encoded."""

    chunk: int
    of: TensorChunk
    kind: Kind
    codec: str | None
    """None: the codec of its tensor is not trusted any more."""
    base: Base | None
    nbytes: int
    began: float
    """When the encoder was given the chunk, by the monotonic clock."""
    work: Future[_Work]


class Coder:
    """Encodes the chunks of one rank's snapshots."""

    def __init__(self, rules: CodecRules, is_local: bool) -> None:
        self._rules, self._is_local = rules, is_local
        self.encodes = _may_encode(rules, is_local)
        """Whether any chunk is ever encoded, whatever the tensors are called; if not, none needs to be looked at."""
        self._store = Rate()
        self._uploads_until = 0.0
        """The time of uploads is accounted for up to here, by the monotonic clock."""
        self._uploads_lock = threading.Lock()
        self._kinds: dict[Kind, _Learned] = {}
        self._table: object = None
        self._encoding = Rate()
        """Seconds in which chunks wait to be encoded, per byte: more if the host has no idle core."""
        self._is_cold = True
        """Whether no chunk but the first was encoded: that pays for memory that is kept, and tells little of others."""
        self._busy_until = 0.0
        """The time of the encoder is accounted for up to here, by the monotonic clock."""
        self._sampled: set[Kind] = set()
        """Kinds of which `candidates` returned samples last."""
        self._plans: list[_Plan | None] = []
        """Plan of each chunk; None: it is stored as it is."""
        self._patches: Patches | None = None
        self._distrusted: set[str] = set()
        """Codecs that made a frame which did not decode to its chunk."""
        self._executor: ThreadPoolExecutor | None = None

    @property
    def samples(self) -> bool:
        """Whether there are samples among the chunks that `candidates` returned last."""
        return bool(self._sampled)

    def note_upload(self, nbytes: int, began: float, ended: float) -> None:
        """Notes that a pack of `nbytes` bytes was put; times are by the monotonic clock. Any thread may call it.

        Time in which several were in flight counts once: the rate is that of all together.
        """
        if nbytes >= MEASURED_FROM_BYTES:
            with self._uploads_lock:
                self._store.add(max(0.0, ended - max(began, self._uploads_until)), nbytes)
                self._uploads_until = max(self._uploads_until, ended)

    def forget_patches(self) -> None:
        """Forgets all patches, since the save failed or its slot was damaged: the next copy of each chunk is whole."""
        self._patches = None

    def comparable(self, snapshot: Snapshot, parent: Part) -> Sequence[str]:
        """Returns the snapshot's digests, but "" for chunks that the parent has rounded in a way that nobody asks for
        now: the job before, from whose memory this one goes on, may have asked for another codec."""
        others = [
            chunk
            for chunk, coding in parent.codings.items()
            if coding.loss is not None and self._asked(snapshot, chunk) != coding.codec
        ]
        if not others:
            return snapshot.digests
        digests = [*snapshot.digests]
        for chunk in others:
            digests[chunk] = ""
        return digests

    def _asked(self, snapshot: Snapshot, chunk: int) -> str | None:
        """Returns the codec that the rules name for a chunk."""
        of = tensor_chunk(snapshot.table, snapshot.layout, chunk)
        return None if of is None else candidate(self._rules, of.tensor, of.content.dtype).codec

    def candidates(self, snapshot: Snapshot, chunks: Sequence[int]) -> tuple[list[int], list[int]]:
        """Returns the chunks that a codec is to be tried on, and those that are stored as they are; both ascending."""
        self._sampled.clear()
        if not self.encodes:
            return [], [*chunks]
        if self._table is not snapshot.table:
            self._table, self._plans, self._patches = snapshot.table, _plans(self._rules, snapshot), None
        coded: list[int] = []
        if_it_pays: dict[Kind, list[int]] = {}
        for chunk in chunks:
            plan = self._plans[chunk]
            if plan is not None:
                (if_it_pays.setdefault(plan.kind, []) if plan.wanted.if_it_pays else coded).append(chunk)
        if not self._is_local and self._store.nbytes:
            for kind, some in if_it_pays.items():
                coded += self._worth_trying(kind, some)
        taken = {*coded}
        return sorted(coded), [chunk for chunk in chunks if chunk not in taken]

    def _worth_trying(self, kind: Kind, chunks: Sequence[int]) -> Sequence[int]:
        """Returns all chunks of a kind if encoding pays, a few now and then if that is not known, or none."""
        learned = self._kinds.setdefault(kind, _Learned())
        if learned.stored.nbytes:
            bps = 1 / max(self._encoding.per_byte, 1e-15)
            store_bps = 1 / max(self._store.per_byte, 1e-15)
            verdict = weigh(Measured(self._is_local, store_bps, bps, learned.stored.per_byte))
            if verdict.encode != learned.pays:
                learned.pays = verdict.encode
                log.info("%s of %s: %s", *kind, verdict.why)
            if verdict.encode:
                learned.pause = FIRST_PAUSE
                return chunks
            learned.num_skipped += 1
            if learned.num_skipped < learned.pause:
                return ()
            learned.pause = min(2 * learned.pause, SAMPLED_EVERY)
        learned.num_skipped = 0
        self._sampled.add(kind)
        return chunks[:: -(-len(chunks) // SAMPLES)]

    def encode(
        self,
        body: memoryview,
        snapshot: Snapshot,
        chunks: Sequence[int],
        parent: Part | None,
        refused: Set[int] = frozenset(),
    ) -> Generator[Encoded, None, None]:
        """Yields the coding of each of these chunks, in their order. A base's pack is numbered as in the parent.

        `refused`: chunks that are not to be stored as changes of what the parent has. `body` is read until the iterator
        ends or is closed. Raises what a codec raises.
        """
        if not chunks:
            return
        self._patches = patches = self._patches or Patches()
        self._executor = self._executor or ThreadPoolExecutor(1, "ckptlib-encode")
        jobs: deque[_Job] = deque()
        nbytes_ahead = 0
        try:
            for chunk in chunks:
                jobs.append(self._submit(self._executor, patches, body, snapshot, chunk, parent, refused))
                nbytes_ahead += jobs[-1].nbytes
                while nbytes_ahead > AHEAD_BYTES:
                    nbytes_ahead -= jobs[0].nbytes
                    yield self._finish(patches, snapshot, parent, jobs.popleft())
            while jobs:
                yield self._finish(patches, snapshot, parent, jobs.popleft())
        finally:  # if the save failed, the slot may be written to again as soon as this is over
            wait([job.work for job in jobs if not job.work.cancel()])

    def _submit(
        self,
        executor: ThreadPoolExecutor,
        patches: Patches,
        body: memoryview,
        snapshot: Snapshot,
        chunk: int,
        parent: Part | None,
        refused: Set[int],
    ) -> _Job:
        of, plan = tensor_chunk(snapshot.table, snapshot.layout, chunk), self._plans[chunk]
        assert of is not None
        assert plan is not None
        start, nbytes = snapshot.table.offsets[chunk], snapshot.table.nbytes[chunk]
        codec, base = registry.find(plan.wanted.codec), None if chunk in refused else base_of(parent, chunk)
        assert isinstance(codec, Codec)
        is_sample = plan.wanted.if_it_pays and plan.kind in self._sampled
        may_patch = codec.lossless and PATCH not in self._distrusted and not is_sample
        attempt = patches.attempt(chunk, of, base) if may_patch else None
        trusted = None if codec.name in self._distrusted else codec
        began = time.monotonic()
        work = executor.submit(_work, body[start : start + nbytes], of, trusted, snapshot.algorithm, attempt)
        return _Job(chunk, of, plan.kind, None if trusted is None else codec.name, base, nbytes, began, work)

    def _finish(self, patches: Patches, snapshot: Snapshot, parent: Part | None, job: _Job) -> Encoded:
        done, chunk, save = job.work.result(), job.chunk, snapshot.header.save
        busy_s = max(0.0, done.ended - max(job.began, self._busy_until))
        self._busy_until = max(self._busy_until, done.ended)
        self._note_wrong(save, job, done)
        if done.attempt is not None:
            found = self._note_attempt(patches, save, parent, job, done, done.attempt, snapshot.digests[chunk])
            if found is not None:
                return found
        if job.codec is None:
            return Encoded(chunk, None, None)
        learned = self._kinds.setdefault(job.kind, _Learned())
        learned.stored.add(job.nbytes if done.frame is None else len(done.frame), job.nbytes)
        if self._is_cold and self._encoding.nbytes:
            self._encoding, self._is_cold = Rate(), False
        self._encoding.add(busy_s, job.nbytes)
        if done.frame is None:
            return Encoded(chunk, None, None)
        if done.rounded is None:
            return Encoded(chunk, done.frame, Coding(job.codec, len(done.frame)))
        digest, *bound = done.rounded
        loss = Loss(snapshot.digests[chunk], *bound)
        return Encoded(chunk, done.frame, Coding(job.codec, len(done.frame), None, loss), digest)

    def _note_wrong(self, save: SaveId, job: _Job, done: _Work) -> None:
        """Stops using a codec that made a wrong frame, and logs that once."""
        found = {PATCH: None if done.attempt is None else done.attempt.wrong, job.codec: done.wrong}
        for codec, wrong in found.items():
            if codec is None or wrong is None or codec in self._distrusted:
                continue
            self._distrusted.add(codec)
            if codec == PATCH:
                self.forget_patches()
            log.error(
                "step %d: codec %s made a wrong frame of %s, chunk %d of %d: %s. Nothing is lost: the frame is not "
                "stored, and this process does not use %s again. A bug of ckptlib, or bad memory: please report it",
                *(save.step, codec, job.of.tensor, job.of.position + 1, job.of.num, wrong, codec),
            )

    def _note_attempt(
        self,
        patches: Patches,
        save: SaveId,
        parent: Part | None,
        job: _Job,
        done: _Work,
        attempt: Attempt,
        digest: str,
    ) -> Encoded | None:
        """Notes the attempt at a patch. Returns the coding if the chunk is stored as that patch."""
        found = None
        if attempt.frame is not None:
            assert job.base is not None
            patches.patched(save, job.chunk, job.of, job.base, len(attempt.frame))
            found = Encoded(job.chunk, attempt.frame, Coding(PATCH, len(attempt.frame), job.base))
        else:
            stored = job.nbytes if done.frame is None else len(done.frame)
            patches.stored_whole(save, job.chunk, job.base, digest, stored, attempt.summary)
        patches.drop_unneeded(job.chunk, job.base, None if parent is None else parent.save)
        return found


def _work(
    raw: memoryview,
    of: TensorChunk,
    codec: Codec | None,
    algorithm: str,
    attempt: Callable[[memoryview], Attempt] | None,
) -> _Work:
    try:
        tried = None if attempt is None else attempt(raw)
    except MemoryError:  # as in `frames.encode`: without memory for either, the chunk is stored as it is
        tried = Attempt(None, None)
    if codec is None or (tried is not None and tried.frame is not None):
        return _Work(tried, None, None, None, time.monotonic())
    try:
        frame, rounded = frames.encode(codec, raw, of.content, algorithm) or (None, None)
    except WrongFrame as error:
        return _Work(tried, None, None, str(error), time.monotonic())
    return _Work(tried, frame, rounded, None, time.monotonic())


def _may_encode(rules: CodecRules, is_local: bool) -> bool:
    words = {word for _, word in rules.rules}
    if not any(pattern == "*" for pattern, _ in rules.rules):
        words.add(AUTO)
    return not words <= ({RAW, AUTO} if is_local else {RAW})


def _plans(rules: CodecRules, snapshot: Snapshot) -> list[_Plan | None]:
    """Returns the plan of each chunk; None for chunks that several small shards share: those are never coded."""
    table, found = snapshot.table, list[_Plan | None]()
    for shard, num in enumerate(table.num_chunks):
        tensor = snapshot.layout.tensors[table.tensors[shard]]
        wanted = candidate(rules, tensor.name, tensor.dtype)
        kind = tensor.name.rpartition("/")[2].rpartition(".")[2], tensor.dtype
        plan = None if wanted.codec == RAW or table.is_shared(shard) else _Plan(kind, wanted)
        found += [plan] * num
    return found
