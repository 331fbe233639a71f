"""What CUDA alone has, and ROCm under its name: registration of host memory, capture modes, where a device is plugged.

All else that a device does for a snapshot is in `ckptlib.staging.device_copies`, by what torch offers for every
accelerator.
"""

from __future__ import annotations

import ctypes
import threading
from collections.abc import Callable, Iterator
from functools import lru_cache
from typing import Any

import torch

PIN_BYTES = 1 << 30
"""Registered at a time: the call holds locks in the driver for as long as it touches pages, and new drivers refuse what
is very large."""

_PORTABLE = 1
"""cudaHostRegisterPortable: pinned for every device of the process."""

_RELAXED = 2
"""cudaStreamCaptureModeRelaxed."""


def current_device() -> int | None:
    """Of this thread; None while this process uses no CUDA. Only the trainer's thread has chosen one."""
    return torch.cuda.current_device() if torch.cuda.is_initialized() else None  # type: ignore[no-untyped-call]


def stretches(address: int, nbytes: int, most: int) -> Iterator[tuple[int, int]]:
    """(first byte, last byte + 1) of what lies between multiples of `most`, wherever the memory begins.

    With a divisor of PIN_BYTES none of them lies in two registrations, which no copy may.
    """
    at = 0
    while at < nbytes:
        stop = min(nbytes, most - (address + at) % most + at)
        yield at, stop
        at = stop


_registered: dict[int, int] = {}
"""Address and bytes of what this process has registered."""


def pin(address: int, nbytes: int, device: int) -> None:
    """Makes host memory known to the device, so that copies run at the link's speed and beside the host.

    Raises RuntimeError where the driver refuses: beyond the locked-memory limit, and a mapped file on a disk (seen with
    driver 580: code 1). Nothing is pinned then.
    """
    pieces = list(stretches(address, nbytes, PIN_BYTES))

    def register() -> int:
        runtime = torch.cuda.cudart()  # type: ignore[no-untyped-call]
        for n, (start, stop) in enumerate(pieces):
            code = int(runtime.cudaHostRegister(address + start, stop - start, _PORTABLE))
            if code:
                for done, _ in pieces[:n]:
                    runtime.cudaHostUnregister(address + done)
                return code
        return 0

    code = _aside(device, register)
    if code:
        raise RuntimeError(
            f"cudaHostRegister of {nbytes:,} bytes failed with code {code}: the driver takes no file on a disk, so "
            "keep slots in /dev/shm, and no more than ulimit -l allows"
        )
    _registered[address] = nbytes


def unpin(address: int, nbytes: int, device: int) -> None:
    """The inverse of `pin`, before the memory is unmapped."""

    def unregister() -> int:
        runtime = torch.cuda.cudart()  # type: ignore[no-untyped-call]
        starts = (address + start for start, _ in stretches(address, nbytes, PIN_BYTES))
        return max(int(runtime.cudaHostUnregister(start)) for start in starts)

    _registered.pop(address, None)
    _aside(device, unregister)


def is_pinned(address: int) -> bool:
    """Whether memory that begins here was pinned whole."""
    return address in _registered


def _aside(device: int, call: Callable[[], int]) -> int:
    """What a call of the runtime returns, made in a thread of its own, for this device.

    The runtime keeps an error for its thread, and torch raises it there after the next kernel, whosesoever that is. And
    a thread that has chosen no device has the first one: each rank of a host would have a context on that.
    """
    codes: list[int] = []

    def run() -> None:
        relax_capture(torch.device("cuda", device))
        with torch.cuda.device(device):
            codes.append(call())

    thread = threading.Thread(target=run, name="ckptlib-pin")
    thread.start()
    thread.join()
    return codes[0] if codes else -1


def relax_capture(device: torch.device) -> None:
    """What this thread asks of the driver from here on breaks no capture of a graph that another thread has begun.

    `device`: one that the thread works with; of another kind than CUDA's, nothing is asked.

    A capture in the mode that torch uses by default is broken by any thread that registers memory or asks for an event,
    unless that thread has said that it knows. Where the call cannot be found, `Checkpointer.drain` before a capture
    keeps the threads from asking.
    """
    is_used = device.type == "cuda" and torch.cuda.is_initialized()  # type: ignore[no-untyped-call]
    exchange = _exchange() if is_used else None
    if exchange is not None:
        with torch.cuda.device(device):  # a thread that has chosen none may get a context on the first by asking
            exchange(ctypes.byref(ctypes.c_int(_RELAXED)))


@lru_cache(maxsize=1)
def _exchange() -> Callable[..., int] | None:
    """Of the runtime that torch has loaded, which Python has no name for."""
    libraries: list[str | None] = [None]
    if torch.version.cuda is not None:
        libraries.append(f"libcudart.so.{torch.version.cuda.partition('.')[0]}")
    for library in libraries:
        for name in ("cudaThreadExchangeStreamCaptureMode", "hipThreadExchangeStreamCaptureMode"):
            try:
                found: Callable[..., int] = getattr(ctypes.CDLL(library), name)
            except (OSError, AttributeError):
                continue
            return found
    return None


def idle_in_private_pools(device: torch.device) -> int:
    """Bytes that the allocator keeps for graphs alone: room for nobody else, whether a graph uses them now or not."""
    segments = torch.cuda.memory_snapshot() if device.type == "cuda" else []  # type: ignore[no-untyped-call]
    return sum(
        segment["total_size"] - segment["allocated_size"]
        for segment in segments
        if segment["device"] == device.index and tuple(segment.get("segment_pool_id", (0, 0))) != (0, 0)
    )


def pci_address(device: int) -> str | None:
    """As /sys has it; None where torch cannot say."""
    found: Any = torch.cuda.get_device_properties(device)
    try:
        return f"{found.pci_domain_id:04x}:{found.pci_bus_id:02x}:{found.pci_device_id:02x}.0"
    except AttributeError:  # before torch 2.8
        return None
