"""Refuses state that nobody would save: what an optimizer keeps beside its `state` and `param_groups`, and a dict
beside its entries.

Wrappers such as Lookahead keep another optimizer, whose moments are its own. Others add to what `state_dict()` returns,
or return their values times a scale that is kept elsewhere, or make a `state` whenever they are asked.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping, MutableMapping, Sequence

import torch
from torch.utils.weak import WeakIdKeyDictionary

from ckptlib.errors import UnsupportedState
from ckptlib.state.frameworks import unwrapped
from ckptlib.state.leaf import PLAIN
from ckptlib.state.places import own_part

_SHOWN = ("state", "param_groups")
_HOOKS = ("_optimizer_state_dict_pre_hooks", "_optimizer_state_dict_post_hooks")
_SAMPLE = 1024
"""How many elements of each tensor are compared."""

_compared: MutableMapping[torch.optim.Optimizer, None] = WeakIdKeyDictionary()
"""Optimizers whose `state_dict()` returned what their state had, once it had some; by identity."""


def refuse_hidden(optimizer: torch.optim.Optimizer, path: str, known: Collection[int]) -> None:
    """Raises UnsupportedState for hidden state, and says what to save instead. `known`: ids of all optimizers of the
    state.

    `state_dict()` is called only if it is not torch's own.
    """
    if optimizer.state is not optimizer.state:
        raise UnsupportedState(
            f"{path}: this {type(optimizer).__name__} makes its state anew whenever it is asked, as of several "
            "optimizers, so what a load fills would be lost; put those that it is made of into the state, in its place"
        )
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
    given: object = optimizer.state_dict()
    told: Mapping[str, object] = given if isinstance(given, Mapping) else {}
    more = _more(saved, told) if told is given else [type(given).__name__]
    if more:
        raise UnsupportedState(
            f"{path}: state_dict() of this {type(optimizer).__name__} also gives {', '.join(map(repr, more[:3]))}"
            f"{', ...' if len(more) > 3 else ''}, which neither its state nor its param_groups have, and would not be "
            "saved; put in its place an object whose state_dict() and load_state_dict() call the optimizer's"
        )
    if optimizer in _compared:
        return
    changed = _changed(saved, told)
    if changed is not None:
        raise UnsupportedState(
            f"{path}: state_dict() of this {type(optimizer).__name__} gives other values of {changed!r} than its state "
            "has, so what they are made with, such as a scale, would not be saved; put in its place an object whose "
            "state_dict() and load_state_dict() call the optimizer's"
        )
    if any(one.state for one in saved):
        _compared[optimizer] = None


def refuse_beyond_entries(node: Mapping[object, object], given: object, path: str) -> None:
    """Raises UnsupportedState for a dict whose own `state_dict()` returned more than its entries: only these are
    saved."""
    if isinstance(given, Mapping):  # names of what an entry has may follow the entry's own
        more = [key for key in given if key not in node and str(key).partition(".")[0] not in node]
    else:
        more = [type(given).__name__]
    if more:
        raise UnsupportedState(
            f"{path}: is a dict whose state_dict() also gives {', '.join(map(repr, more[:3]))}"
            f"{', ...' if len(more) > 3 else ''}, which is none of its entries, and would not be saved; put in its "
            "place an object whose state_dict() and load_state_dict() call those of the dict"
        )


def _optimizers_in(optimizer: torch.optim.Optimizer) -> Iterator[tuple[str, torch.optim.Optimizer]]:
    """Yields the optimizers in another one, each with the attribute that holds it, by itself or in a list or dict."""
    for attribute, value in vars(optimizer).items():
        inner: Iterable[object] = (value,)
        if attribute not in _SHOWN and isinstance(value, (list, tuple, dict)):
            inner = value.values() if isinstance(value, dict) else value
        for one in inner:
            if isinstance(one, torch.optim.Optimizer) and one is not optimizer:
                yield attribute, one


def _is_stock(optimizer: torch.optim.Optimizer) -> bool:
    """Returns whether `state_dict()` returns `state` and `param_groups`, and nobody adds to it."""
    attributes = vars(optimizer)
    own = "state_dict" in attributes or any(attributes.get(hooks) for hooks in _HOOKS)
    return not own and type(optimizer).state_dict is torch.optim.Optimizer.state_dict


def _more(saved: Sequence[torch.optim.Optimizer], told: Mapping[str, object]) -> list[str]:
    """Returns the keys that only `state_dict()` has, wherever it has them: some return an entry in another shape."""
    more = [str(key) for key in told if key not in _SHOWN]
    entries, groups = told.get("state"), told.get("param_groups")
    if isinstance(entries, Mapping):
        more += sorted(_keys(entries.values()) - _keys(entry for one in saved for entry in one.state.values()))
    if isinstance(groups, (list, tuple)):
        more += sorted(_keys(groups) - _keys(group for one in saved for group in one.param_groups))
    return more


def _keys(entries: Iterable[object]) -> set[str]:
    """Returns the innermost keys of entries."""
    found: set[str] = set()
    for entry in entries:
        for key, value in entry.items() if isinstance(entry, Mapping) else ():
            found |= _keys([value]) if isinstance(value, Mapping) else {str(key)}
    return found


def _changed(saved: Sequence[torch.optim.Optimizer], told: Mapping[str, object]) -> str | None:
    """Returns a key for which `state_dict()` has other values than the state, but for their dtype; None if there is
    none.

    TransformerEngine's FusedAdam has moments in fp16 whose scales it keeps beside its state. Only keys with as many
    tensors of the same shapes on both sides are compared: `state_dict()` may well gather what is divided. If the state
    has more keys, none is compared: what is returned may be made with those, which are saved.
    """
    entries = told.get("state")
    given = [*entries.values()] if isinstance(entries, Mapping) else []
    kept = [entry for one in saved for entry in one.state.values()]
    if _keys(kept) - _keys(given):
        return None
    gives = _tensors(given)
    for key, ours in _tensors(kept).items():
        theirs = gives.get(key, [])
        if [x.shape for x in ours] != [x.shape for x in theirs]:
            continue
        other = next((mine for mine, its in zip(ours, theirs, strict=True) if not _are_alike(mine, its)), None)
        if other is not None and not any(x.shape == other.shape and _are_alike(other, x) for x in theirs):
            return key  # else the order differs: by name, or by group
    return None


def _tensors(entries: Iterable[object]) -> dict[str, list[torch.Tensor]]:
    """Returns tensors by innermost key, in order: this process's own part of each."""
    found: dict[str, list[torch.Tensor]] = {}
    for entry in entries:
        for key, value in entry.items() if isinstance(entry, Mapping) else ():
            if isinstance(value, Mapping):
                for below, tensors in _tensors([value]).items():
                    found.setdefault(below, []).extend(tensors)
            elif isinstance(value, torch.Tensor):
                found.setdefault(str(key), []).append(own_part(value))
    return found


def _are_alike(ours: torch.Tensor, theirs: torch.Tensor) -> bool:
    """Returns whether two tensors of equal shape are alike; True for subclasses, which have their scales in
    themselves."""
    if ours is theirs or not {type(ours), type(theirs)} <= set(PLAIN):
        return True
    if any(x.layout is not torch.strided or x.is_complex() for x in (ours, theirs)):
        return True
    mine, given = (x.detach().flatten()[:_SAMPLE].cpu() for x in (ours, theirs))
    try:
        mine, given = mine.to(given.dtype).to(mine.dtype), given.to(mine.dtype)
        return torch.equal(mine.double().nan_to_num(), given.double().nan_to_num())
    except NotImplementedError:  # torch turns float4_e2m1fn_x2 and the like into nothing else
        return True
