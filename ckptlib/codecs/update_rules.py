"""How optimizers compute the new state of a parameter from the old one, as far as can be told without the gradient.

A parameter's state is a few arrays of one shape, in the order in which they can be predicted. The first one is the
average that the gradient goes into, the last one the weights. Once the new average is known, so is the gradient, up to
rounding, and the rest follows. No prediction is exact: frameworks round in other places and at other times.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import ClassVar

import numpy as np
from typing_extensions import override

from ckptlib.codecs.bit_residuals import Floats

Scalars = Sequence[np.float32]
"""Factors of a rule. They are part of a frame, because the value of `beta ** step` depends on the C library."""


class UpdateRule(ABC):
    """One way to update a parameter."""

    number: ClassVar[int]
    """Number of the rule in frames."""
    num_arrays: ClassVar[int]
    num_scalars: ClassVar[int]
    """The first scalar is the share of the old average in the new one."""

    def predict(
        self, array: int, old: Sequence[Floats], new: Sequence[Floats], by: Scalars, room: list[Floats]
    ) -> Floats:
        """Returns the new array number `array`, in `room`, of which it takes up to three. `new`: those before it."""
        if array == 0:
            return np.multiply(old[0], by[0], out=room[0])
        return self.follow(array, old, new, by, room)

    @abstractmethod
    def follow(
        self, array: int, old: Sequence[Floats], new: Sequence[Floats], by: Scalars, room: list[Floats]
    ) -> Floats:
        """Does what `predict` does, for an array behind the first one."""


def _gradient(old: Floats, new: Floats, share: np.float32, inverse: np.float32, room: Floats) -> Floats:
    """Returns the gradient that has made `new` out of `old`: (new - share * old) * inverse."""
    np.multiply(old, share, out=room)
    np.subtract(new, room, out=room)
    return np.multiply(room, inverse, out=room)


class Adam(UpdateRule):
    """Updates exp_avg, exp_avg_sq and weights; decays the weights apart from the gradient (AdamW) or within it."""

    number = 1
    num_arrays = 3
    num_scalars = 8

    @staticmethod
    def scalars(*, lr: float, betas: tuple[float, float], eps: float, decay: float, step: float) -> Scalars:
        """Returns the factors. `decay`: of the weights themselves; 0 if in the gradient. `step`: the new one, >= 1."""
        beta1, beta2 = betas
        found = (
            *(beta1, 1 / (1 - beta1)),
            *(beta2, 1 - beta2),
            *((1 - beta2**step) ** 0.5, eps),
            *(1 - lr * decay, -lr / (1 - beta1**step)),
        )
        return [np.float32(value) for value in found]

    @override
    def follow(
        self, array: int, old: Sequence[Floats], new: Sequence[Floats], by: Scalars, room: list[Floats]
    ) -> Floats:
        _, inverse, share_sq, rest_sq, correction, eps, keeps, rate = by
        if array == 1:
            # m + (m' - m) / (1 - beta1), which inverts torch's lerp
            gradient = np.subtract(new[0], old[0], out=room[0])
            np.multiply(gradient, inverse, out=gradient)
            np.add(gradient, old[0], out=gradient)
            np.multiply(gradient, gradient, out=gradient)
            np.multiply(gradient, rest_sq, out=gradient)
            squares = np.multiply(old[1], share_sq, out=room[1])
            return np.add(squares, gradient, out=squares)
        size = np.sqrt(new[1], out=room[0])
        np.divide(size, correction, out=size)
        np.add(size, eps, out=size)
        change = np.multiply(new[0], rate, out=room[1])
        np.divide(change, size, out=change)
        weights = np.multiply(old[2], keeps, out=room[2])
        return np.add(weights, change, out=weights)


class Momentum(UpdateRule):
    """Stochastic gradient descent: updates momentum_buffer and weights."""

    number = 2
    num_arrays = 2
    num_scalars = 2

    @staticmethod
    def scalars(*, lr: float, momentum: float) -> Scalars:
        return [np.float32(momentum), np.float32(-lr)]

    @override
    def follow(
        self, array: int, old: Sequence[Floats], new: Sequence[Floats], by: Scalars, room: list[Floats]
    ) -> Floats:
        change = np.multiply(new[0], by[1], out=room[0])
        return np.add(old[1], change, out=change)


class Nesterov(UpdateRule):
    """Does what `Momentum` does, but adds the gradient once more to each step."""

    number = 3
    num_arrays = 2
    num_scalars = 4

    @staticmethod
    def scalars(*, lr: float, momentum: float, dampening: float) -> Scalars:
        return [np.float32(value) for value in (momentum, 1 / (1 - dampening), momentum, -lr)]

    @override
    def follow(
        self, array: int, old: Sequence[Floats], new: Sequence[Floats], by: Scalars, room: list[Floats]
    ) -> Floats:
        share, inverse, momentum, rate = by
        gradient = _gradient(old[0], new[0], share, inverse, room[0])
        change = np.multiply(new[0], momentum, out=room[1])
        np.add(change, gradient, out=change)
        np.multiply(change, rate, out=change)
        return np.add(old[1], change, out=change)


class Lion(UpdateRule):
    """Updates exp_avg and weights, by steps of one size in the direction of a sign."""

    number = 4
    num_arrays = 2
    num_scalars = 6

    @staticmethod
    def scalars(*, lr: float, betas: tuple[float, float], decay: float) -> Scalars:
        beta1, beta2 = betas
        return [np.float32(value) for value in (beta2, 1 / (1 - beta2), beta1, 1 - beta1, 1 - lr * decay, -lr)]

    @override
    def follow(
        self, array: int, old: Sequence[Floats], new: Sequence[Floats], by: Scalars, room: list[Floats]
    ) -> Floats:
        share, inverse, before, now, keeps, rate = by
        gradient = _gradient(old[0], new[0], share, inverse, room[0])
        np.multiply(gradient, now, out=gradient)
        change = np.multiply(old[0], before, out=room[1])
        np.add(change, gradient, out=change)
        np.sign(change, out=change)
        np.multiply(change, rate, out=change)
        weights = np.multiply(old[1], keeps, out=room[0])
        return np.add(weights, change, out=weights)


RULES: dict[int, UpdateRule] = {rule.number: rule for rule in (Adam(), Momentum(), Nesterov(), Lion())}
