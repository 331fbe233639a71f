"""Trainings of Lightning that the callback saves: they resume within an epoch or at its end, and end with the bits, and
the calls, of a run that saved nothing and that nobody disturbed.

Five batches are an epoch: see workers/lightning_callback_job.py.
"""

from __future__ import annotations

import json
import signal
import traceback
import warnings
from pathlib import Path
from typing import Any

import lightning_callback_job
import pytest
import torch
from helpers.registry import close_sessions
from helpers.same import same
from launch import fork_ranks, forked
from places import WORKERS
from torch.utils._python_dispatch import TorchDispatchMode

import ckptlib
from ckptlib.adapters.lightning import CkptlibCallback
from ckptlib.errors import EXIT_PREEMPTED
from ckptlib.policy.stop_signal import TOLD_BY

STEPS = 14
JOB = WORKERS / "lightning_callback_job.py"


def here(directory: Path, steps: int = STEPS, root: bool = True, **asked: Any) -> dict[str, Any]:
    """In this process."""
    directory.mkdir(exist_ok=True)
    out = directory / "end.pt"
    state = torch.get_rng_state(), torch.get_num_threads()
    try:
        with warnings.catch_warnings():
            lightning_callback_job.main(str(directory / "root") if root else "", steps, out, asked)
    finally:
        close_sessions()
        torch.set_rng_state(state[0])
        torch.set_num_threads(state[1])
    return torch.load(out, weights_only=True)


def assert_same_end(end: dict[str, Any], whole: dict[str, Any]) -> None:
    for what in ("step", "epoch", "seen", "model"):
        assert same(end[what], whole[what]), what
    assert len(end["optims"]) == len(whole["optims"])
    assert all(same(a, b) for a, b in zip(end["optims"], whole["optims"], strict=True))
    assert end["hooks"] == whole["hooks"][-len(end["hooks"]) :]
    assert len(end["hooks"]) < len(whole["hooks"])


def steps_of(directory: Path) -> list[int]:
    return [info.step for info in ckptlib.checkpoints(directory / "root")]


@pytest.mark.timeout(300)
def test_killed_and_resumed_within_an_epoch(tmp_path: Path) -> None:
    asked = {"validate": 2, "average": True}
    arguments = (tmp_path / "root", STEPS, tmp_path / "end.pt", json.dumps({**asked, "at": 11}))
    codes, output = forked(JOB, 1, *arguments, timeout_s=250)
    assert codes == [-9], output[-20000:]
    end = here(tmp_path, **asked)
    assert_same_end(end, here(tmp_path / "whole", root=False, **asked))
    assert steps_of(tmp_path)[-1] == STEPS


@pytest.mark.parametrize(
    ("asked", "at"),
    [
        ({"every": 5}, 12),  # the newest step is the end of an epoch
        ({"epochs": 3, "every": 5, "validate": 5}, 12),
        pytest.param({"every": 5, "validate": 5, "average": True}, 12, marks=pytest.mark.slow),
        pytest.param({"epochs": 3}, 11, marks=pytest.mark.slow),
        pytest.param({"epochs": 3, "every": 5}, 12, marks=pytest.mark.slow),
        pytest.param({"accumulate": 2, "every": 4}, 11, marks=pytest.mark.slow),
        pytest.param({"accumulate": 2}, 8, marks=pytest.mark.slow),
        pytest.param({"loader": "ours", "workers": 2}, 11, marks=pytest.mark.slow),
        pytest.param({"loader": "ours", "every": 5}, 12, marks=pytest.mark.slow),
        pytest.param({"validate": 3}, 11, marks=pytest.mark.slow),
        pytest.param({"loader": "stream", "every": 10}, 12, marks=pytest.mark.slow),
    ],
    ids=str,
)
def test_an_error_in_the_training(tmp_path: Path, asked: dict[str, Any], at: int) -> None:
    with pytest.raises(RuntimeError, match="as asked"):
        here(tmp_path, at=at, how="raise", **asked)
    assert [signal.getsignal(number) for number in TOLD_BY] == [signal.SIG_DFL] * 2
    assert_same_end(here(tmp_path, **asked), here(tmp_path / "whole", root=False, **asked))


@pytest.mark.slow
def test_two_optimizers(tmp_path: Path) -> None:
    """Lightning counts the steps of both; ckptlib, the batches in which they stepped."""
    with pytest.raises(RuntimeError, match="as asked"):
        here(tmp_path, 28, at=16, how="raise", manual=True)
    assert_same_end(here(tmp_path, 28, manual=True), here(tmp_path / "whole", 28, root=False, manual=True))
    assert steps_of(tmp_path)[-1] == 14


def test_told_to_stop(tmp_path: Path) -> None:
    with pytest.raises(ckptlib.Preempted):
        here(tmp_path, at=7, how="term")
    assert [signal.getsignal(number) for number in TOLD_BY] == [signal.SIG_DFL] * 2
    assert steps_of(tmp_path)[-1] == 9  # where the ranks agree, a step later
    end = here(tmp_path)
    assert_same_end(end, here(tmp_path / "whole", root=False))
    again = here(tmp_path)  # there is nothing left to do
    assert (again["step"], again["hooks"]) == (STEPS, [])
    assert same(again["model"], end["model"])


def test_told_to_stop_beside_another_checkpointer(tmp_path: Path) -> None:
    """Which still hears signals behind it."""
    with ckptlib.Checkpointer(tmp_path / "other", {"w": torch.zeros(3)}, every=10**9):
        before = [signal.getsignal(number) for number in TOLD_BY]
        with pytest.raises(ckptlib.Preempted):
            here(tmp_path, at=7, how="term")
        assert [signal.getsignal(number) for number in TOLD_BY] == before != [signal.SIG_DFL] * 2
    assert [signal.getsignal(number) for number in TOLD_BY] == [signal.SIG_DFL] * 2
    assert steps_of(tmp_path)[-1] == 9


def test_the_best_steps_stay(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Each has the metrics of its own validation; those between have none, and are not kept for an older one's."""
    keep = {"last": 1, "best": "val_loss", "mode": "min", "num_best": 2}
    here(tmp_path, every=100, validate=2, keep=keep)
    told = {info.step: info.metrics for info in ckptlib.checkpoints(tmp_path / "root")}
    assert STEPS in told
    assert len(told) in (2, 3)
    assert all("val_loss" in metrics for metrics in told.values())
    here(tmp_path / "all", every=1, validate=2, keep={**keep, "last": 100})
    found = {info.step: info.metrics for info in ckptlib.checkpoints(tmp_path / "all" / "root")}
    validated = {step for step, metrics in found.items() if "val_loss" in metrics}
    assert {2, 4, 6, 8, 10, 12, 14} == validated  # also those for which no slot was free at once
    best = sorted(validated, key=lambda step: found[step]["val_loss"])[:2]
    assert {*told} == {*best, STEPS}
    assert "is saved already" not in caplog.text  # by `every`, with its metrics


def test_metrics_are_read_of_saved_steps_alone(tmp_path: Path) -> None:
    """A read waits for all that a GPU has been given to do."""

    class Reads(TorchDispatchMode):
        ours = 0

        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            if func is torch.ops.aten._local_scalar_dense.default:
                files = [frame.filename for frame in traceback.extract_stack()]
                self.ours += any(file.endswith("adapters/lightning_callback.py") for file in files)
            return func(*args, **(kwargs or {}))

    with Reads() as reads:
        here(tmp_path, every=100)
    (info,) = ckptlib.checkpoints(tmp_path / "root")
    assert "loss" in info.metrics
    assert 0 < reads.ours < STEPS / 2


def test_told_to_stop_before_it_may(tmp_path: Path) -> None:
    """By early stopping, say: Lightning goes on until `min_epochs`, and each of these steps seemed to be the last."""
    from lightning.pytorch.callbacks import Callback

    class Stop(Callback):
        def on_train_batch_end(self, trainer: Any, *_: Any) -> None:
            trainer.should_stop = trainer.global_step >= 2

    end = here(tmp_path, epochs=4, min_epochs=2, every=100, also=[Stop()])
    assert end["step"] == 10
    assert steps_of(tmp_path) == [10]


@pytest.mark.parametrize(
    ("size", "drop_last", "warns"), [(18, False, True), (18, True, False), (20, False, False), (3, False, False)]
)
def test_epochs_of_different_lengths(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, size: int, drop_last: bool, warns: bool
) -> None:
    """Lightning asks a loader for its length once, and ends no epoch that is a batch shorter as it should."""
    here(tmp_path, 1, loader="ours", size=size, drop_last=drop_last)
    told = "18 items in batches of 4: some epochs have 5 batches and some 4"
    assert (told in caplog.text) == ("drop_last=True" in caplog.text) == warns


@pytest.mark.parametrize("after_setup", [False, True])
def test_goes_on_from_a_file_of_lightning(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, after_setup: bool) -> None:
    """Where the root has no step; later the root's own steps come first. Some strategies load the file when all is set
    up, behind the callback's hook."""
    from lightning.pytorch.callbacks import ModelCheckpoint
    from lightning.pytorch.strategies import SingleDeviceStrategy

    monkeypatch.setattr(SingleDeviceStrategy, "restore_checkpoint_after_setup", after_setup)
    saves = ModelCheckpoint(tmp_path / "theirs", every_n_train_steps=8, save_top_k=-1, filename="{step}")
    theirs = tmp_path / "theirs" / "step=8.ckpt"
    with pytest.raises(RuntimeError, match="as asked"):
        here(tmp_path / "theirs", root=False, at=9, how="raise", also=[saves])
    whole = here(tmp_path / "whole", root=False)
    end = here(tmp_path / "ours", **{"from": str(theirs)})
    assert (end["step"], end["seen"]) == (STEPS, STEPS)
    steps = steps_of(tmp_path / "ours")
    assert (min(steps) > 8, steps[-1]) == (True, STEPS)
    again = here(tmp_path / "ours", 16, **{"from": str(theirs)})
    assert [hook for hook in again["hooks"] if hook.startswith("batch")] == ["batch 2 14", "batch 3 15"]
    assert whole["step"] == STEPS


def test_a_trainer_whose_fit_failed_as_it_began_loads_files_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The root's step came first in that `fit` alone."""
    from lightning.pytorch.callbacks import ModelCheckpoint
    from lightning.pytorch.strategies import SingleDeviceStrategy

    trainers = []

    def fail(model: Any) -> None:
        trainers.append(model.trainer)
        if model.trainer.global_step:
            raise RuntimeError("as asked")

    saves = ModelCheckpoint(tmp_path, filename="theirs")
    monkeypatch.setattr(SingleDeviceStrategy, "restore_checkpoint_after_setup", True)
    monkeypatch.setattr(lightning_callback_job.Model, "on_fit_start", fail)
    end = here(tmp_path, 2, also=[saves])
    with pytest.raises(RuntimeError, match="as asked"):
        here(tmp_path, 2)
    model = lightning_callback_job.Model(manual=False)
    trainers[-1].validate(model, lightning_callback_job.Data(8, "stateful", 0, False), saves.best_model_path)
    assert same(dict(model.state_dict()), dict(end["model"]))


def test_objects_are_refused_by_name_before_the_training(tmp_path: Path) -> None:
    from lightning.pytorch.callbacks import Callback

    class Odd(Callback):
        def state_dict(self) -> dict[str, Any]:
            return {"mine": object()}

    with pytest.raises(ckptlib.UnsupportedState, match=r"callbacks.*mine"):
        here(tmp_path, also=[Odd()])


def test_a_run_that_must_resume_does_not_begin_under_another_path(tmp_path: Path) -> None:
    here(tmp_path, 4)
    with pytest.raises(ckptlib.CheckpointNotFound, match="roott has no step to resume from"):
        saved_by(tmp_path / "roott", must_resume=True)
    assert not (tmp_path / "roott").exists()
    saved_by(tmp_path / "root", must_resume=True)
    assert steps_of(tmp_path)[-1] == 6


def saved_by(root: Path, **options: Any) -> None:
    """A run up to step 6, by a callback with these options."""
    saves = CkptlibCallback(root, every=3, **options)
    try:
        lightning_callback_job.main("", 6, root.parent / "end.pt", {"also": [saves]})
    finally:
        close_sessions()


def two_ranks(directory: Path, timeout_s: float = 250, **asked: Any) -> tuple[list[int | None], str]:
    directory.mkdir(exist_ok=True)
    root = "" if asked.pop("whole", False) else directory / "root"
    told = json.dumps({"devices": 2, "validate": 3, "loader": "ours", **asked})
    return forked(JOB, 2, root, STEPS, directory / "end.pt", told, timeout_s=timeout_s)


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_sharded_weights_are_saved_once_and_the_training_is_the_same(tmp_path: Path) -> None:
    """With ModelParallelStrategy, Lightning's own checkpoint has copies, and making it steps a new optimizer."""
    fork_ranks("lightning_sharded.py", 2, tmp_path, timeout_s=250)


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_two_ranks_killed_and_resumed(tmp_path: Path) -> None:
    """Each has its own place in the data, random state and BatchNorm."""
    codes, output = two_ranks(tmp_path, at=11)
    assert -9 in codes, output[-20000:]
    for directory, asked in ((tmp_path, {}), (tmp_path / "whole", {"whole": True})):
        codes, output = two_ranks(directory, **asked)
        assert codes == [0, 0], output[-20000:]
    ends = [torch.load(directory / "end.pt", weights_only=True) for directory in (tmp_path, tmp_path / "whole")]
    assert_same_end(*ends)


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_one_of_two_ranks_is_told_to_stop(tmp_path: Path) -> None:
    """Both save the same step, and end with the status that says so."""
    codes, output = two_ranks(tmp_path, at=7, how="term")
    assert codes == [EXIT_PREEMPTED] * 2, output[-20000:]
    assert steps_of(tmp_path)[-1] == 9
