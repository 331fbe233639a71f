"""Trainings with transformers' Trainer that went back: `resume_from_checkpoint=True` is the newest checkpoint of what
came of that, whatever number those have that it left behind."""

from __future__ import annotations

import gc
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers.registry import close_sessions

import ckptlib
from ckptlib.cli import app

transformers = pytest.importorskip("transformers", reason="transformers is not installed: it needs Python 3.11")

from hf_job import Settled  # noqa: E402

from ckptlib.adapters import directory_lock  # noqa: E402
from ckptlib.adapters.huggingface import CkptlibCallback, CkptlibTrainerMixin  # noqa: E402
from ckptlib.exporting.export import export  # noqa: E402


@pytest.fixture(autouse=True)
def _close() -> Iterator[None]:
    yield
    close_sessions()


class Model(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = torch.nn.Linear(4, 1)

    def forward(self, x: torch.Tensor) -> dict[str, torch.Tensor]:
        return {"loss": self.layer(x).square().mean()}


class Ours(CkptlibTrainerMixin, transformers.Trainer):  # type: ignore[misc]
    pass


class Watch(transformers.TrainerCallback):  # type: ignore[misc]
    def __init__(self, stops: int) -> None:
        self.began, self._stops = -1, stops

    def on_step_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.began = state.global_step if self.began < 0 else self.began

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        control.should_training_stop = state.global_step == self._stops


def train(directory: Path, whose: str, stops: int, resume: str | bool) -> int:
    """To a step that is saved; the step that it begins at. `resume`: True, the name of a checkpoint, or False."""
    by_callback = whose == "callback"
    args = transformers.TrainingArguments(
        str(directory),
        max_steps=40,
        save_strategy="no" if by_callback else "steps",
        save_steps=2,
        use_cpu=True,
        report_to="none",
        disable_tqdm=True,
    )
    watch, settled, saves = Watch(stops), Settled(), CkptlibCallback(every=2)
    callbacks = [*([saves] if by_callback else []), settled, watch]
    data: Any = [{"x": torch.ones(4)}] * 512
    trainer = (transformers.Trainer if by_callback else Ours)(Model(), args, train_dataset=data, callbacks=callbacks)
    settled.holder = saves if by_callback else trainer
    given: Any = str(directory / resume) if isinstance(resume, str) else resume
    trainer.train(resume_from_checkpoint=saves.last_checkpoint(args) if by_callback and resume is True else given)
    return watch.began


class Interrupt(transformers.TrainerCallback):  # type: ignore[misc]
    """Ctrl-C in a notebook, as soon as a step is saved: its writer has just begun."""

    def __init__(self) -> None:
        self.began: list[int] = []

    def on_step_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.began.append(state.global_step)
        if state.global_step == 2 and len(self.began) > 1:
            raise KeyboardInterrupt


def rewind(directory: Path, step: int) -> None:
    with pytest.raises(SystemExit) as ended:
        app.run(["rewind", str(directory / "ckptlib"), str(step), "--yes"])
    assert ended.value.code == 0


def test_behind_a_checkpoint_that_the_run_went_back_to(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    assert train(tmp_path, "ours", 12, False) == 0
    assert train(tmp_path, "ours", 8, "checkpoint-4") == 4
    assert train(tmp_path, "ours", 10, True) == 8
    assert f"{tmp_path / 'checkpoint-12'} is left out" in caplog.text
    assert train(tmp_path, "ours", 14, "checkpoint-12") == 12, "a path is what it says"


@pytest.mark.parametrize("whose", ["ours", pytest.param("callback", marks=pytest.mark.slow)])
def test_behind_a_rewind(tmp_path: Path, whose: str) -> None:
    train(tmp_path, whose, 8, False)
    rewind(tmp_path, 4)
    assert train(tmp_path, whose, 6, True) == 4


@pytest.mark.parametrize("whose", ["ours", "callback"])
def test_none_is_left(tmp_path: Path, whose: str) -> None:
    """The training neither goes on from what was abandoned nor begins anew."""
    train(tmp_path, whose, 8, False)
    rewind(tmp_path, 4)
    for step in (2, 4):
        shutil.rmtree(tmp_path / f"checkpoint-{step}")
    with pytest.raises(ckptlib.CheckpointNotFound, match="checkpoint-8, were all abandoned"):
        train(tmp_path, whose, 10, True)


@pytest.mark.slow
def test_a_training_that_was_begun_anew(tmp_path: Path) -> None:
    train(tmp_path, "ours", 8, False)
    train(tmp_path, "ours", 4, False)
    assert train(tmp_path, "ours", 6, True) == 4


def test_weights_are_one_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """However large they are: for a model of peft, Trainer takes an index for no weights, and raises."""
    assert export.__kwdefaults__["max_shard_size"] == "5GB"
    monkeypatch.setitem(export.__kwdefaults__, "max_shard_size", "8B")
    train(tmp_path, "callback", 4, False)
    assert train(tmp_path, "callback", 6, True) == 4
    names = [path.name for path in (tmp_path / "checkpoint-4").iterdir() if "safetensors" in path.name]
    assert names == ["model.safetensors"]


@pytest.mark.parametrize("kept", ["its objects are kept", "they are collected"])
def test_a_callback_behind_an_interrupt(tmp_path: Path, kept: str) -> None:
    """The process goes on, as in a notebook, where the trace has the training's objects for some time. The next
    training goes on from what the first one was still saving."""
    watch, locks = Interrupt(), {*directory_lock._locks}

    def made() -> tuple[CkptlibCallback, Any, Any]:
        args = transformers.TrainingArguments(
            str(tmp_path), max_steps=3, save_strategy="no", use_cpu=True, report_to="none", disable_tqdm=True
        )
        saves, data = CkptlibCallback(every=2), [{"x": torch.ones(4)}] * 64
        return saves, args, transformers.Trainer(Model(), args, train_dataset=data, callbacks=[saves, watch])

    first = made()
    with pytest.raises(KeyboardInterrupt):
        first[2].train()
    if kept == "they are collected":
        del first
        gc.collect()
    watch.began.clear()
    saves, args, trainer = made()
    found = saves.last_checkpoint(args)
    assert found == str(tmp_path / "checkpoint-2")
    trainer.train(resume_from_checkpoint=found)
    assert watch.began == [2]
    assert locks == directory_lock._locks, "the first training's is given up, too"
