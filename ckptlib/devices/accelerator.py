"""Streams, events and pinned memory of whichever accelerator torch was built for, by the names that all of them share.

What only CUDA has is in `ckptlib.devices.cuda`. Any thread may call these functions. None of them selects a device for
good in a thread that has chosen none: on some devices that alone takes memory of the first one.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from functools import lru_cache

import torch

POLL_S = 0.0002
"""Seconds between two checks of an event: waiting inside the driver would keep a core busy that training can use."""


def device_of(tensor: torch.Tensor) -> torch.device | None:
    """Returns the device that a tensor is on; None for host memory."""
    return None if tensor.is_cpu else tensor.device


def available() -> torch.device | None:
    """Returns the accelerator that new tensors of this process belong on; None if there is none."""
    # asked first: torch 2.6 raises if it was built for an accelerator that is missing
    return torch.accelerator.current_accelerator() if torch.accelerator.is_available() else None


def _accelerator_of(device: torch.device) -> torch.device | None:
    """Returns the accelerator, if `device` is of its type. For the host's memory it asks nothing: that could start a
    driver."""
    found = None if device.type == "cpu" else available()
    return found if found is not None and found.type == device.type else None


def is_chosen(device: torch.device) -> bool:
    """Returns whether `device` is the one of its type that this thread works on; True if there is no choice."""
    found = _accelerator_of(device)
    if found is None:
        return True
    module = torch.get_device_module(device)
    return module.device_count() < 2 or bool(module.current_device() == device.index)


@lru_cache(maxsize=16)
def has_streams(device: torch.device) -> bool:
    """Returns whether work on a device can run beside other work; on Apple's GPUs it cannot."""
    if _accelerator_of(device) is None:
        return False
    try:
        torch.Stream(device)
    except (RuntimeError, NotImplementedError):
        return False
    return True


def new_stream(device: torch.device) -> torch.Stream:
    """Returns a new stream for a device that has streams."""
    return torch.Stream(device)


def current_stream(device: torch.device) -> torch.Stream:
    """Returns this thread's current stream."""
    return torch.accelerator.current_stream(device)


@contextmanager
def on(stream: torch.Stream) -> Iterator[None]:
    """Sends this thread's work to this stream and its device within the body."""
    device = stream.device
    # not by `torch.accelerator`: at the end that selects the device from before, which may have been none
    with torch.get_device_module(device).device(device):
        before = torch.accelerator.current_stream(device)
        torch.accelerator.set_stream(stream)
        try:
            yield
        finally:
            torch.accelerator.set_stream(before)


def wait(event: torch.Event) -> None:
    """Returns when the work before an event is done. Not for training's own thread at each step."""
    # on the event's device: in a thread that has chosen none, the query would make a context on the first
    with torch.get_device_module(event.device).device(event.device):
        while not event.query():
            time.sleep(POLL_S)


def work_so_far(tensors: Iterable[torch.Tensor]) -> Callable[[], None]:
    """Returns a function that waits, in whichever thread calls it, for the work that this thread's current streams have
    now on the devices of these tensors."""
    devices = dict.fromkeys(map(device_of, tensors))
    events = [current_stream(device).record_event() for device in devices if device is not None and has_streams(device)]

    def wait_for_all() -> None:
        for event in events:
            wait(event)

    return wait_for_all


def capturing(device: torch.device) -> bool:
    """Returns whether the current stream's work is recorded into a graph, not executed."""
    try:
        module = torch.get_device_module(device)
    except RuntimeError:  # a kind that has none, such as meta
        return False
    found = getattr(module, "is_current_stream_capturing", None)
    return found is not None and is_initialized(module) and bool(found())


def is_initialized(module: object) -> bool:
    """Returns whether this process has begun to use a kind of device, by torch's module for it; True if the module does
    not tell, as mps."""
    found = getattr(module, "is_initialized", None)
    return found is None or bool(found())


def pinned(nbytes: int) -> torch.Tensor:
    """Returns host memory with which this thread's device exchanges data at the link's speed, and beside the host.

    It is ordinary memory if no more may be locked: copies then take longer, and hold up the thread that asks for them.
    """
    try:
        return torch.empty(nbytes, dtype=torch.uint8, device="cpu", pin_memory=True)
    except RuntimeError:
        return torch.empty(nbytes, dtype=torch.uint8, device="cpu")


def bring(data: torch.Tensor, device: torch.device) -> Callable[[], torch.Tensor]:
    """Starts to bring a few bytes of a device to the host, after the current stream's work.

    Only a call of the result waits for it, from any thread but training's own, which calls this.
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
