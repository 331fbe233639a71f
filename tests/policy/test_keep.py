"""Which steps Keep drops, and what it refuses."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ckptlib.format.keys import GenerationId, SaveId
from ckptlib.policy.keep import Keep

SAVES = st.lists(st.builds(SaveId, st.integers(0, 60), st.just(GenerationId(1, "0" * 8))), unique=True)


@given(SAVES, st.integers(1, 8), st.none() | st.integers(1, 10))
def test_choose_drops_all_but_the_newest_and_the_multiples(saves: list[SaveId], last: int, every: int | None) -> None:
    dropped = Keep(last, every).choose(saves)
    assert dropped == sorted(dropped)
    assert set(dropped) <= set(saves)
    for save in saves:
        newer = sum(other.step > save.step for other in saves)
        stays = newer < last or (every is not None and save.step % every == 0)
        assert (save in dropped) == (not stays)
    if saves:
        assert max(saves) not in dropped


@given(SAVES, st.integers(1, 8), st.none() | st.integers(1, 10))
def test_choose_again_drops_nothing_more(saves: list[SaveId], last: int, every: int | None) -> None:
    keep = Keep(last, every)
    assert keep.choose([save for save in saves if save not in keep.choose(saves)]) == []


def test_keep_refuses_what_would_drop_the_newest() -> None:
    with pytest.raises(ValueError, match="last >= 1"):
        Keep(last=0)
    with pytest.raises(ValueError, match="every=0"):
        Keep(every=0)
