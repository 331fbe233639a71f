"""Kinds of optimizers: the state that each of torch's keeps for a parameter, so that a load refuses state which it
would not understand.

Nothing is known of other classes: their state may change from step to step.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass

import torch

Shape = tuple[int, ...]

_NEEDED: dict[str, tuple[str, ...]] = {
    "ASGD": ("step", "eta", "mu", "ax"),
    "Adadelta": ("step", "square_avg", "acc_delta"),
    "Adafactor": ("step",),
    "Adagrad": ("step", "sum"),
    "Adam": ("step", "exp_avg", "exp_avg_sq"),
    "AdamW": ("step", "exp_avg", "exp_avg_sq"),
    "Adamax": ("step", "exp_avg", "exp_inf"),
    "LBFGS": (),
    "Muon": (),
    "NAdam": ("step", "mu_product", "exp_avg", "exp_avg_sq"),
    "RAdam": ("step", "exp_avg", "exp_avg_sq"),
    "RMSprop": ("step", "square_avg"),
    "Rprop": ("step", "prev", "step_size"),
    "SGD": (),
    "SparseAdam": ("step", "exp_avg", "exp_avg_sq"),
}
"""Keys that `step()` reads of a parameter that has any state; it fails if one is missing."""

_OF_LBFGS = (
    "func_evals",
    "n_iter",
    "al",
    "d",
    "t",
    "old_dirs",
    "old_stps",
    "ro",
    "H_diag",
    "prev_flat_grad",
    "prev_loss",
)

_OPTIONAL: dict[str, tuple[str, ...]] = {
    "LBFGS": _OF_LBFGS,
    "Muon": ("momentum_buffer",),
    "SGD": ("momentum_buffer",),
}
"""Keys that it reads if they are there."""

_SWITCHED: dict[str, dict[str, str]] = {
    "Adam": {"amsgrad": "max_exp_avg_sq"},
    "AdamW": {"amsgrad": "max_exp_avg_sq"},
    "RMSprop": {"momentum": "momentum_buffer", "centered": "grad_avg"},
}
"""Keys that it reads if a hyper-parameter is neither 0 nor False."""

_AT_ONCE = {"Adagrad"}
"""Optimizers that make their state when they are made, and never again."""

_OWN_SHAPE = frozenset(["step", "eta", "mu", "mu_product"])
"""Keys whose tensors do not have the shape of the parameter, and are scalars."""

_COUNTS_IN_INTS = {"SparseAdam"}
"""Optimizers whose scalars are Python's."""


@dataclass(frozen=True, slots=True)
class Kind:
    """The state that one of torch's optimizers keeps for one parameter."""

    needed: frozenset[str]
    known: frozenset[str]
    """All keys that it reads, including those that it needs."""
    shapes: Mapping[str, Shape]
    """The shapes of the keys that have a fixed shape."""
    at_once: bool
    """Whether it needs its keys before its first step."""

    def lacks(self, keys: Collection[str], stateful: bool) -> list[str]:
        """Returns keys that `step()` would miss. `stateful`: whether the parameter has state now."""
        return sorted(self.needed.difference(keys)) if keys or (stateful and self.at_once) else []

    def strange(self, keys: Iterable[str]) -> list[str]:
        """Returns keys that it would never read."""
        return sorted({*keys} - self.known)


def kind_of(optimizer: torch.optim.Optimizer, options: Mapping[str, object], shape: Shape) -> Kind | None:
    """Returns the kind for a parameter with that (global) shape; None if nothing is known, as for a class that inherits
    from torch's.

    `options`: the hyper-parameters that its group is going to have. To be called once for each shape: for LBFGS all
    parameters are counted.
    """
    name = type(optimizer).__name__
    if name not in _NEEDED or type(optimizer) is not getattr(torch.optim, name, None):
        return None
    shapes: dict[str, Shape]
    switched = _SWITCHED.get(name, {})
    needed = {*_NEEDED[name], *(key for option, key in switched.items() if options.get(option))}
    known = {*needed, *switched.values(), *_OPTIONAL.get(name, ())}
    if name == "LBFGS":
        params = (p for group in optimizer.param_groups for p in group["params"])
        flat = (sum(p.numel() * (2 if p.is_complex() else 1) for p in params),)
        shapes = {"d": flat, "prev_flat_grad": flat}
    elif name == "Adafactor":
        factored = {"row_var": (*shape[:-1], 1), "col_var": (*shape[:-2], 1, *shape[-1:])}
        shapes = factored if len(shape) > 1 else {"variance": shape}
        needed |= shapes.keys()
        known |= needed
    else:
        shapes = dict.fromkeys(known - _OWN_SHAPE, shape)
    return Kind(frozenset(needed), frozenset(known), shapes, name in _AT_ONCE)


def scalars_of(optimizer: torch.optim.Optimizer) -> frozenset[str]:
    """Returns keys whose values torch's own `load_state_dict()` makes tensors without dimensions, also for a class
    that inherits from torch's. They were numbers before torch 1.12, and are in DeepSpeed; a step would not count
    those up."""
    bases = (cls for cls in type(optimizer).__mro__ if cls is getattr(torch.optim, cls.__name__, None))
    name = next((cls.__name__ for cls in bases if cls.__name__ in _NEEDED), "")
    return frozenset() if name in _COUNTS_IN_INTS else _OWN_SHAPE.intersection(_NEEDED.get(name, ()))
