"""The names under which everything is saved: the user's state, and ckptlib's own entries beside it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import cast

from ckptlib.errors import UnsupportedState
from ckptlib.state import first_steps
from ckptlib.state.collector import Flat
from ckptlib.state.flatten import flatten
from ckptlib.state.memo import Memo
from ckptlib.state.visitor import are_scalars

RNG = "@rng"
"""Where the random generators are kept, beside the user's own names."""


def check_dict(state: object) -> Mapping[object, object]:
    """Raises TypeError for a state that is no dict."""
    if not isinstance(state, Mapping):
        raise TypeError(
            f"the state must be a dict of what to save or load, such as {{'model': model, 'optim': optim}}; got "
            f"{type(state).__name__}"
        )
    return state


def check_state(state: object) -> Mapping[object, object]:
    """Raises TypeError for a state that is no dict, ValueError for one that uses ckptlib's own name."""
    checked = check_dict(state)
    if RNG in checked:
        raise ValueError(f"{RNG!r} is reserved for ckptlib; rename that entry of the state")
    return checked


def check_held(state: object) -> None:
    """As `check_state`, for a state that is saved again and again, and restored into.

    Raises UnsupportedState for what the `state_dict()` of a new optimizer, a scheduler or a gradient scaler gave. It is
    a copy: no step of the object reaches it, nor does a restore reach the object, and nothing else would ever tell.
    """
    todo: list[tuple[str, object]] = [(str(key), value) for key, value in check_state(state).items()]
    seen: set[int] = set()
    while todo:
        path, value = todo.pop()
        is_list = isinstance(value, (list, tuple)) and not are_scalars(value)
        if id(value) in seen or not (is_list or isinstance(value, Mapping)):
            continue
        seen.add(id(value))  # one that contains itself is refused by the first look
        entries = dict(value.items() if isinstance(value, Mapping) else enumerate(cast(Sequence[object], value)))
        whose = _copied_from(entries)
        if whose is not None:
            raise UnsupportedState(
                f"{path} is what the state_dict() of {whose} gave: a copy, which no step of the training changes, and "
                "from which a restore fills no object. Give the objects themselves, such as {'model': model, 'optim': "
                "optim, 'sched': sched}, and no state_dict() of theirs"
            )
        todo += [(f"{path}/{key}", inner) for key, inner in entries.items()]


def _copied_from(entries: Mapping[object, object]) -> str | None:
    """Whose `state_dict()` gave these, where its keys tell. That of a module shares memory with it; what an optimizer
    has for its parameters does, too, once it is there."""
    moments = entries.get("state")
    if entries.keys() == {"state", "param_groups"} and isinstance(moments, Mapping) and not moments:
        return "an optimizer without any moments"
    if "_last_lr" in entries:
        return "a scheduler"
    return "a gradient scaler" if "_growth_tracker" in entries else None


def whole_state(state: object, generators: object) -> dict[object, object]:
    """Raises as `check_state` does."""
    return {**check_state(state), RNG: generators}


def first_look(state: object, memo: Memo | None = None) -> Flat:
    """The state, flattened, before the first step, which it leaves as it is.

    The first save reuses the leaves of modules, optimizers and dicts of tensors in `memo` that are the same then.
    Tensors that an object's `state_dict()` made are let go of."""
    with first_steps.undone():
        flat = flatten(state, memo)
    if memo is not None:
        memo.let_go()
    return flat
