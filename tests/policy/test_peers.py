"""What a user may ask of the memory of peers."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import pytest

from ckptlib import Overhead, Peers, Steps


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"copies": -1}, "copies >= 0"),
        ({"copies": 1.5}, r"Peers\(copies=1.5\): expected a whole number, not a float"),
        ({"every": 0}, "every >= 1"),
        ({"domain": None}, r"Peers\(domain=None\): expected a text"),
        ({"timeout": 5}, r"Peers\(timeout=5\): expected timedelta, such as timedelta\(seconds=60\)"),
        ({"timeout": timedelta(0)}, "expected a time above 0"),
        ({"keep_for": 900.0}, r"Peers\(keep_for=900.0\): expected timedelta, such as timedelta\(minutes=15\)"),
        ({"keep_for": -timedelta(1)}, r"expected a time, or timedelta\(0\)"),
        ({"memory": "disk"}, "memory is 'host' or 'device'"),
        ({"link": "zip"}, "link is 'raw' or 'optimizer'"),
        ({"link": "optimizer", "every": 2}, "needs every=1, got every=2"),
        ({"link": "optimizer", "every": Overhead(0.01)}, "needs every=1, got every=Overhead"),
    ],
)
def test_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises((TypeError, ValueError), match=message):
        Peers(**options)


def test_taken() -> None:
    assert Peers().link == "raw"
    assert Peers(keep_for=timedelta(0)).keep_for == timedelta(0)
    assert Peers(copies=2, link="optimizer").link == "optimizer"


@pytest.mark.parametrize("every", [True, 1.5, "often", None, Steps(2)])
def test_no_number_of_steps_and_no_budget(every: Any) -> None:
    with pytest.raises(TypeError, match=r"expected a number of steps, or a budget such as Overhead\(at_most=0.01\)"):
        Peers(every=every)


def test_when() -> None:
    assert [step for step in range(7) if Peers(every=3).policy.due(step)] == [0, 3, 6]
    assert Peers(every=Overhead(0.01)).policy == Overhead(0.01)
