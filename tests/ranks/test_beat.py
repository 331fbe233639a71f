"""The beat: what one rank says, all act upon; and ranks that fell out of step are told so."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor

import pytest
from hypothesis import given
from hypothesis import strategies as st
from typing_extensions import override

from ckptlib.errors import AgreementFailed
from ckptlib.ranks.beat import Beat, Word
from ckptlib.ranks.group import SoloGroup


class ThreadGroup(SoloGroup):
    """A rank that is a thread: the maximum is real, the wire is not."""

    def __init__(self, rank: int, size: int, barrier: threading.Barrier, board: list[Sequence[int]]) -> None:
        self.rank, self.size = rank, size
        self._barrier, self._board = barrier, board

    @override
    def start_max(self, values: Sequence[int]) -> Callable[[], list[int]]:
        self._board[self.rank] = list(values)

        def wait() -> list[int]:
            self._barrier.wait(30)
            found = [max(column) for column in zip(*self._board, strict=True)]
            self._barrier.wait(30)
            return found

        return wait


def agreed(words: Sequence[Word]) -> list[Word | AgreementFailed]:
    """What each rank makes of it, asked for the step that it believes in."""
    barrier, board = threading.Barrier(len(words)), [()] * len(words)

    def run(rank: int) -> Word | AgreementFailed:
        beat = Beat(ThreadGroup(rank, len(words), barrier, board))  # type: ignore[arg-type]
        assert not beat.started
        beat.start(words[rank])
        assert beat.started
        try:
            return beat.agreed(words[rank].step)
        except AgreementFailed as error:
            return error

    with ThreadPoolExecutor(len(words)) as threads:
        return list(threads.map(run, range(len(words))))


FLAGS = st.fixed_dictionaries(
    {
        **{name: st.integers(0, 1) for name in ("due", "inline", "agree", "stop", "superseded")},
        "failures": st.integers(0, 5),
        "needs_held": st.integers(-1, 1000),
        "calm": st.integers(0, 1),
        "oldest_held": st.integers(-1, 1000),
    }
)


@given(st.integers(0, 10**9), st.lists(FLAGS, min_size=1, max_size=4))
def test_all_ranks_act_on_the_same_word(step: int, flags: list[dict[str, int]]) -> None:
    found = agreed([Word(step, **given) for given in flags])
    assert all(word == found[0] for word in found)
    word = found[0]
    assert isinstance(word, Word)
    for name in ("due", "inline", "agree", "stop", "needs_held", "superseded", "failures"):
        assert getattr(word, name) == max(given[name] for given in flags)
    assert word.calm == min(given["calm"] for given in flags)
    assert word.oldest_held == min(given["oldest_held"] for given in flags), "held by all: the oldest counts"


@given(st.lists(st.integers(0, 20), min_size=2, max_size=4).filter(lambda steps: len({*steps}) > 1))
def test_ranks_at_different_steps_are_all_told(steps: list[int]) -> None:
    for found in agreed([Word(step) for step in steps]):
        assert isinstance(found, AgreementFailed)
        assert f"at steps {min(steps)} to {max(steps)};" in str(found)


def test_a_word_for_another_step_is_refused() -> None:
    beat = Beat(SoloGroup())
    beat.start(Word(5))
    with pytest.raises(AgreementFailed, match=r"called after_step\(7\), but the next step was 5"):
        beat.agreed(7)


def test_one_word_is_one_agreement() -> None:
    beat = Beat(SoloGroup())
    beat.start(Word(1, due=1))
    assert beat.agreed(1) == Word(1, due=1)
    assert not beat.started


def test_every_field_travels() -> None:
    word = Word(5, *range(10, 9 + len(Word._fields)))
    beat = Beat(SoloGroup())
    beat.start(word)
    assert beat.agreed(5) == word
