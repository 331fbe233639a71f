"""Replaces a checkpoint as ModelCheckpoint does with `save_top_k=1`, and ends before the new one is written.

lightning_gap.py <directory> <how>

`how`: "dies", with its writer, as a host does; "ends", without a `teardown`.
"""

from __future__ import annotations

import os
import signal
import sys
from pathlib import Path

import torch
from helpers.registry import session_at
from helpers.writers import stop

from ckptlib.adapters.lightning import CkptlibCheckpointIO
from ckptlib.adapters.step_files import ROOT


def main(directory: Path, how: str) -> None:
    io = CkptlibCheckpointIO()
    io.save_checkpoint({"n": 1, "weight": torch.ones(1000)}, directory / "1.ckpt")
    io.teardown()
    writer = session_at(directory / ROOT).writer.pid
    stop(writer)
    io.save_checkpoint({"n": 2, "weight": torch.ones(1000)}, directory / "2.ckpt")
    io.remove_checkpoint(directory / "1.ckpt")
    if how == "dies":
        for pid in (writer, os.getpid()):
            os.kill(pid, signal.SIGKILL)
    os.kill(writer, signal.SIGCONT)


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2])
