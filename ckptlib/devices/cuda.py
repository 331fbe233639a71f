"""What only CUDA has, and ROCm under its name: registration of host memory, capture modes, the PCI address of a device.

Everything else that a device does for a snapshot is in `ckptlib.staging.device_copies`, by what torch offers for every
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
"""Bytes registered at a time: the call holds locks in the driver for as long as it touches pages, and new drivers
refuse very large regions."""

_PORTABLE = 1
"""cudaHostRegisterPortable: pinned for every device of the process."""

_RELAXED = 2
"""cudaStreamCaptureModeRelaxed."""


def current_device() -> int | None:
    """Returns this thread's device; None while this process uses no CUDA. Only the trainer's thread has chosen one."""
    return torch.cuda.current_device() if torch.cuda.is_initialized() else None  # type: ignore[no-untyped-call]


def stretches(address: int, nbytes: int, most: int) -> Iterator[tuple[int, int]]:
    """Yields (first byte, last byte + 1) of each stretch between multiples of `most`, wherever the memory begins.

    If `most` divides PIN_BYTES, no stretch lies in two registrations: no copy may.
    """
    at = 0
    while at < nbytes:
        stop = min(nbytes, most - (address + at) % most + at)
        yield at, stop
        at = stop


_registered: dict[int, int] = {}
"""The address and bytes of each region that this process has registered."""


def pin(address: int, nbytes: int, device: int) -> None:
    """Registers host memory with the device, so that copies run at the link's speed and beside the host.

    Raises RuntimeError if the driver refuses: beyond the locked-memory limit, and for a mapped file on a disk (seen
    with driver 580: code 1). Nothing is pinned then.
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
    """Undoes `pin`, before the memory is unmapped."""

    def unregister() -> int:
        runtime = torch.cuda.cudart()  # type: ignore[no-untyped-call]
        starts = (address + start for start, _ in stretches(address, nbytes, PIN_BYTES))
        return max(int(runtime.cudaHostUnregister(start)) for start in starts)

    _registered.pop(address, None)
    _aside(device, unregister)


def is_pinned(address: int) -> bool:
    """Returns whether the memory that begins here is pinned, all of it."""
    return address in _registered


def _aside(device: int, call: Callable[[], int]) -> int:
    """Returns the result of a runtime call, made in a thread of its own, for this device.

    The runtime keeps an error for its thread, and torch raises it there after the next kernel, whoever launched that.
    And a thread that has chosen no device has the first one: each rank of a host would have a context there.
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
    """Makes this thread's further driver calls harmless for a graph capture that another thread has begun.

    `device`: one that the thread works with; does nothing unless it is a CUDA device.

    A capture in torch's default mode is broken by any thread that registers memory or queries an event, unless that
    thread has relaxed its capture mode. If the runtime's function cannot be found, `Checkpointer.drain` before a
    capture keeps the threads from asking.
    """
    is_used = device.type == "cuda" and torch.cuda.is_initialized()  # type: ignore[no-untyped-call]
    exchange = _exchange() if is_used else None
    if exchange is not None:
        with torch.cuda.device(device):  # in a thread that has chosen none, the call may make a context on the first
            exchange(ctypes.byref(ctypes.c_int(_RELAXED)))


@lru_cache(maxsize=1)
def _exchange() -> Callable[..., int] | None:
    """Returns a function of the runtime that torch has loaded, and that Python has no name for; None if it is not
    found."""
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
    """Returns how many bytes the allocator keeps for graphs alone: no room for anybody else, whether a graph uses them
    now or not."""
    segments = torch.cuda.memory_snapshot() if device.type == "cuda" else []  # type: ignore[no-untyped-call]
    return sum(
        segment["total_size"] - segment["allocated_size"]
        for segment in segments
        if segment["device"] == device.index and tuple(segment.get("segment_pool_id", (0, 0))) != (0, 0)
    )


def pci_address(device: int) -> str | None:
    """Returns a device's PCI address as /sys has it; None if torch cannot say."""
    found: Any = torch.cuda.get_device_properties(device)
    try:
        return f"{found.pci_domain_id:04x}:{found.pci_bus_id:02x}:{found.pci_device_id:02x}.0"
    except AttributeError:  # before torch 2.8
        return None
