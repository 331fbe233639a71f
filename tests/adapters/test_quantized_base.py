"""Adapters on a base that bitsandbytes has quantized (QLoRA): what is trained comes back, and the base is not saved.

A stand-in for the base, whose weight is of a class that nobody can take apart, as Int8Params and Params4bit are.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from helpers.registry import close_sessions
from helpers.same import same
from torch import nn

import ckptlib

transformers = pytest.importorskip("transformers", reason="transformers is not installed: it needs Python 3.11")

from ckptlib.adapters.accelerate import CkptlibAccelerator  # noqa: E402
from ckptlib.adapters.huggingface import CkptlibCallback, CkptlibTrainerMixin  # noqa: E402

STEPS = 5


class Packed(torch.Tensor):
    """Bytes, and what they mean beside them."""


class Adapted(nn.Module):
    is_loaded_in_4bit = True
    _keys_to_ignore_on_save = None  # which Trainer asks of the models of transformers

    def __init__(self) -> None:
        super().__init__()
        self.base = nn.Parameter(torch.arange(16, dtype=torch.uint8).as_subclass(Packed), requires_grad=False)
        self.down, self.drop, self.up = nn.Linear(4, 2), nn.Dropout(0.2), nn.Linear(2, 4)
        self.norm = nn.BatchNorm1d(4, affine=False)
        self.register_buffer("made", torch.ones(1), persistent=False)

    def forward(self, x: torch.Tensor) -> dict[str, torch.Tensor]:
        base = self.base.as_subclass(torch.Tensor).reshape(4, 4).float()
        return {"loss": (x @ base + self.norm(self.up(self.drop(self.down(x))))).square().mean()}


class Ours(CkptlibTrainerMixin, transformers.Trainer):  # type: ignore[misc,name-defined]
    pass


class Stopped(transformers.TrainerCallback):  # type: ignore[misc,name-defined]
    """An error in step 4: the checkpoint is of step 3."""

    def on_step_end(self, args: Any, state: Any, control: Any, **seen: Any) -> None:
        if state.global_step == 4:
            raise RuntimeError("as asked")


def trained(out: Path, whose: str, seed: int = 0, stopped: bool = False) -> dict[str, torch.Tensor]:
    """What training changes, at the end."""
    torch.manual_seed(seed)
    saves = CkptlibCallback(every=3)
    args = transformers.TrainingArguments(
        str(out),
        max_steps=STEPS,
        save_steps=3,
        save_strategy="steps" if whose == "mixin" else "no",
        use_cpu=True,
        report_to="none",
        disable_tqdm=True,
    )
    kind = Ours if whose == "mixin" else transformers.Trainer
    data = [{"x": torch.full((4,), float(i))} for i in range(8 * STEPS)]
    before = [Stopped()] if stopped else []
    trainer = kind(Adapted(), args, train_dataset=data, callbacks=[saves, *before] if whose == "callback" else before)
    try:
        found = {"mixin": lambda: trainer.last_checkpoint(), "callback": lambda: saves.last_checkpoint(args)}
        trainer.train(resume_from_checkpoint=found.get(whose, lambda: None)())
    finally:
        close_sessions()
        saves._run = None if saves._run is None else saves._run.let_go()
    return what_changes(trainer.model)


def what_changes(model: nn.Module) -> dict[str, torch.Tensor]:
    """All but the base."""
    return {name: tensor.clone() for name, tensor in model.state_dict().items() if name != "base"}


@pytest.mark.parametrize("whose", ["mixin", pytest.param("callback", marks=pytest.mark.slow)])
def test_what_is_trained_comes_back(tmp_path: Path, whose: str) -> None:
    whole = trained(tmp_path / "whole", "theirs")
    with pytest.raises(RuntimeError, match="as asked"):
        trained(tmp_path / "run", whose, stopped=True)
    assert same(trained(tmp_path / "run", whose, seed=1), whole)
    root = tmp_path / "run" / "ckptlib"
    assert ckptlib.read(root, STEPS, only="model")["model"].keys() == whole.keys()


def test_accelerate(tmp_path: Path) -> None:
    """The model beside it is saved whole."""
    accelerator = CkptlibAccelerator(cpu=True)
    adapted, other = accelerator.prepare(Adapted(), nn.BatchNorm1d(2))
    accelerator.save_state(tmp_path / "saved")
    before = what_changes(adapted)
    with torch.no_grad():
        for param in (*map(adapted.state_dict().get, before), *other.parameters()):
            param.zero_()
    accelerator.load_state(tmp_path / "saved")
    assert same(what_changes(adapted), before)
    assert other.weight.tolist() == [1, 1]
    accelerator.end_training()
    found = ckptlib.read(tmp_path / "ckptlib", 0)
    assert found["model"].keys() == before.keys()
    assert found["model_1"].keys() == other.state_dict().keys()
