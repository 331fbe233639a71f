"""The arena: the directory in which a rank's slots live, and the rule by which they are reused.

A slot is overwritten only when every rank holds a newer snapshot and nobody reads it.
"""

from __future__ import annotations

import logging
import os
import weakref
from collections.abc import Callable, Collection
from pathlib import Path

from ckptlib.devices.numa import running_on
from ckptlib.errors import NoRoom
from ckptlib.format.keys import GenerationId
from ckptlib.jobs import Job, JobThread
from ckptlib.slots import files
from ckptlib.slots.slot import Slot
from ckptlib.staging.other_slots import OPEN, OtherSlots, prefix_of
from ckptlib.staging.pinning import Pinning

log = logging.getLogger(__name__)

NEVER = 2**62
"""A step that is never reached."""


def directories(given: Path | None) -> list[Path]:
    """Returns where the slots of a job that was given this directory may be, the usual place first.

    Each is a real path: a process that opened one of its own slots by another path would drop its locks on it.
    """
    return [Path(os.path.realpath(path)) for path in (files.usual() if given is None else (given,))]


def searched(given: Path | None) -> list[Path]:
    """Returns where other jobs' slots, and the files of their writers, may be, for a job that was given this directory:
    the others may have been given none."""
    return [*dict.fromkeys([*directories(given), *filter(os.path.isdir, directories(None))])]


class Arena:
    """The slots of one rank; owned by one thread."""

    def __init__(
        self, root_id: str, generation: GenerationId, directory: Path | None, num_slots: int, pin: bool = True
    ) -> None:
        """`directory`: where slots are made; None for memory (/dev/shm), and a file if that has no room.

        `pin`: whether to register slots with the trainer's device, if it needs that. Not for replicas, which mostly
        come from a socket: all memory that may be locked is for the rank's own slots.
        """
        self._prefix = prefix_of(root_id, generation)
        self._directory, *self._fallbacks = directories(directory)
        self.others = OtherSlots(root_id, generation, searched(directory))
        self._num_slots = num_slots
        self._slots: list[Slot] = []
        self._steps: dict[Slot, int] = {}
        """The steps of the snapshots in slots that must be kept."""
        self._warming: JobThread | None = None
        self._growing: JobThread | None = None
        self._pinning = Pinning(pin)
        self.on_made: Callable[[Path], None] = lambda path: None
        """Called with each new slot, from any thread: a process that has it open unlinks it if this one dies."""
        self.on_gone: Callable[[Path], None] = lambda path: None
        """Called with each slot that is unlinked before the end, so that nobody keeps its memory."""

    @property
    def slots(self) -> list[Slot]:
        return list(self._slots)

    def warm(self, capacity: int) -> None:
        """Makes and touches the slots in the background, so that the first snapshot finds them ready.

        If an estimate does not fit, the first snapshot makes the slots: it knows the size.
        """

        def make() -> None:
            try:
                while len(self._slots) < self._num_slots:
                    slot = self._make(capacity)
                    self._slots.append(slot)
            except NoRoom as error:
                log.warning("%s", error)

        self._join()
        self._pinning.choose_device()
        self._warming = self._begin(make)

    def grow(self) -> None:
        """Makes one more slot than needed, in the background: nobody waits for it, and without room there is none. A
        later call tries again once there is room: after a restart, the slots of the job before are still there."""
        capacity = max((slot.capacity for slot in self._slots), default=0)
        # a quota, which the free space does not show, fails each try
        level = logging.WARNING if self._growing is None else logging.INFO

        def make() -> None:
            try:
                self._slots.append(self._make(capacity, must=False))
            except NoRoom as error:
                log.log(level, "%s; memory keeps fewer snapshots while one is being written to the store", error)

        if not self._slots or len(self._slots) > self._num_slots:
            return
        if self._growing is not None and (self._growing.busy or _free_in(self._directory) < 2 * capacity):
            return
        self._pinning.choose_device()
        self._growing = self._begin(make)

    def _begin(self, make: Job) -> JobThread:
        thread = JobThread("arena")
        try:
            thread.put(make)
        except RuntimeError as error:
            log.warning("%s: slots are made when snapshots need them, which wait for that", error)
        thread.leave()
        return thread

    def await_made(self) -> None:
        """Returns when the slots that are made in the background are there and reported."""
        self._join()
        if self._growing is not None:
            self._growing.finish()

    def _join(self) -> None:
        if self._warming is not None:
            self._warming.finish()
            self._warming = None

    def take(self, nbytes: int, held_by_all: int, in_use: Collection[Slot]) -> Slot | None:
        """Returns a locked slot to overwrite, with room for a body of `nbytes`; None while all are needed or read.

        `held_by_all`: the newest step known to be held by all ranks, -1 for none: anything older is not needed.
        `in_use`: slots that somebody still has to read. Of several free slots, takes the one that was taken longest
        ago. Raises NoRoom.
        """
        self._join()
        self._pinning.choose_device()
        self._pinning.pin_later(self._slots)
        for slot in self._free(held_by_all, in_use):
            if slot.try_write_lock():
                self.mark_void(slot)
                # At once: Ctrl-C in between would leave a slot that nobody unlinks.
                self._slots[:] = [*(other for other in self._slots if other is not slot), slot]
                if slot.is_lost:
                    log.warning(
                        "%s was removed, or cut short, below the job; another slot is made in its place", slot.path
                    )
                elif slot.capacity >= nbytes:
                    return self._back_in_memory(slot) or slot
                return self._replaced(slot, max(slot.capacity, nbytes))
        if len(self._slots) < self._num_slots:
            return self._added(self._make(nbytes))
        return None

    def needs_held(self, in_use: Collection[Slot]) -> int:
        """Returns the least `held_by_all` with which `take` finds a slot, as far as can be told without locking one.

        -1 for any; NEVER for none, until a slot is no longer in use.
        """
        if len(self._slots) < self._num_slots:
            return -1
        steps = [self._steps.get(slot) for slot in self._slots if slot not in in_use]
        return min([-1 if step is None else step + 1 for step in steps], default=NEVER)

    def _free(self, held_by_all: int, in_use: Collection[Slot]) -> list[Slot]:
        steps = ((slot, self._steps.get(slot)) for slot in self._slots if slot not in in_use)
        return [slot for slot, step in steps if step is None or step < held_by_all]

    def show(self) -> None:
        """Lets others in this process read the snapshots that must be kept, while the arena is still open. Nobody
        writes to their slots any more."""
        for slot in [*self._steps]:
            OPEN.discard(slot.path)

    def mark_ready(self, slot: Slot, step: int) -> None:
        """Notes that the slot now holds a whole snapshot of `step`."""
        self._steps[slot] = step

    def forget(self, after: int, until: int) -> None:
        """Notes that snapshots of steps in (after, until] need not be kept: another rank lacks its own."""
        self._steps = {slot: step for slot, step in self._steps.items() if not after < step <= until}

    def mark_void(self, slot: Slot) -> None:
        """Notes that the slot's content is worth nothing."""
        self._steps.pop(slot, None)

    def _back_in_memory(self, slot: Slot) -> Slot | None:
        """Replaces a slot in a file on a disk by one in memory, if that has room by now: the job before had not let go
        of its own, or another job has ended since."""
        if slot.path.parent == self._directory or _free_in(self._directory) < 2 * slot.capacity:
            return None  # twice: other ranks check at the same moment
        try:
            found = self._make(slot.capacity, must=False)
        except NoRoom:
            return None
        self._remove(slot)
        return self._added(found)

    def _replaced(self, slot: Slot, nbytes: int) -> Slot:
        self._remove(slot)
        return self._added(self._make(nbytes))

    def _remove(self, slot: Slot) -> None:
        self._slots.remove(slot)
        slot.unlink()
        slot.empty()  # others still have it open, and the new one may find no room beside it
        self._drop(slot)
        self.on_gone(slot.path)

    def _added(self, slot: Slot) -> Slot:
        self._slots.append(slot)
        slot.try_write_lock()
        return slot

    def _make(self, nbytes: int, must: bool = True) -> Slot:
        """Makes a slot. `must`: if memory has no room, an older snapshot is removed for it, or it becomes a file on a
        disk."""
        with running_on(self._pinning.processors()):
            slot = self._make_somewhere(nbytes, must)
            OPEN.add(slot.path)
            weakref.finalize(slot, OPEN.discard, slot.path).atexit = False  # for a job that nobody closed
            slot.prefault()
        self._pinning.pin(slot)
        return slot

    def _make_somewhere(self, nbytes: int, must: bool) -> Slot:
        try:
            slot = self._create(nbytes, must)
        except NoRoom as error:
            if not (self._fallbacks and must):
                raise
            (fallback,) = self._fallbacks
            log.warning("%s; using a file in %s, which is slower", error, fallback)
            slot = Slot.create(fallback, self._prefix, nbytes)
        self.on_made(slot.path)
        return slot

    def _create(self, nbytes: int, must: bool) -> Slot:
        try:
            return Slot.create(self._directory, self._prefix, nbytes)
        except NoRoom:
            if self.others.needed is None or not must:
                raise
            self.others.reclaim(but=[self.others.needed])
            return Slot.create(self._directory, self._prefix, nbytes)

    def _drop(self, slot: Slot) -> None:
        """Lets go of a slot's memory; the file is left to the caller."""
        self._pinning.unpin(slot)
        slot.close()
        OPEN.discard(slot.path)

    def close(self, unlink: bool) -> None:
        """Lets go of the slots; `unlink` them unless a writer is to finish with them."""
        self.await_made()
        for slot in self._slots:
            if unlink:
                slot.unlink()
                slot.empty()  # a forked child still has it open, and may live as long as this process
            self._drop(slot)
        self._slots.clear()


def _free_in(directory: Path) -> int:
    """Returns the free bytes; 0 if the system does not tell."""
    try:
        found = os.statvfs(directory)
    except OSError:
        return 0
    return found.f_bavail * found.f_frsize
