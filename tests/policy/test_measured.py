"""What a start leaves to the next one: read back as written, and never believed where it makes no sense."""

from __future__ import annotations

import json
import math

import pytest

from ckptlib.policy.measured import Measured

TOLD = Measured(step_s=0.2, each_step_s=0.0004, save_s=0.25, visible_s=0.02, persist_s=2.0, num_saves=7)


def test_there_and_back() -> None:
    assert Measured.of(json.loads(json.dumps(TOLD.to_json()))) == TOLD


def test_four_digits_are_enough() -> None:
    told = Measured(0.123456789, 0.0, 1e-12, 0.0, 12345.678, 1).to_json()
    assert (told["step_s"], told["save_s"], told["persist_s"]) == (0.1235, 1e-12, 12350.0)


@pytest.mark.parametrize("value", [None, [], "x", 3, {}, {"step_s": 1.0}])
def test_what_is_none(value: object) -> None:
    assert Measured.of(value) is None


@pytest.mark.parametrize(
    ("name", "value"),
    [
        *(("step_s", value) for value in (0.0, -1.0, math.nan, math.inf, 1e300, 10**400, True, "0.2", None, [0.2])),
        *(("save_s", value) for value in (-0.1, math.nan, 1e300, {})),
        *(("num_saves", value) for value in (0, -3, 2.0, True, "7", None)),
    ],
    ids=repr,
)
def test_numbers_that_nobody_measured(name: str, value: object) -> None:
    assert Measured.of({**TOLD.to_json(), name: value}) is None


def test_more_than_is_known_is_left_alone() -> None:
    assert Measured.of({**TOLD.to_json(), "later": [1]}) == TOLD
