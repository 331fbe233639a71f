"""What a trainer is told of a commit, its own rank's or another one's, and what is left of one that failed."""

from __future__ import annotations

import errno
import os
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from helpers.flushed import note_flushes
from support import ROOT_ID, make_generation, make_root, put_parts, state

from ckptlib.catalog.catalog import Catalog
from ckptlib.catalog.commit import Committer
from ckptlib.format.keys import GenerationId, SaveId
from ckptlib.policy.tier import LocalTier
from ckptlib.stores import Entry
from ckptlib.stores.local import LocalStore
from ckptlib.writer.channel import Channel
from ckptlib.writer.commits import Commits
from ckptlib.writer.failures import Failures
from ckptlib.writer.requests import Request, Requests
from ckptlib.writer.tier import Tier
from ckptlib.writer.trainer import Trainer
from ckptlib.writer.watchdog import Watchdog, Work, stuck


def test_it_is_told_of_a_step_whose_name_is_durable(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The name is there a moment before the put returns by which rank 0 has given it."""
    catalog = make_root(LocalStore(str(tmp_path)))
    save, names = put_parts(catalog, make_generation(catalog), 10, state(10), 2)
    Committer(catalog).commit(save, names)
    flushed = note_flushes(monkeypatch)
    with commits_of(catalog, 1) as (commits, heard):
        commits.put_wait(save, 60.0)
        commits.finish()
        assert [event["event"] for event in heard.receive(0)] == ["committed"]
    assert flushed == {f"{tmp_path}/steps", str(tmp_path)}, "the directory may be as new"


def test_a_save_whose_commit_failed_is_under_way_no_longer(tmp_path: Path) -> None:
    """Else a full store would be given room for ever as if that one might still come to need what was dropped."""
    catalog = make_root(LocalStore(str(tmp_path)))
    save, _ = put_parts(catalog, make_generation(catalog), 10, state(10), 1)
    with commits_of(catalog, 0, deadline_s=0.0) as (commits, heard):
        commits.expect(save)
        commits.put(save, time.monotonic())
        commits.finish()
        assert [event["event"] for event in heard.receive(0)] == ["failed"]
        assert commits._undecided == {}


@pytest.mark.parametrize("has_tier", [False, True])
def test_a_manifest_is_asked_for_once_more_where_a_full_disk_did_not_flush_its_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, has_tier: bool
) -> None:
    catalog, fsync = make_root(LocalStore(str(tmp_path / "root"))), os.fsync
    save, _ = put_parts(catalog, make_generation(catalog), 10, state(10), 2)
    failing = [True]

    def full(fd: int) -> None:
        if failing and os.readlink(f"/proc/self/fd/{fd}") == f"{tmp_path}/root/steps":
            failing.clear()
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        fsync(fd)

    monkeypatch.setattr(os, "fsync", full)
    tier = Tier(LocalTier(tmp_path / "disk", None, 1), catalog.store, 0, ROOT_ID) if has_tier else None
    with commits_of(catalog, 0, tier=tier) as (commits, heard):
        commits.put(save, time.monotonic())
        commits.finish()
        assert [event["event"] for event in heard.receive(0)] == ["committed"]
    assert not failing


def test_a_commit_that_is_given_up_says_how_long_the_save_took(tmp_path: Path) -> None:
    """One that comes behind another, or after slow parts, begins late: "-0 s" said nothing about the deadline."""
    told, ended = list[str](), threading.Event()

    class Silent(LocalStore):
        def scan(self, prefix: str, after: str = "") -> list[Entry]:
            ended.wait(60)
            return super().scan(prefix, after)

    def late(work: Work, request: Request | None) -> None:
        told.append(stuck(work, request))
        ended.set()

    make_root(LocalStore(str(tmp_path)))
    catalog = Catalog(Silent(str(tmp_path)))
    save = SaveId(10, GenerationId(1, "00000001"))
    with commits_of(catalog, 0, 1.0, late) as (commits, _):
        commits.put(save, time.monotonic() - 5)
        commits.finish()
    assert told[0].startswith("the commit of step 10 did not end within 5 s and is given up")


def test_a_save_that_a_rank_gave_up_is_committed_if_all_parts_are_there_and_waits_for_none_otherwise(
    tmp_path: Path,
) -> None:
    """That rank may have put its part, and not heard so."""
    catalog = make_root(LocalStore(str(tmp_path)))
    generation = make_generation(catalog)
    whole, _ = put_parts(catalog, generation, 10, state(10), 2)
    lacking, names = put_parts(catalog, generation, 20, state(20), 2)
    catalog.store.delete(names[1].key)
    for save, kind in ((whole, "committed"), (lacking, "failed")):
        with commits_of(catalog, 0) as (commits, heard):
            commits.stop_waiting(save, 1, "away")
            commits.put(save, time.monotonic())
            commits.finish()
            [event] = heard.receive(0)
            assert event["event"] == kind
    assert event["error"] == "step 20: no part came from 1 of 2 ranks: 1; rank 1 failed: away"


def test_a_rank_that_is_slow_is_waited_for_if_the_part_of_the_one_that_gave_up_is_there(tmp_path: Path) -> None:
    """The store may have taken that one's part, and not have said so: the step may still come to be whole."""
    catalog = make_root(LocalStore(str(tmp_path)))
    save, names = put_parts(catalog, make_generation(catalog), 10, state(10), 2)
    slow = catalog.store.get(names[0].key)
    catalog.store.delete(names[0].key)
    with commits_of(catalog, 0) as (commits, heard):
        commits.stop_waiting(save, 1, "no answer")
        commits.put(save, time.monotonic())
        assert heard.receive(0.1) == []
        catalog.store.put(names[0].key, slow)
        commits.finish()
        assert [event["event"] for event in heard.receive(0)] == ["committed"]


def test_each_rank_that_gave_up_ends_the_wait_for_its_own_part(tmp_path: Path) -> None:
    """Of two, the one that told last has put its part all the same; rank 0 waited for the other's until the end."""
    catalog = make_root(LocalStore(str(tmp_path)))
    generation = make_generation(catalog)
    earlier, _ = put_parts(catalog, generation, 10, state(10), 2)
    save, names = put_parts(catalog, generation, 20, state(20), 2)
    catalog.store.delete(names[0].key)
    with commits_of(catalog, 0) as (commits, heard):
        commits.stop_waiting(earlier, 1, "it was full before")
        for rank, why in ((0, "away"), (1, "no answer")):
            commits.stop_waiting(save, rank, why)
        commits.put(save, time.monotonic())
        commits.finish()
        [event] = heard.receive(0)
    assert event["error"] == "step 20: no part came from 1 of 2 ranks: 0; rank 0 failed: away"


@contextmanager
def commits_of(
    catalog: Catalog,
    rank: int,
    deadline_s: float = 60.0,
    on_overdue: Callable[[Work, Request | None], None] = lambda work, request: None,
    tier: Tier | None = None,
) -> Iterator[tuple[Commits, Channel]]:
    """Of one rank of two, and what its trainer hears."""
    left, right = socket.socketpair()
    with left, right:
        channel, trainer = Channel(right), Trainer(os.getpid())
        trainer.deadline_s = deadline_s
        watchdog = Watchdog(Requests(), deadline_s or 60.0, lambda work, request: None, on_overdue)
        failures = Failures(channel, catalog.shared, rank, watchdog.slack_s, trainer)
        yield Commits(channel, trainer, watchdog, failures, catalog, 2, None, tier), Channel(left)
