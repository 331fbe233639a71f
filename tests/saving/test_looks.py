"""How often a store is asked what became of a save that another rank commits."""

from __future__ import annotations

from ckptlib.saving.looks import JITTER, REMOTE_EVERY_S, Looks


def looks(num_ranks: int, timeout_s: float, is_local: bool = False, lost_at: float = 1e9) -> list[float]:
    """When one rank asks, by hundredths of a second."""
    found = Looks(0.0, timeout_s, num_ranks, is_local)
    return [t / 100 for t in range(int(timeout_s * 100)) if found.due(t / 100, t / 100 >= lost_at)]


def test_a_small_job_asks_every_few_seconds() -> None:
    asked = looks(8, 100.0)
    assert 100 / REMOTE_EVERY_S / (1 + JITTER) - 1 <= len(asked) <= 100 / REMOTE_EVERY_S / (1 - JITTER)
    assert len({*asked}) == len(asked)


def test_all_ranks_together_ask_no_more_than_a_few() -> None:
    """A thousand that wait for ten minutes: a question of two requests for each, every minute or so."""
    asked = [t for _ in range(100) for t in looks(1024, 600.0)]
    assert len(asked) / 100 <= 600 / 38
    assert max(sum(low <= t < low + 1 for t in asked) for low in range(600)) <= 20, "not all at the same time"


def test_a_local_disk_is_asked_often() -> None:
    assert len(looks(2, 10.0, is_local=True)) > 50
    assert looks(1024, 60.0, is_local=True)[0] > 1


def test_who_has_little_patience_asks_once_at_least() -> None:
    assert looks(1024, 0.2) == [0.1]
    assert len(looks(1024, 10.0)) == 1


def test_who_finds_no_notices_any_more_asks_at_once() -> None:
    asked = looks(1024, 30.0, lost_at=3.0)
    assert asked[0] == 3.0
    assert len(asked) <= 2
