"""Directories of torch.distributed.checkpoint, written by it: by one process, and by two ranks that hold shards."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from launch import fork_ranks
from sources import assert_same_state, read, same, whole
from torch import nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_state_dict
from torch.distributed.checkpoint.state_dict_saver import save as dcp_save

import ckptlib


def network() -> nn.Module:
    return nn.Sequential(nn.Linear(9, 7), nn.ReLU(), nn.Linear(7, 5))


@pytest.fixture(scope="module")
def sharded(tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("dcp")
    fork_ranks("dcp_sources.py", 2, out, timeout_s=200)
    return out


def loaded(source: Path, root: Path, optim: str) -> tuple[nn.Module, torch.optim.Optimizer, dict[str, object]]:
    ckptlib.convert(source, root, step=7)
    model = network()
    optimizer = torch.optim.AdamW(model.parameters())
    state: dict[str, object] = {"model": model, optim: optimizer}
    ckptlib.load(root, state, strict=False)
    return model, optimizer, state


@pytest.mark.parametrize(("name", "optim"), [("nested", "optim"), ("flat", "optimizer")])
def test_two_ranks(sharded: Path, tmp_path: Path, name: str, optim: str) -> None:
    """FSDP2: every tensor in a shard of each rank. `flat`: as torchtitan saves."""
    truth = torch.load(sharded / "truth.pt", weights_only=True)
    assert {len(leaf.pieces) for leaf in read(sharded / name).leaves.values()} == {1, 2}
    model, optimizer, _ = loaded(sharded / name, tmp_path / "root", optim)
    assert_same_state(truth["model"], model.state_dict())
    _, found = get_state_dict(model, optimizer, options=StateDictOptions(full_state_dict=True))
    assert_same_state(truth["optim"]["state"], found["state"])
    assert [info.step for info in ckptlib.checkpoints(tmp_path / "root")] == [7]


def test_one_process(tmp_path: Path) -> None:
    model = network()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    model(torch.randn(2, 9)).sum().backward()
    optimizer.step()
    state, optim = get_state_dict(model, optimizer)
    plain = {"step": 3, "config": {"lr": 0.1, "betas": (1, 2)}, "list": [torch.ones(2), 5]}
    dcp_save({"model": state, "optim": optim, **plain}, checkpoint_id=tmp_path / "dcp")
    foreign = read(tmp_path / "dcp")
    assert same(whole(foreign)["list/0"], torch.ones(2))
    assert foreign.plain["list/1"] == 5
    ckptlib.convert(tmp_path / "dcp", tmp_path / "root")
    other = network()
    fresh = torch.optim.SGD(other.parameters(), lr=0.5, momentum=0.9)
    targets = {"model": other, "optim": fresh, "step": 0}
    ckptlib.load(tmp_path / "root", targets, strict=False)
    assert targets["step"] == 3
    assert_same_state(model.state_dict(), other.state_dict())
    assert_same_state(optimizer.state_dict()["state"], fresh.state_dict()["state"])
    assert fresh.param_groups[0]["lr"] == 0.1


@pytest.mark.parametrize("kind", [torch.optim.Adam, torch.optim.SGD])
@pytest.mark.parametrize("stepped", [True, False])
def test_an_optimizers_own_state(kind: type[torch.optim.Optimizer], stepped: bool, tmp_path: Path) -> None:
    """Its parameters have numbers, as of `optimizer.state_dict()`. SGD without momentum has options only."""

    def made(lr: float) -> tuple[nn.Module, torch.optim.Optimizer]:
        model = network()
        first, *others = model.parameters()
        groups = [{"params": [first]}, {"params": others, "weight_decay": lr / 2}]
        return model, kind(groups, lr=lr)  # type: ignore[call-arg]

    model, optimizer = made(0.25)
    if stepped:
        model(torch.randn(2, 9)).sum().backward()
        optimizer.step()
    dcp_save({"model": model.state_dict(), "opt": optimizer.state_dict()}, checkpoint_id=tmp_path / "dcp")
    ckptlib.convert(tmp_path / "dcp", tmp_path / "root")
    other, fresh = made(0.5)
    ckptlib.load(tmp_path / "root", {"model": other}, strict=False)
    ckptlib.load(tmp_path / "root", {"opt": fresh}, strict=False)
    assert_same_state(model.state_dict(), other.state_dict())
    assert_same_state(optimizer.state_dict()["state"], fresh.state_dict()["state"])
    assert optimizer.state_dict()["param_groups"] == fresh.state_dict()["param_groups"]


def test_a_bare_model(tmp_path: Path) -> None:
    model = network()
    dcp_save(model.state_dict(), checkpoint_id=tmp_path / "dcp")
    ckptlib.convert(tmp_path / "dcp", tmp_path / "root")
    other = network()
    ckptlib.load(tmp_path / "root", {"model": other})
    assert_same_state(model.state_dict(), other.state_dict())
