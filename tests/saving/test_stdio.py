"""A job that was started without standard streams, as by `<&- >&- 2>&-`, saves like any other."""

from __future__ import annotations

from pathlib import Path

import pytest
from launch import fork_one

import ckptlib

TRAIN = """if True:
    import os, sys
    for fd in map(int, sys.argv[2].split()):
        os.close(fd)
    import torch, ckptlib
    weights = torch.zeros(3)
    with ckptlib.Checkpointer(sys.argv[1], {"weights": weights}, every=10, arena=os.path.dirname(sys.argv[1])) as ckpt:
        for step in ckpt.loop(ckpt.restore().step, 2):
            weights += 1
    for fd in map(int, sys.argv[2].split()):
        assert os.path.samestat(os.fstat(fd), os.stat(os.devnull))
"""


@pytest.mark.parametrize("closed", ["0 1 2", "1"])
def test_without_standard_streams(tmp_path: Path, closed: str) -> None:
    root = tmp_path / "root"
    script, log = tmp_path / "train.py", tmp_path / "log"
    script.write_text(TRAIN)
    assert fork_one(script, root, closed, log=log, timeout_s=120) == 0, log.read_text()
    assert ckptlib.read(root)["weights"].tolist() == [2, 2, 2]
