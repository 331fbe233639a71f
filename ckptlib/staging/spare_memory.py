"""Memory of a device for snapshots: how much of it the training leaves, and which of it is in use.

The training's peak is what torch measured, without what was taken here: what is granted once is not there to be granted
again, though the driver and the allocator show it as before until the training comes to its next peak. A program may
have torch measure it anew at any time, so at first all that the allocator has reserved counts as well.
"""

from __future__ import annotations

import logging
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Any
from weakref import WeakKeyDictionary, finalize

import torch

from ckptlib.devices import cuda
from ckptlib.staging.copies import Pairs
from ckptlib.staging.prepared_copies import DeviceWork

log = logging.getLogger(__name__)

MARGIN_BYTES = 1 << 30
"""Left free beside a copy in the device's own memory: what fragments, and other libraries, take."""

NUM_SPARES = 2
"""One is copied to the host while the next snapshot is copied into the other: no fence waits for the link."""


@dataclass(frozen=True, slots=True)
class Figures:
    """Bytes of a device."""

    free: int
    """As the driver has it."""
    reserved: int
    """By torch's allocator, in use or not."""
    peak: int
    """The most that was ever allocated at one time."""
    private: int
    """Reserved for graphs alone, and not allocated now."""


def figures(device: torch.device) -> Figures | None:
    """None where torch cannot say."""
    module: Any = torch.get_device_module(device)
    try:
        free, _ = module.mem_get_info(device)
        reserved, peak = module.memory_reserved(device), module.max_memory_allocated(device)
    except (AttributeError, NotImplementedError, RuntimeError):
        return None
    return Figures(int(free), int(reserved), int(peak), cuda.idle_in_private_pools(device))


@dataclass(slots=True)
class Grant:
    """Bytes that somebody has of a device."""

    nbytes: int = 0


class Room:
    """What a device has to spare beside its training. All Checkpointers of a process share it: what one of them was
    granted is in the peak that torch has measured."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._training: int | None = None
        """The most that the training alone was seen to need; None before the first look."""
        self._peak = 0
        """As it was measured when the last grant was made or given back."""
        self.granted = 0
        self._left: list[Grant] = []
        """Of those who were collected and had given nothing back, such as a Checkpointer that nobody closed."""

    def grant_to(self, owner: object) -> Grant:
        """What `owner` has: nothing yet. It has it for as long as it lives, whether it gives it back or not."""
        grant = Grant()
        finalize(owner, self._left.append, grant).atexit = False  # any thread may collect: no call of a device there
        return grant

    def nbytes(self) -> int:
        """How much can be granted now."""
        found = figures(self._device)
        if found is None:
            return 0
        if self._training is None:
            self._training = found.reserved - found.private
        if found.peak != self._peak:  # reached with all in place that is granted now, or measured anew
            self._training = max(self._training, found.peak - self.granted)
            self._peak = found.peak
        while self._left:
            self.granted -= self._left.pop().nbytes
        return max(found.free + found.reserved - found.private - self._training - self.granted - MARGIN_BYTES, 0)

    def take(self, sizes: Collection[int]) -> list[torch.Tensor] | None:
        """Zeroed bytes, of all sizes or of none."""
        if sum(sizes) > self.nbytes():
            return None
        try:
            memory = [torch.zeros(size, dtype=torch.uint8, device=self._device) for size in sizes]
        except torch.OutOfMemoryError:  # it is in pieces
            return None
        self._change(sum(sizes))
        return memory

    def give_back(self, nbytes: int) -> None:
        """What was granted is free again."""
        self.nbytes()  # a peak that came since was reached with all that was granted until now
        self._change(-nbytes)

    def _change(self, nbytes: int) -> None:
        self.granted += nbytes
        found = figures(self._device)
        self._peak = self._peak if found is None else found.peak


_rooms: dict[torch.device, Room] = {}
"""As long as the process: the peak that torch has measured lasts as long."""


class Spare:
    """Memory of a device for the bodies of all slots that one snapshot fills."""

    __slots__ = ("busy", "memory", "works")

    def __init__(self, memory: Mapping[int, torch.Tensor]) -> None:
        self.memory = memory
        """By the rank whose snapshot it is."""
        self.busy = False
        """Whether a snapshot in it is still on its way to the host. Set by the main thread, cleared by any."""
        self.works: WeakKeyDictionary[Pairs, DeviceWork] = WeakKeyDictionary()
        """The copies by way of it: views of it, so nobody else keeps them. Main thread."""

    @property
    def nbytes(self) -> int:
        return sum(memory.numel() for memory in self.memory.values())


@dataclass(frozen=True, slots=True)
class Body:
    """What one slot has to hold."""

    layout: object
    """What lies where in it; compared by identity."""
    nbytes: int


class Spares:
    """Of one device; main thread, but for `Spare.busy`."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._room = _rooms.setdefault(device, Room(device))
        self._grant = self._room.grant_to(self)
        self._bodies: dict[int, Body] = {}
        """By rank: for which there is memory, or was none."""
        self._spares: list[Spare] = []
        self._leaving: list[Spare] = []
        """Of another layout, still on their way to the host."""

    @property
    def ready(self) -> bool:
        """Whether the next snapshot need not wait for an earlier one's way to the host."""
        return not self._spares or not all(spare.busy for spare in self._spares)

    def take(self, bodies: Mapping[int, Body]) -> Spare | None:
        """Memory for these, by rank, busy from now on; None where there is none.

        It is for all of them or for none: a fence that waits for the link of one waits as long as for that of all.
        """
        if any(rank not in self._bodies or self._bodies[rank].layout is not b.layout for rank, b in bodies.items()):
            self._bodies |= bodies
            self._replace()
        elif not all(spare.busy for spare in self._leaving):
            self._fill()
        spare = next((spare for spare in self._spares if not spare.busy), None)
        if spare is not None:
            spare.busy = True
        return spare

    def _replace(self) -> None:
        """Memory is given back before there is another; that of a snapshot on its way when it has arrived."""
        self._leaving += self._spares
        self._spares = []
        self._fill()
        if len(self._spares) < NUM_SPARES:
            told = (
                "the next snapshot waits until that one is on the host"
                if self._spares
                else "snapshots are copied straight to the host, and the next optimizer.step() may wait for that"
            )
            log.warning(
                "%s has no room for %s snapshot of %s bytes on top of the training's peak (%s bytes to spare): %s",
                self._device,
                "a second" if self._spares else "a",
                f"{sum(body.nbytes for body in self._bodies.values()):,}",
                f"{self._room.nbytes():,}",
                told,
            )

    def _fill(self) -> None:
        """Gives back the memory of what has arrived, and takes what is lacking, if there is room."""
        self._leaving = [spare for spare in self._leaving if spare.busy]
        self._give_back(sum(spare.nbytes for spare in (*self._leaving, *self._spares)))
        sizes = {rank: body.nbytes for rank, body in self._bodies.items()}
        while len(self._spares) < NUM_SPARES:
            memory = self._room.take(sizes.values())
            if memory is None:
                break
            self._spares.append(Spare(dict(zip(sizes, memory, strict=True))))
            self._grant.nbytes += self._spares[-1].nbytes

    def _give_back(self, nbytes_left: int) -> None:
        """All that was granted but so many bytes."""
        self._room.give_back(self._grant.nbytes - nbytes_left)
        self._grant.nbytes = nbytes_left

    def close(self) -> None:
        """Gives all of it back."""
        self._bodies, self._spares, self._leaving = {}, [], []
        self._give_back(0)
