"""Brings bytes from a read onto a device: through pinned buffers, two per thread, and a stream per thread and device.

A thread reads into one buffer while the other is being copied; the device cuts, casts and places the bytes that have
arrived. From ordinary memory on the training's stream, each copy would block its thread, at a fifth of the link's
speed.
"""

from __future__ import annotations

import threading
from collections.abc import Iterable, Iterator
from contextlib import contextmanager

import torch

from ckptlib.devices import accelerator, cuda

SMALLEST_BYTES = 1 << 20
"""The least bytes of a buffer: making one takes longer than filling it."""


class _Berth:
    """One thread's buffers and streams. Only its own thread uses it until everything has landed."""

    def __init__(self) -> None:
        self.buffers: list[torch.Tensor | None] = [None, None]
        self.busy: list[list[torch.Event]] = [[], []]
        """By buffer: the events to wait for before it is filled again."""
        self.at = 0
        self.streams: dict[torch.device, torch.Stream] = {}


class Landing:
    """The landing of one load. The thread that loads makes and closes it."""

    def __init__(self, targets: Iterable[torch.Tensor]) -> None:
        """Call it when no stream has these tensors to read or to write any more."""
        devices = set(map(accelerator.device_of, targets))
        self._devices = {device for device in devices if device is not None and accelerator.has_streams(device)}
        self._local = threading.local()
        self._berths: list[_Berth] = []

    @property
    def needed(self) -> bool:
        """Whether any target is on a device with streams."""
        return bool(self._devices)

    def device(self, target: torch.Tensor) -> torch.device | None:
        """Returns the device whose buffer takes a target's bytes; None: they are read straight into the target."""
        if not self._devices:  # asked for each of thousands of small tensors
            return None
        found = accelerator.device_of(target)
        return found if found in self._devices else None

    def _berth(self) -> _Berth:
        found: _Berth | None = getattr(self._local, "berth", None)
        if found is None:
            found = self._local.berth = _Berth()
            self._berths.append(found)
        return found

    def buffer(self, nbytes: int, device: torch.device) -> memoryview:
        """Returns this thread's next buffer, after its last content has landed."""
        berth = self._berth()
        berth.at = 1 - berth.at
        while berth.busy[berth.at]:
            accelerator.wait(berth.busy[berth.at].pop())
        held = berth.buffers[berth.at]
        if held is None or held.numel() < nbytes:
            with accelerator.on(self._stream(berth, device)):
                held = berth.buffers[berth.at] = accelerator.pinned(max(nbytes, SMALLEST_BYTES))
        return held.numpy().data[:nbytes]

    @contextmanager
    def on(self, device: torch.device) -> Iterator[None]:
        """Wraps work that reads this thread's buffer on the device; the buffer is reused only after it."""
        berth = self._berth()
        stream = self._stream(berth, device)
        with accelerator.on(stream):
            try:
                yield
            finally:
                berth.busy[berth.at].append(stream.record_event())

    def _stream(self, berth: _Berth, device: torch.device) -> torch.Stream:
        if device not in berth.streams:
            cuda.relax_capture(device)
            berth.streams[device] = accelerator.new_stream(device)
        return berth.streams[device]

    def close(self) -> None:
        """Waits until everything has landed, even if the load failed: until then the device uses the buffers."""
        for berth in self._berths:
            for events in berth.busy:
                while events:
                    accelerator.wait(events.pop())
        self._berths.clear()
