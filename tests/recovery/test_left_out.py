"""What is told of snapshots that are newer than the step that a job goes on from."""

from __future__ import annotations

import logging
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
from support import make_generation, make_root

from ckptlib.format.keys import GenerationId, SaveId
from ckptlib.ranks.group import SoloGroup
from ckptlib.recovery.candidates import Candidate
from ckptlib.recovery.inventory import Found, Inventory, SnapshotId, describe
from ckptlib.recovery.left_out import tell_left_out
from ckptlib.recovery.local_step import LocalStep
from ckptlib.stores.memory import MemoryStore


@pytest.mark.parametrize("unrecorded", [None, 5, 7])
def test_only_of_a_job_without_a_record_it_is_told_why_its_snapshot_is_left_out(
    unrecorded: int | None, caplog: pytest.LogCaptureFixture
) -> None:
    """Snapshots that a rewind has abandoned stay in memory for a while, too: whoever went back knows that."""
    catalog = make_root(MemoryStore())
    saves = [SaveId(step, make_generation(catalog)) for step in (4, 5, 6)]
    if unrecorded is not None:
        saves.append(SaveId(unrecorded, GenerationId(2, "2" * 8)))
    found = [
        Found(SnapshotId(save, n, 1), 0, "A", f"/dev/shm/{n}.slot", "0" * 32, 100, 4096) for n, save in enumerate(saves)
    ]
    session: Any = SimpleNamespace(group=SoloGroup(), catalog=catalog)
    restored = Candidate(saves[0], found[0].snapshot, committed=False)
    tell_left_out(session, Inventory([describe(found, ["A"], "A", [0])]), {}, {}, restored)
    told = [record.getMessage() for record in caplog.records]
    assert [line.partition(" is whole in the memory")[0] for line in told] == [f"step {save}" for save in saves[3:]]


@pytest.mark.parametrize(("restored", "told"), [(None, 6), (5, 6), (6, None), (7, None)])
def test_of_what_is_not_whole_the_newest_is_told_that_is_newer(
    restored: int | None, told: int | None, caplog: pytest.LogCaptureFixture
) -> None:
    """A job that takes a snapshot at each step leaves older ones in part behind, which no restart would want."""
    generation = GenerationId(1, "0" * 8)
    in_part = {SaveId(step, generation): [1] for step in (4, 6, 5)}
    candidate = None if restored is None else Candidate(SaveId(restored, generation), None, committed=True)
    session: Any = SimpleNamespace(group=SoloGroup(), catalog=None)
    tell_left_out(session, Inventory([]), in_part, {}, candidate)
    lines = [record.getMessage().partition(" is in the memory")[0] for record in caplog.records]
    assert lines == ([] if told is None else [f"step {SaveId(told, generation)}"])


@pytest.mark.parametrize(
    ("restored", "tier", "level"),
    [
        (None, "store", logging.WARNING),
        (5, "store", logging.WARNING),
        (5, "local", logging.INFO),
        (5, "memory", logging.INFO),
        (6, "store", None),
    ],
)
def test_of_steps_of_which_disks_lack_shares_the_newest_is_told_that_is_newer(
    restored: int | None, tier: str, level: int | None, caplog: pytest.LogCaptureFixture
) -> None:
    """A host that is missing from the job may cost hours of training, and can be brought back. A job that dies leaves
    one on its way."""
    caplog.set_level(logging.INFO, "ckptlib")
    generation = GenerationId(1, "0" * 8)
    in_part = {SaveId(step, generation): [1] for step in (4, 6)}
    candidate = None if restored is None else Candidate(SaveId(restored, generation), None, committed=True)
    candidate = candidate and replace(
        candidate,
        snapshot=SnapshotId(candidate.save, 1, 1) if tier == "memory" else None,
        local=LocalStep(candidate.save, (), ()) if tier == "local" else None,
    )
    session: Any = SimpleNamespace(group=SoloGroup(), catalog=make_root(MemoryStore()))
    tell_left_out(session, Inventory([]), {}, in_part, candidate)
    told = [(record.levelno, record.getMessage().partition(" is on the local disks")[0]) for record in caplog.records]
    assert told == ([] if level is None else [(level, f"step {SaveId(6, generation)}")])
