"""Rebuilds objects with a `state_dict()` from their trees in a layout, and the tensors and values of a load plan."""

from __future__ import annotations

import logging
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from typing import Any, cast

import torch
import torch.distributed as dist

from ckptlib.errors import FormatError, StateMismatch
from ckptlib.format import tagged_values
from ckptlib.format.layout import Placed, TensorEntry
from ckptlib.format.paths import join
from ckptlib.format.values import Json, is_nest
from ckptlib.loading.load_plan import LoadPlan, Make, is_whole, made
from ckptlib.reading.rank_values import any_below
from ckptlib.state.leaf import PerRank, Sharded
from ckptlib.state.subclasses import is_subclass
from ckptlib.words import listed

log = logging.getLogger(__name__)


def add_object(
    plan: LoadPlan,
    path: str,
    get: Callable[[], object],
    load: Callable[[Any], object],
    device: torch.device | None = None,
) -> bool:
    """Plans to rebuild the `state_dict()` of an object and load it. Returns whether the checkpoint has it.

    `device`: where to make tensors that the object does not have yet.
    """
    if not plan.wanted(path, whole=True):
        return False
    name = plan.named(path)
    tree = plan.saved.objects.get(name)
    saved = plan.saved.values_at(name)
    if name in saved and not is_nest(saved[name]):  # first: the tree is another rank's, whose object holds tensors
        plan.use(name)
        value = plan.saved.value(name)
        plan.then(lambda: _call_like(None, load, value))
    elif tree is not None:
        plan.use(name)
        now, cut = get(), list[str]()
        build = rebuild(plan, tree, name, now, maker(device, cut))
        _warn_of_whole(path, cut)
        plan.then(lambda: _call_like(now, load, build()))
    else:
        if not plan.miss_kind(path, name, "an object"):
            is_dict = any_below(plan.saved.names, name) or plan.saved.below(name)
            plan.miss(path, _as_dict(path, name) if is_dict else None)
        return False
    return True


def _as_dict(path: str, name: str) -> str:
    """Returns the message for an object whose `state_dict()` result was saved as a dict. That may be a copy from long
    before the step, so only the user can tell whether to take it."""
    return (
        f"{path}: is an object in the state; the checkpoint has a dict, as of its state_dict(). If that was given anew "
        f"for each save, load with optional={path!r}, and then give what ckptlib.read(url, only={name!r}) has there to "
        "its load_state_dict(). If it was given once, as that run began, it is as old as that"
    )


def maker(device: torch.device | None = None, cut: list[str] | None = None) -> Make:
    """Returns a maker of plain tensors, whole on each rank. Lists those that were saved as parts in `cut`."""

    def make(path: str, entry: TensorEntry, now: object) -> torch.Tensor:
        if cut is not None and isinstance(entry.holding, Placed) and not is_whole(entry):
            cut.append(path)
        return made(entry, device)

    return make


def _warn_of_whole(path: str, names: Sequence[str]) -> None:
    """Warns of tensors that were saved as parts, and that an object gets whole, since it has no DTensor to fill."""
    if names and dist.is_initialized() and dist.get_rank() == 0:
        log.warning(
            "%s: this object has nothing to fill for %d tensors that were saved as parts of DTensors (%s). Each rank "
            "gets them whole, as plain tensors. If it is an optimizer of DTensors, let it take a step before the load, "
            "which fills what that makes",
            path,
            len(names),
            listed(names, 3),
        )


def rebuild(plan: LoadPlan, tree: Json, path: str, now: object, make: Make, depth: int = 0) -> Callable[[], object]:
    """Wants the tensors of a tree; returns the function that makes the object once they are filled.

    `make`: makes tensors that the object does not have yet.
    """
    if depth > tagged_values.MAX_DEPTH:
        raise FormatError(
            f"{path[:80]}: the layout's tree of this object is deeper than {tagged_values.MAX_DEPTH} levels"
        )
    if tree == "tensor":
        tensor = plan.tensor_for(path, now, make)
        return lambda: tensor
    if tree == "value":
        plan.use(path)
        value = plan.saved.value(path, depth)  # decoded now, while an error can still fail all ranks together
        return lambda: value
    match tree:
        case {"dict": list(pairs)}:
            made = _pairs(plan, pairs, path, now, make, depth)
            return lambda: {key: build() for key, build in made.items()}
        case {"odict": list(pairs)}:
            made = _pairs(plan, pairs, path, now, make, depth)
            return lambda: OrderedDict((key, build()) for key, build in made.items())
        case {"list": list(items)}:
            builds = _items(plan, items, path, now, make, depth)
            return lambda: [build() for build in builds]
        case {"tuple": list(items)}:
            builds = _items(plan, items, path, now, make, depth)
            return lambda: tuple(build() for build in builds)
        case {"subclass": dict(kind)}:
            return _subclass(plan, kind, path, now)
        case _:
            raise StateMismatch(f"{path}: the layout's tree of this object cannot be read: {tagged_values.brief(tree)}")


def _subclass(plan: LoadPlan, kind: Mapping[str, Json], path: str, now: object) -> Callable[[], object]:
    """Plans to fill the instance that is there, and returns a function that returns it: none is ever made from the name
    of a class."""
    now = now.value if isinstance(now, PerRank) else now
    if is_subclass(now):
        plan.fill_subclass(now, path, path, kind)
    else:
        plan.use(path)
        plan.mismatch(
            f"{path}: the checkpoint has a {kind.get('class')}, and there is none here that could be filled; make "
            "it before it is loaded (an optimizer makes its state in its first step: take one, then load)"
        )
    return lambda: now


def _pairs(
    plan: LoadPlan, pairs: list[Json], path: str, now: object, make: Make, depth: int
) -> dict[Any, Callable[[], object]]:
    made: dict[Any, Callable[[], object]] = {}
    for key, name, tree in tagged_values.decode_entries(pairs, path, depth):
        inner = now.get(key) if isinstance(now, Mapping) else None
        made[key] = rebuild(plan, cast(Json, tree), name, inner, make, depth + 1)
    return made


def _items(
    plan: LoadPlan, trees: list[Json], path: str, now: object, make: Make, depth: int
) -> list[Callable[[], object]]:
    have = now if isinstance(now, (list, tuple)) and len(now) == len(trees) else [None] * len(trees)
    return [rebuild(plan, tree, join(path, i), have[i], make, depth + 1) for i, tree in enumerate(trees)]


def _call_like(now: object, load: Callable[[Any], object], state: object) -> None:
    """Calls `load`, in inference mode if a tensor was made in it: only then can such a tensor be written to."""
    with torch.inference_mode() if _holds_inference(now) else nullcontext():
        load(state)


def _holds_inference(node: object, depth: int = 0) -> bool:
    if isinstance(node, torch.Tensor) or depth > tagged_values.MAX_DEPTH:
        return isinstance(node, torch.Tensor) and node.is_inference()
    if isinstance(node, (PerRank, Sharded)):
        return _holds_inference(node.value if isinstance(node, PerRank) else node.tensor, depth + 1)
    inner = node.values() if isinstance(node, Mapping) else node if isinstance(node, (list, tuple)) else ()
    return any(_holds_inference(item, depth + 1) for item in inner)
