"""The CheckpointIO for Lightning: by itself, and in trainings that are killed and go on in mid-epoch."""

from __future__ import annotations

import copy
import os
import shutil
import signal
import subprocess
import sys
import uuid
from collections import Counter, OrderedDict
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import lightning_job
import pytest
import torch
from helpers.registry import close_sessions, session_at
from helpers.writers import stop, until
from launch import environment, fork_one, fork_ranks
from places import ROOT, WORKERS

import ckptlib
from ckptlib.adapters import lightning, step_files
from ckptlib.adapters.lightning import CkptlibCheckpointIO
from ckptlib.format.keys import parse_save
from ckptlib.saving.pending import Pending


@pytest.fixture
def io() -> Iterator[CkptlibCheckpointIO]:
    made = CkptlibCheckpointIO()
    yield made
    made.teardown()
    close_sessions()


def checkpoint(n: int) -> dict[str, Any]:
    """As Lightning makes it, and more."""
    return {
        "epoch": n,
        "state_dict": OrderedDict({"net.0.weight": torch.full((4, 2), float(n)), "n": torch.tensor(n)}),
        "optimizer_states": [{"state": {0: {"step": torch.tensor(2.0)}}, "param_groups": [{"lr": 0.1, "params": [0]}]}],
        "loops": {"fit_loop": {"state_dict": {}, "done": [1, (2, 3)], "none": None}},
        "callbacks": {"ModelCheckpoint{'monitor': 'loss'}": {"best_k_models": {"/a/b=1.ckpt": torch.tensor(0.5)}}},
        "empty": {},
        "hyper_parameters": {"names": ("a", "b"), "inf": float("inf")},
        "lr_schedulers": [{"milestones": Counter({30: 1, 80: 2}), "last_epoch": n}],
    }


def same(a: Any, b: Any) -> bool:
    """Types and order as well."""
    if type(a) is not type(b):
        return False
    if isinstance(a, dict):
        return [*a] == [*b] and all(same(a[key], b[key]) for key in a)
    if isinstance(a, list | tuple):
        return len(a) == len(b) and all(map(same, a, b))
    if isinstance(a, torch.Tensor):
        return a.dtype == b.dtype and torch.equal(a, b)
    return bool(a == b)


@contextmanager
def slow_second_save(io: CkptlibCheckpointIO, *directories: Path, name: str = "2.ckpt") -> Iterator[list[int]]:
    """1.ckpt is there, and the second file is not until the body is done: the writers stand still."""
    for directory in directories:
        io.save_checkpoint(checkpoint(1), directory / "1.ckpt")
    io.teardown()
    writers = [session_at(directory / "ckptlib").writer.pid for directory in directories]
    for writer in writers:
        stop(writer)
    try:
        for directory in directories:
            io.save_checkpoint(checkpoint(2), directory / name)
        yield writers
    finally:
        for writer in writers:
            os.kill(writer, signal.SIGCONT)


def test_what_goes_in_comes_out(io: CkptlibCheckpointIO, tmp_path: Path) -> None:
    paths = [tmp_path / f"step={n}-loss=0.1.ckpt" for n in range(3)]
    for n, path in enumerate(paths):
        saved = checkpoint(n)
        io.save_checkpoint(saved, path)
        saved["state_dict"]["net.0.weight"].zero_()  # training goes on
    for n, path in enumerate(paths):
        assert same(io.load_checkpoint(path), checkpoint(n))
    assert [info.step for info in ckptlib.checkpoints(tmp_path / "ckptlib")] == [0, 1, 2]


def test_a_path_is_saved_to_again(io: CkptlibCheckpointIO, tmp_path: Path) -> None:
    """Only the last step stays, and one of which somebody has a copy."""
    for n in range(4):
        io.save_checkpoint(checkpoint(n), tmp_path / "last.ckpt")
        if n == 1:
            io.teardown()
            shutil.copy(tmp_path / "last.ckpt", tmp_path / "copy.ckpt")
    assert same(io.load_checkpoint(str(tmp_path / "last.ckpt")), checkpoint(3))
    io.teardown()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["ckptlib", "copy.ckpt", "last.ckpt"]
    assert [info.step for info in ckptlib.checkpoints(tmp_path / "ckptlib")] == [1, 3]
    assert same(io.load_checkpoint(tmp_path / "copy.ckpt"), checkpoint(1))


def test_a_step_that_cannot_be_dropped_only_takes_room(
    io: CkptlibCheckpointIO, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    io.save_checkpoint(checkpoint(0), tmp_path / "last.ckpt")
    io.teardown()
    (tmp_path / "ckptlib" / "trash").write_text("in the way of what is put there")
    io.save_checkpoint(checkpoint(1), tmp_path / "last.ckpt")
    io.teardown()
    assert "last.ckpt: step 0, which it named before, is left" in caplog.text
    assert same(io.load_checkpoint(tmp_path / "last.ckpt"), checkpoint(1))


@pytest.mark.parametrize(
    ("told", "stays", "name"),
    [
        (lambda path: {"callbacks": {"ModelCheckpoint": {"best_k_models": {path: torch.tensor(0.5)}}}}, True, "2.ckpt"),
        (
            lambda path: {"callbacks": {"M": {"best_k_models": {path: 1.0}, "kth_best_model_path": path}}},
            False,
            "2.ckpt",
        ),
        (
            lambda path: {"callbacks": {"ModelCheckpoint": {"best_k_models": {}, "last_model_path": path}}},
            False,
            "2.ckpt",
        ),
        (lambda path: {"pytorch-lightning_version": "2.6.6"}, True, "2.ckpt"),  # weights alone do not tell
        (lambda path: {"pytorch-lightning_version": "2.6.6"}, False, "last.ckpt"),
        (lambda path: {}, False, "2.ckpt"),  # Fabric's: its user has chosen the name
    ],
    ids=["ranked", "the best one", "last", "weights", "last weights", "Fabric"],
)
def test_saved_to_again_before_the_file_was_there(
    io: CkptlibCheckpointIO,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    told: Callable[[str], dict[str, Any]],
    stays: bool,
    name: str,
) -> None:
    """Where ModelCheckpoint had seen it, it would have chosen 2-v1.ckpt, and have kept both."""
    path, committed = str(tmp_path / name), Pending.wait_committed
    with slow_second_save(io, tmp_path, name=name) as writers:

        def woken(pending: Pending) -> None:
            os.kill(writers[0], signal.SIGCONT)
            committed(pending)

        monkeypatch.setattr(Pending, "wait_committed", woken)
        io.save_checkpoint({"n": 3, **told(path)}, path)
    io.teardown()
    assert io.load_checkpoint(path)["n"] == 3
    assert [info.step for info in ckptlib.checkpoints(tmp_path / "ckptlib")] == ([0, 1, 2] if stays else [0, 2])
    assert ("2.ckpt is saved to again" in caplog.text) == ("step 1 stays" in caplog.text) == stays


def test_saves_again_behind_a_teardown(io: CkptlibCheckpointIO, tmp_path: Path) -> None:
    """Lightning tears down as each `fit` ends, and then users call `trainer.save_checkpoint`, or `fit` again."""
    for n in range(3):
        io.save_checkpoint(checkpoint(n), tmp_path / f"{n}.ckpt")
        io.teardown()
        assert (tmp_path / f"{n}.ckpt").exists()
    for n in range(3):
        assert same(io.load_checkpoint(tmp_path / f"{n}.ckpt"), checkpoint(n))


def test_another_trainer_loads_at_once(io: CkptlibCheckpointIO, tmp_path: Path) -> None:
    """What the plugin of the first has not written yet; and a copy of a module has its Trainer's plugin with it."""
    others = [CkptlibCheckpointIO(), copy.deepcopy(io)]
    for n, plugin in enumerate([io, *others]):
        plugin.save_checkpoint(checkpoint(n), tmp_path / f"{n}.ckpt")
        assert same(others[n - 1].load_checkpoint(tmp_path / f"{n}.ckpt"), checkpoint(n))
    copied = copy.deepcopy(io)  # with a thread of its own
    assert same(copied.load_checkpoint(tmp_path / "0.ckpt"), checkpoint(0))
    for plugin in others:
        plugin.teardown()
    assert [info.step for info in ckptlib.checkpoints(tmp_path / "ckptlib")] == [0, 1, 2]


def test_removed_while_it_is_saved(io: CkptlibCheckpointIO, tmp_path: Path) -> None:
    for n in range(3):
        io.save_checkpoint(checkpoint(n), tmp_path / f"{n}.ckpt")
        io.remove_checkpoint(tmp_path / f"{n}.ckpt")
        assert not (tmp_path / f"{n}.ckpt").exists()
    io.remove_checkpoint(tmp_path / "never.ckpt")
    io.teardown()
    assert [path.name for path in tmp_path.iterdir()] == ["ckptlib"]
    assert [*ckptlib.checkpoints(tmp_path / "ckptlib")] == []


def test_the_old_one_is_there_until_the_new_one_is(io: CkptlibCheckpointIO, tmp_path: Path) -> None:
    """ModelCheckpoint saves, and at once removes what the new one replaces."""
    with slow_second_save(io, tmp_path):
        io.remove_checkpoint(tmp_path / "1.ckpt")
        assert not (tmp_path / "2.ckpt").exists()
        assert (tmp_path / "1.ckpt").exists()
        assert [info.step for info in ckptlib.checkpoints(tmp_path / "ckptlib")] == [0]
    io.teardown()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["2.ckpt", "ckptlib"]
    assert [info.step for info in ckptlib.checkpoints(tmp_path / "ckptlib")] == [1]


def test_the_old_one_stays_where_the_new_one_fails(
    io: CkptlibCheckpointIO, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with slow_second_save(io, tmp_path):
        io.remove_checkpoint(tmp_path / "1.ckpt")
        (tmp_path / "ckptlib").rename(tmp_path / "away")
    with pytest.raises(ckptlib.SaveFailed):
        io.teardown()
    shutil.rmtree(tmp_path / "ckptlib", ignore_errors=True)
    (tmp_path / "away").rename(tmp_path / "ckptlib")
    assert "1.ckpt stays: a save failed" in caplog.text
    assert not (tmp_path / "2.ckpt").exists()
    assert same(io.load_checkpoint(tmp_path / "1.ckpt"), checkpoint(1))


def test_a_save_that_fails_leaves_the_later_ones_alone(io: CkptlibCheckpointIO, tmp_path: Path) -> None:
    bad, good = tmp_path / "bad", tmp_path / "good"
    with ThreadPoolExecutor(1) as pool, slow_second_save(io, bad, good) as going:
        (bad / "ckptlib").rename(bad / "away")
        os.kill(going[0], signal.SIGCONT)
        ending = pool.submit(io.teardown)
        until(lambda: ending.done() or str(good / "2.ckpt") not in io._saving)  # it waits for the good one
    with pytest.raises(ckptlib.SaveFailed, match="bad/ckptlib is not there"):
        ending.result(0)
    assert same(io.load_checkpoint(good / "2.ckpt"), checkpoint(2))
    assert not (bad / "2.ckpt").exists()


def test_removed_and_saved_to_again_behind_a_save(io: CkptlibCheckpointIO, tmp_path: Path) -> None:
    with slow_second_save(io, tmp_path):
        io.remove_checkpoint(tmp_path / "1.ckpt")
    with pytest.raises(FileNotFoundError, match="Checkpoint file not found"):
        io.load_checkpoint(tmp_path / "1.ckpt")
    io.save_checkpoint(checkpoint(3), tmp_path / "1.ckpt")
    io.teardown()
    assert same(io.load_checkpoint(tmp_path / "1.ckpt"), checkpoint(3))


@pytest.mark.parametrize(
    ("how", "code", "there"), [("dies", -9, ["1.ckpt", "ckptlib"]), ("ends", 0, ["1.ckpt", "2.ckpt", "ckptlib"])]
)
def test_a_job_that_ends_as_a_checkpoint_is_replaced(tmp_path: Path, how: str, code: int, there: list[str]) -> None:
    log, run = tmp_path / "log", tmp_path / "run"
    assert fork_one(WORKERS / "lightning_gap.py", run, how, log=log, timeout_s=120) == code, log.read_text()
    assert sorted(path.name for path in run.iterdir()) == there
    assert ("1.ckpt stays" in log.read_text()) == (how == "ends")
    for name in there[:-1]:
        assert CkptlibCheckpointIO().load_checkpoint(run / name)["n"] == int(name[0])


def test_what_is_replaced_as_the_program_ends_stays(
    io: CkptlibCheckpointIO, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It has no threads any more by which a step could be dropped."""
    monkeypatch.setattr(CkptlibCheckpointIO, "_ending", False)
    with slow_second_save(io, tmp_path) as writers:
        shutil.copy(tmp_path / "1.ckpt", tmp_path / "2.ckpt")  # as if from an earlier program
        (tmp_path / "1.ckpt").unlink()
        os.kill(writers[0], signal.SIGCONT)
        lightning._finish_all()
    io.teardown()
    assert [info.step for info in ckptlib.checkpoints(tmp_path / "ckptlib")] == [0, 1]
    assert io.load_checkpoint(tmp_path / "2.ckpt")["epoch"] == 2


def test_a_file_is_flushed_before_it_gets_its_name(
    io: CkptlibCheckpointIO, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else a power loss may leave its name, and none of its bytes, where a whole one was."""
    fsync, flushed = os.fsync, []

    def noted(fd: int) -> None:
        flushed.append((Path(os.readlink(f"/proc/self/fd/{fd}")), (tmp_path / "last.ckpt").exists()))
        fsync(fd)

    monkeypatch.setattr(os, "fsync", noted)
    io.save_checkpoint(checkpoint(0), tmp_path / "last.ckpt")
    io.teardown()
    assert (tmp_path / "last.ckpt.0.part", False) in flushed
    assert flushed[-1] == (tmp_path, True)


@pytest.mark.parametrize("how", ["copied", "linked hard", "renamed"])
def test_a_file_that_somebody_keeps_under_another_name(io: CkptlibCheckpointIO, tmp_path: Path, how: str) -> None:
    """As people do with the best one, and Lightning itself with `last.ckpt` where it can make no link."""
    first, best = tmp_path / "0.ckpt", tmp_path / "best.ckpt"
    io.save_checkpoint(checkpoint(0), first)
    io.save_checkpoint(checkpoint(1), tmp_path / "1.ckpt")
    io.teardown()
    (tmp_path / "notes.txt").write_text("mine")
    (tmp_path / "gone.ckpt").symlink_to(tmp_path / "nothing")
    {"copied": shutil.copy, "linked hard": os.link, "renamed": os.rename}[how](first, best)
    io.remove_checkpoint(first)
    assert not first.exists()
    assert same(io.load_checkpoint(best), checkpoint(0))
    io.remove_checkpoint(best)
    assert [info.step for info in ckptlib.checkpoints(tmp_path / "ckptlib")] == [1]


def test_files_beside_are_found_where_paths_are_urls() -> None:
    """A bucket lists names without the scheme."""
    directory = f"memory://{uuid.uuid4().hex}"
    save = parse_save("000000000003-000001-aaaaaaaa")
    step_files.write(f"{directory}/copy.ckpt", save)
    assert step_files.named_beside(f"{directory}/first.ckpt") == {save}


def test_another_process_goes_on(tmp_path: Path) -> None:
    for n in range(3):
        io = CkptlibCheckpointIO(asynchronous=n != 1)
        io.save_checkpoint(checkpoint(n), tmp_path / f"{n}.ckpt")
        io.teardown()
        close_sessions()
    io = CkptlibCheckpointIO()
    for n in range(3):
        assert same(io.load_checkpoint(tmp_path / f"{n}.ckpt"), checkpoint(n))


@pytest.mark.parametrize(
    "location",
    ["cpu", torch.device("cpu"), {"cpu": "cpu"}, lambda storage, where: storage],
    ids=["name", "device", "dict", "function"],
)
def test_map_location(io: CkptlibCheckpointIO, tmp_path: Path, location: Any) -> None:
    io.save_checkpoint(checkpoint(1), tmp_path / "1.ckpt")
    assert same(io.load_checkpoint(tmp_path / "1.ckpt", map_location=location), checkpoint(1))


def test_objects_are_refused_by_name(io: CkptlibCheckpointIO, tmp_path: Path) -> None:
    with pytest.raises(ckptlib.UnsupportedState, match=r"callbacks\.mine"):
        io.save_checkpoint({**checkpoint(0), "callbacks": {"mine": object()}}, tmp_path / "0.ckpt")
    assert not (tmp_path / "0.ckpt").exists()
    io.save_checkpoint(checkpoint(1), tmp_path / "1.ckpt")
    assert same(io.load_checkpoint(tmp_path / "1.ckpt"), checkpoint(1))


def test_options_of_one_checkpoint_are_refused(io: CkptlibCheckpointIO, tmp_path: Path) -> None:
    with pytest.raises(TypeError, match=r"CkptlibCheckpointIO\(storage_options="):
        io.save_checkpoint(checkpoint(0), tmp_path / "0.ckpt", storage_options={"key": "k"})
    assert [*tmp_path.iterdir()] == []


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"PK\x03\x04",
        b"[]",
        b"{}",
        b'{"ckptlib": "../other", "step": "000000000000-000001-aaaaaaaa"}',
        b'{"ckptlib": "ckptlib", "step": 3}',
        b'{"ckptlib": "ckptlib", "step": "../../etc"}',
        b"[" * 4000,
        b"\xff" * 100_000,
    ],
)
def test_hostile_files(io: CkptlibCheckpointIO, tmp_path: Path, data: bytes) -> None:
    (tmp_path / "bad.ckpt").write_bytes(data)
    with pytest.raises(ckptlib.FormatError, match=r"bad\.ckpt"):
        io.load_checkpoint(tmp_path / "bad.ckpt")


def test_files_of_steps_that_are_not_there(io: CkptlibCheckpointIO, tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match="Checkpoint file not found"):
        io.load_checkpoint(tmp_path / "none.ckpt")
    io.save_checkpoint(checkpoint(0), tmp_path / "0.ckpt")
    io.load_checkpoint(tmp_path / "0.ckpt")
    text = (tmp_path / "0.ckpt").read_text()
    (tmp_path / "1.ckpt").write_text(text.replace("000000000000-", "000000000007-"))
    with pytest.raises(ckptlib.CheckpointNotFound):
        io.load_checkpoint(tmp_path / "1.ckpt")


def test_all_ranks_load_what_rank_0_has_just_saved(tmp_path: Path) -> None:
    """Those that know of no save would find no file, or load the checkpoint that is being replaced."""
    fork_ranks("lightning_ranks.py", 2, tmp_path, timeout_s=60)


def train(directory: Path, steps: int, devices: int, whose: str) -> dict[str, Any]:
    """In as many processes, which Lightning starts."""
    out = directory.with_suffix(".pt")
    command = [sys.executable, WORKERS / "lightning_job.py", directory, steps, -1, out, devices, whose]
    variables = {**environment(), "PYTHONPATH": os.pathsep.join([str(ROOT), environment()["PYTHONPATH"]])}
    done = subprocess.run([*map(str, command)], env=variables, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stdout + done.stderr
    return torch.load(out, weights_only=True)


def here(directory: Path, steps: int) -> dict[str, Any]:
    """In this process, which has imported Lightning: seconds of every other one."""
    out = directory.with_suffix(".pt")
    try:
        lightning_job.main(directory, steps, -1, out, 1, "ours")
    finally:
        close_sessions()
    return torch.load(out, weights_only=True)


@pytest.mark.timeout(300)
def test_killed_and_resumed_in_mid_epoch(tmp_path: Path) -> None:
    """Four batches are an epoch, and checkpoints come every third step."""
    whole = here(tmp_path / "whole", 14)
    given, log = (tmp_path / "parted", 14, 11, tmp_path / "parted.pt", 1, "ours"), tmp_path / "log"
    assert fork_one(WORKERS / "lightning_job.py", *given, log=log, timeout_s=120) == -9, log.read_text()
    assert (tmp_path / "parted" / "last.ckpt").exists()
    parted = here(tmp_path / "parted", 14)
    assert (parted["step"], whole["step"]) == (14, 14)
    assert same(parted["model"], whole["model"])


@pytest.mark.slow
@pytest.mark.timeout(400)
def test_two_ranks_resume_as_with_lightnings_own_files(tmp_path: Path) -> None:
    """Lightning keeps the place in the data of rank 0 alone, so a run that goes on is another one than one that was
    left alone; it is the same with either plugin."""
    ends = []
    for whose in ("ours", "theirs"):
        train(tmp_path / whose, 10, devices=2, whose=whose)
        ends.append(train(tmp_path / whose, 14, devices=2, whose=whose))
    assert ends[0]["step"] == 14
    assert same(ends[0], ends[1])
