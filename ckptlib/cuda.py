"""Staging from CUDA devices: copies on a side stream behind the compute stream, into pinned slots.

Thin on purpose: what must be copied at once holds up the compute stream, the rest is behind an event that the fence
makes the compute stream wait for; the host waits for neither. Where memory of the device is to spare, that event comes
when the copy there is whole, and the host's follows from it. Nothing here synchronises the device.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import chain

import torch

from ckptlib.memory import bytes_of

log = logging.getLogger(__name__)

PIN_BYTES = 1 << 30
"""Registered at a time: the call holds locks in the driver for as long as it touches pages."""

SAMPLE_BYTES = 64

SPARE_MARGIN_BYTES = 1 << 30
"""Left free beside a copy in the device's own memory: what fragments, and other libraries, take."""

Copy = tuple[torch.Tensor, torch.Tensor]
"""Target, source."""


@dataclass(frozen=True, slots=True)
class DeviceWork:
    """What is copied from one device for one slot."""

    now: list[Copy]
    """The compute stream waits for these."""
    later: list[Copy]
    """The fence does."""
    then: list[Copy]
    """From the device's spare memory to the host, where the others go to spare memory: nothing waits."""
    names: list[str]
    """Of what `later` copies."""


def spare_memory(device: torch.device, nbytes: int) -> torch.Tensor | None:
    """Zeroed bytes of a device; None where they do not fit beside the most that was ever allocated at one time."""
    room = spare_nbytes(device)
    try:
        if nbytes <= room:
            return torch.zeros(nbytes, dtype=torch.uint8, device=device)
    except torch.OutOfMemoryError:
        room = 0  # it is in pieces
    log.warning(
        "%s has no room for a snapshot of %s bytes beside the peak of the training (%s to spare): it is copied to the "
        "host at once, and the next optimizer.step() may wait for that",
        device,
        f"{nbytes:,}",
        f"{room:,}",
    )
    return None


def spare_nbytes(device: torch.device) -> int:
    """How much memory of a device is left beside the most that was ever allocated at one time, and a margin."""
    free, _ = torch.cuda.mem_get_info(device)
    taken = torch.cuda.max_memory_allocated(device) - torch.cuda.memory_reserved(device)
    return max(free - taken - SPARE_MARGIN_BYTES, 0)


def pin(address: int, nbytes: int, device: int) -> None:
    """Makes host memory known to the device, so that copies run at the link's speed and beside the host.

    Raises RuntimeError where the driver refuses, for instance beyond the locked-memory limit; nothing is pinned then.
    """

    def register() -> int:
        runtime = torch.cuda.cudart()  # type: ignore[no-untyped-call]
        for n, (start, size) in enumerate(_pieces(address, nbytes)):
            code = int(runtime.cudaHostRegister(start, size, _PORTABLE))
            if code:
                for done, _ in _pieces(address, nbytes)[:n]:
                    runtime.cudaHostUnregister(done)
                return code
        return 0

    code = _aside(device, register)
    if code:
        raise RuntimeError(f"cudaHostRegister of {nbytes:,} bytes failed with code {code}; see ulimit -l")


def unpin(address: int, nbytes: int, device: int) -> None:
    """The inverse of `pin`, before the memory is unmapped."""

    def unregister() -> int:
        runtime = torch.cuda.cudart()  # type: ignore[no-untyped-call]
        return max(int(runtime.cudaHostUnregister(start)) for start, _ in _pieces(address, nbytes))

    _aside(device, unregister)


_PORTABLE = 1
"""cudaHostRegisterPortable: pinned for every device of the process."""


def _pieces(address: int, nbytes: int) -> list[tuple[int, int]]:
    return [(address + at, min(PIN_BYTES, nbytes - at)) for at in range(0, nbytes, PIN_BYTES)]


def _aside(device: int, call: Callable[[], int]) -> int:
    """What a call of the runtime returns, made in a thread of its own, for this device.

    The runtime keeps an error for its thread, and torch raises it there after the next kernel, whosesoever that is. And
    a thread that has chosen no device has the first one: each rank of a host would have a context on that.
    """
    codes: list[int] = []

    def run() -> None:
        with torch.cuda.device(device):
            codes.append(call())

    thread = threading.Thread(target=run, name="ckptlib-pin")
    thread.start()
    thread.join()
    return codes[0] if codes else -1


class DeviceCopies:
    """The copies of one snapshot from one device, begun when it is made. Keeps its sources until they are read."""

    def __init__(self, stream: torch.cuda.Stream, works: Sequence[DeviceWork]) -> None:
        self._stream, self._device = stream, stream.device
        self._names = [name for work in works for name in work.names]
        sources = [source for work in works for _, source in work.later]
        self._targets = [[target for target, _ in work.later] for work in works]
        compute = torch.cuda.current_stream(self._device)
        self._before = _samples(sources)
        stream.wait_stream(compute)
        with torch.cuda.stream(stream):
            for work in works:
                _enqueue(work.now)
            compute.wait_event(stream.record_event())
            for work in works:
                _enqueue(work.later)
            self._after = _samples(sources)
            # spare memory is the next snapshot's as soon as this stream is done; what is on the host is not there yet,
            # and ours until the seal. One slot may go by spare memory, and another have had no room there.
            spare = zip(works, self._targets, strict=True)
            self._copied = [_samples(targets) if work.then else None for work, targets in spare]
            self._read = stream.record_event()
            for work in works:
                _enqueue(work.then)
            self._done = stream.record_event()
        self._used = [copy for work in works for copy in chain(work.now, work.later, work.then)]

    def hold_compute(self) -> None:
        """The current stream does not go on before the sources are read; the host does."""
        torch.cuda.current_stream(self._device).wait_event(self._read)

    def finish(self) -> list[str]:
        """Waits for the copies, on the host; returns the names of what was written to meanwhile."""
        # on the other stream than the one of the training, which would have its backlog waited for; and on the device,
        # since a thread that has chosen none makes itself a context on the first
        with torch.cuda.device(self._device), torch.cuda.stream(self._stream):
            self._done.synchronize()
            self._used.clear()
            landed = (_samples(t) if c is None else c for t, c in zip(self._targets, self._copied, strict=True))
            before, after, copied = self._before.cpu(), self._after.cpu(), torch.cat([found.cpu() for found in landed])
        same = (before == after).all(1) & (before == copied).all(1)
        return [name for name, good in zip(self._names, same.tolist(), strict=True) if not good]


@torch.no_grad()
def _enqueue(copies: Sequence[Copy]) -> None:
    if copies and copies[0][0].device == copies[0][1].device:  # one kernel for hundreds of tensors
        targets, sources = zip(*copies, strict=True)
        torch._foreach_copy_(targets, sources, non_blocking=True)
        return
    for target, source in copies:
        target.copy_(source, non_blocking=True)


@torch.no_grad()
def _samples(tensors: Sequence[torch.Tensor]) -> torch.Tensor:
    """A few bytes from the middle of every tensor, gathered where they are, by one kernel on the current stream."""
    device = tensors[0].device if tensors else torch.device("cpu")
    found = torch.zeros(len(tensors), SAMPLE_BYTES, dtype=torch.uint8, device=device)
    windows = [_window(tensor) for tensor in tensors]
    if windows:
        torch._foreach_copy_([found[i, : w.numel()] for i, w in enumerate(windows)], windows)
    return found


def _window(tensor: torch.Tensor) -> torch.Tensor:
    """Bytes from the middle of a contiguous tensor."""
    data = bytes_of(tensor)
    middle = data.numel() // 2
    return data[middle : middle + SAMPLE_BYTES]


def bring(data: torch.Tensor, device: torch.device) -> Callable[[], torch.Tensor]:
    """Has a few bytes of a device brought to the host, behind what the current stream has to do.

    Nobody waits for it but who calls the result, from any thread, which gives them.
    """
    found = torch.empty(data.numel(), dtype=torch.uint8, device="cpu", pin_memory=True)
    found.copy_(data, non_blocking=True)
    done = torch.cuda.current_stream(device).record_event()

    def wait() -> torch.Tensor:
        with torch.cuda.device(device):
            done.synchronize()
        return found

    return wait
