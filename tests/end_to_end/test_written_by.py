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


def fresh(kept: Path) -> tuple[nn.Module, torch.optim.Optimizer, dict[str, Any]]:
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
    if kept.name != "written-by-0.1":
        state["frozen"] = [torch.zeros(20_000) for _ in range(2)]
    return model, optim, state


def described(tensor: torch.Tensor) -> list[object]:
    data = tensor.detach().reshape(-1).view(torch.uint8).numpy().tobytes()
    return [str(tensor.dtype).removeprefix("torch."), list(tensor.shape), data.hex()]


STEPS = {"written-by-0.1": [1, 2], "written-by-0.2": [2, 3, 4]}


def test_nothing_that_was_written_is_lost() -> None:
    assert [path.name for path in KEPT] == [*STEPS]


@pytest.mark.parametrize("kept", KEPT, ids=lambda path: path.name)
def test_it_loads(kept: Path) -> None:
    model, optim, state = fresh(kept)
    report = ckptlib.load(kept / "root", state)
    assert report.step == STEPS[kept.name][-1]
    for tensor, sign in zip(state.get("frozen", ()), (1, -1), strict=False):
        assert torch.equal(tensor, sign * torch.arange(20_000.0))
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
    _, _, state = fresh(kept)
    with ckptlib.Checkpointer(tmp_path / "root", state, every=1) as ckpt:
        last = STEPS[kept.name][-1]
        assert ckpt.restore().step == last
        for _ in ckpt.loop(last, last + 1):
            state["epoch"] = 5
    assert [info.step for info in ckptlib.checkpoints(tmp_path / "root")] == [*STEPS[kept.name], last + 1]


def test_the_second_one_has_all_that_version_2_brought() -> None:
    """Packs of a step that was dropped, and packs of what had not changed and was written again."""
    catalog = Catalog(LocalStore(str(DATA / "written-by-0.2" / "root")))
    manifests = [catalog.manifest(save) for save in catalog.saves()]
    uses = [{(used.save.step, used.carried) for used in manifest.uses} for manifest in manifests]
    assert uses[0] == {(1, False)}
    assert uses[1] == set()
    assert uses[2] == {(3, True)}
    for manifest in manifests:
        for name in manifest.parts:
            assert catalog.part(name).uses or manifest is manifests[1]
    assert [path.name[:12] for path in (DATA / "written-by-0.2/root/trash").iterdir()] == [f"{1:012d}"]


@pytest.mark.parametrize("step", [2, 3, 4])
def test_every_increment_loads(step: int) -> None:
    state: dict[str, Any] = {"frozen": [torch.zeros(20_000) for _ in range(2)], "cut": torch.zeros(4, 3)}
    assert ckptlib.load(DATA / "written-by-0.2" / "root", state, step=step, only=["frozen", "cut"]).step == step
    assert torch.equal(state["frozen"][1], -torch.arange(20_000.0))
    assert state["cut"].tolist() == [[0.0] * 3] * 2 + [[1.0] * 3] * 2
