"""What says when to save: numbers, times, functions and policies, alone and combined; and what says nothing."""

from __future__ import annotations

from datetime import timedelta

import pytest
from typing_extensions import override

import ckptlib
from ckptlib.policy.overhead import Overhead, overhead_in
from ckptlib.policy.tier import LocalTier, tier_of
from ckptlib.policy.when import First, Minutes, Moment, Policy, Steps, When, policy_of

HOUR = timedelta(hours=1)


def at(step: int, **known: object) -> Moment:
    return Moment(**{"step": step, "saved": 0, "now": 0.0, "saved_at": 0.0, "is_first": False, **known})  # type: ignore[arg-type]


def due(when: When, steps: range, **known: object) -> list[int]:
    policy = policy_of(when)
    return [step for step in steps if policy.due_at(at(step, **known))]


class Squares(Policy):
    @override
    def due(self, step: int) -> bool:
        return int(step**0.5) ** 2 == step


class Duck:
    """No policy, but it has what it takes."""

    def due(self, step: int) -> bool:
        return step == 3


def test_a_number_and_steps_are_multiples_of_the_step() -> None:
    assert due(4, range(1, 13)) == due(Steps(4), range(1, 13)) == [4, 8, 12]


def test_a_function_a_policy_of_ones_own_and_what_looks_like_one() -> None:
    assert due(lambda step: step in (2, 5), range(1, 10)) == [2, 5]
    assert due(Squares(), range(1, 20)) == [1, 4, 9, 16]
    assert due(Duck(), range(1, 10)) == [3]  # type: ignore[arg-type]


def test_minutes_and_a_timedelta_go_by_the_clock() -> None:
    for when in (Minutes(60), HOUR):
        assert not due(when, range(7, 8), now=4599.0, saved_at=1000.0)
        assert due(when, range(7, 8), now=4600.0, saved_at=1000.0)


def test_combinations_are_due_when_one_of_them_is() -> None:
    combined = Steps(5) | 7 | (lambda step: step == 1) | HOUR
    assert due(combined, range(1, 15)) == [1, 5, 7, 10, 14]
    assert due(combined, range(1, 3), now=3600.0) == [1, 2]
    assert due(3 | First(), range(1, 7)) == [3, 6]
    assert due(3 | First(), range(1, 3), is_first=True) == [1, 2]
    assert due(HOUR | Squares(), range(1, 5)) == [1, 4]


@pytest.mark.parametrize("wrong", [True, 2.5, "500", None, Steps, [Steps(5)]])
def test_what_says_no_time_is_refused_with_examples(wrong: object) -> None:
    with pytest.raises(TypeError, match=r"every=.*Steps\(500\), Minutes\(10\) or Overhead\(at_most=0.035\)"):
        policy_of(wrong)  # type: ignore[arg-type]


@pytest.mark.parametrize("n", [0, -1])
def test_steps_need_one_at_least(n: int) -> None:
    with pytest.raises(ValueError, match="n >= 1"):
        policy_of(n)


@pytest.mark.parametrize("minutes", ["5", True, None, timedelta(minutes=5)])
def test_minutes_are_a_number(minutes: object) -> None:
    with pytest.raises(TypeError, match=r"expected a number, such as Minutes\(10\)"):
        Minutes(minutes)  # type: ignore[arg-type]


@pytest.mark.parametrize("minutes", [0, -5, float("nan"), float("inf")])
def test_a_time_must_pass(minutes: float) -> None:
    with pytest.raises(ValueError, match="above 0"):
        Minutes(minutes)


def test_a_policy_without_an_answer_says_what_to_override() -> None:
    with pytest.raises(NotImplementedError, match=r"Policy does not say.*override due"):
        Policy().due(1)


def test_public() -> None:
    assert issubclass(ckptlib.Overhead, ckptlib.Policy)
    assert isinstance(ckptlib.First() | ckptlib.Minutes(1) | ckptlib.Steps(2), ckptlib.Policy)


# Overhead


@pytest.mark.parametrize("at_most", [0, 0.0, 1, 1.0, 3.5, -0.01, float("nan")])
def test_a_budget_is_a_share_between_nothing_and_all(at_most: float) -> None:
    with pytest.raises(ValueError, match="above 0 and below 1"):
        Overhead(at_most=at_most)


def test_a_budget_given_in_percent_is_told_what_it_meant() -> None:
    with pytest.raises(ValueError, match=r"for 3.5 % give 0.035"):
        Overhead(at_most=3.5)


@pytest.mark.parametrize("wrong", ["3%", True, None])
def test_a_budget_is_a_number(wrong: object) -> None:
    with pytest.raises(TypeError, match=r"such as 0\.035"):
        Overhead(at_most=wrong)  # type: ignore[arg-type]


@pytest.mark.parametrize("name", ["at_most_lost", "mtbf"])
def test_bounds_are_times_above_nothing(name: str) -> None:
    for wrong in (timedelta(0), timedelta(seconds=-1)):
        with pytest.raises(ValueError, match=f"{name}=.*above 0"):
            Overhead(0.01, **{name: wrong})  # type: ignore[arg-type]
    with pytest.raises(TypeError, match=f"{name}=.*expected a timedelta, such as"):
        Overhead(0.01, **{name: 600})  # type: ignore[arg-type]


def test_a_run_keeps_to_one_budget() -> None:
    one = Overhead(0.01)
    assert overhead_in(Steps(5)) is None
    assert overhead_in(one) is overhead_in(Steps(5) | (one | First())) is one
    with pytest.raises(ValueError, match=r"1.0% and 5.0%.*give one"):
        overhead_in(one | Steps(2) | Overhead(0.05))


# Drains, which go by the step alone


@pytest.mark.parametrize("by_clock", [Minutes(5), Overhead(0.01), First(), Steps(5) | Minutes(5)])
def test_drains_go_by_the_step(by_clock: Policy) -> None:
    with pytest.raises(ValueError, match=r"drain=.*step alone.*Steps\(500\)"):
        tier_of("/disk", by_clock, 2, None)


def test_drains_by_several_numbers_of_steps() -> None:
    tier = tier_of("/disk", Steps(5) | Steps(7), 2, None)
    assert isinstance(tier, LocalTier)
    assert tier.drain is not None
    assert [step for step in range(1, 15) if tier.drain.due(step)] == [5, 7, 10, 14]
