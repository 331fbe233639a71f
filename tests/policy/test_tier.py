"""The local tier's options, and when the next save is drained."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ckptlib.policy.tier import DueDrains, LocalTier, tier_of
from ckptlib.policy.when import Steps


def test_what_a_writer_is_told_of() -> None:
    tier = LocalTier(Path("/nvme/run"), Steps(10), 3, 1e9)
    assert LocalTier.from_json(tier.to_json()) == LocalTier(Path("/nvme/run"), None, 3, 1e9)


def test_a_path_is_made_absolute_and_nothing_is_no_tier() -> None:
    assert tier_of("here", None, 2, None) == LocalTier(Path.cwd() / "here")
    assert tier_of(None, None, 2, None) is None
    with pytest.raises(ValueError, match="expected an absolute path"):
        LocalTier(Path("here"))


@given(st.integers(1, 7), st.lists(st.booleans(), min_size=1, max_size=60))
def test_what_is_due_stays_owed_until_a_save_is_drained(every: int, taken: list[bool]) -> None:
    due, last = DueDrains(Steps(every)), 0
    for step, is_taken in enumerate(taken, 1):
        due.look_ahead(step)
        assert due.owed == any(between % every == 0 for between in range(last + 1, step + 1))
        if is_taken and due.owed:
            due.begin()
            last = step


def test_without_a_policy_every_save_is_drained() -> None:
    due = DueDrains(None)
    for step in range(1, 4):
        due.look_ahead(step)
        assert due.owed
        due.begin()
