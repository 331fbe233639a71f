"""Accelerators, whichever torch was built for: streams, events and pinned memory by the names that all of them share.

What CUDA alone has is in `ckptlib.devices.cuda`. Any thread may call these; a thread that has chosen no device is never
given one for good, since on some devices that alone takes memory of the first.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from functools import lru_cache

import torch

POLL_S = 0.0002
"""Between two looks at an event: waiting inside the driver would keep a core busy that the training has a use for."""


def device_of(tensor: torch.Tensor) -> torch.device | None:
    """Where a tensor is; None in memory of the host."""
    return None if tensor.is_cpu else tensor.device


def available() -> torch.device | None:
    """The accelerator that new tensors of this process belong on; None where there is none."""
    # asked first: torch 2.6 raises where it was built for one that is not there
    return torch.accelerator.current_accelerator() if torch.accelerator.is_available() else None


def _accelerator_of(device: torch.device) -> torch.device | None:
    """The accelerator, if `device` is of its type. For the host's nothing is asked: that could begin a driver."""
    found = None if device.type == "cpu" else available()
    return found if found is not None and found.type == device.type else None


def is_chosen(device: torch.device) -> bool:
    """Whether it is the one of its type that this thread works on; also where there is no choice."""
    found = _accelerator_of(device)
    if found is None:
        return True
    module = torch.get_device_module(device)
    return module.device_count() < 2 or bool(module.current_device() == device.index)


@lru_cache(maxsize=16)
def has_streams(device: torch.device) -> bool:
    """Whether work on a device can be put beside other work; on Apple's GPUs it cannot."""
    if _accelerator_of(device) is None:
        return False
    try:
        torch.Stream(device)
    except (RuntimeError, NotImplementedError):
        return False
    return True


def new_stream(device: torch.device) -> torch.Stream:
    """One of its own, for a device that has streams."""
    return torch.Stream(device)


def current_stream(device: torch.device) -> torch.Stream:
    """Of this thread."""
    return torch.accelerator.current_stream(device)


@contextmanager
def on(stream: torch.Stream) -> Iterator[None]:
    """This thread's work goes to this stream, and to its device."""
    device = stream.device
    # not by `torch.accelerator`: when the body ends, that selects the device from before, which may have been none
    with torch.get_device_module(device).device(device):
        before = torch.accelerator.current_stream(device)
        torch.accelerator.set_stream(stream)
        try:
            yield
        finally:
            torch.accelerator.set_stream(before)


def wait(event: torch.Event) -> None:
    """Returns when the work before an event is done. Not for the training's thread, at each step of it."""
    # on the event's device: a thread that has chosen none would make itself a context on the first by asking
    with torch.get_device_module(event.device).device(event.device):
        while not event.query():
            time.sleep(POLL_S)


def work_so_far(tensors: Iterable[torch.Tensor]) -> Callable[[], None]:
    """Waits, in whichever thread it is called, for what this thread's current streams have to do by now on the devices
    of these."""
    devices = dict.fromkeys(map(device_of, tensors))
    events = [current_stream(device).record_event() for device in devices if device is not None and has_streams(device)]

    def wait_for_all() -> None:
        for event in events:
            wait(event)

    return wait_for_all


def capturing(device: torch.device) -> bool:
    """Whether the current stream's work is recorded into a graph, not done."""
    module = torch.get_device_module(device)
    found = getattr(module, "is_current_stream_capturing", None)
    return found is not None and is_initialized(module) and bool(found())


def is_initialized(module: object) -> bool:
    """Whether this process has begun to use a kind of device, by torch's module for it; mps does not tell."""
    found = getattr(module, "is_initialized", None)
    return found is None or bool(found())


def pinned(nbytes: int) -> torch.Tensor:
    """Bytes of the host that the device of this thread copies from and to at the link's speed, and beside the host.

    Ordinary ones where no more may be locked: copies take longer then, and hold up the thread that asks for them.
    """
    try:
        return torch.empty(nbytes, dtype=torch.uint8, device="cpu", pin_memory=True)
    except RuntimeError:
        return torch.empty(nbytes, dtype=torch.uint8, device="cpu")


def bring(data: torch.Tensor, device: torch.device) -> Callable[[], torch.Tensor]:
    """Has a few bytes of a device brought to the host, behind what the current stream has to do.

    Nobody waits for it but who calls the result, from any thread but the training's, which gives them.
    """
    if not has_streams(device):
        there = data.cpu()
        return lambda: there
    found = pinned(data.numel())
    found.copy_(data, non_blocking=True)
    done = current_stream(device).record_event()

    def arrive() -> torch.Tensor:
        wait(done)
        return found

    return arrive
