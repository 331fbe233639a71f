"""A training with transformers' Trainer, whose checkpoints are ckptlib's, on one rank or under torchrun:

    hf_job.py <directory> <steps> <step at which it is killed, or -1> <file for the weights> <whose> [JSON]

`whose`: "ours" for the mixin, "callback" for the callback, or "theirs" for Trainer's own files.

JSON: arguments of TrainingArguments; "resume" for `train` ("last or True": by a callback, in a run that must resume),
"options" for `ckptlib_options`, "every" for the callback, "how" for what happens at the step: "kill", "term", "group"
(SIGTERM to the workers of data loaders as well), "stop", "break" or "raise"; "fsdp2": true; "own_disks": true for an
output directory of each rank, and the steps in that of the first one.

Five updates are an epoch; checkpoints come every third step. Resumes from the newest of ours, unless told otherwise.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch
from accelerate_job import choose_fsdp2, whole
from torch import nn
from torch.distributed.tensor import DTensor
from transformers import PretrainedConfig, PreTrainedModel, Trainer, TrainerCallback, TrainingArguments

import ckptlib
from ckptlib.adapters.huggingface import CkptlibCallback, CkptlibTrainerMixin


class Config(PretrainedConfig):
    model_type = "tiny"
    width = 8


class Model(PreTrainedModel):
    """BatchNorm has a state that no optimizer owns, and dropout draws at random."""

    config_class = Config

    def __init__(self, config: Config) -> None:
        super().__init__(config)
        self.net = nn.Sequential(
            nn.Linear(4, config.width), nn.BatchNorm1d(config.width), nn.Dropout(0.2), nn.Linear(config.width, 1)
        )
        self.post_init()

    def get_input_embeddings(self) -> None:
        """It has none; FSDP2 asks."""

    def get_output_embeddings(self) -> None:
        """As above."""

    def forward(self, x: torch.Tensor, labels: torch.Tensor | None = None) -> dict[str, torch.Tensor]:
        out = self.net(x)
        return {"loss": (out.squeeze(-1) - labels).square().mean(), "logits": out}


class Sharded(Trainer):
    """By Accelerate's FSDP2, where it was asked for: which Accelerate offers on accelerators only, but runs on CPUs."""

    fsdp2 = False

    def create_accelerator_and_postprocess(self) -> None:
        super().create_accelerator_and_postprocess()
        if self.fsdp2:
            choose_fsdp2(self.accelerator)
            self.is_fsdp_enabled = True


class Ours(CkptlibTrainerMixin, Sharded):
    pass


def break_store(root: Path) -> None:
    """No pack can be written any more, once a step is there."""
    while not [*root.glob("steps/*")]:
        time.sleep(0.02)
    (root / "packs").rename(root.parent / "packs")
    (root / "packs").write_text("no directory")


class Hurt(TrainerCallback):
    """Ends the process, or its training."""

    def __init__(self, at: int, how: str) -> None:
        self.at, self.how = at, how

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if state.global_step != self.at:
            return
        if self.how == "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        if self.how == "group":
            assert os.getpgrp() == os.getpid()
            subprocess.run(["kill", "-TERM", "--", f"-{os.getpgrp()}"], check=True, start_new_session=True)
        elif self.how == "term":
            if state.is_world_process_zero:
                os.kill(os.getpid(), signal.SIGTERM)
        elif self.how == "stop":
            control.should_training_stop = True
        elif self.how == "break":
            if state.is_world_process_zero:
                break_store(Path(args.output_dir) / "ckptlib")
        else:
            raise RuntimeError("as asked")


class Settled(TrainerCallback):
    """A slot is free at each save, however short steps are: without one, a save that is due is taken a step later."""

    def __init__(self) -> None:
        self.holder: Any = None
        """A trainer, or a callback, that has a run."""

    def on_step_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        run = getattr(self.holder, "_run", None)
        if run is not None and run.checkpointer.pending is not None:
            with suppress(ckptlib.SaveFailed):
                run.checkpointer.pending.wait_committed(60.0)


def main(directory: Path, steps: int, at: int, out: Path, whose: str, asked: dict[str, Any]) -> None:
    torch.set_num_threads(1)
    torch.manual_seed(0)
    resume, how = asked.pop("resume", None), asked.pop("how", "kill")
    Sharded.fsdp2 = asked.pop("fsdp2", False)
    Ours.ckptlib_options = asked.pop("options", {})
    Ours.ckptlib_root = str(directory / "ckptlib") if asked.pop("own_disks", False) else None
    if Ours.ckptlib_root and os.environ.get("RANK", "0") != "0":
        directory = directory.with_suffix(".other")
    saves = CkptlibCallback(every=asked.pop("every", 3))
    world = int(os.environ.get("WORLD_SIZE", 1))
    data = [{"x": torch.randn(4), "labels": torch.randn(())} for _ in range(4 * 2 * 5 * world)]
    args = TrainingArguments(
        **{
            "output_dir": str(directory),
            "max_steps": steps,
            "per_device_train_batch_size": 4,
            "gradient_accumulation_steps": 2,
            "save_strategy": "no" if whose == "callback" else "steps",
            "save_steps": 3,
            "save_total_limit": 2,
            "learning_rate": 0.05,
            "lr_scheduler_type": "cosine",
            "logging_steps": 2,
            "report_to": [],
            "disable_tqdm": True,
            "use_cpu": True,
            **asked,
        }
    )
    settled = Settled()
    callbacks = [*([saves] if whose == "callback" else []), settled, Hurt(at, how)]
    trainer = (Ours if whose == "ours" else Sharded)(
        Model(Config()), args, train_dataset=data, eval_dataset=data[:8], callbacks=callbacks
    )
    settled.holder = saves if whose == "callback" else trainer
    if resume is None and whose == "ours":
        resume = trainer.last_checkpoint() is not None
    if whose == "callback" and resume in (None, "last or True"):
        resume = saves.last_checkpoint(args) or resume == "last or True"
    trainer.train(resume_from_checkpoint=resume)
    assert {type(param) is DTensor for param in trainer.model.parameters()} == {Sharded.fsdp2}
    state = whole({"model": trainer.model.state_dict(), "optim": trainer.optimizer.state_dict()["state"]})
    if trainer.is_world_process_zero():
        told = {"step": trainer.state.global_step, "history": [*map(repr, trainer.state.log_history)]}
        torch.save({**state, **told}, out)


if __name__ == "__main__":
    main(
        Path(sys.argv[1]),
        int(sys.argv[2]),
        int(sys.argv[3]),
        Path(sys.argv[4]),
        sys.argv[5],
        json.loads([*sys.argv, "{}"][6]),
    )
