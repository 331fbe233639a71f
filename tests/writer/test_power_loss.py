"""Killed between a name and its flush, taken over by the next process, and then the power fails.

Whoever takes over finds the names: the page cache has them. What is told to be saved must be there without it. It is
read by the parts, each chunk with its digest.
"""

from __future__ import annotations

import errno
import os
import socket
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from helpers.flushed import ForgetfulDisk, Killed
from helpers.persists import OneRank
from support import ROOT_ID

from ckptlib.catalog.catalog import Catalog
from ckptlib.catalog.commit import Committer
from ckptlib.catalog.local_disk import part_there
from ckptlib.errors import StoreError
from ckptlib.format.check import compared
from ckptlib.policy.tier import LocalTier
from ckptlib.stores.local import LocalStore
from ckptlib.writer.channel import Channel
from ckptlib.writer.drain import Drain, Pace
from ckptlib.writer.failures import Failures
from ckptlib.writer.own_shares import OwnShares
from ckptlib.writer.persist import Persister
from ckptlib.writer.tier import Tier
from ckptlib.writer.trainer import Trainer

PACK_NBYTES = 1 << 16

ARRAYS = {name: np.full(PACK_NBYTES - 4096, i, np.uint8) for i, name in enumerate("ab")}


class Job(OneRank):
    """A snapshot in memory, and a local disk before the root."""

    def __init__(self, directory: Path) -> None:
        directory.mkdir()
        super().__init__(directory, LocalStore(str(directory / "root")), "raw")
        self.step_saved, self.snapshot = self.slot(ARRAYS)
        self.disk = LocalStore(str(directory / "disk"))


def commit(job: Job) -> None:
    Committer(Catalog(job.store)).commit_when_whole(job.step_saved, 1, lambda: 0.0)


def save(job: Job) -> None:
    Persister(job.store, ThreadPoolExecutor(1), 0, 1).persist(job.snapshot, job.step_saved)
    commit(job)


def save_as_an_import(job: Job) -> None:
    """Packs that are there are not put again."""
    persister = Persister(job.store, ThreadPoolExecutor(1), 0, 1, pack_nbytes=PACK_NBYTES)
    persister.persist(job.snapshot, job.step_saved)
    commit(job)


def tier_of(job: Job) -> Tier:
    return Tier(LocalTier(Path(job.disk.url.removeprefix("file://")), None, 1), job.store, 0, ROOT_ID)


def save_on_the_disk(job: Job) -> None:
    tier = tier_of(job)
    if tier.persisted(job.snapshot, job.step_saved) is None:
        persister = Persister(job.disk, ThreadPoolExecutor(1), 0, 1, drained=tier.parents)
        persister.persist(job.snapshot, job.step_saved)


def drain(job: Job) -> None:
    bucket = Catalog(job.store)
    copier = Drain(Catalog(job.disk), bucket, ThreadPoolExecutor(1), 0, 60.0, Pace(None), lambda *told: None)
    copier.copy(job.step_saved)
    commit(job)


@pytest.mark.parametrize(
    ("before", "action", "where"),
    [
        (None, save, "root"),
        (None, save_as_an_import, "root"),
        (None, save_on_the_disk, "disk"),
        (save_on_the_disk, drain, "root"),
    ],
)
def test_what_is_taken_over_survives_a_power_loss(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    before: Callable[[Job], None] | None,
    action: Callable[[Job], None],
    where: str,
) -> None:
    moment, was_killed = 0, True
    while was_killed:
        moment += 1
        job, was_killed = Job(tmp_path / f"{moment}"), False
        if before is not None:
            before(job)
        with monkeypatch.context() as patched:
            power = ForgetfulDisk(patched)
            power.links_left = moment
            try:
                action(job)
            except Killed:
                was_killed = True
                action(job)
            power.lose_power()
        check(job, where)
        job.snapshot.unlink()
    assert moment > 3


def check(job: Job, where: str) -> None:
    catalog = Catalog(LocalStore(str(job.directory / where)))
    if where == "root":
        assert catalog.saves() == [job.step_saved]
    name = part_there(catalog, job.step_saved, 0)
    assert name is not None
    job.catalog, job.store = catalog, catalog.store
    job.check(catalog.part(name), ARRAYS)


def test_the_part_of_another_snapshot_of_the_step_is_not_taken_over(tmp_path: Path) -> None:
    """As where the step was snapshotted again since: its other ranks have the newer one."""
    job = Job(tmp_path / "job")
    save_on_the_disk(job)
    assert tier_of(job).persisted(job.snapshot, job.step_saved) is not None
    job.snapshot.write_header(replace(job.snapshot.read_header(), check=compared(8)))
    assert tier_of(job).persisted(job.snapshot, job.step_saved) is None
    job.snapshot.unlink()


@pytest.mark.parametrize(("refused", "in_doubt"), [("/disk/.tmp/", None), ("/disk/parts/", True)])
def test_a_part_on_a_disk_that_did_not_flush_its_name_may_be_restored(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, refused: str, in_doubt: bool | None
) -> None:
    """So nobody is told that the step never comes back; of one whose packs are not there, they are."""
    job, fsync = Job(tmp_path / "job"), os.fsync
    tier, save = tier_of(job), job.step_saved
    persister = Persister(job.disk, ThreadPoolExecutor(1), 0, 1, drained=tier.parents)

    def fail(fd: int) -> None:
        if refused in f"{os.readlink(f'/proc/self/fd/{fd}')}/":
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        fsync(fd)

    with monkeypatch.context() as patched:
        patched.setattr(os, "fsync", fail)
        with pytest.raises(StoreError) as error:
            persister.persist(job.snapshot, save)
    tier.open(60.0, lambda *told: None)
    unused: Any = SimpleNamespace(forget=lambda *told: None)
    left, right = socket.socketpair()
    with left, right:
        channel, catalog = Channel(right), Catalog(job.store)
        failures = Failures(channel, catalog.shared, 0, 1.0, Trainer(os.getpid()))
        own = (channel, unused, unused, failures, catalog, 0, unused, unused, persister, tier, unused)
        OwnShares(*own).fail(save, error.value, drains=False)
        (told,) = Channel(left).receive(0)
    assert (told["event"], told.get("in_doubt")) == ("failed", in_doubt)
    assert (part_there(Catalog(job.disk), save, 0) is not None) == bool(in_doubt)
