"""The threads of a read: as many as asked for, none where that is one, and nothing under way when they are stopped."""

from __future__ import annotations

import threading

import pytest

from ckptlib.reading.hands import Hands


def test_one_works_on_the_thread_that_asks() -> None:
    with Hands(1) as hands:
        assert [*hands.map(lambda n: (n, threading.get_ident()), [1, 2])] == [
            (n, threading.get_ident()) for n in (1, 2)
        ]


def test_several_work_at_once() -> None:
    meeting = threading.Barrier(3, timeout=60)
    with Hands(3) as hands:
        assert sorted(hands.map(lambda _: meeting.wait(), range(3))) == [0, 1, 2]


@pytest.mark.parametrize("num", [1, 2])
def test_an_error_ends_it_and_leaves_no_thread(num: int) -> None:
    def call(n: int) -> int:
        if n == 2:
            raise ValueError("two")
        return n

    with Hands(num) as hands:
        results = hands.map(call, range(1000))
        assert [next(results), next(results)] == [0, 1]
        with pytest.raises(ValueError, match="two"):
            next(results)
    assert not [thread for thread in threading.enumerate() if thread.name.startswith("ckptlib-read")]
