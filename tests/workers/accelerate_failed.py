"""A save that fails on two ranks, of which one hears of it later than the other:

accelerate_failed.py <directory>
"""

from __future__ import annotations

import sys
import time
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

import ckptlib
from ckptlib.adapters.accelerate import CkptlibAccelerator
from ckptlib.saving.pending import Pending


def main(directory: Path) -> None:
    accelerator = CkptlibAccelerator(cpu=True)
    accelerator.prepare(torch.nn.Linear(2, 1))
    accelerator.save_state(directory / "one")
    accelerator.wait_for_saves()
    packs = directory / "ckptlib" / "packs"
    if accelerator.is_main_process:
        packs.rename(directory / "packs")
        packs.write_text("no directory")
    dist.barrier()
    accelerator.save_state(directory / "two")
    (saving,) = accelerator._under_way
    while not saving.pending.done():
        time.sleep(0.05)
    dist.barrier()
    if accelerator.is_main_process:
        packs.unlink()
        (directory / "packs").rename(packs)
    dist.barrier()
    with pytest.MonkeyPatch.context() as patch:
        if not accelerator.is_main_process:
            patch.setattr(Pending, "done", lambda self: False)
        with pytest.raises(ckptlib.SaveFailed, match="step 1 is not saved"):
            accelerator.save_state(directory / "three")
    accelerator.save_state(directory / "three")
    accelerator.end_training()


if __name__ == "__main__":
    main(Path(sys.argv[1]))
