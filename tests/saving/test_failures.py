"""When saves have failed for too long, told by numbers and times alone."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ckptlib.saving.failures import MAX_FAILURES, FailureRun

ERROR = RuntimeError("no answer")


def test_many_failures_within_a_short_outage_are_not_too_many() -> None:
    run = FailureRun(1800.0)
    for second in range(300):
        run.fail(1000.0 + second, ERROR)
        assert not run.too_long
    assert (run.count, run.error) == (300, ERROR)


@pytest.mark.parametrize("count", range(1, MAX_FAILURES + 2))
def test_a_long_outage_needs_some_failures(count: int) -> None:
    """One save that fails after an hour is no reason to end."""
    run = FailureRun(1800.0)
    for n in range(count):
        run.fail(3600.0 * n, ERROR)
    assert run.too_long == (count >= MAX_FAILURES)


def test_without_an_outage_that_is_allowed_only_the_number_counts() -> None:
    run = FailureRun(0.0)
    found = []
    for _ in range(MAX_FAILURES):
        run.fail(5.0, ERROR)
        found.append(run.too_long)
    assert found == [False] * (MAX_FAILURES - 1) + [True]


def test_time_without_a_failure_does_not_count() -> None:
    """Nobody knows whether the outage lasts."""
    run = FailureRun(60.0)
    for second in (0.0, 10.0, 20.0):
        run.fail(second, ERROR)
    assert not run.too_long
    run.fail(60.0, ERROR)
    assert run.too_long


def test_what_a_local_disk_has_is_no_reason_to_end_the_training() -> None:
    run = FailureRun(60.0)
    for minute in range(10):
        run.fail(60.0 * minute, ERROR, is_local=True)
        assert not run.too_long
    assert (run.count, run.error) == (10, ERROR), "the next save makes it good"
    run.fail(600.0, ERROR)
    assert run.too_long


@given(st.lists(st.one_of(st.none(), st.floats(0, 100)), max_size=30), st.floats(0, 300))
def test_a_success_begins_anew(events: list[float | None], max_outage_s: float) -> None:
    """None: a save is durable; a number: another one failed, so much later. Judged by the tail of the list alone."""
    run, now, times = FailureRun(max_outage_s), 0.0, list[float]()
    for event in events:
        if event is None:
            run.succeed()
            times = []
        else:
            now += event
            run.fail(now, ERROR)
            times.append(now)
        assert run.too_long == (len(times) >= MAX_FAILURES and times[-1] - times[0] >= max_outage_s)
        assert (run.error is None) == (not times)
