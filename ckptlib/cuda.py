"""Staging from CUDA devices: copies on a side stream behind the compute stream, into pinned slots.

Thin on purpose: what must be copied at once holds up the compute stream, the rest is behind an event that the fence
makes the compute stream wait for; the host waits for neither. Nothing here synchronises the device.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from ckptlib.memory import bytes_of

PIN_BYTES = 1 << 30
"""Registered at a time: the call holds locks in the driver for as long as it touches pages."""

SAMPLE_BYTES = 64

Copy = tuple[torch.Tensor, torch.Tensor]
"""Target on the host, source on the device."""


def pin(address: int, nbytes: int) -> None:
    """Makes host memory known to the device, so that copies run at the link's speed and beside the host.

    Raises RuntimeError where the driver refuses, for instance beyond the locked-memory limit.
    """
    runtime = torch.cuda.cudart()  # type: ignore[no-untyped-call]
    for offset in range(0, nbytes, PIN_BYTES):
        code = int(runtime.cudaHostRegister(address + offset, min(PIN_BYTES, nbytes - offset), 0))
        if code:
            raise RuntimeError(f"cudaHostRegister of {nbytes:,} bytes failed with code {code}; see ulimit -l")


def unpin(address: int, nbytes: int) -> None:
    """The inverse of `pin`, before the memory is unmapped."""
    for offset in range(0, nbytes, PIN_BYTES):
        torch.cuda.cudart().cudaHostUnregister(address + offset)  # type: ignore[no-untyped-call]


class DeviceCopies:
    """The copies of one snapshot from one device, begun when it is made. Keeps its sources until they are read."""

    def __init__(self, stream: torch.cuda.Stream, now: Sequence[Copy], later: Sequence[Copy]) -> None:
        """`now`: the compute stream waits for these. `later`: the fence does."""
        self._later = list(later)
        self._device = stream.device
        compute = torch.cuda.current_stream(self._device)
        self._before = _samples(self._later)
        stream.wait_stream(compute)
        with torch.cuda.stream(stream):
            _enqueue(now)
            compute.wait_event(stream.record_event())
            _enqueue(self._later)
            self._after = _samples(self._later)
            self._done = stream.record_event()
        self._sources = [source for _, source in (*now, *later)]

    def hold_compute(self) -> None:
        """The current stream does not go on before the copies are done; the host does."""
        torch.cuda.current_stream(self._device).wait_event(self._done)

    def finish(self) -> list[int]:
        """Waits for the copies, on the host; returns which of `later` were written to meanwhile."""
        self._done.synchronize()
        self._sources.clear()
        if not self._later:
            return []
        before, after = self._before.cpu(), self._after.cpu()
        torn = []
        for i, (target, _) in enumerate(self._later):
            copied = _window(target)
            n = copied.numel()
            if not (torch.equal(before[i, :n], after[i, :n]) and torch.equal(before[i, :n], copied)):
                torn.append(i)
        return torn


@torch.no_grad()
def _enqueue(copies: Sequence[Copy]) -> None:
    for target, source in copies:
        target.copy_(source, non_blocking=True)


@torch.no_grad()
def _samples(copies: Sequence[Copy]) -> torch.Tensor:
    """A few bytes from the middle of every source, gathered by one kernel on the current stream."""
    device = copies[0][1].device if copies else torch.device("cpu")
    found = torch.zeros(len(copies), SAMPLE_BYTES, dtype=torch.uint8, device=device)
    windows = [_window(source) for _, source in copies]
    if windows:
        torch._foreach_copy_([found[i, : w.numel()] for i, w in enumerate(windows)], windows)
    return found


def _window(tensor: torch.Tensor) -> torch.Tensor:
    """Bytes from the middle of a contiguous tensor."""
    data = bytes_of(tensor)
    middle = data.numel() // 2
    return data[middle : middle + SAMPLE_BYTES]
