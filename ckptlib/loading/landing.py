"""The way of bytes from a read onto a device: pinned buffers, two per thread, and a stream for each of them.

A thread reads into one buffer while the other is on its way; the device cuts, casts and places what has arrived. From
ordinary memory on the training's stream, each copy would hold up its thread, at a fifth of the link's speed.
"""

from __future__ import annotations

import threading
from collections.abc import Iterable, Iterator
from contextlib import contextmanager

import torch

from ckptlib.devices import accelerator, cuda

SMALLEST_BYTES = 1 << 20
"""Of a buffer: to make one takes longer than to fill it."""


class _Berth:
    """One thread's buffers and streams. Only its own thread uses it, until all is landed."""

    def __init__(self) -> None:
        self.buffers: list[torch.Tensor | None] = [None, None]
        self.busy: list[list[torch.Event]] = [[], []]
        """By buffer: the wait that must end before it is filled again."""
        self.at = 0
        self.streams: dict[torch.device, torch.Stream] = {}


class Landing:
    """Of one load: made, and closed, by the thread that asks for it."""

    def __init__(self, targets: Iterable[torch.Tensor]) -> None:
        """No stream has these to read or to write any more."""
        devices = set(map(accelerator.device_of, targets))
        self._devices = {device for device in devices if device is not None and accelerator.has_streams(device)}
        self._local = threading.local()
        self._berths: list[_Berth] = []

    @property
    def needed(self) -> bool:
        """Whether anything comes ashore."""
        return bool(self._devices)

    def device(self, target: torch.Tensor) -> torch.device | None:
        """The buffer for a target's bytes; None: they go straight there."""
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
        """This thread's next buffer; its last content has landed."""
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
        """Around work that reads this thread's buffer on the device; the buffer is reused only after it."""
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
        """Waits until all has landed, whatever became of the load: until then the buffers are the device's."""
        for berth in self._berths:
            for events in berth.busy:
                while events:
                    accelerator.wait(events.pop())
        self._berths.clear()
