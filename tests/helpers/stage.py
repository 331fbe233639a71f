"""What lies inside of staging: its thread and its queue, its fence, its copies, its slots in the making."""

from __future__ import annotations

import gc
import queue
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch.optim.optimizer import _global_optimizer_pre_hooks

from ckptlib.staging import fence as fences
from ckptlib.staging.arena import Arena
from ckptlib.staging.device_copies import DeviceCopies
from ckptlib.staging.fence import Fence, Fenced
from ckptlib.staging.pinned_ring import Move
from ckptlib.staging.prepared_copies import Across, Inside, Samples
from ckptlib.staging.replica_digests import ReplicaDigests, Seen
from ckptlib.staging.spare_memory import Spares
from ckptlib.staging.stager import Stager, Staging

WAIT_S = 150.0

# Of the staging thread


def put_job(stager: Stager, job: Callable[[], None]) -> None:
    """The thread does it before whatever is begun from now on."""
    stager._jobs.put(job)


@contextmanager
def held(stager: Stager) -> Iterator[threading.Event]:
    """The staging thread does nothing more until the event is set; it is when the body ends."""
    gate = threading.Event()

    def hold() -> None:
        gate.wait(WAIT_S)

    put_job(stager, hold)
    try:
        yield gate
    finally:
        gate.set()


def end_thread(stager: Stager) -> None:
    """Its jobs are done by whoever calls `run_job`."""
    stager._jobs.finish()
    stager._jobs = queue.SimpleQueue()  # type: ignore[assignment]


def has_jobs(stager: Stager) -> bool:
    """Of one whose thread was ended."""
    return not stager._jobs.empty()  # type: ignore[attr-defined]


def run_job(stager: Stager) -> None:
    """The next one, here, if there is one."""
    if has_jobs(stager):
        job = stager._jobs.get()  # type: ignore[attr-defined]
        assert job is not None
        with torch.no_grad():
            job()


# Of a snapshot in the making


def is_copied(staging: Staging) -> bool:
    """Whether the host has read the sources, whatever devices are still at."""
    return staging._copied.is_set()


def seal(staging: Staging) -> None:
    """As the staging thread does at the end."""
    staging._sealed.set()


# Of the fence


def pending_of(fence: Fence) -> list[Fenced]:
    """What the next step waits for."""
    return fence._pending


def replace_pending(fence: Fence, pending: list[Fenced]) -> list[Fenced]:
    """What it waited for until now."""
    before, fence._pending = fence._pending, pending
    return before


def is_installed(fence: Fence) -> bool:
    """Whether steps come through it."""
    return any(found() is fence for found in fences._installed.values())


def num_installed() -> int:
    """Fences that steps come through."""
    gc.collect()
    return len(fences._installed)


@contextmanager
def unhooked() -> Iterator[None]:
    """No optimizer has a hook that all have, as before the first fence of a process."""
    fences._hook_all()
    before = {**_global_optimizer_pre_hooks}
    _global_optimizer_pre_hooks.clear()
    fences._hook_all.cache_clear()
    try:
        yield
    finally:
        fences._hook_all()
        _global_optimizer_pre_hooks.clear()
        _global_optimizer_pre_hooks.update(before)


# Of copies


def alike(across: Across) -> list[Move]:
    """Targets and sources whose bytes are moved as they are."""
    return across._moves


def odd(across: Across) -> list[Move]:
    """Those whose bytes are not: such as conjugates."""
    return across._odd


def num_gathered(inside: Inside) -> int:
    """Bytes that are put together on the device before they leave it."""
    return sum(group[0][0].nbytes for group in inside._groups.values())


def granted(spares: Spares) -> int:
    """Bytes of the device's memory that were taken."""
    return spares._room.granted


def read_event(copies: DeviceCopies) -> Any:
    """After which devices no longer read the sources."""
    return copies._read


def forget_copies_without_samples(copies: DeviceCopies) -> None:
    copies._free = [work for work in copies._free if work.samples.names]


def window_of(samples: Samples) -> torch.Tensor:
    """The first that is being looked at."""
    return samples._windows[samples._at][0][0]


def last_reading(digests: ReplicaDigests) -> Seen | None:
    return digests._last


# Of the arena


def wait_warm(arena: Arena) -> None:
    """Until its slots are made that were asked for beforehand."""
    arena._join()


def wait_grown(arena: Arena) -> None:
    """Until the slot is made that it makes in the background, if any."""
    if arena._growing is not None:
        arena._growing.finish()


def wait_pinned(arena: Arena) -> None:
    if arena._pinning._thread is not None:
        arena._pinning._thread.join()
