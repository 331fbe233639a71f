"""Bytes per parameter, in training and in a checkpoint. Pure."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Precision:
    """Bytes of one number of each kind."""

    weights: int
    gradients: int
    master: int
    """A second copy of the weights, which the optimizer updates; 0: there is none."""
    moments: int
    """One of the numbers that the optimizer keeps for each parameter."""


PRECISIONS = {
    "mixed": Precision(2, 2, 4, 4),
    "fp32": Precision(4, 4, 0, 4),
    "bf16": Precision(2, 2, 0, 2),
}
"""mixed: weights in 16 bits, and a master copy in fp32. bf16: everything in 16 bits."""

MOMENTS = {"adamw": 2, "adam": 2, "lion": 1, "momentum": 1, "sgd": 0}
"""Numbers that an optimizer keeps for each parameter."""

NO_OPTIMIZER = "none"
"""In place of an optimizer: only weights are saved."""


@dataclass(frozen=True, slots=True)
class PerParameter:
    """Bytes that one parameter takes."""

    weights: int
    gradients: int
    master: int
    moments: int

    @property
    def in_training(self) -> int:
        """Bytes in training, without activations."""
        return self.weights + self.gradients + self.master + self.moments

    @property
    def in_checkpoint(self) -> int:
        """Bytes in a checkpoint: all but gradients, which each step computes anew."""
        return self.in_training - self.gradients


def per_parameter(precision: str, optimizer: str) -> PerParameter:
    """Returns the bytes per parameter. `precision`: a key of PRECISIONS. `optimizer`: one of MOMENTS, or
    NO_OPTIMIZER."""
    found = PRECISIONS[precision]
    if optimizer == NO_OPTIMIZER:
        return PerParameter(found.weights, 0, 0, 0)
    return PerParameter(found.weights, found.gradients, found.master, MOMENTS[optimizer] * found.moments)
