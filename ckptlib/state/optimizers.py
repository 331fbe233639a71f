"""Names an optimizer's state by parameter, and never by position in a flat list.

This module knows names and which optimizers cannot be saved; the walk over an optimizer is in `ckptlib.state.flatten`.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Iterator, Mapping, MutableMapping, Sequence
from contextlib import contextmanager
from itertools import chain
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.utils.weak import WeakIdKeyDictionary

from ckptlib.errors import UnsupportedState
from ckptlib.format.paths import join
from ckptlib.state.frameworks import known_class
from ckptlib.state.leaf import Sharded, storage_of

log = logging.getLogger(__name__)

_REFUSED_OPTIMIZERS = {
    ("torch.distributed.optim.zero_redundancy_optimizer", "ZeroRedundancyOptimizer"): "use FSDP2, or a plain optimizer "
    "(not the one inside it either, which gets its hyper-parameters from around it at each step)",
    ("deepspeed.runtime.zero.stage3", "DeepSpeedZeroOptimizer_Stage3"): "use FSDP2",
    ("deepspeed.runtime.zero.stage_1_and_2", "DeepSpeedZeroOptimizer"): "use FSDP2",
    ("deepspeed.runtime.bf16_optimizer", "BF16_Optimizer"): "use FSDP2",
    ("megatron.core.optimizer.distrib_optimizer", "DistributedOptimizer"): "use FSDP2",
    ("megatron.core.optimizer.optimizer", "ChainedOptimizer"): "use FSDP2",
}


def refuse_optimizer(optimizer: object, path: str) -> None:
    """Raises UnsupportedState for optimizers whose state cannot be named by parameter; not all are torch's."""
    known = known_class(optimizer, _REFUSED_OPTIMIZERS)
    if known:
        raise UnsupportedState(f"{path}: {known[1]} divides its state between the ranks: {_REFUSED_OPTIMIZERS[known]}")


def refuse_strangers(optimizer: torch.optim.Optimizer, params: Sequence[torch.Tensor], path: str) -> None:
    """Raises UnsupportedState for state that no parameter of the groups, `params`, has."""
    known = set(map(id, params))
    for key in optimizer.state:
        if id(key) not in known and isinstance(key, torch.Tensor):
            raise UnsupportedState(
                f"{path}: the optimizer keeps state of a parameter of shape {list(key.shape)} that is in none of its "
                "groups any more; remove it, as with del optimizer.state[param], when a parameter leaves its group"
            )
        if id(key) not in known:
            raise UnsupportedState(
                f"{path}: the optimizer keeps state under {str(key)[:40]!r}, which is not a parameter of its groups; "
                "put in its place an object whose state_dict() and load_state_dict() call the optimizer's"
            )


@contextmanager
def saying_how(optimizer: torch.optim.Optimizer) -> Iterator[None]:
    """Adds advice on how to save it to an UnsupportedState about what an optimizer keeps for a parameter beside
    tensors."""
    try:
        yield
    except UnsupportedState as error:
        raise UnsupportedState(
            f"{error} (in the state of a {type(optimizer).__name__}, which makes it). Put in the optimizer's place an "
            "object whose state_dict() gives the optimizer's, with vars(x), or list(x) of a deque, in place "
            "of each x, and whose load_state_dict() gives that to the optimizer's, and then makes each x again in "
            "optimizer.state"
        ) from None


def group_path(path: str, index: int) -> str:
    """Returns the path of a group's hyper-parameters."""
    return f"{path}/@group.{index}" if path else f"@group.{index}"


def is_group_path(name: str) -> bool:
    """Returns whether a name is that of a group's hyper-parameters."""
    return name.rpartition("/")[2].startswith("@group.")


def state_path(path: str, param_name: str, key: object) -> str:
    """Returns the path of one entry of a parameter's optimizer state. Raises UnsupportedState for a key that is no
    text."""
    if not isinstance(key, str):
        raise UnsupportedState(f"{path}/{param_name}: optimizer state has the key {key!r}; keys must be text")
    return join(f"{path}/{param_name}" if path else param_name, key)


def names_of_params(optimizer: torch.optim.Optimizer, param_names: Mapping[int, str], path: str) -> list[list[str]]:
    """Returns the names of an optimizer's parameters, by group.

    They are those of the modules in the same state; else those the optimizer was given (`named_parameters()`); else
    positions. Raises UnsupportedState if two parameters have one name: each would get the options and the moments of
    either.
    """
    names = []
    for i, group in enumerate(optimizer.param_groups):
        given: Sequence[str] = group.get("param_names") or ()
        if len(given) != len(group["params"]):  # none, or those of other parameters than it has by now
            given = [f"@{i}.{j}" for j in range(len(group["params"]))]
        names.append([param_names.get(id(p), given[j]) for j, p in enumerate(group["params"])])
    known: dict[str, torch.Tensor] = {}
    params = (param for group in optimizer.param_groups for param in group["params"])
    for name, param in zip(chain.from_iterable(names), params, strict=True):
        if known.setdefault(name, param) is not param:
            cls = type(optimizer).__name__
            raise UnsupportedState(
                f"{path}: two parameters of this {cls} have the name {name!r}, so a load could not "
                "tell them apart; put their modules into the state, or give the optimizer a name of its own for each, "
                "such as [(f'encoder.{name}', p) for name, p in encoder.named_parameters()]"
            )
    return names


_told: MutableMapping[torch.optim.Optimizer, set[str]] = WeakIdKeyDictionary()
"""What was logged of each optimizer. By identity: one may define its own `==`, and no hash."""


def warn_of_positions(optimizer: torch.optim.Optimizer, names: Sequence[Sequence[str]], path: str, done: str) -> None:
    """Warns once if only their order tells an optimizer's parameters apart. `done`: "saved", "loaded"."""
    told = _told.setdefault(optimizer, set())
    if done in told or (dist.is_initialized() and dist.get_rank()):
        return
    told.add(done)
    positions = sum(name == f"@{i}.{j}" for i, group in enumerate(names) for j, name in enumerate(group))
    if positions > 1:
        log.warning(
            "%s: the state of %d parameters is %s by their position, since nothing in the state names them. If their "
            "order changes, they get the moments of others. Put their module into the same state, or create the "
            "optimizer from model.named_parameters()",
            path,
            positions,
            done,
        )


def warn_of_unsaved(
    optimizer: torch.optim.Optimizer,
    params: Sequence[tuple[str, torch.Tensor]],
    modules: Iterable[nn.Module],
    saved: Iterable[torch.Tensor],
    path: str,
) -> None:
    """Warns once if the state has some of an optimizer's parameters, but not these. `params`: by name.

    Leaves out those that are in a module, which may give others in their place, or in the memory of a tensor of the
    state.
    """
    told = _told.setdefault(optimizer, set())
    if "unsaved" in told:
        return
    held = {id(param) for module in modules for param in module.parameters()}
    memory = {*map(storage_of, saved)} - {None}
    lost = [
        f"{name} {list(param.shape)}"
        for name, param in params
        if param.requires_grad and id(param) not in held and storage_of(param) not in memory
    ]
    if lost:
        told.add("unsaved")
        log.warning(
            "%s: updates %d parameters that are nowhere else in the state, so their values are not saved, and a resume "
            "begins with those that the program makes: %s%s. Put them, or their module, into the state",
            path,
            len(lost),
            ", ".join(lost[:4]),
            ", ..." if len(lost) > 4 else "",
        )


def hyper_parameters(group: Mapping[str, Any]) -> Iterator[tuple[str, object]]:
    """Returns a parameter group's entries beside its parameters."""
    return ((key, value) for key, value in group.items() if key not in ("params", "param_names"))


def cut_like(param: Sharded | None, value: torch.Tensor) -> torch.Tensor | Sharded:
    """Returns optimizer state of a parameter that was cut by hand: tensors of the parameter's shape are cut like it."""
    if param is None or value.shape != param.tensor.shape:
        return value
    return Sharded(value, param.offset, param.shape)
