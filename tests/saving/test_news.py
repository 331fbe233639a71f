"""What rank 0 tells of its saves, as the others hear it."""

from __future__ import annotations

import time
from collections.abc import Mapping
from pathlib import Path

import pytest
import torch.distributed as dist
from launch import fork_ranks

from ckptlib.ranks.notices import KEPT, Notices
from ckptlib.saving import news
from ckptlib.saving.news import News

PATIENCE_S = 150.0


def ranks() -> tuple[News, News]:
    store = dist.HashStore()
    rank0, rank1 = (News(Notices(store, "job", 2), rank, 2, is_local=True) for rank in (0, 1))
    return rank0, rank1


def heard(rank: News, save: str) -> Mapping[str, object]:
    deadline = time.monotonic() + PATIENCE_S
    while (event := rank.of(save)) is None:
        assert time.monotonic() < deadline
        time.sleep(0.001)
    return event


def test_ends_of_saves_are_told_and_nothing_else() -> None:
    rank0, rank1 = ranks()
    rank0.tell({"event": "ready"})
    rank0.tell({"event": "released", "save": "a", "slot": "/dev/shm/x", "error": None})
    rank0.tell({"event": "committed", "save": "a", "seconds": 1.0, "nbytes": 5})
    rank0.tell({"event": "failed", "save": "b", "kind": "SaveFailed", "error": "rank 3\nsaid so " + "x" * 5000})
    assert heard(rank1, "a") == {"event": "committed", "save": "a"}
    failed = heard(rank1, "b")
    assert (failed["event"], failed["kind"]) == ("failed", "SaveFailed")
    assert str(failed["error"]).startswith("rank 3\nsaid so x")
    assert len(str(failed["error"])) == 1000
    assert rank1.of("c") is None
    for rank in (rank0, rank1):
        rank.close()


def test_of_each_save_the_first_word_counts() -> None:
    """A rank that looked late found no more that it was in doubt, but that it would never be."""
    rank0, rank1 = ranks()
    rank0.tell({"event": "failed", "save": "a", "kind": "StoreTimeout", "error": "hung", "in_doubt": True})
    rank0.tell({"event": "failed", "save": "a", "kind": "SaveFailed", "error": "hung"})
    assert "in_doubt" in heard(rank1, "a")
    for number in range(KEPT):
        rank0.tell({"event": "committed", "save": str(number)})
        assert heard(rank1, str(number))
        assert "in_doubt" in (rank1.of("a") or {"in_doubt": "the notice is gone"})
    for rank in (rank0, rank1):
        rank.close()


class Interrupted:
    """An error whose text Ctrl-C interrupts once."""

    def __init__(self) -> None:
        self._again = False

    def __str__(self) -> str:
        if not self._again:
            self._again = True
            raise KeyboardInterrupt
        return "no space"


def test_a_word_that_was_interrupted_is_told_as_its_event_comes_again() -> None:
    rank0, rank1 = ranks()
    event = {"event": "failed", "save": "a", "kind": "SaveFailed", "error": Interrupted()}
    with pytest.raises(KeyboardInterrupt):
        rank0.tell(event)
    rank0.tell(event)
    assert heard(rank1, "a")["error"] == "no space"
    for rank in (rank0, rank1):
        rank.close()


def test_what_other_ranks_hear_from_their_own_writers_is_not_told() -> None:
    rank0, rank1 = ranks()
    rank1.tell({"event": "failed", "save": "a", "kind": "SaveFailed", "error": "no space"})
    rank0.tell({"event": "committed", "save": "b"})
    assert heard(rank1, "b") == {"event": "committed", "save": "b"}
    assert rank1.of("a") is None


def test_rank_0_is_told_of_shares_of_others_that_failed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(news, "GIVEN_UP_EVERY_S", 0.001)
    rank0, rank1 = ranks()
    rank1.tell({"event": "failed", "save": "a", "kind": "SaveFailed", "error": "rank 0 said so", "seen": True})
    rank1.tell({"event": "failed", "save": "b", "kind": "SaveFailed", "error": "/a\udcff: away\n" + "x" * 5000})
    rank0.tell({"event": "committed", "save": "c"})
    assert given_up(rank0, "b", 1) == {1: ("/a\udcff: away\n" + "x" * 5000)[:1000]}
    for save in "acac":
        assert rank0.given_up(save) == {}
        time.sleep(0.01)
    for rank in (rank0, rank1):
        rank.close()


def given_up(rank0: News, save: str, num_ranks: int) -> Mapping[int, str]:
    """What rank 0 finds, once so many ranks have told."""
    deadline = time.monotonic() + PATIENCE_S
    while len(told := rank0.given_up(save)) < num_ranks:
        assert time.monotonic() < deadline
        time.sleep(0.001)
    return told


def test_no_word_of_a_share_that_failed_hides_another(monkeypatch: pytest.MonkeyPatch) -> None:
    """The rank that told last may have put its part all the same; rank 0 waited an hour for that of the other."""
    monkeypatch.setattr(news, "GIVEN_UP_EVERY_S", 0.001)
    store = dist.HashStore()
    rank0, *others = (News(Notices(store, "job", 3), rank, 3, is_local=True) for rank in (0, 1, 2))
    for rank, why in zip(others, ("away", "no answer"), strict=True):
        rank.tell({"event": "failed", "save": "a", "kind": "StoreError", "error": why})
    assert given_up(rank0, "a", 2) == {1: "away", 2: "no answer"}
    for rank in (rank0, *others):
        rank.close()


def test_a_usual_commit_is_over_before_rank_0_looks_for_failures_of_others() -> None:
    rank0, rank1 = ranks()
    rank1.tell({"event": "failed", "save": "a", "kind": "SaveFailed", "error": "away"})
    assert rank0.given_up("a") == {}
    assert rank0._notices._thread is None


def test_rank_0_waits_for_no_share_that_failed_while_the_store_is_away_for_its_rank(tmp_path: Path) -> None:
    """It waited until the save's deadline, an hour, and committed nothing later meanwhile: that rank could put nothing
    into the store, its failure neither."""
    (tmp_path / "plan").write_text("[]")
    output = fork_ranks("failed_untold.py", 2, tmp_path / "root", tmp_path / "plan", timeout_s=100)
    assert sorted(line for line in output.splitlines() if line.endswith("done")) == ["rank 0 done", "rank 1 done"]
    [step] = (tmp_path / "root" / "steps").iterdir()
    assert step.name.startswith("000000000002-")


def test_a_slot_that_is_still_read_is_not_taken_for_free_when_rank_0_tells_that_its_save_failed(tmp_path: Path) -> None:
    """The next save waits for it; it did not find one, which ended the training."""
    (tmp_path / "plan").write_text("[]")
    output = fork_ranks("failed_elsewhere.py", 2, tmp_path / "root", tmp_path / "plan", timeout_s=100)
    assert sorted(line for line in output.splitlines() if line.endswith("done")) == ["rank 0 done", "rank 1 done"]
