"""The two scripts of the table in docs/reading.md do the same, resume bit by bit, and have the lines it says."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from launch import forked
from places import ROOT
from safetensors.torch import load_file

SCRIPTS = {name: ROOT / "examples" / f"nanogpt_{name}.py" for name in ("before", "after")}


def run(name: str, *arguments: object) -> str:
    """The last line that the script prints. Forked, since each start would import torch anew."""
    codes, output = forked(SCRIPTS[name], 1, *arguments, timeout_s=120)
    assert codes == [0], output
    return output.splitlines()[-1] if output else ""


def test_they_do_the_same(tmp_path: Path) -> None:
    losses = {}
    for name in SCRIPTS:
        for total in (20, 30):  # the second one goes on
            run(name, tmp_path / name, "train", total)
        run(name, tmp_path / f"{name}-whole", "train", 30)
        losses[name] = run(name, tmp_path / name, "eval")
        assert losses[name] == run(name, tmp_path / f"{name}-whole", "eval")
    assert losses["before"] == losses["after"]
    before = load_file(tmp_path / "before" / "model.safetensors")
    after = load_file(tmp_path / "after" / "30" / "model.safetensors")
    assert len(before) == len(after)
    for name, tensor in before.items():
        assert (after[name] if name in after else after[{"lm_head.weight": "wte.weight"}[name]]).equal(tensor)


@pytest.mark.parametrize("name", SCRIPTS)
def test_the_table_counts_them(name: str) -> None:
    lines = SCRIPTS[name].read_text().splitlines()
    marked = sum(line.endswith("# ckpt") for line in lines)
    (row,) = re.findall(rf"^\| .*nanogpt_{name}\.py.*$", (ROOT / "docs" / "reading.md").read_text(), re.M)
    assert int(re.findall(r"\| (\d+) ", row)[0]) == marked
