"""How long does transformers' Trainer stand still for a checkpoint, with its own files and with ckptlib's mixin?

One process, a stack of linear layers under AdamW, a checkpoint every fourth step; in turns, in the same run. The stall
is what `_save_checkpoint` takes, and what the next optimizer step waits for the copy (`fence`). Trainer does not flush
its files; ckptlib does, beside the training. The first checkpoint of each turn is left out: it allocates.
"""

from __future__ import annotations

import logging
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
from torch import nn

from benchmarks.common import Report, spread
from benchmarks.trainers import CHECKPOINTS, EVERY, given


def main(arguments: list[str]) -> None:
    nbytes, turns, out, directory = given("hf_trainer", __doc__, arguments)
    logging.getLogger("transformers").setLevel(logging.ERROR)
    with tempfile.TemporaryDirectory(dir=directory) as place:
        report = Report("hf_trainer", out, Path(place), nbytes=nbytes, turns=turns, every=EVERY)
        stalls: dict[str, list[float]] = {"Trainer": [], "ckptlib": []}
        waits: list[float] = []
        for turn in range(turns):
            for subject in stalls:
                told = train(subject, Path(place) / f"{subject}-{turn}", nbytes)
                stalls[subject] += told["stalls"][1:]
                waits += told["waits"][1:] if subject == "ckptlib" else []
        for subject, samples in stalls.items():
            report.add("figure", subject=subject, what="stall", unit="s", **spread(samples), worst=max(samples))
        report.add("figure", subject="ckptlib", what="fence", unit="s", **spread(waits), worst=max(waits))


def train(subject: str, directory: Path, nbytes: int) -> dict[str, list[float]]:
    """Seconds of each checkpoint, and of the wait behind it."""
    from transformers import Trainer, TrainerCallback, TrainingArguments

    from ckptlib.adapters.huggingface import CkptlibTrainerMixin

    stalls: list[float] = []
    waited: list[float] = []

    class Timed(Trainer):  # type: ignore[misc]
        def _save_checkpoint(self, model: nn.Module, trial: Any) -> None:
            began = time.perf_counter()
            super()._save_checkpoint(model, trial)
            stalls.append(time.perf_counter() - began)

    class Ours(CkptlibTrainerMixin, Trainer):
        def _save_checkpoint(self, model: nn.Module, trial: Any) -> None:
            began = time.perf_counter()
            super()._save_checkpoint(model, trial)
            stalls.append(time.perf_counter() - began)

    class Fence(TrainerCallback):  # type: ignore[misc]
        """Reads behind each optimizer step what has been waited for at the fence, all in all."""

        def on_optimizer_step(self, *args: Any, **kwargs: Any) -> None:
            run = getattr(trainer, "_run", None)
            waited.append(0.0 if run is None else run.checkpointer.fence_waited_s)

    args = TrainingArguments(
        output_dir=str(directory),
        max_steps=EVERY * CHECKPOINTS + 1,
        per_device_train_batch_size=32,
        save_steps=EVERY,
        save_total_limit=2,
        report_to=[],
        disable_tqdm=True,
        use_cpu=True,
        logging_steps=10**6,
    )
    torch.manual_seed(0)
    width = max(16, int((nbytes / 3 / 4 / 8) ** 0.5))
    data = [{"x": torch.randn(width)} for _ in range(64)]
    trainer = (Ours if subject == "ckptlib" else Timed)(Stack(width), args, train_dataset=data, callbacks=[Fence()])
    trainer.train()
    after = [waited[i] - waited[i - 1] for i in range(EVERY, len(waited), EVERY)]
    return {"stalls": stalls[:CHECKPOINTS], "waits": after[:CHECKPOINTS]}


class Stack(nn.Module):
    """Eight square layers."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.layers = nn.Sequential(*(nn.Linear(width, width) for _ in range(8)))

    def forward(self, x: torch.Tensor) -> dict[str, torch.Tensor]:
        return {"loss": self.layers(x).square().mean()}


if __name__ == "__main__":
    import sys

    main(sys.argv[1:])
