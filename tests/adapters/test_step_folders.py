"""Directories that name steps of a root: published when these are committed, settled after a kill, dropped together."""

from __future__ import annotations

import multiprocessing
import os
import shutil
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers.registry import close_sessions

import ckptlib
from ckptlib.adapters.step_folders import POINTER, ROOT, StepFolders, step_of
from ckptlib.catalog.catalog import Catalog
from ckptlib.catalog.pins import pin
from ckptlib.format import keys
from ckptlib.format.keys import GenerationId, SaveId
from ckptlib.format.manifest import TrashRecord
from ckptlib.staging.other_slots import OtherSlots
from ckptlib.stores import open_store


@pytest.fixture(autouse=True)
def _sessions() -> Iterator[None]:
    yield
    close_sessions()


def save(directory: Path, step: int) -> SaveId:
    pending = ckptlib.save_async(directory / ROOT, {"x": torch.full((8,), float(step))}, step)
    pending.wait_committed()
    return pending.save


def steps_of(directory: Path) -> list[int]:
    return [info.step for info in ckptlib.checkpoints(directory / ROOT)]


def make(directory: Path, limit: int = 100) -> StepFolders:
    def beyond(newest: Path) -> list[Path]:
        found = sorted(path for path in directory.glob("checkpoint-*") if path != newest)
        return found[: max(0, len(found) + 1 - limit)]

    return StepFolders(directory, str(directory / ROOT), None, beyond)


def live_on(lives: Any) -> None:
    lives.set()
    time.sleep(600)


def names(directory: Path) -> list[str]:
    return sorted(path.name for path in directory.iterdir() if path.name != ROOT)


def test_a_directory_gets_its_name_when_it_is_published(tmp_path: Path) -> None:
    folders, saved = make(tmp_path), save(tmp_path, 3)
    draft = folders.draft("checkpoint-3", saved)
    (draft / "more").mkdir()
    (draft / "more" / "file").write_text("text")
    assert names(tmp_path) == [f".checkpoint-3.{saved}.part"]
    folders.publish("checkpoint-3", saved)
    folders.close()
    assert names(tmp_path) == ["checkpoint-3"]
    assert step_of(tmp_path / "checkpoint-3") == saved
    assert (tmp_path / "checkpoint-3" / "more" / "file").read_text() == "text"


def test_what_callbacks_have_put_there_meanwhile_stays(tmp_path: Path) -> None:
    """They write to checkpoint-N as soon as the trainer tells them of it, which is before the commit."""
    folders = make(tmp_path)
    for step, turn in enumerate(("first", "again")):  # the second time, the directory of the first one is replaced
        saved = save(tmp_path, step)
        draft = folders.draft("checkpoint-3", saved)
        (draft / "state").write_text(f"ours, {turn}")
        adapter = tmp_path / "checkpoint-3" / f"adapter-{turn}"
        adapter.mkdir(parents=True)
        (adapter / "file").write_text(turn)
        (tmp_path / "checkpoint-3" / "state").write_text("theirs")
        folders.publish("checkpoint-3", saved)
        folders.wait()
        assert step_of(tmp_path / "checkpoint-3") == saved
        assert (adapter / "file").read_text() == turn
        assert (tmp_path / "checkpoint-3" / "state").read_text() == f"ours, {turn}"
    assert not (tmp_path / "checkpoint-3" / "adapter-first").exists(), "that is of the checkpoint that was replaced"
    folders.close()


def test_who_looks_removes_no_draft_of_a_training(tmp_path: Path) -> None:
    """Another process, such as an evaluation, which this one stands in for: a lock is of an open file."""
    folders = make(tmp_path)
    folders.draft("checkpoint-1", uncommitted := SaveId(1, GenerationId(1, "0" * 8)))
    folders.draft("checkpoint-2", saved := save(tmp_path, 2))
    make(tmp_path).settle()
    assert names(tmp_path) == [f".checkpoint-1.{uncommitted}.part", "checkpoint-2"], "what is committed has its name"
    folders.publish("checkpoint-2", saved)
    fork = multiprocessing.get_context("fork")
    lives = fork.Event()
    child = fork.Process(target=live_on, args=(lives,))  # as a worker of a DataLoader
    child.start()
    assert lives.wait(60)
    folders.close()
    assert names(tmp_path) == [f".checkpoint-1.{uncommitted}.part", "checkpoint-2"]
    make(tmp_path).settle()
    child.kill()
    child.join()
    assert names(tmp_path) == ["checkpoint-2"]


def use_its_number(folders: StepFolders) -> None:
    assert folders._lock is not None
    held = folders._lock.peek()
    assert held is not None
    os.dup2(os.open(os.devnull, os.O_RDONLY), number := held[2][0])
    folders.let_go()
    os.fstat(number)


def test_a_forked_child_closes_no_file_that_has_the_number_of_the_lock(tmp_path: Path) -> None:
    folders = make(tmp_path)
    folders.draft("checkpoint-1", SaveId(1, GenerationId(1, "0" * 8)))
    child = multiprocessing.get_context("fork").Process(target=use_its_number, args=(folders,))
    child.start()
    child.join(60)
    child.kill()
    assert child.exitcode == 0
    folders.let_go()


def test_too_many_go_and_their_steps(tmp_path: Path) -> None:
    folders = make(tmp_path, limit=2)
    for step in range(5):
        saved = save(tmp_path, step)
        folders.draft(f"checkpoint-{step}", saved)
        folders.publish(f"checkpoint-{step}", saved)
        folders.wait()
    folders.close()
    assert names(tmp_path) == ["checkpoint-3", "checkpoint-4"]
    assert steps_of(tmp_path) == [3, 4]


@pytest.mark.parametrize("is_dropped", [False, True])
def test_a_kill_while_one_is_removed_leaves_no_step_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, is_dropped: bool
) -> None:
    """The next start takes up where the last one was: right before the step is dropped, or right behind."""
    drop = StepFolders._drop

    def killed(self: StepFolders, saves: set[SaveId]) -> None:
        if is_dropped:
            drop(self, saves)
        raise KeyboardInterrupt

    folders = make(tmp_path, limit=2)
    for step in (1, 2, 3):
        saved = save(tmp_path, step)
        folders.draft(f"checkpoint-{step}", saved)
        if step == 3:
            monkeypatch.setattr(StepFolders, "_drop", killed)
        folders.publish(f"checkpoint-{step}", saved)
    with pytest.raises(KeyboardInterrupt):
        folders.wait()
    folders.let_go()
    monkeypatch.undo()
    assert "checkpoint-1" not in names(tmp_path)
    half = tmp_path / f".checkpoint-0.{saved}.part"  # of which a kill has left the rest
    half.mkdir()
    (half / "trainer_state.json").write_text("{}")

    again = make(tmp_path, limit=2)
    again.settle()
    assert names(tmp_path) == [*(["checkpoint-1"] if not is_dropped else []), "checkpoint-2", "checkpoint-3"]
    saved = save(tmp_path, 4)
    again.draft("checkpoint-4", saved)
    again.publish("checkpoint-4", saved)
    again.close()
    assert names(tmp_path) == ["checkpoint-3", "checkpoint-4"]
    assert steps_of(tmp_path) == [3, 4]


def test_a_kill_while_a_step_is_dropped_leaves_no_step_alone(tmp_path: Path) -> None:
    """Its trash record is there, the manifest, too: nobody drops the step while the record is young."""
    folders = make(tmp_path, limit=2)
    for step in (1, 2):
        saved = save(tmp_path, step)
        folders.draft(f"checkpoint-{step}", saved)
        folders.publish(f"checkpoint-{step}", saved)
        folders.wait()
    folders.let_go()
    first = step_of(tmp_path / "checkpoint-1")
    assert first is not None
    record = tmp_path / ROOT / first.trash_key
    record.parent.mkdir(exist_ok=True)
    record.write_bytes(TrashRecord(first, "interrupted").encode())

    draft = f".checkpoint-1.{first}.part"
    for step in (3, 4):
        again = make(tmp_path, limit=2)
        again.settle()
        assert names(tmp_path)[0] == "checkpoint-1"
        saved = save(tmp_path, step)
        again.draft(f"checkpoint-{step}", saved)
        again.publish(f"checkpoint-{step}", saved)
        again.wait()
        assert names(tmp_path) == [draft, f"checkpoint-{step - 1}", f"checkpoint-{step}"]
        assert steps_of(tmp_path) == [1, step - 1, step]
        if step == 4:
            hours_ago = time.time() - 2 * 3600
            os.utime(record, (hours_ago, hours_ago))
        again.close()
    assert names(tmp_path) == ["checkpoint-3", "checkpoint-4"], "as soon as the record is old enough"
    assert steps_of(tmp_path) == [3, 4]


def test_a_pinned_step_stays_without_its_directory(tmp_path: Path) -> None:
    folders = make(tmp_path, limit=1)
    for step in (1, 2):
        saved = save(tmp_path, step)
        folders.draft(f"checkpoint-{step}", saved)
        folders.publish(f"checkpoint-{step}", saved)
        folders.wait()
        if step == 1:
            with open_store(str(tmp_path / ROOT)) as store:
                pin(Catalog(store), saved)
    folders.close()
    assert names(tmp_path) == ["checkpoint-2"]
    assert steps_of(tmp_path) == [1, 2]


def test_a_start_removes_no_checkpoint(tmp_path: Path) -> None:
    """Of several drafts, the last one to get its name is not always the newest."""
    folders = make(tmp_path)
    for step in (9, 12):
        folders.draft(f"checkpoint-{step}", save(tmp_path, step))
    folders.let_go()
    again = make(tmp_path, limit=1)
    again.settle()
    again.let_go()
    assert names(tmp_path) == ["checkpoint-12", "checkpoint-9"]
    assert steps_of(tmp_path) == [9, 12]


def test_a_step_that_another_directory_names_stays(tmp_path: Path) -> None:
    folders, saved = make(tmp_path), save(tmp_path, 1)
    for name in ("checkpoint-1", "best"):
        folders.draft(name, saved)
        folders.publish(name, saved)
    folders.wait()
    shutil.rmtree(tmp_path / "checkpoint-1")
    folders.close()
    assert steps_of(tmp_path) == [1]
    again = make(tmp_path)
    shutil.rmtree(tmp_path / "best")
    again.close()
    assert steps_of(tmp_path) == []


def test_what_a_kill_leaves(tmp_path: Path) -> None:
    first, saved = make(tmp_path), save(tmp_path, 1)
    first.draft("checkpoint-1", saved)
    first.draft("checkpoint-2", SaveId(2, saved.generation))  # of which nothing was committed
    (tmp_path / ".mine.part").mkdir()  # somebody else's
    (tmp_path / ".mine.part" / "file").write_text("text")
    first.let_go()
    second = make(tmp_path)
    second.settle()
    second.close()
    assert names(tmp_path) == [".mine.part", "checkpoint-1"]
    assert steps_of(tmp_path) == [1]


def test_what_a_first_job_still_wrote_when_the_next_one_looked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its record came then, and its parts, and nobody had committed the step: no other process shares its number."""
    first, saved = make(tmp_path), save(tmp_path, 1)
    first.draft("checkpoint-1", saved)
    first.let_go()
    close_sessions()
    (tmp_path / ROOT / f"steps/{saved}.json").unlink()
    records = [path for path in tmp_path.rglob(f"{saved.generation}*.json") if path.parent.name == "generations"]
    for path in records:
        path.rename(path.with_suffix(".late"))

    def writes_yet(self: object) -> list[Path]:
        late = [path for path in records if not path.exists()]
        for path in late:
            path.with_suffix(".late").rename(path)
        return late

    monkeypatch.setattr(OtherSlots, "under_way", writes_yet)
    monkeypatch.setattr(keys, "new_nonce", lambda: "0" * 8)  # below theirs
    second = make(tmp_path)
    second.settle()
    second.close()
    assert records
    assert names(tmp_path) == ["checkpoint-1"]
    assert steps_of(tmp_path) == [1]


def test_what_is_left_where_there_is_no_root(tmp_path: Path) -> None:
    saved = save(tmp_path, 1)
    killed = make(tmp_path)
    killed.draft("checkpoint-1", saved)
    killed.let_go()
    shutil.rmtree(tmp_path / ROOT)
    folders = make(tmp_path)
    folders.settle()
    folders.close()
    assert names(tmp_path) == []


def test_one_is_replaced(tmp_path: Path) -> None:
    folders, saves = make(tmp_path), [save(tmp_path, 1), save(tmp_path, 2)]
    for saved in saves:
        folders.draft("last", saved)
        folders.publish("last", saved)
    folders.close()
    assert names(tmp_path) == ["last"]
    assert step_of(tmp_path / "last") == saves[1]
    assert steps_of(tmp_path) == [2]


def test_two_drafts_of_one_name(tmp_path: Path) -> None:
    """The later step wins, whoever publishes them."""
    saves = [save(tmp_path, 1), save(tmp_path, 2)]
    first = make(tmp_path)
    for saved in saves:
        first.draft("last", saved)
    first.let_go()
    second = make(tmp_path)
    second.settle()
    second.close()
    assert names(tmp_path) == ["last"]
    assert step_of(tmp_path / "last") == saves[1]
    assert steps_of(tmp_path) == [2]


def test_a_directory_that_cannot_get_its_name(tmp_path: Path) -> None:
    folders, saved = make(tmp_path), save(tmp_path, 1)
    folders.draft("checkpoint-1", saved)
    (tmp_path / "checkpoint-1").write_text("a file is in its way")
    folders.publish("checkpoint-1", saved)
    with pytest.raises(OSError, match="checkpoint-1"):
        folders.close()
    assert (tmp_path / "checkpoint-1").read_text() == "a file is in its way"
    assert steps_of(tmp_path) == [1]


def test_directories_that_name_no_step(tmp_path: Path) -> None:
    assert step_of(tmp_path) is None
    assert step_of(tmp_path / "none") is None
    (tmp_path / POINTER).write_bytes(b'{"ckptlib": "ckptlib", "step": "../../../etc/passwd"}')
    with pytest.raises(ckptlib.FormatError, match=POINTER):
        step_of(tmp_path)


def test_others_are_left_alone(tmp_path: Path) -> None:
    """Also those whose file cannot be read, and what a link leads to."""
    elsewhere, run = tmp_path / "elsewhere", tmp_path / "run"
    (run / "checkpoint-1").mkdir(parents=True)
    (run / "checkpoint-1" / POINTER).write_bytes(b"\xff")
    saved = save(tmp_path, 7)
    draft, link = make(elsewhere).draft("x", saved), f".x.{saved}.part"
    (run / link).symlink_to(draft)
    folders = make(run)
    folders.settle()
    folders.close()
    assert names(run) == [link, "checkpoint-1"]
    assert step_of(draft) == saved


@pytest.mark.parametrize("how", ["copied", "renamed"])
def test_one_that_somebody_keeps_under_another_name(tmp_path: Path, how: str) -> None:
    """While the process lives that has named it: its step is needed, whatever becomes of the directory it was in."""
    folders = make(tmp_path, limit=1)
    for step in (1, 2):
        saved = save(tmp_path, step)
        folders.draft(f"checkpoint-{step}", saved)
        if step == 2 and how == "copied":
            shutil.copytree(tmp_path / "checkpoint-1", tmp_path / "best")
        elif step == 2:
            (tmp_path / "checkpoint-1").rename(tmp_path / "best")
        folders.publish(f"checkpoint-{step}", saved)
        folders.wait()
    folders.close()
    assert names(tmp_path) == ["best", "checkpoint-2"]
    assert steps_of(tmp_path) == [1, 2]
    again = make(tmp_path)
    shutil.rmtree(tmp_path / "best")
    again.close()
    assert steps_of(tmp_path) == [2]


@pytest.mark.parametrize("left", ["nothing", "another directory"])
def test_the_directory_of_all_of_them_is_gone(tmp_path: Path, caplog: pytest.LogCaptureFixture, left: str) -> None:
    """Moved, or not mounted any more: that says nothing about the steps, which lie elsewhere."""
    run, root = tmp_path / "run", tmp_path / ROOT
    folders = StepFolders(run, str(root), None, lambda _: [])
    for step in (1, 2, 3):
        saved = save(tmp_path, step)
        folders.draft(f"checkpoint-{step}", saved)
        folders.publish(f"checkpoint-{step}", saved)
        folders.wait()
        if step == 2:
            run.rename(tmp_path / "moved")
    if left == "nothing":
        run.rename(tmp_path / "moved, too")
    folders.close()
    assert steps_of(tmp_path) == [1, 2, 3]
    assert f"{run} is not there any more, or another directory is in its place" in caplog.text


def test_a_kill_while_the_files_are_written(tmp_path: Path) -> None:
    """The step may be committed by then: a directory without its files is no checkpoint all the same."""

    def killed(folder: Path) -> None:
        (folder / "trainer_state.json").write_text('{"global')
        raise KeyboardInterrupt

    folders, saved = make(tmp_path), save(tmp_path, 1)
    with pytest.raises(KeyboardInterrupt):
        folders.draft("checkpoint-1", saved, killed)
    folders.let_go()
    assert names(tmp_path) == [f".checkpoint-1.{saved}.part"]
    again = make(tmp_path)
    again.settle()
    again.close()
    assert names(tmp_path) == []


def test_files_that_cannot_be_written(tmp_path: Path) -> None:
    def full(folder: Path) -> None:
        (folder / "trainer_state.json").write_text("{}")
        raise OSError(28, "No space left on device")

    folders, saved = make(tmp_path), save(tmp_path, 1)
    with pytest.raises(OSError, match="No space left"):
        folders.draft("checkpoint-1", saved, full)
    folders.publish("checkpoint-1", saved)
    with pytest.raises(FileNotFoundError):
        folders.close()
    assert names(tmp_path) == []
    assert steps_of(tmp_path) == [1]
