"""How long does a loop with Accelerate stand still in `save_state`, with its own files and with CkptlibAccelerator?

One process, a stack of linear layers under AdamW, a checkpoint every fourth step; in turns, in the same run. The stall
is what `save_state` takes. Accelerate does not flush its files; ckptlib does, beside the training. The first checkpoint
of each turn is left out: it allocates.
"""

from __future__ import annotations

import time
from pathlib import Path

import torch
from torch import nn

from benchmarks.trainers import CHECKPOINTS, EVERY, stalls_in_turns

SUBJECTS = ("Accelerator", "CkptlibAccelerator")


def main(arguments: list[str]) -> None:
    stalls_in_turns("accelerate_stall", __doc__, arguments, SUBJECTS, train)


def train(subject: str, directory: Path, nbytes: int) -> list[float]:
    """Seconds of each checkpoint."""
    from accelerate import Accelerator
    from accelerate.utils import ProjectConfiguration

    from ckptlib.adapters.accelerate import CkptlibAccelerator

    project = ProjectConfiguration(str(directory), automatic_checkpoint_naming=True, total_limit=2)
    kind = CkptlibAccelerator if subject == "CkptlibAccelerator" else Accelerator
    accelerator = kind(cpu=True, project_config=project)
    torch.manual_seed(0)
    width = max(16, int((nbytes / 3 / 4 / 8) ** 0.5))
    model: nn.Module = nn.Sequential(*(nn.Linear(width, width) for _ in range(8)))
    model, optim = accelerator.prepare(model, torch.optim.AdamW(model.parameters()))
    x = torch.randn(32, width)
    stalls: list[float] = []
    for step in range(1, EVERY * CHECKPOINTS + 1):
        accelerator.backward(model(x).square().mean())
        optim.step()
        optim.zero_grad()
        if step % EVERY == 0:
            began = time.perf_counter()
            accelerator.save_state()
            stalls.append(time.perf_counter() - began)
    accelerator.end_training()
    return stalls


if __name__ == "__main__":
    import sys

    main(sys.argv[1:])
