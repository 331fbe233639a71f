"""A snapshot that all ranks gave up since replicas differ, while a writer has it: its slot must come back."""

from __future__ import annotations

import os
import signal
from datetime import timedelta
from pathlib import Path

import pytest
from helpers.inside import forget_last_save, poll, session_of, snapshots_of, writer_of
from helpers.one_job import WAIT_S, Job, faulty, steps
from helpers.writers import alive, until

import ckptlib
from ckptlib.errors import ReplicasDiffer
from ckptlib.writer.client import MAX_DEATHS


@pytest.fixture
def job(tmp_path: Path) -> Job:
    return Job(tmp_path / "root")


def voided(job: Job, ckpt: ckptlib.Checkpointer) -> str:
    """A save that the store does not take, and that the ranks gave up; as `Verdicts` does, which has several ranks."""
    pending = ckpt.save(1)
    pending.wait_staged(WAIT_S)
    until(lambda: poll(ckpt) or not snapshots_of(ckpt).settling)
    called: list[ckptlib.Pending] = []
    pending.add_done_callback(called.append)
    assert session_of(ckpt).outcomes.forget(pending.save, ReplicasDiffer("as planned"))
    assert pending.done()
    assert called == [pending]
    forget_last_save(ckpt)
    assert snapshots_of(ckpt).persisting_saves == [str(pending.save)]
    return str(pending.save)


def is_answered(ckpt: ckptlib.Checkpointer, save: str) -> bool:
    poll(ckpt)
    return save not in [order["save"] for order in writer_of(ckpt)._open]


HELD = {"op": "commit", "key": "^packs/", "action": "hold"}


def test_its_slot_is_free_when_its_writer_was_replaced(job: Job) -> None:
    """The store hangs until the deadline. The save was known already, so nobody listened to its failure."""
    url, soon = faulty(job, [HELD]), timedelta(seconds=3)
    with ckptlib.Checkpointer(url, job.state, every=1000, arena=job.root.parent, save_deadline=soon) as ckpt:
        save, first = voided(job, ckpt), writer_of(ckpt).pid
        until(lambda: is_answered(ckpt, save))
        assert writer_of(ckpt).pid != first
        assert snapshots_of(ckpt).persisting_saves == []


def test_its_slot_is_free_when_writers_kept_dying(job: Job) -> None:
    url = faulty(job, [HELD])
    with ckptlib.Checkpointer(url, job.state, every=1000, arena=job.root.parent) as ckpt:
        save = voided(job, ckpt)
        for _ in range(MAX_DEATHS):
            pid = writer_of(ckpt).pid
            os.kill(pid, signal.SIGKILL)
            until(lambda pid=pid: not alive(pid))
            until(lambda pid=pid: poll(ckpt) or writer_of(ckpt).pid != pid)
        until(lambda: is_answered(ckpt, save))
        assert snapshots_of(ckpt).persisting_saves == []
        faulty(job, [])
        job.body()
        ckpt.save(2).wait_committed(WAIT_S)
    assert steps(job.root) == [2]
