"""Registers slots with the driver of the trainer's device, so that it copies to them at the full speed of its link."""

from __future__ import annotations

import logging
import threading
from collections.abc import Iterable
from pathlib import Path

from ckptlib.devices import cuda
from ckptlib.devices.numa import processors_near
from ckptlib.slots.slot import Slot

log = logging.getLogger(__name__)


class Pinning:
    """Pins the slots of one arena; no other slots may be passed to it."""

    def __init__(self, wanted: bool) -> None:
        self._wanted = wanted
        self._device: int | None = None
        """The trainer's device, as its own thread has chosen it: in all other threads it would be the first, on which
        each rank of a host would then have a context. None until this process uses CUDA."""
        self._pinned: dict[Path, int | None] = {}
        """The device for which each slot is pinned; None if that was refused."""
        self._thread: threading.Thread | None = None

    def choose_device(self) -> None:
        """Notes the device. On the trainer's thread."""
        if self._wanted and self._device is None:
            self._device = cuda.current_device()

    def processors(self) -> frozenset[int]:
        """Returns the processors that the device is plugged in beside; empty, for no preference, if there is no
        device."""
        address = None if self._device is None else cuda.pci_address(self._device)
        return frozenset() if address is None else processors_near(address)

    def pin(self, slot: Slot) -> None:
        if self._device is None or slot.path in self._pinned:
            return
        self._pinned[slot.path] = None
        try:
            cuda.pin(slot.address(), slot.capacity, self._device)
            self._pinned[slot.path] = self._device
        except RuntimeError as error:
            log.warning("cannot pin a slot, so copies from the device go through a buffer and take CPU time: %s", error)

    def pin_later(self, slots: Iterable[Slot]) -> None:
        """Pins, in the background, slots that were made before this process used CUDA. Until then, copies to them go
        through the buffer."""
        late = [] if self._device is None else [slot for slot in slots if slot.path not in self._pinned]

        def pin() -> None:
            for slot in late:
                self.pin(slot)

        if late and self._thread is None:
            thread = threading.Thread(target=pin, name="ckptlib-arena")
            try:
                thread.start()
            except RuntimeError as error:
                log.info("slots are not pinned, so copies from the device go through a buffer: %s", error)
                return
            self._thread = thread

    def unpin(self, slot: Slot) -> None:
        """Unpins a slot, before its memory is unmapped."""
        if self._thread is not None:
            self._thread.join()
            self._thread = None
        device = self._pinned.pop(slot.path, None)
        if device is not None:
            cuda.unpin(slot.address(), slot.capacity, device)
