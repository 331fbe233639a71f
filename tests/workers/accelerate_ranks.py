"""Ranks that do not see the same directory, as where a file system has not told all hosts of it yet:

accelerate_ranks.py <directory>
"""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch

from ckptlib.adapters.accelerate import CkptlibAccelerator


def main(directory: Path) -> None:
    accelerator = CkptlibAccelerator(cpu=True)
    model = accelerator.prepare(torch.nn.Linear(2, 1))
    accelerator.save_state(directory / "one")
    accelerator.wait_for_saves()
    with pytest.raises(ValueError, match=r"none is no directory|one is no directory"):
        accelerator.load_state(directory / ("none" if accelerator.is_main_process else "one"))
    weight = model.module.weight.detach().clone()
    torch.nn.init.zeros_(model.module.weight)
    accelerator.load_state(directory / ("one" if accelerator.is_main_process else "none"))
    assert torch.equal(model.module.weight, weight)
    accelerator.end_training()


if __name__ == "__main__":
    main(Path(sys.argv[1]))
