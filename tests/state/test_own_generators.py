"""Generators of numpy and of Python's `random` in a state: they go on where they were, bit for bit."""

from __future__ import annotations

import random
from collections.abc import Callable
from copy import deepcopy
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from onerank import Holder, Root

import ckptlib
from ckptlib import StateMismatch, UnsupportedState
from ckptlib.state.rng import python_bytes

BITS = [np.random.PCG64, np.random.PCG64DXSM, np.random.MT19937, np.random.Philox, np.random.SFC64]

MAKERS: dict[str, Callable[[int], Any]] = {
    **{f"Generator {kind.__name__}": lambda seed, kind=kind: np.random.Generator(kind(seed)) for kind in BITS},
    **{kind.__name__: kind for kind in BITS},
    "RandomState": np.random.RandomState,
    "RandomState Philox": lambda seed: np.random.RandomState(np.random.Philox(seed)),
    "Random": random.Random,
}


def drawn(generator: Any, times: int = 1) -> list[Any]:
    """Odd numbers of normals and of 32 bits, so that a half of what was drawn is kept for the next."""
    if isinstance(generator, random.Random):
        return [(generator.gauss(0, 1), generator.random(), generator.getrandbits(40)) for _ in range(times)]
    if isinstance(generator, np.random.BitGenerator):
        generator = np.random.Generator(generator)
    if isinstance(generator, np.random.Generator):
        return [(generator.integers(0, 99, dtype=np.uint32), generator.normal()) for _ in range(times)]
    return [(generator.randint(0, 99, dtype=np.uint32), generator.normal()) for _ in range(times)]


def state_of(generator: Any) -> str:
    if isinstance(generator, random.Random):
        return repr(generator.getstate())
    bits = generator.get_state(legacy=False) if isinstance(generator, np.random.RandomState) else None
    with np.printoptions(threshold=1000):
        return repr(bits or getattr(generator, "bit_generator", generator).state)


@pytest.mark.parametrize("kind", MAKERS)
def test_goes_on_where_it_was(root: Root, kind: str) -> None:
    make = MAKERS[kind]
    mine, theirs = [make(1), make(2), make(3)], [make(4), make(5), make(6)]
    for times, generator in enumerate(mine):
        drawn(generator, times)
    root.save({"rng": mine[0], "more": [mine[1], {"inner": (mine[2],)}]})
    states = [*map(state_of, mine)]
    expected = [drawn(generator, 700) for generator in mine]
    for _ in range(2):
        root.load({"rng": theirs[0], "more": [theirs[1], {"inner": (theirs[2],)}]})
        assert [*map(state_of, theirs)] == states
        assert [drawn(generator, 700) for generator in theirs] == expected


def test_a_state_that_numpy_was_given_by_hand(root: Root) -> None:
    """numpy makes odd increments alone, and takes even ones."""
    mine, theirs = np.random.PCG64(1), np.random.PCG64(2)
    mine.state = {**mine.state, "state": {"state": 5, "inc": 2}}
    root.move({"g": mine}, {"g": theirs})
    assert theirs.state == mine.state


def test_a_resumed_run_draws_as_one_that_was_not(tmp_path: Path) -> None:
    def run(path: Path, totals: list[int]) -> list[Any]:
        seen: list[Any] = []
        for incarnation, total in enumerate(totals):
            state = {"rng": np.random.default_rng(incarnation), "py": random.Random(incarnation), "w": torch.zeros(3)}
            with ckptlib.Checkpointer(path, state, every=1, arena=path) as ckpt:
                start = ckpt.restore().step
                seen += [drawn(state["rng"]) + drawn(state["py"]) for _ in ckpt.loop(start, total)]
        return seen

    assert run(tmp_path / "parted", [1, 3]) == run(tmp_path / "whole", [3])


@pytest.mark.parametrize(
    ("saved", "here", "message"),
    [
        (
            "Generator PCG64",
            "Generator Philox",
            "g: is a Generator that draws by Philox, .* has the state of a PCG64",
        ),
        (
            "Generator PCG64",
            "Random",
            r"g: is a Random that draws by random\.Random, .* has the state of a PCG64; ",
        ),
        ("Random", "RandomState", r"g: is a RandomState that draws by MT19937, .* the state of a random\.Random; make"),
        (
            "RandomState",
            "MT19937",
            "g: the checkpoint has .* in the state of this generator, which a MT19937 nev",
        ),
    ],
)
def test_another_kind_is_refused(root: Root, saved: str, here: str, message: str) -> None:
    generator = MAKERS[here](2)
    before = state_of(generator)
    with pytest.raises(StateMismatch, match=message):
        root.move({"g": MAKERS[saved](1)}, {"g": generator})
    assert state_of(generator) == before


def given(kind: str) -> Any:
    """What a generator gives, as the file has it."""
    generator = MAKERS[kind](1)
    if isinstance(generator, random.Random):
        return {"python": python_bytes(generator)}
    state = generator.get_state(legacy=False) if isinstance(generator, np.random.RandomState) else None
    return deepcopy(state or getattr(generator, "bit_generator", generator).state)


HOSTILE: list[tuple[str, str, Any]] = [
    *(("PCG64", "state/state", value) for value in (-1, 2**128, 1.0, True, [1])),
    ("PCG64DXSM", "state/inc", 2**128),
    ("PCG64", "state", [1, 2]),
    ("PCG64", "more", 1),
    ("PCG64", "has_uint32", 2),
    ("Generator PCG64", "uinteger", 2**32),
    *(("MT19937", "state/pos", value) for value in (-1, 625, 2**40)),
    *(("MT19937", "state/key", np.zeros(size, np.uint32)) for size in (0, 623, 624)),
    ("MT19937", "state/key", np.ones(624, np.int64)),
    *(("Generator Philox", "buffer_pos", value) for value in (-1, 5)),
    ("Philox", "buffer", np.ones(3, np.uint64)),
    ("SFC64", "state/state", np.ones((2, 2), np.uint64)),
    ("RandomState", "has_gauss", -1),
    ("RandomState", "gauss", "0.5"),
    ("RandomState", "bit_generator", 7),
    *(("Random", "python", value) for value in (b"", "text", bytes(2513), b"\2" * 2513, b"\3\0\0\0" + b"\7" * 2509)),
]


@pytest.mark.parametrize("case", range(len(HOSTILE)))
def test_what_is_no_state_sets_nothing(root: Root, case: int) -> None:
    kind, key, value = HOSTILE[case]
    state = at = given(kind)
    *above, last = key.split("/")
    for name in above:
        at = at[name]
    at[last] = value
    generator = MAKERS[kind](2)
    before = state_of(generator)
    with pytest.raises(StateMismatch, match=r"^g: "):
        root.move({"g": Holder(state)}, {"g": generator})
    assert state_of(generator) == before


def test_what_is_lacking_is_told(root: Root) -> None:
    with pytest.raises(StateMismatch, match="g: not in the checkpoint"):
        root.move({"w": torch.zeros(2)}, {"w": torch.zeros(2), "g": random.Random(1)})
    with pytest.raises(StateMismatch, match="g: not in the state"):
        root.move({"w": torch.zeros(2), "g": random.Random(1)}, {"w": torch.zeros(2)})


def test_a_class_of_ones_own_is_refused(root: Root) -> None:
    """It may keep more."""

    class Bits(np.random.PCG64):
        pass

    class Mine(random.Random):
        pass

    with pytest.raises(UnsupportedState, match="g: this Generator draws from a bit generator that numpy does not have"):
        root.save({"g": np.random.Generator(Bits(1))})
    for own in (Mine(1), random.SystemRandom(), Bits(1)):
        with pytest.raises(UnsupportedState, match=r"g: cannot save a .*give its owner state_dict"):
            root.save({"g": own})
