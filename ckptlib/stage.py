"""Staging: the copy of this rank's shards into a slot, and the seal that makes it a snapshot.

Whatever has not earned its overlap is copied before `begin` returns; the rest by a thread, behind the fence. A sample
of the rest is taken first: when slot and source do not both still show it after the copy, somebody wrote past the
fence, and the snapshot is torn and never becomes ready.
"""

from __future__ import annotations

import ctypes
import logging
import queue
import random
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

import torch

from ckptlib.cuda import DeviceCopies
from ckptlib.digests import digester
from ckptlib.documents import encode
from ckptlib.errors import CkptError, WaitTimeout
from ckptlib.manifest import Table
from ckptlib.plan import body_nbytes
from ckptlib.slot import Slot, SlotHeader
from ckptlib.values import Json

log = logging.getLogger(__name__)

OVERLAP_FROM_BYTES = 64 * 1024
"""Below this, handing a tensor over costs as much as copying it at once."""

COPY_TIMEOUT_S = 600.0
"""A copy runs at memory speed; one that takes longer has lost its thread."""

SAMPLE_BYTES = 64
SAMPLES = 2
"""Windows per tensor: 0.5 us each; a write to a whole tensor that leaves both alone is not to be expected."""


class TornSnapshot(CkptError):
    """The state was written to while it was copied; the snapshot is worth nothing."""


@dataclass(frozen=True, slots=True)
class Source:
    """One shard to be copied."""

    name: str
    tensor: torch.Tensor
    """This rank's box of it, of the box's shape; any strides."""
    overlap: bool
    """Whether its only writer waits at the fence."""


Pair = tuple[Source, torch.Tensor]
"""A shard, and the view of the slot that it is copied to."""


@dataclass(frozen=True)
class Content:
    """All of a snapshot but its bytes."""

    header: SlotHeader
    """Without documents."""
    layout: bytes
    table: Table
    values: Mapping[str, Json]
    metrics: Mapping[str, Json]
    created: float
    algorithm: str


class Staging:
    """One snapshot in the making. Sources are kept alive until they are copied."""

    def __init__(self, slot: Slot, content: Content) -> None:
        self.slot = slot
        self.content = content
        self.error: Exception | None = None
        self.seconds = 0.0
        """Of the copy behind the fence."""
        self.device_copies: list[tuple[DeviceCopies, list[Source]]] = []
        """Under way on devices, each with the sources that are copied behind the fence."""
        self._copied = threading.Event()
        self._sealed = threading.Event()

    @property
    def step(self) -> int:
        return self.content.header.save.step

    def wait_copied(self) -> None:
        """Returns when the sources are no longer read; on devices, the current stream is made to wait instead.

        Raises WaitTimeout.
        """
        for copies, _ in self.device_copies:
            copies.hold_compute()
        if not self._copied.wait(COPY_TIMEOUT_S):
            raise WaitTimeout(f"the copy of step {self.step} still read its sources after {COPY_TIMEOUT_S:.0f} s")

    @property
    def done(self) -> bool:
        """Whether it is ready or has failed."""
        return self._sealed.is_set()

    def wait_sealed(self, timeout_s: float | None) -> None:
        """Returns when it is ready. Raises what made it fail, or WaitTimeout."""
        if not self._sealed.wait(timeout_s):
            raise WaitTimeout(f"the snapshot of step {self.step} was not ready within {timeout_s} s")
        if self.error is not None:
            raise self.error


class Stager:
    """The thread that copies and seals; one per rank."""

    def __init__(self, on_sealed: Callable[[Staging], None]) -> None:
        """`on_sealed` is called from the thread, with a staging that is ready or has failed."""
        self._on_sealed = on_sealed
        self._random = random.Random(0xC0FFEE)
        self._jobs: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._views: dict[tuple[str, str], list[torch.Tensor]] = {}
        self._streams: dict[torch.device, torch.cuda.Stream] = {}
        self._thread = threading.Thread(target=self._run, name="ckptlib-stage", daemon=True)
        self._thread.start()

    @torch.no_grad()
    def begin(self, slot: Slot, content: Content, sources: Sequence[Source]) -> Staging:
        """Copies what must be copied now; hands the rest to the thread. `sources` are in the table's order."""
        staging = Staging(slot, content)
        header = replace(content.header, sequence=content.header.sequence - 1)
        slot.write_header(header)
        pairs = list(zip(sources, self._targets(slot, content, sources), strict=True))
        devices = {source.tensor.device for source in sources if source.tensor.device.type == "cuda"}
        for device in devices:
            staging.device_copies.append(self._begin_device(device, [p for p in pairs if p[0].tensor.device == device]))
        later = []
        for source, target in pairs:
            if source.tensor.device in devices:
                continue
            if source.overlap and target.nbytes >= OVERLAP_FROM_BYTES and _movable(source.tensor):
                later.append((source, target))
            else:
                _copy(target, source.tensor)
        samples = [self._sample(source.tensor) for source, _ in later]
        if not later:
            staging._copied.set()
        self._jobs.put(lambda: self._finish(staging, later, samples))
        return staging

    def _begin_device(self, device: torch.device, pairs: list[Pair]) -> tuple[DeviceCopies, list[Source]]:
        stream = self._streams.setdefault(device, torch.cuda.Stream(device))  # type: ignore[no-untyped-call]
        overlaps = [
            p for p in pairs if p[0].overlap and p[1].nbytes >= OVERLAP_FROM_BYTES and p[0].tensor.is_contiguous()
        ]
        chosen = {id(source) for source, _ in overlaps}
        now = [(target, source.tensor) for source, target in pairs if id(source) not in chosen]
        later = [(target, source.tensor) for source, target in overlaps]
        return DeviceCopies(stream, now, later), [source for source, _ in overlaps]

    def _targets(self, slot: Slot, content: Content, sources: Sequence[Source]) -> list[torch.Tensor]:
        """Views of the slot's body, one per shard."""
        key = (str(slot.path), content.table.digest)
        found = self._views.get(key)
        if found is None:
            self._views = {k: v for k, v in self._views.items() if k[1] == content.table.digest}
            found = self._views[key] = _views(slot, content.table, sources)
        return found

    def _sample(self, tensor: torch.Tensor) -> list[tuple[int, bytes]]:
        """(offset, bytes) of a few windows of a movable tensor."""
        last, address, draw = tensor.nbytes - SAMPLE_BYTES, tensor.data_ptr(), self._random.random
        offsets = [int(draw() * last) for _ in range(SAMPLES)]
        return [(offset, ctypes.string_at(address + offset, SAMPLE_BYTES)) for offset in offsets]

    @torch.no_grad()
    def _finish(
        self,
        staging: Staging,
        later: list[Pair],
        samples: list[list[tuple[int, bytes]]],
    ) -> None:
        try:
            began = time.perf_counter()
            try:
                for source, target in later:
                    _copy(target, source.tensor)
                _check_samples(later, samples, staging.step)
            finally:
                staging.seconds = time.perf_counter() - began
                later.clear()
                staging._copied.set()
            for copies, overlapping in staging.device_copies:
                for i in copies.finish():
                    raise _torn(staging.step, overlapping[i].name)
            _seal(staging)
        except Exception as error:  # kept for whoever waits, and told to the other ranks; the thread must live on
            staging.error = error
        self._on_sealed(staging)
        staging._sealed.set()  # last: whoever waited for it may be killed at once, and the writer has its order

    def _run(self) -> None:
        while (job := self._jobs.get()) is not None:
            job()

    def close(self) -> None:
        """Waits for what is under way."""
        self._jobs.put(None)
        self._thread.join()
        self._views.clear()


def _views(slot: Slot, table: Table, sources: Sequence[Source]) -> list[torch.Tensor]:
    body = torch.frombuffer(slot.body, dtype=torch.uint8)
    views = []
    for source, first in zip(sources, table.first_chunks, strict=True):
        offset = table.offsets[first]
        raw = body[offset : offset + source.tensor.nbytes]
        views.append(raw.view(source.tensor.dtype).view(source.tensor.shape))
    return views


def _movable(tensor: torch.Tensor) -> bool:
    """Whether its bytes are what they seem: contiguous, on the host, with no conjugation or negation pending."""
    return tensor.device.type == "cpu" and tensor.is_contiguous() and not tensor.is_conj() and not tensor.is_neg()


def _copy(target: torch.Tensor, source: torch.Tensor) -> None:
    if _movable(source):
        # no dispatch, no autograd, no thread pool that would compete with the trainer's; the GIL is released
        ctypes.memmove(target.data_ptr(), source.data_ptr(), source.nbytes)
    else:
        target.copy_(source)


def _check_samples(later: list[Pair], samples: list[list[tuple[int, bytes]]], step: int) -> None:
    for (source, target), windows in zip(later, samples, strict=True):
        for offset, expected in windows:
            copied = ctypes.string_at(target.data_ptr() + offset, SAMPLE_BYTES)
            now = ctypes.string_at(source.tensor.data_ptr() + offset, SAMPLE_BYTES)
            if not expected == copied == now:
                raise _torn(step, source.name)


def _torn(step: int, name: str) -> TornSnapshot:
    return TornSnapshot(
        f"step {step}: {name} was written to while it was copied; a writer that is not an optimizer of the state must "
        "run inside `with checkpointer.updating():`"
    )


def _seal(staging: Staging) -> None:
    """Digests, documents, and last of all the header that says ready."""
    content, slot = staging.content, staging.slot
    digest, body, table = digester(content.algorithm), slot.body, content.table
    digests = [digest(body[o : o + n]) for o, n in zip(table.offsets, table.nbytes, strict=True)]
    snapshot = encode(
        "snapshot",
        {
            "created": content.created,
            "algorithm": content.algorithm,
            "digests": "".join(digests),
            "metrics": dict(content.metrics),
            "values": dict(content.values),
        },
    )
    places = slot.write_documents(
        body_nbytes(table), {"layout": content.layout, "table": table.encoded.encode(), "snapshot": snapshot}
    )
    slot.write_header(replace(content.header, documents=places))
