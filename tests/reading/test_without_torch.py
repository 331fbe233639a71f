"""Reading where torch is not installed: a process of its own, in which importing it fails."""

from __future__ import annotations

import subprocess
import sys
import textwrap
from pathlib import Path

import numpy as np
import torch
from onerank import opened
from places import ROOT

BLOCKED = """
import sys, importlib.abc

class Blocker(importlib.abc.MetaPathFinder):
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] == "torch":
            raise ModuleNotFoundError("No module named 'torch'", name="torch")

sys.meta_path.insert(0, Blocker())
"""


def without_torch(code: str, *args: object) -> str:
    """What it printed."""
    command = [sys.executable, "-c", BLOCKED + textwrap.dedent(code), *map(str, args)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_everything_but_what_numpy_has_no_dtype_for(tmp_path: Path) -> None:
    torch.manual_seed(0)
    weight = torch.randn(300, 7)
    state = {
        "model": {"w": weight, "half": torch.ones(3, dtype=torch.bfloat16)},
        "epoch": 3,
        "dtype": torch.bfloat16,
        "mine": (1, "x"),
    }
    with opened(tmp_path / "root") as root:
        root.save(state)
    np.save(tmp_path / "w.npy", weight.numpy())
    without_torch(
        """
        import numpy as np, ckptlib
        url, expected = sys.argv[1], np.load(sys.argv[2])
        with ckptlib.open(url) as step:
            assert "model/half" in step.keys()
            found = step.get_tensor("model/w")
            assert isinstance(found, np.ndarray) and found.tobytes() == expected.tobytes()
            assert step.get_slice("model/w")[10:20, 3].tolist() == expected[10:20, 3].tolist()
            assert step.get_slice("model/half").get_dtype() == "BF16"
            assert step.values["epoch"] == 3
            try:
                step.get_tensor("model/half")
            except ckptlib.UnsupportedState as error:
                assert "model/half: numpy has no bfloat16" in str(error)
            else:
                raise AssertionError
        tree = ckptlib.read(url, only=["model/w", "epoch", "mine"])
        assert tree["model"]["w"].tobytes() == expected.tobytes() and tree["mine"] == (1, "x"), tree
        try:
            ckptlib.open(url, framework="pt")
        except ImportError as error:
            assert "ask for framework='numpy', or export to safetensors" in str(error)
        else:
            raise AssertionError
        assert "torch" not in sys.modules
        """,
        tmp_path / "root",
        tmp_path / "w.npy",
    )
