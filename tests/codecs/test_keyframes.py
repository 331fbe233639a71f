"""When a chunk is stored whole again: no other length of the cycle takes fewer bytes."""

from __future__ import annotations

from itertools import pairwise

from hypothesis import given
from hypothesis import strategies as st

from ckptlib.codecs.keyframes import Cycle, Trials

SIZES = st.lists(st.integers(0, 10_000), max_size=60).map(sorted)


def length(keyframe: int, patches: list[int]) -> int:
    """Saves of a cycle by the policy, the keyframe's included."""
    cycle = Cycle(keyframe)
    for patch in patches:
        if cycle.ends_before(patch):
            break
        cycle = cycle.then(patch)
    return cycle.num_saves


def mean(keyframe: int, patches: list[int], num_saves: int) -> float:
    return (keyframe + sum(patches[: num_saves - 1])) / num_saves


@given(st.integers(0, 10_000), SIZES)
def test_no_other_length_has_a_lower_mean(keyframe: int, patches: list[int]) -> None:
    chosen = mean(keyframe, patches, length(keyframe, patches))
    best = min(mean(keyframe, patches, n) for n in range(1, len(patches) + 2))
    assert chosen <= best * (1 + 1e-12)


@given(st.integers(1, 10_000), SIZES)
def test_no_patch_is_larger_than_the_keyframe(keyframe: int, patches: list[int]) -> None:
    assert all(patch <= keyframe for patch in patches[: length(keyframe, patches) - 1])


def test_a_cold_chunk_has_no_second_keyframe() -> None:
    assert length(1000, [10] * 500) == 501


def test_no_patch_ends_the_cycle() -> None:
    assert Cycle(1000).ends_before(None)
    assert Cycle(1000, 7).ends_before(None)


def attempts(num_keyframes: int) -> list[int]:
    """Numbers of the keyframes that have a summary, where no patch ever pays."""
    trials, found = Trials(), []
    for number in range(num_keyframes):
        if trials.due:
            found.append(number)
            trials = trials.failed()
        else:
            trials = trials.skipped()
    return found


def test_what_changes_as_a_whole_is_summarized_ever_less_often() -> None:
    found = attempts(1000)
    assert found[:8] == [0, 2, 6, 14, 30, 62, 126, 190]
    assert {after - before for before, after in pairwise(found[6:])} == {64}
