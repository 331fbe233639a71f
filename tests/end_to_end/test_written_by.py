"""Roots that earlier versions wrote load for ever, bit for bit."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from places import DATA
from torch import nn

import ckptlib
from ckptlib.catalog.catalog import Catalog
from ckptlib.stores.local import LocalStore
from ckptlib.verify.root import verify_root

KEPT = sorted(DATA.glob("written-by-*"))


def fresh() -> tuple[nn.Module, torch.optim.Optimizer, dict[str, Any]]:
    model = nn.Sequential(nn.Embedding(7, 6), nn.Linear(6, 5), nn.Linear(5, 7, bias=False))
    model[1].to(torch.bfloat16)
    optim = torch.optim.AdamW(model.parameters())
    state = {
        "model": model,
        "optim": optim,
        "plain": {"scale": torch.zeros(()), "fp8": torch.zeros(5, dtype=torch.float8_e4m3fn)},
        "mine": ckptlib.PerRank(torch.zeros(2, dtype=torch.int64)),
        "cut": torch.zeros(4, 3),
        "tied": [torch.zeros(3), torch.zeros(3), (0, "", 0.0)],
        "epoch": 0,
    }
    return model, optim, state


def described(tensor: torch.Tensor) -> list[object]:
    data = tensor.detach().reshape(-1).view(torch.uint8).numpy().tobytes()
    return [str(tensor.dtype).removeprefix("torch."), list(tensor.shape), data.hex()]


def test_something_is_kept() -> None:
    assert KEPT


@pytest.mark.parametrize("kept", KEPT, ids=lambda path: path.name)
def test_it_loads(kept: Path) -> None:
    model, optim, state = fresh()
    report = ckptlib.load(kept / "root", state)
    assert report.step == 2
    found = {f"model/{name}": described(p) for name, p in model.named_parameters()}
    for name, param in model.named_parameters():
        found |= {f"optim/model/{name}/{key}": described(value) for key, value in optim.state[param].items()}
    assert found == json.loads((kept / "expected.json").read_text())
    assert optim.param_groups[0]["lr"] == 0.01
    assert (state["plain"]["scale"].item(), state["epoch"]) == (2.5, 4)
    assert state["plain"]["fp8"].to(torch.float32).tolist() == [0, 1, 2, 3, 4]
    assert state["mine"].value.tolist() == [0, 0]
    assert state["cut"].tolist() == [[0.0] * 3] * 2 + [[1.0] * 3] * 2
    assert state["tied"][0].tolist() == state["tied"][1].tolist() == [1, 1, 1]
    assert state["tied"][2] == (1, "two", 3.5)


@pytest.mark.parametrize("kept", KEPT, ids=lambda path: path.name)
def test_it_is_whole_and_goes_on(kept: Path, tmp_path: Path) -> None:
    shutil.copytree(kept / "root", tmp_path / "root")
    assert list(verify_root(Catalog(LocalStore(str(tmp_path / "root"))))) == []
    _, _, state = fresh()
    with ckptlib.Checkpointer(tmp_path / "root", state, every=1) as ckpt:
        assert ckpt.restore().step == 2
        for _ in ckpt.loop(2, 3):
            state["epoch"] = 5
    assert [info.step for info in ckptlib.checkpoints(tmp_path / "root")] == [1, 2, 3]
