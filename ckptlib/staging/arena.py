"""The arena: the directory in which a rank's slots live, and the rule by which they are reused.

A slot is overwritten only when every rank holds a newer snapshot and nobody reads it. Slots that no live process has
open are unlinked when the next incarnation of the same root asks for it.
"""

from __future__ import annotations

import logging
import os
import tempfile
import threading
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from pathlib import Path

from ckptlib.devices import cuda
from ckptlib.devices.numa import processors_near, running_on
from ckptlib.errors import CorruptData, FormatError, NoRoom
from ckptlib.format.keys import GenerationId, SaveId
from ckptlib.slots.slot import SUFFIX, Slot

log = logging.getLogger(__name__)

MEMORY = Path("/dev/shm")

NEVER = 2**62
"""A step that is never reached."""

_own: set[Path] = set()
"""Slots that any arena of this process has open: its locks do not keep itself out, so only this tells them apart."""


class Arena:
    """The slots of one rank; owned by one thread."""

    def __init__(
        self, root_id: str, generation: GenerationId, directory: Path | None, num_slots: int, pin: bool = True
    ) -> None:
        """`directory`: where slots are made; None: memory (/dev/shm), and a file where that has no room.

        `pin`: whether they are known to the trainer's device, where it has a use for that; not those of replicas, which
        come from a socket for the most part: all that may be locked is for the rank's own.
        """
        self._root_prefix = f"ckptlib-{root_id[:16]}-"
        self._prefix = f"{self._root_prefix}{generation}"
        self._generation = generation
        self._directory = MEMORY if directory is None else directory
        self._fallback = Path(tempfile.gettempdir()) if directory is None else None
        self._num_slots = num_slots
        self._slots: list[Slot] = []
        self._steps: dict[Path, int] = {}
        """What is in the slots that hold something to be kept."""
        self._warming: threading.Thread | None = None
        self._growing: threading.Thread | None = None
        self._left_alone: set[Path] = set()
        """What was told of already."""
        self._pins = pin
        self._device: int | None = None
        """Of the trainer, as its own thread has chosen it: for all others it is the first, on which each rank of a host
        would have a context then. None until this process uses CUDA."""
        self._pinned: dict[Path, int | None] = {}
        """By slot: for which device; None: it was refused."""
        self._pinning: threading.Thread | None = None
        self.on_made: Callable[[Path], None] = lambda path: None
        """Told of each slot when it is made, from any thread: who has it open unlinks it, should this process die."""
        self.on_gone: Callable[[Path], None] = lambda path: None
        """Told of each that is unlinked before the end, so that nobody keeps its memory."""

    @property
    def slots(self) -> list[Slot]:
        return list(self._slots)

    def warm(self, capacity: int) -> None:
        """Makes and touches the slots in the background, so that the first snapshot finds them ready.

        An estimate that does not fit is left to the first snapshot, which knows the size.
        """

        def make() -> None:
            try:
                while len(self._slots) < self._num_slots:
                    slot = self._make(capacity)
                    self._slots.append(slot)
            except NoRoom as error:
                log.warning("%s", error)

        self._join()
        self._choose_device()
        self._warming = threading.Thread(target=make, name="ckptlib-arena", daemon=True)
        self._warming.start()

    def grow(self) -> None:
        """Makes one slot more, once, in the background: nobody waits for it, and without room there is none."""

        def make() -> None:
            try:
                self._slots.append(self._make(max(slot.capacity for slot in self._slots)))
            except NoRoom as error:
                log.warning("%s; snapshots in memory are fewer while one is written to the store", error)

        self._choose_device()
        if self._growing is None and self._slots:
            self._growing = threading.Thread(target=make, name="ckptlib-arena", daemon=True)
            self._growing.start()

    def _join(self) -> None:
        if self._warming is not None:
            self._warming.join()
            self._warming = None

    def take(self, nbytes: int, held_by_all: int, in_use: Collection[Slot]) -> Slot | None:
        """A slot to overwrite, locked, with room for a body of `nbytes`; None while all are needed or read.

        `held_by_all`: the newest step known to be held by all ranks, -1 for none: what is older is not needed.
        `in_use`: slots that somebody still has to read. Of several, the one that was taken first. Raises NoRoom.
        """
        self._join()
        self._choose_device()
        self._pin_later()
        for slot in self._free(held_by_all, in_use):
            if slot.try_write_lock():
                self.mark_void(slot)
                self._slots.remove(slot)
                self._slots.append(slot)
                return slot if slot.capacity >= nbytes else self._grown(slot, nbytes)
        if len(self._slots) < self._num_slots:
            return self._add(nbytes)
        return None

    def needs_held(self, in_use: Collection[Slot]) -> int:
        """The least `held_by_all` with which `take` finds a slot, as far as can be told without locking one.

        -1: any; NEVER: none, until one is no longer in use.
        """
        if len(self._slots) < self._num_slots:
            return -1
        steps = (self._steps.get(slot.path) for slot in self._slots if slot not in in_use)
        return min((-1 if step is None else step + 1 for step in steps), default=NEVER)

    def _free(self, held_by_all: int, in_use: Collection[Slot]) -> list[Slot]:
        steps = ((slot, self._steps.get(slot.path)) for slot in self._slots if slot not in in_use)
        return [slot for slot, step in steps if step is None or step < held_by_all]

    def mark_ready(self, slot: Slot, step: int) -> None:
        """The slot holds a whole snapshot of `step` now."""
        self._steps[slot.path] = step

    def forget(self, after: int, until: int) -> None:
        """Snapshots of steps in (after, until] need not be kept: another rank lacks its own."""
        self._steps = {path: step for path, step in self._steps.items() if not after < step <= until}

    def mark_void(self, slot: Slot) -> None:
        """The slot's content is worth nothing."""
        self._steps.pop(slot.path, None)

    def _grown(self, slot: Slot, nbytes: int) -> Slot:
        self._slots.remove(slot)
        slot.unlink()
        slot.empty()  # others have it open still, and the new one may find no room beside it
        self._drop(slot)
        self.on_gone(slot.path)
        return self._add(nbytes)

    def _add(self, nbytes: int) -> Slot:
        slot = self._make(nbytes)
        self._slots.append(slot)
        slot.try_write_lock()
        return slot

    def _make(self, nbytes: int) -> Slot:
        with running_on(self._processors()):
            slot = self._make_somewhere(nbytes)
            _own.add(slot.path)
            slot.prefault()
        self._pin(slot)
        return slot

    def _choose_device(self) -> None:
        """On the trainer's thread."""
        if self._pins and self._device is None:
            self._device = cuda.current_device()

    def _processors(self) -> frozenset[int]:
        """Those that the device is plugged in beside; none in particular where there is no device."""
        address = None if self._device is None else cuda.pci_address(self._device)
        return frozenset() if address is None else processors_near(address)

    def _pin(self, slot: Slot) -> None:
        if self._device is None or slot.path in self._pinned:
            return
        self._pinned[slot.path] = None
        try:
            cuda.pin(slot.address(), slot.capacity, self._device)
            self._pinned[slot.path] = self._device
        except RuntimeError as error:
            log.warning("copies from the device go by way of a buffer, which takes a thread's time: %s", error)

    def _pin_later(self) -> None:
        """In the background: slots that were made before this process used CUDA. Until then they go by the buffer."""
        slots = [] if self._device is None else [slot for slot in self._slots if slot.path not in self._pinned]

        def pin() -> None:
            for slot in slots:
                self._pin(slot)

        if slots and self._pinning is None:
            self._pinning = threading.Thread(target=pin, name="ckptlib-arena")
            self._pinning.start()

    def _make_somewhere(self, nbytes: int) -> Slot:
        try:
            slot = Slot.create(self._directory, self._prefix, nbytes)
        except NoRoom as error:
            if self._fallback is None:
                raise
            log.warning("%s; using a file in %s, which is slower", error, self._fallback)
            slot = Slot.create(self._fallback, self._prefix, nbytes)
        self.on_made(slot.path)
        return slot

    def _drop(self, slot: Slot) -> None:
        """Lets go of the memory; the file is the caller's."""
        if self._pinning is not None:
            self._pinning.join()
            self._pinning = None
        device = self._pinned.pop(slot.path, None)
        if device is not None:
            cuda.unpin(slot.address(), slot.capacity, device)
        slot.close()
        _own.discard(slot.path)

    @property
    def directories(self) -> list[Path]:
        """Where slots may be, the usual one first."""
        return [directory for directory in (self._directory, self._fallback) if directory is not None]

    def being_read(self) -> list[Path]:
        """Slots of this root, of other generations, that a writer on this host has yet to finish with."""
        with self.others() as slots:
            return [slot.path for slot in slots if slot.being_read()]

    def reclaim(self, but: SaveId | None = None) -> list[Path]:
        """Unlinks the slots of this root, of earlier generations, that no live process on this host has open.

        `but`: those that hold this snapshot stay. What a later generation keeps for its successor is not ours to take.
        """
        with self.others() as slots:
            left_behind = [
                slot
                for slot in slots
                if not self._is_later(slot) and (but is None or not _holds(slot, but)) and slot.abandoned()
            ]
            for slot in left_behind:
                log.info("reclaimed %s, a slot that its processes left behind", slot.path)
                slot.unlink()
                slot.empty()  # its old writer may have it open until the last of them is gone
            return [slot.path for slot in left_behind]

    def _is_later(self, slot: Slot) -> bool:
        """By its name, whose numbers have fixed width. Generations that began at one time may have one number."""
        own = f"{self._generation.number:06d}"
        return slot.path.name.removeprefix(self._root_prefix)[: len(own)] > own

    @property
    def has_others(self) -> bool:
        """Whether slots of this root, of earlier generations, are there."""
        with self.others() as slots:
            return any(not self._is_later(slot) for slot in slots)

    @contextmanager
    def others(self) -> Iterator[list[Slot]]:
        """The slots of this root, of other generations, open for a moment. What is not this user's is left alone.

        Who only looks does not count as having them open: ranks of one host that look at the same time would each take
        the other for an owner, and none would reclaim anything.
        """
        slots = []
        for directory in self.directories:
            for entry in os.scandir(directory):
                path = Path(entry.path)
                other = entry.name.startswith(self._root_prefix) and not entry.name.startswith(self._prefix)
                if other and entry.name.endswith(SUFFIX) and path not in _own:
                    try:
                        slots.append(Slot.open(path))
                        slots[-1].abandon()
                    except FormatError as error:
                        if path.exists() and path not in self._left_alone:
                            self._left_alone.add(path)
                            log.warning("left alone: %s", error)
        try:
            yield slots
        finally:
            for slot in slots:
                slot.close()

    def close(self, unlink: bool) -> None:
        """Lets go of the slots; `unlink` them unless a writer is to finish with them."""
        self._join()
        if self._growing is not None:
            self._growing.join()
        for slot in self._slots:
            if unlink:
                slot.unlink()
            self._drop(slot)
        self._slots.clear()


def _holds(slot: Slot, save: SaveId) -> bool:
    try:
        return slot.read_header().save == save
    except (CorruptData, FormatError):
        return False
