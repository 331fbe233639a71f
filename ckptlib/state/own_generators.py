"""Saves generators of numpy and of Python's `random` that are in a state as plain values, and restores them in place.

Those of torch are tensors, and the global ones of the process are in `ckptlib.state.rng`. Generators made by `spawn()`
are no part of a generator's state.
"""

from __future__ import annotations

import random
from collections.abc import Mapping
from typing import Any, TypeAlias

import numpy as np

from ckptlib.errors import FormatError, StateMismatch, UnsupportedState
from ckptlib.format.tagged_values import brief
from ckptlib.state.rng import python_bytes, python_state

_BITS: tuple[type[np.random.BitGenerator], ...] = (
    np.random.PCG64,
    np.random.PCG64DXSM,
    np.random.MT19937,
    np.random.Philox,
    np.random.SFC64,
)
_BIT_NAMES = frozenset(cls.__name__ for cls in _BITS)

Generator: TypeAlias = "random.Random | np.random.Generator | np.random.RandomState | np.random.BitGenerator"

GENERATORS: frozenset[type] = frozenset([random.Random, np.random.Generator, np.random.RandomState, *_BITS])
"""The exact types of generators; a class that inherits from one may keep more state."""

_UP_TO = {
    "pos": 624,  # beyond these two numpy reads foreign memory
    "buffer_pos": 4,
    "has_uint32": 1,
    "has_gauss": 1,
    "uinteger": 2**32 - 1,
    "state": 2**128 - 1,
    "inc": 2**128 - 1,
}
"""The largest number for each key of a numpy state. The smallest is 0."""


class OwnGenerator:
    """A generator, as an object that gives and takes its state."""

    def __init__(self, generator: Generator, path: str) -> None:
        """Raises UnsupportedState for a bit generator that is not numpy's own."""
        self._generator = generator
        self._path = path
        if not isinstance(generator, random.Random) and self.state_dict().get("bit_generator") not in _BIT_NAMES:
            raise UnsupportedState(
                f"{path}: this {type(generator).__name__} draws from a bit generator that numpy does not have, so what "
                "its state must be is not known; put in its place an object whose state_dict() and load_state_dict() "
                "give and take it as plain values"
            )

    def state_dict(self) -> Mapping[str, Any]:
        made: Any
        if isinstance(self._generator, random.Random):
            return {"python": python_bytes(self._generator)}
        if isinstance(self._generator, np.random.RandomState):
            made = self._generator.get_state(legacy=False)
        elif isinstance(self._generator, np.random.Generator):
            made = self._generator.bit_generator.state
        else:
            made = self._generator.state
        return made if isinstance(made, Mapping) else {}

    def load_state_dict(self, state: object) -> None:
        """Sets the generator. Raises StateMismatch, and sets nothing, if this is no state of this kind of generator."""
        if isinstance(self._generator, random.Random):
            self._load_python(self._generator, state)
            return
        self._check(state)
        given: Any = state
        if isinstance(self._generator, np.random.RandomState):
            self._generator.set_state(given)
        elif isinstance(self._generator, np.random.Generator):
            self._generator.bit_generator.state = given
        else:
            self._generator.state = given

    def _load_python(self, generator: random.Random, state: object) -> None:
        data = state.get("python") if isinstance(state, Mapping) and len(state) == 1 else None
        if not isinstance(data, bytes):
            raise self._other(state)
        try:
            generator.setstate(python_state(data))
        except FormatError as error:
            raise StateMismatch(f"{self._path}: {error}; load another step, or leave it out with only=") from error

    def _check(self, state: object) -> None:
        """Checks a state: numpy takes whatever it is given for some values."""
        mine = self.state_dict()
        if not isinstance(state, Mapping) or state.get("bit_generator") != mine["bit_generator"]:
            raise self._other(state)
        wrong = _wrong(state, mine)
        if wrong is not None:
            raise StateMismatch(
                f"{self._path}: the checkpoint has {wrong} in the state of this generator, which a "
                f"{mine['bit_generator']} never has; load another step, or leave it out with only="
            )

    def _other(self, state: object) -> StateMismatch:
        mine, saved = self.state_dict(), state if isinstance(state, Mapping) else {}
        here = mine.get("bit_generator", "random.Random")
        there = "random.Random" if "python" in saved else saved.get("bit_generator")
        told = f"the state of a {there}" if isinstance(there, str) else brief(state)
        return StateMismatch(
            f"{self._path}: is a {type(self._generator).__name__} that draws by {here}, the checkpoint has {told}; "
            "make it of the kind that was saved"
        )


def _wrong(given: object, mine: object, key: str = "") -> str | None:
    """Returns the first value that the state of such a generator never has, for messages; None if there is none."""
    if isinstance(mine, Mapping):
        if not isinstance(given, Mapping) or given.keys() != mine.keys():
            return f"{key} {brief(given)}".strip()
        return next((wrong for k in mine if (wrong := _wrong(given[k], mine[k], k)) is not None), None)
    is_right = type(given) is type(mine)
    if isinstance(given, np.ndarray) and isinstance(mine, np.ndarray):
        # from a Mersenne twister's words of zeros come only zeros, and normals loop for ever
        is_right = (given.dtype, given.shape) == (mine.dtype, mine.shape) and (mine.size != 624 or bool(given.any()))
    elif is_right and isinstance(given, int):
        is_right = 0 <= given <= _UP_TO.get(key, 0)
    return None if is_right else f"{key} {brief(given)}"
