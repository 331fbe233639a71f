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
from ckptlib.checkpoint import LoadOrder, load_step
from ckptlib.imports.beginning import opened
from ckptlib.imports.formats import format_of
from ckptlib.ranks.group import SoloGroup


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


def mappings(ending: str) -> list[range]:
    """Where in memory files are, by the end of their names."""
    lines = [line.split() for line in Path("/proc/self/maps").read_text().splitlines() if line.endswith(ending)]
    return [range(int(first, 16), int(last, 16)) for first, last in (line[0].split("-") for line in lines)]


def test_tensors_stay_in_the_files_wherever_they_lie_there(tmp_path: Path) -> None:
    """DCP puts them behind one another, at any byte."""
    kinds = [torch.float32, torch.bfloat16, torch.float64, torch.complex64, torch.int64, torch.float8_e4m3fn]
    made = {f"{i}": torch.randn(7 + i, 5).to(kind) for i, kind in enumerate(kinds * 3)}
    made |= {"scalar": torch.tensor(3.0), "turned": torch.randn(4, 6).t(), "conj": torch.randn(5, 3).cfloat().conj()}
    dcp_save({"t": made}, checkpoint_id=tmp_path / "dcp")
    foreign = read(tmp_path / "dcp")
    addresses = {leaf.name: leaf.pieces[0][1].data_ptr() for leaf in foreign.leaves.values()}
    files = mappings(".distcp")
    assert {name for name, at in addresses.items() if not any(at in file for file in files)} <= {"t/turned", "t/conj"}
    assert any(at % made[name[2:]].itemsize for name, at in addresses.items())

    ckptlib.convert(tmp_path / "dcp", tmp_path / "root")
    all_of = {name: torch.zeros_like(tensor) for name, tensor in made.items()}
    ckptlib.load(tmp_path / "root", {"t": all_of})
    for name, tensor in made.items():
        assert same(all_of[name].resolve_conj(), tensor.resolve_conj()), name

    columns = {
        name: ckptlib.Sharded(torch.zeros_like(t[2:5, 1:3]), (2, 1), t.shape) for name, t in made.items() if t.dim()
    }
    state = {"t": columns}
    step = opened(SoloGroup(), format_of(tmp_path / "dcp"), tmp_path / "dcp", state, None, None)
    load_step(SoloGroup(), step, LoadOrder(state, strict=False, reader=lambda _, rank: step.reader(rank)))
    for name, box in columns.items():
        assert same(box.tensor.resolve_conj(), made[name][2:5, 1:3].resolve_conj()), name


def test_a_bare_model(tmp_path: Path) -> None:
    model = network()
    dcp_save(model.state_dict(), checkpoint_id=tmp_path / "dcp")
    ckptlib.convert(tmp_path / "dcp", tmp_path / "root")
    other = network()
    ckptlib.load(tmp_path / "root", {"model": other})
    assert_same_state(model.state_dict(), other.state_dict())
