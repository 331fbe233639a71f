"""What an optimizer keeps that its `state` and `param_groups` do not show: nobody would save it.

Wrappers such as Lookahead keep another optimizer, whose moments are its own. Others add to what `state_dict()` gives.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence

import torch

from ckptlib.errors import UnsupportedState
from ckptlib.state.frameworks import unwrapped

_SHOWN = ("state", "param_groups")
_HOOKS = ("_optimizer_state_dict_pre_hooks", "_optimizer_state_dict_post_hooks")


def refuse_hidden(optimizer: torch.optim.Optimizer, path: str, known: Collection[int]) -> None:
    """Raises UnsupportedState, and says what to give instead. `known`: ids of all optimizers of the state.

    `state_dict()` is called only where it is not torch's own.
    """
    saved = [optimizer]
    for attribute, inner in _optimizers_in(optimizer):
        saved.append(inner)
        if inner.state is not optimizer.state and id(unwrapped(inner)) not in known:
            raise UnsupportedState(
                f"{path}: this {type(optimizer).__name__} has a {type(inner).__name__} in its attribute {attribute!r}, "
                "with a state of its own, which would not be saved; put that optimizer into the state, in place of "
                "this one or beside it"
            )
    if _is_stock(optimizer):
        return
    told: object = optimizer.state_dict()
    more = _more(saved, told) if isinstance(told, Mapping) else [type(told).__name__]
    if more:
        raise UnsupportedState(
            f"{path}: state_dict() of this {type(optimizer).__name__} also gives {', '.join(map(repr, more[:3]))}"
            f"{', ...' if len(more) > 3 else ''}, which neither its state nor its param_groups have, and would not be "
            "saved; put in its place an object whose state_dict() and load_state_dict() call the optimizer's"
        )


def _optimizers_in(optimizer: torch.optim.Optimizer) -> Iterator[tuple[str, torch.optim.Optimizer]]:
    """Each with the attribute that holds it, by itself or in a list or dict."""
    for attribute, value in vars(optimizer).items():
        inner: Iterable[object] = (value,)
        if attribute not in _SHOWN and isinstance(value, (list, tuple, dict)):
            inner = value.values() if isinstance(value, dict) else value
        for one in inner:
            if isinstance(one, torch.optim.Optimizer) and one is not optimizer:
                yield attribute, one


def _is_stock(optimizer: torch.optim.Optimizer) -> bool:
    """Whether `state_dict()` gives `state` and `param_groups`, and nobody adds to it."""
    attributes = vars(optimizer)
    own = "state_dict" in attributes or any(attributes.get(hooks) for hooks in _HOOKS)
    return not own and type(optimizer).state_dict is torch.optim.Optimizer.state_dict


def _more(saved: Sequence[torch.optim.Optimizer], told: Mapping[str, object]) -> list[str]:
    """The keys that only `state_dict()` has, wherever it has them: some give an entry in another shape."""
    more = [str(key) for key in told if key not in _SHOWN]
    entries, groups = told.get("state"), told.get("param_groups")
    if isinstance(entries, Mapping):
        more += sorted(_keys(entries.values()) - _keys(entry for one in saved for entry in one.state.values()))
    if isinstance(groups, (list, tuple)):
        more += sorted(_keys(groups) - _keys(group for one in saved for group in one.param_groups))
    return more


def _keys(entries: Iterable[object]) -> set[str]:
    """The innermost."""
    found: set[str] = set()
    for entry in entries:
        for key, value in entry.items() if isinstance(entry, Mapping) else ():
            found |= _keys([value]) if isinstance(value, Mapping) else {str(key)}
    return found
