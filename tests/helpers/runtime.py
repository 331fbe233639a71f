"""CUDA's runtime, as far as host memory is registered with it, and torch's allocator, as far as it counts."""

from __future__ import annotations

import threading
from contextlib import nullcontext
from dataclasses import dataclass, field

import pytest
import torch


@dataclass
class Runtime:
    """Registers host memory piece by piece, until there is no more to be had."""

    room: int = 1 << 62
    """Bytes that may be registered."""
    largest: int = 1 << 62
    """Bytes of one registration."""
    device: int = 0
    """That the trainer's thread has chosen; every other has the first."""
    registered: dict[int, int] = field(default_factory=dict)
    """By address."""
    callers: set[str] = field(default_factory=set)
    contexts: set[int] = field(default_factory=set)
    """Devices on which anything was asked for."""
    initialized: bool = True

    def __post_init__(self) -> None:
        self._trainer = threading.get_ident()
        self._chosen = threading.local()

    def patch(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(torch.cuda, "cudart", lambda: self)
        monkeypatch.setattr(torch.cuda, "is_initialized", lambda: self.initialized)
        monkeypatch.setattr(torch.cuda, "current_device", self.current)
        monkeypatch.setattr(torch.cuda, "device", self.choose)
        monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: None)

    def current(self) -> int:
        chosen = getattr(self._chosen, "device", None)
        return chosen if chosen is not None else self.device if threading.get_ident() == self._trainer else 0

    def choose(self, device: int) -> nullcontext[None]:
        self._chosen.device = device  # by threads that end with it
        return nullcontext()

    def cudaHostRegister(self, address: int, nbytes: int, flags: int) -> int:
        self._note()
        assert flags == 1, "for all devices"
        if nbytes > self.largest or nbytes + sum(self.registered.values()) > self.room:
            return 2
        for start, size in self.registered.items():
            if address < start + size and start < address + nbytes:
                return 712  # cudaErrorHostMemoryAlreadyRegistered
        self.registered[address] = nbytes
        return 0

    def cudaHostUnregister(self, address: int) -> int:
        self._note()
        return 0 if self.registered.pop(address, None) is not None else 713

    def _note(self) -> None:
        self.callers.add(threading.current_thread().name)
        self.contexts.add(self.current())

    def give(self, address: int, nbytes: int) -> None:
        """Memory that torch's allocator has pinned; what was there before is gone."""
        for start, _ in self._touched(address, nbytes):
            del self.registered[start]
        self.registered[address] = nbytes

    def _touched(self, address: int, nbytes: int) -> list[tuple[int, int]]:
        found = list(self.registered.items())  # a thread may be registering more
        return [(start, size) for start, size in found if address < start + size and start < address + nbytes]

    def check(self, address: int, nbytes: int) -> bool:
        """Whether a copy to this memory runs beside the host. Raises what the driver says of one over a boundary."""
        touched = self._touched(address, nbytes)
        if not touched or not nbytes:
            return False
        (start, size), *more = touched
        if more or address < start or address + nbytes > start + size:
            raise RuntimeError("CUDA error: invalid argument")
        return True


@dataclass
class Allocator:
    """Memory of a device: what the driver has, what torch keeps of it, and the most that was ever allocated."""

    total: int
    allocated: int = 0
    reserved: int = 0
    peak: int = 0
    private: int = 0
    """Reserved for graphs, allocated by none."""

    @property
    def free(self) -> int:
        return self.total - self.reserved

    def allocate(self, nbytes: int) -> None:
        """Raises torch.OutOfMemoryError."""
        self.allocated += nbytes
        self.reserved = max(self.reserved, self.allocated + self.private)
        if self.reserved > self.total:
            raise torch.OutOfMemoryError(f"{nbytes} bytes")
        self.peak = max(self.peak, self.allocated)

    def release(self, nbytes: int) -> None:
        self.allocated -= nbytes

    def iterate(self, nbytes: int) -> None:
        """One step of a training that needs so much beside its state."""
        self.allocate(nbytes)
        self.release(nbytes)
