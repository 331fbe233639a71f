"""Undoes first steps of optimizers that a look at their state takes."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_pre_hook


@contextmanager
def undone() -> Iterator[None]:
    """Clears, at the end, the state of optimizers that this thread steps for the first time in the body.

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
