"""Loads optimizers that the step has in another form than the state dict.

Every rank takes part in each load here, even if its own state dict has no such optimizer.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from typing import Any

from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict, set_optimizer_state_dict
from torch.optim import Optimizer

from ckptlib.adapters.optimizer_names import GROUPS, Node, SavedOptimizers, Wanted
from ckptlib.adapters.state_dicts import model_of, unwrap, wrapped
from ckptlib.errors import StateMismatch
from ckptlib.loading.report import LoadReport
from ckptlib.ranks.group import Group
from ckptlib.ranks.together import together
from ckptlib.reading.opened import CheckpointReader


def _agreed(group: Group, mine: list[str]) -> list[str]:
    """Returns the names of all ranks, sorted. Collective."""
    if not group.any(bool(mine)):
        return []
    return sorted({key for told in group.gather(json.dumps(mine).encode()) for key in json.loads(told)})


def fill_optimizers(
    group: Group, states: Mapping[str, Any], missing: set[str], fill: Callable[[dict[str, Any]], LoadReport]
) -> set[str]:
    """Loads optimizers themselves from states that `get_state_dict` once made of them. Collective.

    Returns the names that are still missing.
    """
    models = {key: model_of(states[key], states) for key in missing if isinstance(states.get(key), Optimizer)}
    still = set(missing)
    for key in _agreed(group, [key for key, model in models.items() if model is not None]):
        model = models.get(key)
        state = {} if model is None else {key: get_optimizer_state_dict(model, states[key])}
        target = wrapped(state)
        lacking = fill(target).missing
        if model is None:
            continue
        still = (still - {key}) | {*lacking}
        if not lacking:
            unwrap(state, target)
            set_optimizer_state_dict(model, states[key], state[key])
    return still


def fill_named(
    group: Group,
    named: Mapping[str, tuple[Node, object]],
    missing: set[str],
    opened: Callable[[], CheckpointReader],
    fill: Callable[[dict[str, Any], dict[str, str]], LoadReport],
) -> set[str]:
    """Loads states with parameter names from an optimizer saved as it is, or from its `state_dict()`. Collective.

    named: the dict and its `param_groups` before the load, by path of the state.

    Returns the names that are still missing.
    """
    lacking = {path for path in named if any(name == path or name.startswith(f"{path}/") for name in missing)}
    if not group.any(bool(lacking)):
        return missing
    wanted = Wanted()

    def look() -> None:
        for path in lacking:  # the load may have overwritten the groups of a state without names
            node, groups = named[path]
            if groups is not None:
                node[GROUPS] = groups
        if lacking:
            with opened() as step:
                saved = SavedOptimizers(step)
                for path in sorted(lacking):
                    saved.want(path, named[path][0], wanted)

    together(group, "matching the names of optimizers' parameters", look)
    tensors = [(name, tensor) for name, tensors in wanted.tensors.items() for tensor in tensors]
    report = fill(
        {str(i): tensor for i, (_, tensor) in enumerate(tensors)}, {str(i): name for i, (name, _) in enumerate(tensors)}
    )
    if report.missing:
        raise StateMismatch(f"step {report.step} lacks {', '.join(tensors[int(i)][0] for i in report.missing[:20])}")
    wanted.put()
    left = {name for name in missing if not any(name.startswith(f"{path}/") for path in lacking)}
    return left | {*wanted.missing}
