"""The fence: an optimizer that is about to write waits for the copy that still reads. So does a load.

It is a step pre-hook on every optimizer of the process, so no training script has to remember it. An optimizer that
came into the state after its last save, or is in no state, waits as well: it may write to what others own. The hook
also tells which optimizers really run through it: a wrapper with a kernel of its own fires no hook, and its tensors are
then copied before `after_step` returns. So are tensors that a CUDA graph writes, since a replay calls no Python.
"""

from __future__ import annotations

import logging
import os
import threading
import time
import weakref
from collections import OrderedDict
from collections.abc import Iterable, MutableMapping
from functools import cache
from typing import Any, Protocol, cast

import torch
from torch.optim.optimizer import _global_optimizer_pre_hooks, register_optimizer_step_pre_hook
from torch.utils.weak import WeakIdKeyDictionary

from ckptlib.devices import accelerator

log = logging.getLogger(__name__)


class Fenced(Protocol):
    """A copy in flight."""

    def wait_copied(self) -> None:
        """Returns when the copy no longer reads its sources; on devices, the current stream is made to wait instead."""

    @property
    def copied(self) -> bool:
        """Whether nobody has to wait for it any more, on any stream."""

    def wait_done(self, timeout_s: float | None) -> None:
        """Returns when the whole copy has ended, on devices too."""


class Fence:
    """Holds optimizer steps until one Checkpointer's copies are done. Steps may come from an autograd thread."""

    def __init__(self) -> None:
        self.waited_s = 0.0
        """Total seconds that threads have waited here."""
        self._fired: MutableMapping[torch.optim.Optimizer, int] = WeakIdKeyDictionary()
        """The optimizers that ran through the hook, each with the interval of its last run. By the objects themselves:
        the address of one that is gone may be another's."""
        self._interval = 0
        self._captured = WeakIdKeyDictionary()
        """Optimizers whose step a graph replays."""
        self._pending: list[Fenced] = []
        self._pid = os.getpid()
        self._lock = threading.Lock()
        """Guards `_pending` and `waited_s`; nobody waits while holding it."""

    def install(self, optimizers: Iterable[torch.optim.Optimizer]) -> None:
        """Has each step run through the fence from now on. `optimizers`: those of the state; warns once of any that
        takes no hook."""
        number = id(self)
        if number in _installed:
            return

        def gone(_: object) -> None:
            _installed.pop(number, None)

        _hook_all()
        _installed[number] = weakref.ref(self, gone)
        for optimizer in optimizers:
            try:
                optimizer._optimizer_step_pre_hooks  # noqa: B018
            except AttributeError as error:  # a wrapper that never ran Optimizer.__init__
                log.warning(
                    "%s does not accept a step hook (%s): its tensors are copied before after_step returns, "
                    "without overlap. For overlap, pass the optimizer that it wraps",
                    type(optimizer).__qualname__,
                    error,
                )

    def remove(self) -> None:
        """Has no step run through the fence any more."""
        _installed.pop(id(self), None)

    def before_step(self, optimizer: torch.optim.Optimizer) -> None:
        """Notes a step that is about to write, or is recorded into a graph, and waits for copies."""
        if _is_captured(optimizer):  # the capture writes nothing, and its replays will not ask
            self._captured[optimizer] = True
            self.drain()
            return
        self._fired[optimizer] = self._interval
        self.wait()

    def guard(self, pending: Fenced) -> None:
        """Closes the fence until this copy, and each that it is closed for already, is done."""
        with self._lock:  # if no hook fires, nobody else drops finished copies
            self._pending = [*(copy for copy in self._pending if not copy.copied), pending]

    def wait(self) -> None:
        """Returns when no copy reads its sources any more; on devices, the current stream is made to wait instead.

        Each thread waits for itself, on its own stream: the wait of one does not serve another. In a forked process no
        copy reads anything: it has its own memory.
        """
        pending = self._under_way()
        if pending:
            began = time.perf_counter()
            for copy in pending:
                copy.wait_copied()
            self._under_way()
            with self._lock:
                self.waited_s += time.perf_counter() - began

    def drain(self) -> None:
        """Returns when no copy is in flight, on devices too."""
        if self._pid != os.getpid():
            return
        with self._lock:
            pending = list(self._pending)  # each stays until it is over: another thread has yet to wait for itself
        for copy in pending:
            copy.wait_done(DRAIN_TIMEOUT_S)
        self._under_way()

    def _under_way(self) -> list[Fenced]:
        if self._pid != os.getpid():  # first: another thread may have had the lock when the process was forked
            return []
        with self._lock:
            self._pending = [copy for copy in self._pending if not copy.copied]
            return list(self._pending)

    def fired(self, optimizer: torch.optim.Optimizer) -> bool:
        """Returns whether the optimizer went through its hook since `forget`, and always will."""
        return self._fired.get(optimizer) == self._interval and optimizer not in self._captured

    def forget(self) -> None:
        """Begins a new interval: hooks that fired in the last one no longer count."""
        self._interval += 1  # at each step: clearing the dict would take ten calls


_installed: dict[int, weakref.ref[Fence]] = {}
"""The fences that exist, by address. Changed and listed in one operation: threads share it, and a fork may come at any
time."""


@cache
def _hook_all() -> None:
    """Registers the hook, once and for good: to remove it would change torch's own dict of hooks while a thread walks
    through it. It comes before hooks that are there already, which may write to parameters."""
    handle = register_optimizer_step_pre_hook(_before_step)
    cast("OrderedDict[int, Any]", _global_optimizer_pre_hooks).move_to_end(handle.id, last=False)


def _before_step(optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
    for found in list(_installed.values()):
        fence = found()
        if fence is not None:
            fence.before_step(optimizer)


def wait_for_copies() -> None:
    """Returns when this process copies nothing any more, on devices too: the caller is about to write to memory that
    may be saved, on any stream. Raises WaitTimeout."""
    for found in list(_installed.values()):
        fence = found()
        if fence is not None:
            fence.wait()  # lets a copy go on if its beginning was interrupted
            fence.drain()


# the mark that torch.compiler.disable sets; calling that would import all of dynamo, which takes seconds
_before_step._torchdynamo_disable = True  # type: ignore[attr-defined]


DRAIN_TIMEOUT_S = 600.0
"""How long to wait for a copy. It runs at memory speed, so one that takes longer has lost its thread."""


def _is_captured(optimizer: torch.optim.Optimizer) -> bool:
    """Returns whether the optimizer's step is recorded into a graph, not executed."""
    devices = {p.device for group in optimizer.param_groups for p in group["params"][:1]}  # ShardedTensor has no is_cpu
    return any(map(accelerator.capturing, devices))
