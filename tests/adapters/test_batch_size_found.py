"""Trainer's `auto_find_batch_size`: where memory runs out, it begins the training anew, with another scheduler."""

from __future__ import annotations

import signal
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers.registry import close_sessions
from torch import nn

import ckptlib

transformers = pytest.importorskip("transformers", reason="transformers is not installed: it needs Python 3.11")

from ckptlib.adapters.huggingface import CkptlibCallback, CkptlibTrainerMixin  # noqa: E402

STEPS, EVERY, RATE = 12, 4, 0.12


class Model(nn.Module):
    """Runs out of memory as a device does: with eight samples, or once, in the batch of this number."""

    def __init__(self, fails_at: int | None) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layer = nn.Linear(4, 1)
        self._fails_at, self._batches = fails_at, 0

    def forward(self, x: torch.Tensor) -> dict[str, torch.Tensor]:
        self._batches += 1
        if len(x) > 7 if self._fails_at is None else self._batches == self._fails_at:
            raise RuntimeError("CUDA out of memory.")
        return {"loss": self.layer(x).square().mean()}


class Ours(CkptlibTrainerMixin, transformers.Trainer):  # type: ignore[misc]
    pass


def train(directory: Path, whose: str, fails_at: int | None = None, resume: str | None = None) -> list[torch.Tensor]:
    """The weights at the end."""
    by_callback = whose == "callback"
    args = transformers.TrainingArguments(
        str(directory),
        max_steps=STEPS,
        save_strategy="no" if by_callback else "steps",
        save_steps=EVERY,
        per_device_train_batch_size=8,
        auto_find_batch_size=True,
        learning_rate=RATE,
        use_cpu=True,
        report_to="none",
        disable_tqdm=True,
    )
    data: Any = [{"x": torch.full((4,), float(i))} for i in range(128)]
    model = Model(fails_at)
    more = {"callbacks": [CkptlibCallback(every=EVERY)]} if by_callback else {}
    trainer = (Ours if whose == "mixin" else transformers.Trainer)(model, args, train_dataset=data, **more)
    trainer.train(resume_from_checkpoint=resume)
    close_sessions()
    return [parameter.detach().clone() for parameter in model.parameters()]


def saved_rates(directory: Path) -> dict[int, float]:
    found = {
        info.step: ckptlib.read(directory / "ckptlib", info.step) for info in ckptlib.checkpoints(directory / "ckptlib")
    }
    assert all(state["sched"]["last_epoch"] == step for step, state in found.items())
    return {step: state["optim"]["param_groups"][0]["lr"] for step, state in found.items()}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("whose", "fails_at"),
    [
        ("callback", 4),
        ("mixin", None),
        ("mixin", 4),
        ("callback", None),
    ],
)
def test_the_scheduler_of_the_training_that_goes_on_is_saved(tmp_path: Path, whose: str, fails_at: int | None) -> None:
    """Memory runs out in the first step, or when the Checkpointer knows of three."""
    before = signal.getsignal(signal.SIGTERM)
    found = train(tmp_path / "run", whose, fails_at)
    assert signal.getsignal(signal.SIGTERM) is before, "one that was begun before still listens"
    rates = {step: RATE * (STEPS - step) / STEPS for step in (4, 8, 12)}
    assert saved_rates(tmp_path / "run") == pytest.approx(rates)
    assert all(map(torch.equal, found, train(tmp_path / "theirs", "theirs", fails_at)))


@pytest.mark.slow
def test_it_goes_on_as_it_would_have(tmp_path: Path) -> None:
    whole = train(tmp_path / "run", "mixin")
    again = train(tmp_path / "run", "mixin", resume=str(tmp_path / "run" / "checkpoint-8"))
    assert all(map(torch.equal, whole, again))
