"""Round marks that hold all values, and places that stay on the chart."""

from __future__ import annotations

import math
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ckptlib.reporting.scale import Scale, bytes_axis, count_axis, is_date, seconds_axis, time_axis


@given(st.floats(0, 1e18), st.sampled_from([seconds_axis, bytes_axis, count_axis]))
def test_an_axis_holds_its_values(most: float, axis: object) -> None:
    found = axis(most)  # type: ignore[operator]
    assert found.ticks[0] == 0
    assert found.high >= most * (1 - 1e-6)
    assert 2 <= len(found.ticks) <= 7
    assert len(found.ticks) == len(found.words) == len({*found.ticks})
    gaps = [b - a for a, b in pairwise(found.ticks)]
    assert max(gaps) == pytest.approx(min(gaps))


@given(st.floats(1e-3, 3e10), st.floats(0, 3e9))
def test_a_time_axis_lies_within(first: float, span: float) -> None:
    last = min(first + span, 3.2e10)
    found = time_axis(min(first, last), last)
    assert len(found.ticks) <= 10
    assert all(first - 1e-3 <= tick <= max(last, first + 1) + 1e-3 for tick in found.ticks)


@pytest.mark.parametrize(
    ("most", "words"),
    [
        (0.045, ["0", "20 ms", "40 ms", "60 ms"]),
        (3.1, ["0", "1 s", "2 s", "3 s", "4 s"]),
        (4000, ["0", "17 min", "33 min", "50 min", "67 min"]),
    ],
)
def test_words_of_seconds(most: float, words: list[str]) -> None:
    assert list(seconds_axis(most).words) == words


def test_words_of_bytes_and_dates() -> None:
    assert bytes_axis(7.3e9).words == ["0", "2.00 GB", "4.00 GB", "6.00 GB", "8.00 GB"]
    assert time_axis(1_700_000_000, 1_700_000_060).words[0] == "22:13:20"
    assert time_axis(1_700_000_000, 1_702_000_000).words[0] == "Nov 16"  # every third day since 1970


@given(st.floats(allow_nan=False, allow_infinity=False), st.floats(-1e9, 1e9), st.floats(-1e9, 1e9))
def test_places_stay_on_the_chart(value: float, low: float, high: float) -> None:
    at = Scale(low, high, 10, 200)(value)
    assert 10 <= at <= 200
    assert math.isfinite(at)


@pytest.mark.parametrize(("number", "fine"), [(0.0, False), (-1.0, False), (1.7e9, True), (1e300, False)])
def test_dates(number: float, fine: bool) -> None:
    assert is_date(number) is fine
