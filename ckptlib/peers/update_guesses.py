"""Guesses how a parameter was updated, by what its optimizer's group says of itself. Guesses are tried on a sample.

A snapshot has the state after a step. If a scheduler stepped before `after_step`, the learning rate there is the next
step's; that of this step is in the snapshot before. Pure; no torch.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

from ckptlib.codecs.update_rules import Adam, Lion, Momentum, Nesterov, Scalars, UpdateRule
from ckptlib.peers.parameters import ADAM, SGD

Options = Mapping[str, object]
"""A group's hyper-parameters, by name; tensors as the numbers in them."""


class Guess(NamedTuple):
    """A rule, and the scalars that it takes."""

    rule: UpdateRule
    by: Scalars


def guesses(
    family: tuple[str, ...], kind: str, options: Options, before: Options, step: float | None, steps: float
) -> list[Guess]:
    """Returns the guesses, the likeliest first; none if the group lacks an option that rules need.

    kind:   the class of the optimizer. `before`: the options in the snapshot before.
    step:   of the parameter, if known. `steps`: how many the training has done, which is most often the same.
    """
    found: list[Guess] = []
    for lr in dict.fromkeys((_number(options.get("lr")), _number(before.get("lr")))):
        if lr is not None:
            found += _at(lr, family, kind, options, steps if step is None else step)
    return found


def _at(lr: float, family: tuple[str, ...], kind: str, options: Options, step: float) -> list[Guess]:
    if family == SGD:
        return _sgd(lr, options)
    match options.get("betas"):
        case (beta1, beta2):
            betas = _number(beta1), _number(beta2)
        case _:
            return []
    if betas[0] is None or betas[1] is None or not all(0 <= beta < 1 for beta in betas if beta is not None):
        return []
    both = betas[0], betas[1]
    decays = _decays(kind, options)
    if family != ADAM:
        return [Guess(_LION, Lion.scalars(lr=lr, betas=both, decay=decay)) for decay in decays]
    eps = _number(options.get("eps"))
    if eps is None or not step >= 1:
        return []
    return [Guess(_ADAM, Adam.scalars(lr=lr, betas=both, eps=eps, decay=decay, step=step)) for decay in decays]


def _decays(kind: str, options: Options) -> list[float]:
    """Returns the decays that the weights by themselves may have. Adam's own decay is part of the gradient."""
    decay = _number(options.get("weight_decay")) or 0.0
    apart = options.get("decoupled_weight_decay", True if kind in ("AdamW", "Lion") else None)
    return [0.0] if not decay or apart is False else [decay] if apart is True else [decay, 0.0]


def _sgd(lr: float, options: Options) -> list[Guess]:
    momentum, dampening = _number(options.get("momentum")), _number(options.get("dampening")) or 0.0
    if momentum is None:
        return []
    if options.get("nesterov") and dampening != 1:
        return [Guess(_NESTEROV, Nesterov.scalars(lr=lr, momentum=momentum, dampening=dampening))]
    return [Guess(_MOMENTUM, Momentum.scalars(lr=lr, momentum=momentum))]


_ADAM, _MOMENTUM, _NESTEROV, _LION = Adam(), Momentum(), Nesterov(), Lion()


def _number(value: object) -> float | None:
    """Returns the number; None for a value that is no number, or too large to count with."""
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not abs(value) < 1e15:
        return None
    return float(value)
