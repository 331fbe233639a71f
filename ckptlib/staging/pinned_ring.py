"""Copies from a device to host memory that it cannot copy to at full speed, through two buffers that it can.

This is for slots that cannot be registered with the driver: beyond the locked-memory limit, and on all accelerators but
CUDA's.
"""

from __future__ import annotations

import ctypes
from collections.abc import Iterable
from typing import NamedTuple

import torch

from ckptlib.devices import accelerator

RING_BYTES = 16 << 20
"""The bytes of each buffer: a copy then takes 0.3 ms to 1 ms, far more than the two calls around it."""


class Move(NamedTuple):
    """Bytes of the host, and as many bytes of a device that go there."""

    target: torch.Tensor
    source: torch.Tensor


class Ring:
    """Two buffers; used by one thread at a time."""

    def __init__(self) -> None:
        self._buffers: list[torch.Tensor] = []

    def copy(self, moves: Iterable[Move], stream: torch.Stream) -> None:
        """Copies, and returns when everything is there. `stream`: the current one, whose earlier work is waited for,
        too."""
        if not self._buffers:
            self._buffers = [accelerator.pinned(RING_BYTES) for _ in range(2)]
        under_way: list[tuple[torch.Tensor, torch.Tensor, torch.Event]] = []
        for n, (host, source) in enumerate(_pieces(moves)):
            if len(under_way) == 2:
                _land(*under_way.pop(0))
            buffer = self._buffers[n % 2][: source.numel()]
            buffer.copy_(source, non_blocking=True)
            under_way.append((host, buffer, stream.record_event()))
        for landing in under_way:
            _land(*landing)


def _pieces(moves: Iterable[Move]) -> Iterable[Move]:
    for target, source in moves:
        yield from map(Move, torch.split(target, RING_BYTES), torch.split(source, RING_BYTES))


def _land(host: torch.Tensor, buffer: torch.Tensor, event: torch.Event) -> None:
    accelerator.wait(event)
    ctypes.memmove(host.data_ptr(), buffer.data_ptr(), buffer.numel())  # releases the GIL
