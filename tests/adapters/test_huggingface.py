"""Trainings with transformers' Trainer whose checkpoints are ckptlib's: they resume in mid-epoch, and end with the bits
of a run with Trainer's own files that nobody disturbed.

Five updates of two batches are an epoch, and checkpoints come every third step: see workers/hf_job.py.
"""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers.half_dropped import dropped_by_halves
from helpers.registry import close_sessions
from helpers.same import same
from launch import environment, fork_one, forked
from places import WORKERS

import ckptlib
from ckptlib.adapters.step_folders import POINTER
from ckptlib.cli import app
from ckptlib.errors import EXIT_PREEMPTED
from ckptlib.policy.stop_signal import TOLD_BY

pytest.importorskip("transformers", reason="transformers is not installed: it needs Python 3.11")
import hf_job

from ckptlib.adapters.trainer_run import TrainerRun, checkpoints_in

STEPS = 14
KILLED_AT = 11


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """The end of a run that nobody disturbed, with Trainer's own files."""
    return here(tmp_path_factory.mktemp("whole") / "run", whose="theirs")


def here(directory: Path, steps: int = STEPS, at: int = -1, whose: str = "ours", **asked: Any) -> dict[str, Any]:
    """In this process."""
    out = directory.with_suffix(".pt")
    state = torch.get_rng_state(), torch.get_num_threads()
    try:
        hf_job.main(directory, steps, at, out, whose, asked)
    finally:
        close_sessions()
        let_go_of_signals()
        torch.set_rng_state(state[0])
        torch.set_num_threads(state[1])
    return torch.load(out, weights_only=True)


def let_go_of_signals() -> None:
    """Which a Checkpointer holds that nobody closed: a callback is not told that its Trainer has raised."""
    signal.set_wakeup_fd(-1)
    for number in TOLD_BY:
        signal.signal(number, signal.SIG_DFL)


def assert_same_end(a: dict[str, Any], b: dict[str, Any]) -> None:
    assert a["step"] == b["step"] == STEPS
    assert same(a["model"], b["model"])
    assert same(a["optim"], b["optim"])


def checkpoints(directory: Path) -> list[str]:
    """The directories. Without the draft of a step that a kill has left half dropped: it goes later."""
    left = tuple(f".checkpoint-{step}." for step in dropped_by_halves(directory / "ckptlib"))
    found = sorted(path.name for path in directory.iterdir() if path.name != "ckptlib")
    return [name for name in found if not name.startswith(left)]


def steps_of(directory: Path) -> list[int]:
    """Without those that a kill has left half dropped."""
    left = dropped_by_halves(directory / "ckptlib")
    return [info.step for info in ckptlib.checkpoints(directory / "ckptlib") if info.step not in left]


@pytest.mark.timeout(300)
def test_killed_and_resumed_in_mid_epoch(tmp_path: Path, whole: dict[str, Any]) -> None:
    directory, out = tmp_path / "run", tmp_path / "run.pt"
    log, given = tmp_path / "log", (directory, STEPS, KILLED_AT, out, "ours")
    assert fork_one(WORKERS / "hf_job.py", *given, log=log, timeout_s=250) == -9, log.read_text()
    assert not out.exists()
    assert_same_end(here(directory), whole)
    assert checkpoints(directory) == ["checkpoint-12", "checkpoint-14"]  # save_total_limit=2
    assert steps_of(directory) == [12, 14]
    for name in checkpoints(directory):
        files = {path.name for path in (directory / name).iterdir()}
        assert files == {"trainer_state.json", POINTER, "config.json"}
        state = json.loads((directory / name / "trainer_state.json").read_text())
        assert f"checkpoint-{state['global_step']}" == name


def two_ranks(directory: Path, at: int, whose: str, **asked: Any) -> dict[str, Any]:
    """In processes of their own. Empty where they were killed."""
    out = directory.with_suffix(".pt")
    given = directory, STEPS, at, out, whose, json.dumps(asked)
    codes, output = forked(WORKERS / "hf_job.py", 2, *given, timeout_s=250)
    assert set(codes) == {0} if at < 0 else -9 in codes, output[-20000:]
    return torch.load(out, weights_only=True) if at < 0 else {}


@pytest.fixture(scope="module")
def whole_of_two(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    return two_ranks(tmp_path_factory.mktemp("whole") / "two", -1, "theirs")


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_two_ranks_whose_store_fails(tmp_path: Path, whole_of_two: dict[str, Any]) -> None:
    """Both train on to the end, and both say that the last checkpoint is missing."""
    directory = tmp_path / "two"
    arguments = (directory, STEPS, 5, tmp_path / "two.pt", "ours", json.dumps({"how": "break"}))
    codes, output = forked(WORKERS / "hf_job.py", 2, *arguments, timeout_s=250, each=True)
    assert codes == [1, 1], output[-20000:]
    assert len(re.findall(r"SaveFailed: .*000000000014-", output)) == 2, output[-20000:]
    assert checkpoints(directory) == ["checkpoint-3", "packs"]
    (directory / "ckptlib" / "packs").unlink()
    (directory / "packs").rename(directory / "ckptlib" / "packs")
    assert_same_end(two_ranks(directory, -1, "ours"), whole_of_two)
    assert steps_of(directory) == [12, 14]


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_two_ranks_of_fsdp2_are_killed_and_resumed(tmp_path: Path) -> None:
    undisturbed = two_ranks(tmp_path / "whole", -1, "ours", fsdp2=True)
    two_ranks(tmp_path / "two", KILLED_AT, "ours", fsdp2=True)
    assert_same_end(two_ranks(tmp_path / "two", -1, "ours", fsdp2=True), undisturbed)
    assert steps_of(tmp_path / "two") == [12, 14]


@pytest.mark.timeout(400)
@pytest.mark.parametrize("whose", ["ours", pytest.param("callback", marks=pytest.mark.slow)])
def test_two_ranks_killed_and_resumed(tmp_path: Path, whole_of_two: dict[str, Any], whose: str) -> None:
    """Each has its own random state, and BatchNorm's of its own batches."""
    two_ranks(tmp_path / "run", KILLED_AT, whose)
    assert_same_end(two_ranks(tmp_path / "run", -1, whose), whole_of_two)
    steps = steps_of(tmp_path / "run")
    assert (len(steps), steps[-1]) == (2, 14), (steps, checkpoints(tmp_path / "run"))
    assert {f"checkpoint-{step}" for step in steps} == {*checkpoints(tmp_path / "run")}


@pytest.mark.parametrize("whose", ["ours", pytest.param("callback", marks=pytest.mark.slow)])
def test_all_processes_are_told_to_stop(tmp_path: Path, whole: dict[str, Any], whose: str) -> None:
    """As Slurm does: a data loader whose workers die has Trainer raise, before the step is saved."""
    asked = {"how": "group", "dataloader_num_workers": 2}
    given = [tmp_path / "run", STEPS, 7, tmp_path / "run.pt", whose, json.dumps(asked)]
    command = [sys.executable, WORKERS / "hf_job.py", *given]
    job = subprocess.run(
        [*map(str, command)], env=environment(), start_new_session=True, capture_output=True, text=True
    )
    assert job.returncode == EXIT_PREEMPTED, job.stderr
    assert_same_end(here(tmp_path / "run", whose=whose), whole)


def test_told_to_stop(tmp_path: Path, whole: dict[str, Any]) -> None:
    """The state is saved at once, and train() ends with the status that says so."""
    with pytest.raises(ckptlib.Preempted):
        here(tmp_path / "run", at=7, how="term")
    assert checkpoints(tmp_path / "run") == ["checkpoint-6", "checkpoint-8"]
    assert_same_end(here(tmp_path / "run"), whole)


@pytest.mark.timeout(400)
def test_one_of_two_ranks_is_told_to_stop(tmp_path: Path) -> None:
    """Both save the same step, and end with the status that says so."""
    arguments = (tmp_path / "run", STEPS, 7, tmp_path / "run.pt", "ours", json.dumps({"how": "term"}))
    codes, output = forked(WORKERS / "hf_job.py", 2, *arguments, timeout_s=250)
    assert codes == [EXIT_PREEMPTED] * 2, output[-20000:]
    assert checkpoints(tmp_path / "run") == ["checkpoint-6", "checkpoint-8"]
    assert steps_of(tmp_path / "run") == [6, 8]


@pytest.mark.slow
def test_an_error_in_the_training(tmp_path: Path, whole: dict[str, Any]) -> None:
    with pytest.raises(RuntimeError, match="as asked"):
        here(tmp_path / "run", at=8, how="raise")
    assert_same_end(here(tmp_path / "run", resume=True), whole)
    assert steps_of(tmp_path / "run") == [12, 14]


def damage(root: Path, step: int) -> None:
    """All tensors of a step."""
    for pack in root.glob(f"packs/{step:012d}-*/**/*"):
        if pack.is_file():
            data = bytearray(pack.read_bytes())
            begin = 8 + int.from_bytes(data[:8], "little")
            data[begin:] = bytes(byte ^ 1 for byte in data[begin:])
            pack.write_bytes(data)


def test_a_damaged_checkpoint_is_skipped(
    tmp_path: Path, whole: dict[str, Any], caplog: pytest.LogCaptureFixture
) -> None:
    directory = tmp_path / "run"
    end = here(directory, at=10, how="stop", save_total_limit=None)
    assert end["step"] == 10
    assert checkpoints(directory) == ["checkpoint-3", "checkpoint-6", "checkpoint-9"]
    damage(directory / "ckptlib", 9)
    assert_same_end(here(directory, resume=True), whole)
    assert f"{directory / 'checkpoint-9'} cannot be resumed from and is skipped" in caplog.text


@pytest.mark.parametrize("left", [b"", pytest.param(b'{"epoch": 1.8, "glo', marks=pytest.mark.slow), None])
def test_a_damaged_state_of_trainer_is_skipped(
    tmp_path: Path, whole: dict[str, Any], caplog: pytest.LogCaptureFixture, left: bytes | None
) -> None:
    """As a power loss, or a copy that was broken off, leaves it."""
    directory = tmp_path / "run"
    here(directory, at=7, how="stop")
    file = directory / "checkpoint-6" / "trainer_state.json"
    file.unlink()
    if left is not None:
        file.write_bytes(left)
    assert_same_end(here(directory, resume=True), whole)
    assert f"{directory / 'checkpoint-6'} cannot be resumed from and is skipped: trainer_state.json" in caplog.text


@pytest.mark.slow
def test_all_are_damaged(tmp_path: Path) -> None:
    directory = tmp_path / "run"
    here(directory, at=7, how="stop")
    for step in (3, 6):
        damage(directory / "ckptlib", step)
    before = {path: path.read_bytes() for path in directory.rglob("*") if path.is_file()}
    with pytest.raises(ckptlib.CorruptData):
        here(directory, resume=True)
    assert {path: path.read_bytes() for path in before} == before


@pytest.mark.parametrize("whose", [pytest.param("theirs", marks=pytest.mark.slow), "ours"])
def test_going_on_from_another_directory(tmp_path: Path, whole: dict[str, Any], whose: str) -> None:
    """From ckptlib's checkpoints, and from Trainer's own."""
    here(tmp_path / "one", at=7, how="stop", whose=whose)
    assert_same_end(here(tmp_path / "two", resume=str(tmp_path / "one" / "checkpoint-6")), whole)
    assert steps_of(tmp_path / "two") == [12, 14]
    assert checkpoints(tmp_path / "one") == ["checkpoint-3", "checkpoint-6"]


@pytest.mark.slow
def test_going_back(tmp_path: Path, whole: dict[str, Any]) -> None:
    """Later checkpoints are written anew; a run without `resume_from_checkpoint` begins at the begin."""
    here(tmp_path / "run", at=10, how="stop", save_total_limit=None)
    assert_same_end(here(tmp_path / "run", resume=str(tmp_path / "run" / "checkpoint-3")), whole)
    assert checkpoints(tmp_path / "run") == ["checkpoint-12", "checkpoint-14"]
    assert_same_end(here(tmp_path / "run", resume=False), whole)
    assert steps_of(tmp_path / "run") == [12, 14]


def test_a_store_that_fails(tmp_path: Path, whole: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    """Training goes on; checkpoints of failed saves never appear; the next start goes on from the last whole one."""
    directory = tmp_path / "run"
    packs = directory / "ckptlib" / "packs"

    def fail(self: Any, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if state.global_step == 5:
            deadline = time.monotonic() + 120
            while not steps_of(directory) and time.monotonic() < deadline:
                time.sleep(0.02)
            packs.rename(directory / "elsewhere")
            packs.write_text("no directory")

    with monkeypatch.context() as patched:
        patched.setattr(hf_job.Hurt, "on_step_end", fail)
        with pytest.raises(ckptlib.SaveFailed, match="000000000014-"):
            here(directory)
    packs.unlink()
    (directory / "elsewhere").rename(packs)
    assert checkpoints(directory) == ["checkpoint-3"]
    assert_same_end(here(directory), whole)


def test_files_that_cannot_be_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Rank 0 alone writes them: it trains on, as the others do, and all say at the end that a checkpoint is missing."""
    numbers = iter([3, 6])

    def fail(self: Any, folder: str) -> None:
        (Path(folder) / "config.json").write_text("{")
        if next(numbers) == 3:
            raise OSError(28, "No space left on device")

    monkeypatch.setattr(hf_job.Config, "save_pretrained", fail)
    with pytest.raises(FileNotFoundError, match="checkpoint-3"):
        here(tmp_path / "run", steps=6)
    assert "checkpoint-3: its files cannot be written: [Errno 28] No space left on device" in caplog.text
    assert checkpoints(tmp_path / "run") == ["checkpoint-6"]
    assert steps_of(tmp_path / "run") == [3, 6]


def test_directories_that_were_copied_have_no_ages(tmp_path: Path) -> None:
    """All of them are as new as the copy, in no order: the ones with the smallest numbers go."""
    here(tmp_path / "run", at=10, how="stop", save_total_limit=None)
    assert checkpoints(tmp_path / "run") == ["checkpoint-3", "checkpoint-6", "checkpoint-9"]
    now = time.time()
    for place, step in enumerate((9, 6, 3)):
        os.utime(tmp_path / "run" / f"checkpoint-{step}", (now, now + place / 100))
    here(tmp_path / "run", steps=11, resume=True, save_total_limit=3)
    assert checkpoints(tmp_path / "run") == ["checkpoint-11", "checkpoint-6", "checkpoint-9"]


@pytest.mark.parametrize("bad", [3, 6])
def test_a_save_that_cannot_be_begun(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, bad: int
) -> None:
    """Training goes on without it; one whose last save is missing does not end as if it were there."""
    save = ckptlib.Checkpointer.save

    def fail(self: ckptlib.Checkpointer, step: int, metrics: Any = None) -> ckptlib.Pending:
        if step == bad:
            raise ckptlib.SaveFailed(f"not at {step}")
        return save(self, step, metrics)

    monkeypatch.setattr(ckptlib.Checkpointer, "save", fail)
    monkeypatch.setattr(TrainerRun, "_is_due", lambda *_: False)  # so that `save` is asked for each
    if bad == 6:
        with pytest.raises(ckptlib.SaveFailed, match="not at 6"):
            here(tmp_path / "run", steps=6)
    else:
        here(tmp_path / "run", steps=6)
    assert f"checkpoint-{bad}: not at {bad}" in caplog.text
    assert steps_of(tmp_path / "run") == [9 - bad]


EVALUATED = {"eval_strategy": "steps", "eval_steps": 3, "load_best_model_at_end": True, "metric_for_best_model": "loss"}


def test_the_best_model_is_loaded(tmp_path: Path) -> None:
    """And its checkpoint is the one that stays, as with Trainer's own files."""
    ends = []
    for whose in ("ours", "theirs"):
        ends.append(here(tmp_path / whose, whose=whose, save_total_limit=1, **EVALUATED))
    assert same(ends[0]["model"], ends[1]["model"])
    assert checkpoints(tmp_path / "ours") == checkpoints(tmp_path / "theirs")
    assert [f"checkpoint-{step}" for step in steps_of(tmp_path / "ours")] == checkpoints(tmp_path / "theirs")


def test_the_best_model_is_not_loaded(tmp_path: Path) -> None:
    """With a limit of one its checkpoint stays alone, and the last one, written until then, does not come back."""
    asked = {**EVALUATED, "load_best_model_at_end": False, "greater_is_better": True, "save_total_limit": 1}
    for whose in ("ours", "theirs"):
        here(tmp_path / whose, whose=whose, **asked)
    assert checkpoints(tmp_path / "ours") == checkpoints(tmp_path / "theirs") == ["checkpoint-3"]
    assert steps_of(tmp_path / "ours") == [3]


def no_save_at(bad: int, losses: list[float], monkeypatch: pytest.MonkeyPatch) -> None:
    """`losses`: of the evaluations, as far as they are not 0.9."""
    save, told = ckptlib.Checkpointer.save, iter([*losses, *[0.9] * 9])

    def fail(self: ckptlib.Checkpointer, step: int, metrics: Any = None) -> ckptlib.Pending:
        if step == bad:
            raise ckptlib.SaveFailed(f"not at {bad}")
        return save(self, step, metrics)

    monkeypatch.setattr(ckptlib.Checkpointer, "save", fail)
    monkeypatch.setattr(TrainerRun, "_is_due", lambda *_: False)  # so that `save` is asked for each
    monkeypatch.setattr(hf_job.Ours, "evaluate", lambda *_, **__: {"eval_loss": next(told)})


@pytest.mark.parametrize("limit", [1, 2])
def test_the_best_model_could_not_be_saved(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, limit: int) -> None:
    """The one before it stays, and is loaded."""
    no_save_at(6, [0.5, 0.2], monkeypatch)
    ended = here(tmp_path / "run", save_total_limit=limit, **EVALUATED, greater_is_better=False)
    assert checkpoints(tmp_path / "run") == ["checkpoint-14", "checkpoint-3"][2 - limit :]
    assert same(ckptlib.read(tmp_path / "run" / "ckptlib", 3, only="model")["model"], dict(ended["model"]))


def test_the_only_best_model_could_not_be_saved(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """None is loaded then; Trainer looked for its directory all the same, and raised on one rank."""
    no_save_at(3, [0.2], monkeypatch)
    ended = here(tmp_path / "run", save_total_limit=1, **EVALUATED, greater_is_better=False)
    assert checkpoints(tmp_path / "run") == ["checkpoint-14"]
    assert same(ckptlib.read(tmp_path / "run" / "ckptlib", 14, only="model")["model"], dict(ended["model"]))
    assert "checkpoint-3 has the best model, but is not there" in caplog.text


def test_the_best_model_is_the_last_one_which_could_not_be_saved(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Trainer has that failure, and not another one behind it."""
    no_save_at(12, [0.5, 0.9, 0.9, 0.2], monkeypatch)
    with pytest.raises(ckptlib.SaveFailed, match="not at 12"):
        here(tmp_path / "run", steps=12, save_total_limit=1, **EVALUATED, greater_is_better=False)
    assert checkpoints(tmp_path / "run") == ["checkpoint-3"]


def test_the_best_model_of_another_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It is looked for there, not by its number among the checkpoints of this run."""
    no_save_at(-1, [0.2], monkeypatch)
    asked = {**EVALUATED, "save_total_limit": 1, "greater_is_better": False}
    here(tmp_path / "first", steps=3, **asked)
    ended = here(tmp_path / "run", steps=6, resume=str(tmp_path / "first" / "checkpoint-3"), **asked)
    assert same(ckptlib.read(tmp_path / "first" / "ckptlib", 3, only="model")["model"], dict(ended["model"]))


@pytest.mark.timeout(400)
@pytest.mark.slow
def test_the_best_model_of_ranks_that_do_not_see_its_checkpoint(tmp_path: Path) -> None:
    """It is an earlier step, saved between Trainer's own; whether it is there is what the first rank sees."""
    asked = {**EVALUATED, "greater_is_better": True, "eval_steps": 1, "save_steps": 7, "save_total_limit": None}
    ended = two_ranks(tmp_path / "run", -1, "ours", own_disks=True, options={"every": 1}, **asked)
    state = json.loads((tmp_path / "run" / f"checkpoint-{STEPS}" / "trainer_state.json").read_text())
    best = state["best_global_step"]
    assert best % 7
    assert Path(state["best_model_checkpoint"]) == tmp_path / "run" / f"checkpoint-{best}"
    assert same(ckptlib.read(tmp_path / "run" / "ckptlib", best, only="model")["model"], dict(ended["model"]))


def test_the_last_step_has_the_last_weights(tmp_path: Path) -> None:
    """Though those of the best one are loaded behind it; Trainer itself saves only where it is better."""
    asked = {**EVALUATED, "greater_is_better": True, "save_strategy": "best", "save_total_limit": None}
    left = here(tmp_path / "theirs", whose="theirs", **{**asked, "load_best_model_at_end": False})["model"]
    ended = here(tmp_path / "run", options={"every": STEPS}, **asked)["model"]
    assert steps_of(tmp_path / "run") == [3, STEPS]
    assert same(ckptlib.read(tmp_path / "run" / "ckptlib", STEPS, only="model")["model"], dict(left))
    assert same(ckptlib.read(tmp_path / "run" / "ckptlib", 3, only="model")["model"], dict(ended))


def test_saves_by_epoch_and_of_the_model_only(tmp_path: Path) -> None:
    here(tmp_path / "run", save_strategy="epoch", save_only_model=True, save_total_limit=None)
    assert checkpoints(tmp_path / "run") == ["checkpoint-10", "checkpoint-14", "checkpoint-5"]
    assert set(ckptlib.read(tmp_path / "run" / "ckptlib", 10)) == {"model", "@rng"}


def test_a_checkpoint_gets_its_weights_by_the_command(tmp_path: Path) -> None:
    """Where its config lies: `from_pretrained` reads the directory, and a run still resumes from it."""
    directory = tmp_path / "run"
    model = here(directory, 3)["model"]
    root, folder = str(directory / "ckptlib"), str(directory / "checkpoint-3")
    given = ["export", root, folder, "--step", "3", "--format", "hf", "--only", "model", "--strip", "model/"]
    with pytest.raises(SystemExit, match=r"^0$"):
        app.run(given)
    assert same(hf_job.Model.from_pretrained(folder).state_dict(), model)
    assert here(directory, 6)["step"] == 6


def test_options(tmp_path: Path, whole: dict[str, Any]) -> None:
    """More saves than Trainer asks for have directories, too."""
    directory, options = tmp_path / "run", {"every": 1, "codec": "planes"}
    assert_same_end(here(directory, options=options, save_total_limit=None), whole)
    steps = steps_of(directory)
    assert {3, 6, 9, 12, 14} < {*steps}
    assert checkpoints(directory) == sorted(f"checkpoint-{step}" for step in steps)
    further = min({*steps} - {3, 6, 9, 12, 14})
    assert_same_end(here(directory, resume=str(directory / f"checkpoint-{further}")), whole)
    for name, value in (("keep", ckptlib.Keep(last=2)), ("must_resume", True)):
        with pytest.raises(ValueError, match=f"{name} cannot be given"):
            here(tmp_path / "other", options={name: value})


def test_a_run_that_must_resume_does_not_begin_in_another_directory(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="No valid checkpoint found"):
        here(tmp_path / "run", resume=True)
    with pytest.raises(ValueError, match="No valid checkpoint found"):
        here(tmp_path / "run", whose="callback", resume="last or True")
    assert [*tmp_path.rglob("*")] in ([], [tmp_path / "run"])
    here(tmp_path / "run", 3, whose="callback")
    here(tmp_path / "run", 6, whose="callback", resume="last or True")
    assert steps_of(tmp_path / "run")[-1] == 6


@pytest.mark.parametrize("data", [b"", b"[]", b'{"step": 3}', b'{"step": "../../etc"}', b"[" * 5000], ids=range(5))
def test_hostile_files(tmp_path: Path, data: bytes) -> None:
    directory = tmp_path / "run"
    (directory / "checkpoint-3").mkdir(parents=True)
    (directory / "checkpoint-3" / POINTER).write_bytes(data)
    (directory / "checkpoint-3" / "trainer_state.json").write_text("{}")
    with pytest.raises(ckptlib.FormatError, match=POINTER):
        here(directory, resume=True)


@pytest.mark.parametrize("every", [5, 3], ids=["from the begin of an epoch", "from its midst"])
def test_a_callback_in_a_trainer_of_any_class(tmp_path: Path, whole: dict[str, Any], every: int) -> None:
    """It resumes with the bits of an undisturbed run, though Trainer itself is handed weights and nothing else."""
    directory = tmp_path / "run"
    with pytest.raises(RuntimeError, match="as asked"):
        here(directory, at=every + 1, how="raise", whose="callback", every=every)
    assert_same_end(here(directory, whose="callback", every=every), whole)
    steps = steps_of(directory)
    assert (len(steps), steps[1]) == (2, 14)  # save_total_limit=2
    assert {f"checkpoint-{step}" for step in steps} == {*checkpoints(directory)}


def test_a_callback_skips_what_is_damaged(tmp_path: Path, whole: dict[str, Any]) -> None:
    directory = tmp_path / "run"
    here(directory, at=10, how="stop", whose="callback", save_total_limit=None)
    first, *steps = steps_of(directory)
    assert (first, steps[-1]) == (3, 10)
    for step in steps:
        damage(directory / "ckptlib", step)
    assert_same_end(here(directory, whose="callback"), whole)


def test_a_callback_whose_checkpoints_are_all_damaged(tmp_path: Path) -> None:
    """It says so: a training that began anew would remove them one by one."""
    directory = tmp_path / "run"
    here(directory, at=7, how="stop", whose="callback")
    for step in steps_of(directory):
        damage(directory / "ckptlib", step)
    before = checkpoints(directory)
    with pytest.raises(ckptlib.CorruptData):
        here(directory, whose="callback")
    assert checkpoints(directory) == before


def test_the_state_of_trainer_is_damaged_in_all(tmp_path: Path) -> None:
    """They are told of, as ever, so that nobody begins anew."""
    directory = tmp_path / "run"
    here(directory, at=7, how="stop")
    for file in directory.glob("checkpoint-*/trainer_state.json"):
        file.write_bytes(b"")
    with pytest.raises(json.JSONDecodeError):
        here(directory, resume=True)
    assert checkpoints_in(directory, None, {}) == [directory / "checkpoint-6", directory / "checkpoint-3"]


def test_a_callback_says_what_it_does_not_do(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="save_strategy='no'"):
        here(tmp_path / "run", whose="callback", save_strategy="steps")
