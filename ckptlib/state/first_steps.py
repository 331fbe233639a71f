"""Optimizers that are stepped by a look at their state."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_pre_hook


@contextmanager
def undone() -> Iterator[None]:
    """Optimizers that this thread has step for the first time inside have no state behind it, as before.

    Wrappers made for DCP call torch's get_optimizer_state_dict in `state_dict()`. It makes the state of a new optimizer
    by a step with lr 0 and gradients of zero: weights stay, but Adam counts a step, and its bias correction would be
    one ahead for ever.
    """
    thread = threading.get_ident()
    new: list[Optimizer] = []

    def note(optimizer: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if not optimizer.state and threading.get_ident() == thread:
            new.append(optimizer)

    handle = register_optimizer_step_pre_hook(note)
    try:
        yield
    finally:
        handle.remove()
        for optimizer in new:
            optimizer.state.clear()
