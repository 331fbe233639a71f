"""A root without a step: a run that must resume raises, and another one is told what earlier starts have left there."""

from __future__ import annotations

import logging
import re
import shutil
from pathlib import Path

import pytest
import torch
from helpers.one_job import Job
from launch import fork_ranks
from support import make_generation, make_root

import ckptlib
from ckptlib.catalog.catalog import Catalog
from ckptlib.catalog.no_step import warn_of_traces
from ckptlib.errors import CheckpointNotFound
from ckptlib.stores.local import LocalStore
from ckptlib.stores.testing import FaultStore, write_plan


def run_once(root: Path, step: int = 1) -> None:
    """A start that saves."""
    with Job(root).checkpointer() as ckpt:
        ckpt.restore()
        ckpt.save(step)


def fresh(root: Path, caplog: pytest.LogCaptureFixture) -> list[str]:
    """Warnings of a start that restores, and finds no step."""
    caplog.clear()
    with Job(root).checkpointer() as ckpt:
        assert ckpt.restore().step == 0
    return [record.getMessage() for record in caplog.records if record.levelno >= logging.WARNING]


def test_a_run_that_must_resume_does_not_begin_under_another_url(tmp_path: Path) -> None:
    run_once(tmp_path / "root")
    with pytest.raises(
        CheckpointNotFound, match=r"/roott has no step to resume from, .* nobody has saved there bef"
    ) as caught:
        Job(tmp_path / "roott").checkpointer(must_resume=True)
    assert caught.value.__context__ is None  # its traceback is read by somebody at night
    assert [path.name for path in tmp_path.iterdir()] == ["root"]  # a later start would take it for a run's
    with Job(tmp_path / "root").checkpointer(must_resume=True) as ckpt:
        assert ckpt.restore().step == 1


def test_a_root_that_no_step_has_come_to_is_no_run_to_resume(tmp_path: Path) -> None:
    fresh_job = Job(tmp_path / "root")
    with fresh_job.checkpointer() as ckpt:
        ckpt.restore()
    job = Job(tmp_path / "root", seed=1)
    before = job.bits()
    with job.checkpointer(must_resume=True) as ckpt, pytest.raises(CheckpointNotFound, match="nobody has saved there"):
        ckpt.restore()
    assert job.bits() == before


def test_a_run_whose_root_lacks_its_document_resumes(tmp_path: Path) -> None:
    run_once(tmp_path / "root")
    (tmp_path / "root" / "ckptlib.json").unlink()
    shutil.rmtree(tmp_path / "root" / "copies")
    with Job(tmp_path / "root").checkpointer(must_resume=True) as ckpt:
        assert ckpt.restore().step == 1


def test_what_a_run_begins_from_is_no_step_to_resume_from(tmp_path: Path) -> None:
    run_once(tmp_path / "other")
    job = Job(tmp_path / "root", seed=1)
    before = job.bits()
    with job.checkpointer():
        pass  # makes the root
    with (
        job.checkpointer(init_from=tmp_path / "other", must_resume=True) as ckpt,
        pytest.raises(CheckpointNotFound, match="no step to"),
    ):
        ckpt.restore()
    assert job.bits() == before


@pytest.mark.parametrize("lost", [["steps"], ["steps", "ckptlib.json", "copies"]])
def test_a_root_that_has_lost_its_steps_is_no_fresh_run_without_a_word(
    tmp_path: Path, lost: list[str], caplog: pytest.LogCaptureFixture
) -> None:
    """As a copy that has not come to `steps/` yet: the packs and parts of these are not there either."""
    root = tmp_path / "root"
    run_once(root)
    for name in [*lost, "packs", "parts"]:
        shutil.rmtree(root / name) if (root / name).is_dir() else (root / name).unlink()
    (said,) = fresh(root, caplog)
    assert "has no step, so this is a fresh run; but a job has begun to save there, as generation 000001-" in said
    with (
        pytest.raises(CheckpointNotFound, match="a job has begun to save there"),
        Job(root).checkpointer(must_resume=True) as ckpt,
    ):
        ckpt.restore()


def test_shares_of_saves_are_told_of_where_nothing_else_is_left(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    root = tmp_path / "root"
    run_once(root)
    for path in root.iterdir():
        if path.name != "parts":
            shutil.rmtree(path) if path.is_dir() else path.unlink()
    assert any("but shares of saves are in its parts/" in said for said in fresh(root, caplog))


def test_a_second_start_that_has_found_steps_is_told_nothing(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    run_once(tmp_path / "root")
    caplog.clear()
    run_once(tmp_path / "root", step=2)
    assert not [record for record in caplog.records if record.levelno >= logging.WARNING]
    assert fresh(tmp_path / "new", caplog) == []


def test_a_hint_that_cannot_be_given_ends_no_run(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Nor is a start told of itself."""
    catalog = make_root(LocalStore(str(tmp_path / "root")))
    own = make_generation(catalog, 1)
    warn_of_traces(catalog, own)
    assert not caplog.records
    write_plan(tmp_path / "plan", [{"op": "scan", "key": "^generations/", "action": "error"}])
    warn_of_traces(Catalog(FaultStore(catalog.store, str(tmp_path / "plan"))), own)
    assert "whether a run has saved there before is not known: " in caplog.text


def test_all_ranks_raise_and_none_of_them_alone(tmp_path: Path) -> None:
    said = fork_ranks("must_resume.py", 2, tmp_path, timeout_s=120)
    for rank in (0, 1):
        assert re.search(f"rank {rank}: some: ValueError: .*/root: must_resume= or local= was given on some", said)
        assert re.search(f"rank {rank}: all: CheckpointNotFound: .*/root has no step to resume from", said)
    state = {"w": torch.zeros(3)}
    with ckptlib.Checkpointer(tmp_path / "root", state, every=1, must_resume=True) as ckpt:
        assert ckpt.restore().step == 1
    assert state["w"].eq(1).all()
