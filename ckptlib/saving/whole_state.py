"""The names under which everything is saved: the user's state, and ckptlib's own entries beside it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import cast

from ckptlib.errors import UnsupportedState
from ckptlib.state import first_steps
from ckptlib.state.collector import Flat
from ckptlib.state.flatten import flatten
from ckptlib.state.memo import Memo
from ckptlib.state.rng import RNG
from ckptlib.state.visitor import are_scalars


def check_dict(state: object) -> Mapping[object, object]:
    """Checks that a state is a dict. Raises TypeError if not."""
    if not isinstance(state, Mapping):
        raise TypeError(
            f"the state must be a dict of what to save or load, such as {{'model': model, 'optim': optim}}; got "
            f"{type(state).__name__}"
        )
    return state


def check_state(state: object) -> Mapping[object, object]:
    """Checks a state. Raises TypeError if it is no dict, ValueError if it uses ckptlib's own name."""
    checked = check_dict(state)
    if RNG in checked:
        raise ValueError(f"{RNG!r} is reserved for ckptlib; rename that entry of the state")
    return checked


def check_held(state: object) -> None:
    """Checks, as `check_state` does, a state that is saved again and again, and restored into.

    Raises UnsupportedState for the result of a `state_dict()` of a new optimizer, a scheduler or a gradient scaler. It
    is a copy: no step of the object changes it, nor does a restore reach the object, and nothing else would ever tell.
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
    """Returns whose `state_dict()` gave these entries, if their keys tell; None for others. That of a module shares
    memory with it; so does what an optimizer holds for its parameters, once it exists."""
    moments = entries.get("state")
    if entries.keys() == {"state", "param_groups"} and isinstance(moments, Mapping) and not moments:
        return "an optimizer without any moments"
    if "_last_lr" in entries:
        return "a scheduler"
    return "a gradient scaler" if "_growth_tracker" in entries else None


def whole_state(state: object, generators: object) -> dict[object, object]:
    """Returns the user's state and the generators together. Raises as `check_state` does."""
    return {**check_state(state), RNG: generators}


def first_look(state: object, memo: Memo | None = None) -> Flat:
    """Returns the flattened state before the first step, and leaves the state as it is.

    The first save reuses the leaves of modules, optimizers and dicts of tensors in `memo` that are still the same.
    Tensors that an object's `state_dict()` made are let go of.
    """
    with first_steps.undone():
        flat = flatten(state, memo)
    if memo is not None:
        memo.let_go()
    return flat
