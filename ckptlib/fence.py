"""The fence: an optimizer that is about to write waits for the copy that still reads.

It is a step pre-hook on every optimizer of the state, so no training script has to remember it. The hook also tells
which optimizers really run through it: a wrapper with a kernel of its own fires no hook, and what it owns is then
copied before `after_step` returns.
"""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Iterable
from typing import Any, Protocol

import torch
from torch.utils.hooks import RemovableHandle

log = logging.getLogger(__name__)


class Fenced(Protocol):
    """A copy under way."""

    def wait_copied(self) -> None:
        """Returns when the copy no longer reads its sources (on CUDA: when the current stream is made to wait)."""


class Fence:
    """The hooks of one Checkpointer; main thread only."""

    def __init__(self) -> None:
        self.waited_s = 0.0
        """Seconds that the main thread has waited here, all in all."""
        self._handles: dict[int, RemovableHandle] = {}
        self._fired: set[int] = set()
        self._pending: list[Fenced] = []
        self._pid = os.getpid()

    def install(self, optimizers: Iterable[torch.optim.Optimizer]) -> None:
        """Hooks every optimizer that is not hooked yet, where it can be."""
        for optimizer in optimizers:
            if id(optimizer) not in self._handles:
                try:
                    self._handles[id(optimizer)] = optimizer.register_step_pre_hook(self._make_hook())
                except AttributeError as error:  # a wrapper that never ran Optimizer.__init__
                    log.warning(
                        "%s takes no step hook (%s): what it owns is copied before after_step returns, without "
                        "overlap; to have that, give the optimizer that it wraps",
                        type(optimizer).__qualname__,
                        error,
                    )

    def _make_hook(self) -> Any:
        def before_step(optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
            self._fired.add(id(optimizer))
            self.wait()

        # what torch.compiler.disable sets; calling it would import all of dynamo, which takes seconds
        before_step._torchdynamo_disable = True  # type: ignore[attr-defined]
        return before_step

    def guard(self, pending: Fenced) -> None:
        """Closes the fence until the copy is done; one that it is closed for already counts as well."""
        self._pending.append(pending)

    def wait(self) -> None:
        """Returns when no copy reads its sources any more. In a forked process none does: it has memory of its own."""
        if self._pid != os.getpid():
            self._pending.clear()
        if self._pending:
            began = time.perf_counter()
            for pending in self._pending:
                pending.wait_copied()
            self._pending.clear()
            self.waited_s += time.perf_counter() - began

    def fired(self, optimizer: torch.optim.Optimizer) -> bool:
        """Whether the optimizer went through its hook since `forget`."""
        return id(optimizer) in self._fired

    def forget(self) -> None:
        """Begins a new interval: what fired before it says nothing about the next."""
        self._fired.clear()

    def remove(self) -> None:
        """Takes the hooks out."""
        for handle in self._handles.values():
            handle.remove()
        self._handles.clear()
