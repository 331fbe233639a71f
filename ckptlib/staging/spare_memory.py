"""Memory of a device for snapshots: how much of it training leaves, and which of it is in use.

Training's peak is what torch measured, less what was taken here. What is granted once must not be granted again, though
the driver and the allocator show it as free until training comes to its next peak. A program may have torch measure the
peak anew at any time, so at first all that the allocator has reserved counts as well.
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
"""Bytes left free beside a copy in the device's own memory, for fragmentation and other libraries."""

NUM_SPARES = 2
"""One copy goes to the host while the next snapshot goes to the other: no fence waits for the link."""


@dataclass(frozen=True, slots=True)
class Figures:
    """Bytes of a device."""

    free: int
    """Free bytes, as the driver reports them."""
    reserved: int
    """Bytes reserved by torch's allocator, in use or not."""
    peak: int
    """The most bytes that were ever allocated at one time."""
    private: int
    """Bytes reserved for graphs alone, and not allocated now."""


def figures(device: torch.device) -> Figures | None:
    """Returns a device's figures; None if torch cannot say."""
    module: Any = torch.get_device_module(device)
    try:
        free, _ = module.mem_get_info(device)
        reserved, peak = module.memory_reserved(device), module.max_memory_allocated(device)
    except (AttributeError, NotImplementedError, RuntimeError):
        return None
    return Figures(int(free), int(reserved), int(peak), cuda.idle_in_private_pools(device))


@dataclass(slots=True)
class Grant:
    """Bytes of a device that one owner has."""

    nbytes: int = 0


class Room:
    """The memory that a device has to spare beside its training. All Checkpointers of a process share it: what one of
    them was granted is in the peak that torch has measured."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._training: int | None = None
        """The most bytes that training alone was seen to need; None before the first look."""
        self._peak = 0
        """The peak when the last grant was made or given back."""
        self.granted = 0
        self._left: list[Grant] = []
        """Grants of owners that were collected and gave nothing back, such as a Checkpointer that nobody closed."""

    def grant_to(self, owner: object) -> Grant:
        """Returns the grant of `owner`: nothing yet. It lasts as long as the owner lives, whether given back or not."""
        grant = Grant()
        finalize(owner, self._left.append, grant).atexit = False  # any thread may collect: it must call no device
        return grant

    def nbytes(self) -> int:
        """Returns how many bytes can be granted now."""
        found = figures(self._device)
        if found is None:
            return 0
        if self._training is None:
            self._training = found.reserved - found.private
        if found.peak != self._peak:  # reached with all current grants in place, or measured anew
            self._training = max(self._training, found.peak - self.granted)
            self._peak = found.peak
        while self._left:
            self.granted -= self._left.pop().nbytes
        return max(found.free + found.reserved - found.private - self._training - self.granted - MARGIN_BYTES, 0)

    def take(self, sizes: Collection[int]) -> list[torch.Tensor] | None:
        """Takes zeroed memory, of all sizes or of none; None if there is no room."""
        if sum(sizes) > self.nbytes():
            return None
        try:
            memory = [torch.zeros(size, dtype=torch.uint8, device=self._device) for size in sizes]
        except torch.OutOfMemoryError:  # memory is fragmented
            return None
        self._change(sum(sizes))
        return memory

    def give_back(self, nbytes: int) -> None:
        """Notes that granted bytes are free again."""
        self.nbytes()  # a peak since then was reached with all that was granted until now
        self._change(-nbytes)

    def _change(self, nbytes: int) -> None:
        self.granted += nbytes
        found = figures(self._device)
        self._peak = self._peak if found is None else found.peak


_rooms: dict[torch.device, Room] = {}
"""Kept as long as the process lives: the peak that torch has measured lasts as long."""


class Spare:
    """Memory of a device for the bodies of all slots that one snapshot fills."""

    __slots__ = ("busy", "memory", "works")

    def __init__(self, memory: Mapping[int, torch.Tensor]) -> None:
        self.memory = memory
        """The memory, by the rank whose snapshot it is for."""
        self.busy = False
        """Whether a snapshot in it is still on its way to the host. The main thread sets it, any thread clears it."""
        self.works: WeakKeyDictionary[Pairs, DeviceWork] = WeakKeyDictionary()
        """The copies by way of this memory: they are views of it, so nobody else keeps them. Main thread."""

    @property
    def nbytes(self) -> int:
        return sum(memory.numel() for memory in self.memory.values())


@dataclass(frozen=True, slots=True)
class Body:
    """The size and layout of one slot's body."""

    layout: object
    """The layout of the body; compared by identity."""
    nbytes: int


class Spares:
    """The spare memory of one device; main thread, but for `Spare.busy`."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._room = _rooms.setdefault(device, Room(device))
        self._grant = self._room.grant_to(self)
        self._bodies: dict[int, Body] = {}
        """The bodies for which memory was taken, or was lacking, by rank."""
        self._spares: list[Spare] = []
        self._leaving: list[Spare] = []
        """Memory for an earlier layout, still on its way to the host."""

    @property
    def ready(self) -> bool:
        """Whether the next snapshot need not wait until an earlier one is on the host."""
        return not self._spares or not all(spare.busy for spare in self._spares)

    def take(self, bodies: Mapping[int, Body]) -> Spare | None:
        """Returns memory for these bodies, by rank, busy from now on; None if there is none.

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
        """Replaces the memory. It is given back before more is taken; that of a snapshot in flight when it has
        arrived."""
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
        """Gives back the memory of snapshots that have arrived, and takes what is lacking, if there is room."""
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
        """Gives back all that was granted except `nbytes_left`."""
        self._room.give_back(self._grant.nbytes - nbytes_left)
        self._grant.nbytes = nbytes_left

    def close(self) -> None:
        """Gives all memory back."""
        self._bodies, self._spares, self._leaving = {}, [], []
        self._give_back(0)
