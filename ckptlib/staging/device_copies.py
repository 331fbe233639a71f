"""The copies of a snapshot from one device, on streams of their own beside training's.

Copies that must be made at once hold up training's stream; the others come before an event for which the fence makes
writers wait. If the device has memory to spare, that event comes when the copy on the device is whole, and the host's
copy follows from it on another stream, so that no fence ever waits for the link. The host waits for neither, as long as
its memory is registered with the driver; else the data goes through a ring, which the staging thread drives.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

import torch

from ckptlib.devices import accelerator, cuda
from ckptlib.staging.copies import Pairs
from ckptlib.staging.pinned_ring import Ring
from ckptlib.staging.prepared_copies import Across, DeviceWork
from ckptlib.staging.spare_memory import Body, Spare, Spares
from ckptlib.staging.watch import Counts
from ckptlib.state.raw_bytes import bytes_of, dense


@dataclass(frozen=True, slots=True)
class Lane:
    """The streams of one device, and the ways to host memory that is not registered."""

    copy: torch.Stream
    link: torch.Stream
    """The stream of copies from gathered memory to the host."""
    now: Ring
    """The ring of training's thread."""
    later: Ring
    """The ring of the staging thread."""


class DeviceCopies:
    """The copies of one snapshot from one device, begun when this is made. Keeps its sources alive until they are
    read."""

    def __init__(self, lane: Lane, works: Sequence[DeviceWork], spare: Spare | None) -> None:
        """Begins the copies, on training's thread. `spare`: the memory that `works` go by, given back at the end."""
        self._lane, self._spare = lane, spare
        self._free, self._ringed = list[DeviceWork](), list[DeviceWork]()
        """Works to registered memory, and works that go through the ring."""
        for work in works:
            (self._free if cuda.is_pinned(work.home.data_ptr()) else self._ringed).append(work)
        self.driven = any(work.across_later for work in self._ringed)
        """Whether `drive` reads sources."""
        compute = accelerator.current_stream(lane.copy.device)
        lane.copy.wait_stream(compute)
        with accelerator.on(lane.copy):
            for work in works:
                work.samples.look_before()
                work.inside_now.enqueue()
            for work in self._free:
                _enqueue(work.across_now)
            for work in self._ringed:
                lane.now.copy(work.across_now.moves(), lane.copy)
            compute.wait_event(lane.copy.record_event())
            for work in works:
                work.inside_later.enqueue()
            for work in self._free:
                _enqueue(work.across_later)
            for work in works:
                if work in self._free or not work.across_later:
                    work.samples.look_after()
            self._read = lane.copy.record_event()
        lane.link.wait_event(self._read)
        with accelerator.on(lane.link):
            for work in self._free:
                work.samples.take()
                _enqueue(work.then)
            self._linked = lane.link.record_event()

    @property
    def counts(self) -> list[Counts]:
        """The counts of the writes to what is copied behind the fence."""
        return [work.counts for work in (*self._free, *self._ringed)]

    @property
    def read(self) -> bool:
        """Whether the sources are read, except those that `drive` reads."""
        return self._read.query()

    def hold_compute(self) -> None:
        """Makes the current stream wait until the sources are read, except those that `drive` reads.

        The host does not wait.
        """
        accelerator.current_stream(self._lane.copy.device).wait_event(self._read)

    def drive(self) -> None:
        """Reads the sources that go through the ring. On the staging thread; returns when they are read."""
        if not self.driven:
            return
        lane = self._lane
        cuda.relax_capture(lane.copy.device)
        with accelerator.on(lane.copy):
            for work in self._ringed:
                if work.across_later:
                    lane.later.copy(work.across_later.moves(), lane.copy)
                    work.samples.look_after()
            looked = lane.copy.record_event()
        accelerator.wait(looked)  # the fence opens next: a later sample would take allowed writes for stray ones

    def finish(self) -> list[str]:
        """Waits until everything is on the host; returns the names of tensors that were written to meanwhile. On the
        staging thread."""
        lane = self._lane
        cuda.relax_capture(lane.copy.device)
        try:
            if self._ringed:
                lane.link.wait_stream(lane.copy)
                with accelerator.on(lane.link):
                    for work in self._ringed:
                        work.samples.take()
                        lane.later.copy(work.then.moves(), lane.link)
                    self._linked = lane.link.record_event()
            accelerator.wait(self._linked)
            return [name for work in (*self._free, *self._ringed) for name in work.samples.written()]
        finally:
            self._free.clear()
            self._ringed.clear()
            if (spare := self._spare) is not None:
                self._spare, spare.busy = None, False  # keeping the snapshot must keep no memory of the device


def _by_way_of(spare: Spare, pairs: Pairs, rank: int, device: torch.device) -> DeviceWork:
    """Returns the copies by way of `spare`. They are made once, and go with the memory or the pairs."""
    if pairs not in spare.works:
        spare.works[pairs] = pairs.by_way_of(spare.memory[rank], device)
    return spare.works[pairs]


def _enqueue(across: Across) -> None:
    for target, source in across.moves():
        target.copy_(source, non_blocking=True)


class Devices:
    """Streams, events and memory that a rank's snapshots share, from the first to the last; main thread."""

    def __init__(self, wants_spare: bool) -> None:
        """`wants_spare`: whether devices keep a copy in their own memory, if it fits."""
        self._wants_spare = wants_spare
        self._lanes: dict[torch.device, Lane] = {}
        self._spares: dict[torch.device, Spares] = {}

    @property
    def ready(self) -> bool:
        """Whether another snapshot may begin: if no memory of a device is free for it, it would wait for the link."""
        return all(spares.ready for spares in self._spares.values())

    def begin(self, copied: Sequence[Copied], spare: bool) -> Iterator[DeviceCopies]:
        """Begins the copies of one device after the other, and yields them. If a device has no streams, copies at once.

        `spare`: whether memory of the device may be taken for the snapshot.
        """
        for device in dict.fromkeys(device for slot in copied for pairs in slot.pairs for device in pairs.devices):
            here = [slot for slot in copied if any(device in pairs.devices for pairs in slot.pairs)]
            if accelerator.has_streams(device):
                yield self._begin(device, here, spare and self._wants_spare)
            else:
                _copy_blocking(device, here)

    def _begin(self, device: torch.device, copied: Sequence[Copied], spare: bool) -> DeviceCopies:
        if device not in self._lanes:
            streams = accelerator.new_stream(device), accelerator.new_stream(device)
            self._lanes[device] = Lane(*streams, Ring(), Ring())
        lane, memory = self._lanes[device], None
        if spare:
            if device not in self._spares:
                self._spares[device] = Spares(device)
            memory = self._spares[device].take({slot.rank: slot.body for slot in copied})
        try:
            works = [
                pairs.straight(device) if memory is None else _by_way_of(memory, pairs, slot.rank, device)
                for slot in copied
                for pairs in slot.pairs
                if device in pairs.devices
            ]
            return DeviceCopies(lane, works, memory)
        except BaseException:
            for stream in (lane.copy, lane.link):  # copies in flight write to a slot and memory that are free next
                accelerator.wait(stream.record_event())
            if memory is not None:
                memory.busy = False
            raise

    def clear(self) -> None:
        """Gives all memory back."""
        for spares in self._spares.values():
            spares.close()
        self._spares.clear()


@dataclass(frozen=True, slots=True)
class Copied:
    """The copies from devices into one slot."""

    rank: int
    body: Body
    pairs: list[Pairs]


def _copy_blocking(device: torch.device, copied: Iterable[Copied]) -> None:
    for pair in (pair for slot in copied for pairs in slot.pairs for pair in pairs.all if pair.device == device):
        bytes_of(pair.target).copy_(bytes_of(dense(pair.source.tensor)))
