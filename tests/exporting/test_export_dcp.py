"""Exports for torch.distributed.checkpoint, read by its own `load`, whole and in other shards."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from launch import fork_one, fork_ranks
from onerank import bits, same
from torch import nn
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save
from torch.distributed.checkpoint.state_dict import get_model_state_dict, get_optimizer_state_dict, set_state_dict

import ckptlib
import ckptlib.dcp
from ckptlib.errors import CorruptData, ObjectExists, StateMismatch, UnsupportedState
from ckptlib.exporting import dcp_files


def trained(seed: int, num_steps: int) -> tuple[nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(30, 50), nn.BatchNorm1d(50), nn.Linear(50, 7))
    optimizer = torch.optim.AdamW([{"params": model[0].parameters()}, {"params": model[1:].parameters(), "lr": 0.5}])
    for _ in range(num_steps):
        model(torch.randn(4, 30)).sum().backward()
        optimizer.step()
    return model, optimizer


def load(path: Path, state: dict[str, Any]) -> dict[str, Any]:
    dcp.load(state, checkpoint_id=path, no_dist=True)
    return state


def test_a_job_of_torchs_own_goes_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dcp_files, "BATCH_BYTES", 1000)
    model, optimizer = trained(0, 3)
    ckptlib.save(tmp_path / "root", {"model": model, "optim": optimizer, "args": {"lr": 0.1, "name": "x"}, "it": 3}, 3)
    report = ckptlib.export(tmp_path / "root", tmp_path / "out", format="dcp")
    assert report.files == (tmp_path / "out",)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["out", "root"]
    assert sorted(path.name for path in (tmp_path / "out").iterdir()) == [".metadata", "__0_0.distcp"]

    other, moments = trained(1, 1)
    state = {
        "model": get_model_state_dict(other),
        "optim": get_optimizer_state_dict(other, moments),
        "args": {"lr": None, "name": None},
        "it": 0,
    }
    load(tmp_path / "out", state)
    set_state_dict(other, moments, model_state_dict=state["model"], optim_state_dict=state["optim"])
    assert (state["args"], state["it"]) == ({"lr": 0.1, "name": "x"}, 3)
    assert {n: bits(t) for n, t in other.state_dict().items()} == {n: bits(t) for n, t in model.state_dict().items()}
    assert same(moments.state_dict(), optimizer.state_dict())

    dcp_to_torch_save(tmp_path / "out", tmp_path / "whole.pt")
    whole = torch.load(tmp_path / "whole.pt", weights_only=False)
    assert same(dict(whole["model"]), dict(model.state_dict()))
    ckptlib.convert(tmp_path / "out", tmp_path / "back")
    again, its = trained(2, 1)
    ckptlib.load(tmp_path / "back", {"model": again, "optim": its}, strict=False)
    assert same(its.state_dict(), optimizer.state_dict())


def test_betas_that_are_tensors(tmp_path: Path) -> None:
    def made(first: float) -> tuple[nn.Module, torch.optim.Optimizer]:
        model = nn.Linear(2, 2)
        betas = torch.tensor(first), torch.tensor(0.99)
        optimizer = torch.optim.Adam(model.parameters(), lr=torch.tensor(first), betas=betas, foreach=False)
        model(torch.ones(1, 2)).sum().backward()
        optimizer.step()
        return model, optimizer

    model, optimizer = made(0.9)
    ckptlib.save(tmp_path / "root", {"model": model, "optim": optimizer}, 3)
    ckptlib.export(tmp_path / "root", tmp_path / "out", format="dcp")
    state = load(tmp_path / "out", {"optim": get_optimizer_state_dict(*made(0.5))})
    assert same(state["optim"], get_optimizer_state_dict(model, optimizer))


def test_tensors_of_all_kinds(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dcp_files, "BATCH_BYTES", 700)
    shared = torch.randn(40, 3)
    state: dict[str, Any] = {
        "half": torch.randn(500).bfloat16(),
        "fp8": torch.randn(5, 50).to(torch.float8_e4m3fn),
        "complex": torch.randn(9, dtype=torch.complex128),
        "wide": torch.randn(2, 3, 400),
        "flags": torch.rand(77) < 0.5,
        "empty": torch.zeros(0, 4),
        "scalar": torch.tensor(3.5, dtype=torch.float64),
        "list": [torch.ones(2), {"deep": torch.zeros(3, dtype=torch.int8)}],
        "shared": shared,
        "again": shared,
    }
    ckptlib.save(tmp_path / "root", state, 1)
    report = ckptlib.export(tmp_path / "root", tmp_path / "out", format="dcp")
    assert len(report.ties) == 1
    empty = {name: torch.zeros_like(value) for name, value in state.items() if isinstance(value, torch.Tensor)}
    found = load(tmp_path / "out", {**empty, "list": [torch.zeros(2), {"deep": torch.ones(3, dtype=torch.int8)}]})
    assert same(found, state)


def test_names_and_numbers_of_ones_choice(tmp_path: Path) -> None:
    model, optimizer = trained(0, 1)
    ckptlib.save(tmp_path / "root", {"model": model, "optim": optimizer}, 1)
    root, out = tmp_path / "root", tmp_path / "out"
    names = {"strip": "model/", "map": {"0": "first"}}
    ckptlib.export(root, out, format="dcp", only="model", dtype="bf16", **names)  # type: ignore[arg-type]
    found = load(out, {"first.weight": torch.zeros(50, 30, dtype=torch.bfloat16)})
    assert torch.equal(found["first.weight"], model.state_dict()["0.weight"].bfloat16())
    with pytest.raises(ObjectExists, match="out is there already"):
        ckptlib.export(root, out, format="dcp")
    with pytest.raises(StateMismatch, match="strip nobody"):
        ckptlib.export(root, tmp_path / "b", format="dcp", strip="nobody")
    with pytest.raises(StateMismatch, match="nobody"):
        ckptlib.export(root, tmp_path / "b", format="dcp", only="nobody")
    with pytest.raises(UnsupportedState, match="would be called"):
        ckptlib.export(root, tmp_path / "b", format="dcp", only="model", map={"model/0.bias": "model/2.bias"})
    assert not (tmp_path / "b").exists()


def test_names_that_torch_cannot_tell_apart(tmp_path: Path) -> None:
    ckptlib.save(tmp_path / "root", {"model": {"a.b": torch.ones(1), "a": {"b": torch.zeros(1)}}}, 1)
    with pytest.raises(UnsupportedState, match=r"step 1: duplicated flatten key model\.a\.b; choose with only="):
        ckptlib.export(tmp_path / "root", tmp_path / "out", format="dcp")
    assert not (tmp_path / "out").exists()
    ckptlib.export(tmp_path / "root", tmp_path / "out", format="dcp", only="model/a.b")
    assert load(tmp_path / "out", {"model": {"a.b": torch.zeros(1)}})["model"]["a.b"] == 1


def test_damage_leaves_nothing(tmp_path: Path) -> None:
    ckptlib.save(tmp_path / "root", {"x": torch.randn(100_000)}, 1)
    (pack,) = (tmp_path / "root" / "packs").rglob("*.safetensors")
    data = bytearray(pack.read_bytes())
    data[len(data) // 2] ^= 1
    pack.chmod(0o644)
    pack.write_bytes(data)
    with pytest.raises(CorruptData, match="x"):
        ckptlib.export(tmp_path / "root", tmp_path / "out", format="dcp")
    assert [path.name for path in tmp_path.iterdir()] == ["root"]


def run(code: str, directory: Path) -> tuple[int | None, str]:
    """How a program ended that exports, and what it said."""
    program, log = directory / "program.py", directory / "log"
    program.write_text(code)
    status = fork_one(program, directory / "root", directory / "out", log=log, timeout_s=150)
    return status, log.read_text()


def test_a_full_disk_leaves_nothing(tmp_path: Path) -> None:
    ckptlib.save(tmp_path / "root", {"x": torch.randn(1 << 20)}, 1)
    code = (
        "import resource, sys, ckptlib\n"
        "resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 20, 1 << 20))\n"
        "ckptlib.export(sys.argv[1], sys.argv[2], format='dcp')\n"
    )
    status, said = run(code, tmp_path)
    assert status == 1
    assert "StoreError" in said
    assert "File too large" in said
    assert sorted(path.name for path in tmp_path.iterdir()) == ["log", "program.py", "root"]


def test_two_ranks_save_and_two_others_load(tmp_path: Path) -> None:
    assert fork_ranks(str(Path(__file__).parent / "dcp_ranks.py"), 2, tmp_path, timeout_s=120).count("alike") == 2


def test_memory_is_bounded(tmp_path: Path) -> None:
    """512 MiB in one tensor, and 128 of 1 MiB, in a process of its own that tells its peak."""
    state = {f"small{i}": torch.randn(1 << 18) for i in range(128)}
    state["large"] = torch.arange(128 << 20, dtype=torch.float32)
    ckptlib.save(tmp_path / "root", state, 1)
    code = (
        "import re, sys, torch, torch.distributed.checkpoint, ckptlib\n"
        "peak = lambda: int(re.search(r'VmHWM:\\s+(\\d+)', open('/proc/self/status').read())[1])\n"
        "before = peak()\n"
        "ckptlib.export(sys.argv[1], sys.argv[2], format='dcp')\n"
        "print(peak() - before)\n"
    )
    status, said = run(code, tmp_path)
    print(said)
    assert status == 0
    assert int(said) < 300_000


class Held:
    """An object of the job's own."""

    def __init__(self, state: dict[str, Any]) -> None:
        self.state = state

    def state_dict(self) -> dict[str, Any]:
        return self.state

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.state = state


def held(fill: float) -> dict[str, Any]:
    pair = (torch.full((3,), fill), [torch.full((2,), 2 * fill, dtype=torch.bfloat16)])
    return {"pair": pair, "n": fill, "steps": {7: torch.full((2,), 3 * fill)}}


@pytest.mark.parametrize("by", ["export", "StorageReader"])
def test_tuples_of_tensors_and_keys_that_are_no_text(tmp_path: Path, by: str) -> None:
    """Torch takes a tuple for one leaf, with all that is in it, and tells keys as text."""
    ckptlib.save(tmp_path / "root", {"h": Held(held(1.0)), "x": torch.ones(1)}, 1)
    state = {"h": held(0.0), "x": torch.zeros(1)}
    if by == "export":
        ckptlib.export(tmp_path / "root", tmp_path / "out", format="dcp")
        load(tmp_path / "out", state)
    else:
        dcp.load(state, storage_reader=ckptlib.dcp.StorageReader(tmp_path / "root"), no_dist=True)
    want = {"h": held(1.0), "x": torch.ones(1)}
    assert repr(state) == repr(want)
