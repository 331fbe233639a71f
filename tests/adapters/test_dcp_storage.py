"""`ckptlib.dcp.StorageReader` and `StorageWriter` under DCP's own save and load."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import dcp_storage
import pytest
import torch
import torch.distributed.checkpoint as torch_dcp
from helpers.registry import close_sessions
from helpers.verdicts import assert_passed, fork_cases
from launch import forked
from places import WORKERS
from torch import nn
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner, DefaultSavePlanner
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.checkpoint.state_dict_loader import _load_state_dict_from_keys

import ckptlib
from ckptlib import dcp

State = dict[str, Any]


@pytest.fixture(autouse=True)
def _quiet() -> Iterator[None]:
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="torch.distributed is")
        yield
    close_sessions()


def trained(seed: int) -> tuple[nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(4, 6), nn.BatchNorm1d(6), nn.Linear(6, 2))
    optim = torch.optim.AdamW(model.parameters(), lr=0.1 * seed)
    model(torch.randn(8, 4)).square().sum().backward()
    optim.step()
    return model, optim


def named(seed: int) -> State:
    model, optim = get_state_dict(*trained(seed))
    rest: State = {"losses": [0.5] * seed, "deep": {"a/b": [torch.full((2, 3), float(seed)), (seed, "x")]}, "n": seed}
    odd = {"empty": torch.empty(0, 3), "scalar": torch.tensor(seed), "half": torch.full((3,), seed).bfloat16()}
    return {"model": model, "optim": optim, **rest, **odd}


def bits(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        return value.dtype, tuple(value.shape), value.detach().reshape(-1).view(torch.uint8).tolist()
    if isinstance(value, dict):
        return {key: bits(entry) for key, entry in value.items()}
    return [bits(entry) for entry in value] if isinstance(value, list | tuple) else value


@pytest.mark.parametrize("reads", ["DCP", "ckptlib"])
@pytest.mark.parametrize("writes", ["DCP", "ckptlib"])
def test_whichever_writes_and_reads(tmp_path: Path, writes: str, reads: str) -> None:
    """DCP's functions with ckptlib's storage, and ckptlib's functions: the same state comes back."""
    where = tmp_path / "step-1"
    if writes == "DCP":
        torch_dcp.save(named(1), storage_writer=dcp.StorageWriter(where))
    else:
        dcp.save(named(1), checkpoint_id=where)
    found = named(2)
    assert bits(found) != bits(named(1))
    if reads == "DCP":
        torch_dcp.load(found, storage_reader=dcp.StorageReader(where))
    else:
        dcp.load(found, checkpoint_id=where)
    assert bits(found) == bits(named(1))


def test_optimizers_saved_as_they_are_are_read_by_name(tmp_path: Path) -> None:
    """Also from what a Checkpointer has saved."""
    model, optim = trained(1)
    ckptlib.save(tmp_path / "run", {"model": model, "optim": optim}, 5)
    other = trained(2)
    model_state, optim_state = get_state_dict(*other)
    found = {"model": model_state, "optim": optim_state}
    torch_dcp.load(found, storage_reader=dcp.StorageReader(tmp_path / "run" / "5"))
    set_state_dict(*other, model_state_dict=found["model"], optim_state_dict=found["optim"])
    assert bits(other[0].state_dict()) == bits(model.state_dict())
    assert bits(other[1].state_dict()) == bits(optim.state_dict())


def test_keys_without_a_state_dict(tmp_path: Path) -> None:
    dcp.save(named(1), checkpoint_id=tmp_path / "step-1")
    reader = dcp.StorageReader(tmp_path / "step-1")
    found = _load_state_dict_from_keys({"model", "losses"}, storage_reader=reader)
    assert bits(found) == bits({"model": {**named(1)["model"]}, "losses": [0.5]})
    assert bits(_load_state_dict_from_keys(None, storage_reader=reader)) == bits(named(1))


def test_only_what_is_asked_for_is_read(tmp_path: Path) -> None:
    """Of a step whose other tensors are gone, too; a part of a tensor needs its chunks alone."""
    dcp.save({"a": torch.arange(10.0), "b": torch.randn(1_000_000)}, checkpoint_id=tmp_path / "step-1", codec="raw")
    for pack in (tmp_path / "step" / "packs").rglob("*.safetensors"):
        data = bytearray(pack.read_bytes())
        data[len(data) // 2] ^= 1  # in the middle of b
        pack.chmod(0o600)
        pack.write_bytes(data)
    found = {"a": torch.zeros(10)}
    torch_dcp.load(found, storage_reader=dcp.StorageReader(tmp_path / "step-1"))
    assert found["a"].equal(torch.arange(10.0))
    damaged = {"b": torch.zeros(1_000_000)}
    with pytest.raises(CheckpointException, match=r"CorruptData.*b\["):
        torch_dcp.load(damaged, storage_reader=dcp.StorageReader(tmp_path / "step-1"))


def test_nothing_that_was_stored_is_unpickled(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Planners call torch.load, of bytes that the reader made in this process."""
    dcp.save({"value": {"a": [1, 2]}, "w": torch.ones(3)}, checkpoint_id=tmp_path / "step-1")
    made: list[bytes] = []
    save, load = torch.save, torch.load

    def noted(value: object, file: Any) -> None:
        save(value, file)
        made.append(file.getvalue())

    def checked(file: Any, **options: Any) -> Any:
        assert file.getvalue() in made
        return load(file, **options)

    monkeypatch.setattr(torch, "save", noted)
    monkeypatch.setattr(torch, "load", checked)
    found: State = {"value": {"a": [0]}, "w": torch.zeros(3)}
    torch_dcp.load(found, storage_reader=dcp.StorageReader(tmp_path / "step-1"))
    assert found["value"] == {"a": [1, 2]}
    for path in tmp_path.rglob("*"):
        assert not path.is_file() or b"pickle" not in path.read_bytes()


def test_states_that_are_empty(tmp_path: Path) -> None:
    state: State = {"empty": {}}
    torch_dcp.save(state, storage_writer=dcp.StorageWriter(tmp_path / "step-1"))
    torch_dcp.load(state, storage_reader=dcp.StorageReader(tmp_path / "step-1"))
    assert state == {"empty": {}}


@pytest.mark.parametrize("saves", ["DCP", "ckptlib"])
def test_a_key_without_a_character(tmp_path: Path, saves: str) -> None:
    def state(of: float) -> State:
        return {"": torch.full((3,), of), "a": {"": torch.full((2,), of)}, "b": {"": {"": of}}}

    if saves == "DCP":
        torch_dcp.save(state(1.5), storage_writer=dcp.StorageWriter(tmp_path / "step-1"))
    else:
        dcp.save(state(1.5), checkpoint_id=tmp_path / "step-1")
    found = state(0.0)
    torch_dcp.load(found, storage_reader=dcp.StorageReader(tmp_path / "step-1"))
    assert bits(found) == bits(state(1.5))


def test_what_does_not_fit(tmp_path: Path) -> None:
    saved = {"w": torch.full((2, 3), 1.5), "n": 3, "c": torch.ones(2, dtype=torch.complex64)}
    dcp.save(saved, checkpoint_id=tmp_path / "step-1")
    with pytest.raises(CheckpointException, match="Missing key"):
        torch_dcp.load({"v": torch.zeros(2)}, storage_reader=dcp.StorageReader(tmp_path / "step-1"))
    with pytest.raises(CheckpointException, match="Size mismatch"):
        torch_dcp.load({"w": torch.zeros(3)}, storage_reader=dcp.StorageReader(tmp_path / "step-1"))
    half: State = {"w": torch.zeros(2, 3, dtype=torch.float16)}
    with pytest.raises(CheckpointException, match="target is float16, checkpoint has float32"):
        torch_dcp.load(half, storage_reader=dcp.StorageReader(tmp_path / "step-1"))
    assert half["w"].eq(0).all()
    torch_dcp.load(half, storage_reader=dcp.StorageReader(tmp_path / "step-1", cast=True))
    assert half["w"].eq(1.5).all()
    with pytest.raises(CheckpointException, match=r"target is float32, checkpoint has complex64; .*cast=True does not"):
        torch_dcp.load({"c": torch.zeros(2)}, storage_reader=dcp.StorageReader(tmp_path / "step-1", cast=True))
    with pytest.raises(CheckpointException, match="step 2"):
        torch_dcp.load({"w": torch.zeros(2, 3)}, storage_reader=dcp.StorageReader(tmp_path / "step-2"))
    partial = DefaultLoadPlanner(allow_partial_load=True)
    some = {"w": torch.zeros(2, 3), "v": torch.full((1,), 9.0)}
    torch_dcp.load(some, storage_reader=dcp.StorageReader(tmp_path / "step-1"), planner=partial)
    assert some["w"].eq(1.5).all()
    assert some["v"] == 9


class Halves(DefaultSavePlanner):
    """A planner as users write them: it leaves a part out, and casts."""

    def create_local_plan(self) -> Any:
        self.state_dict = {name: value for name, value in self.state_dict.items() if not name.startswith("optim")}
        return super().create_local_plan()

    def transform_object(self, write_item: Any, object: Any) -> Any:
        found = super().transform_object(write_item, object)
        return found.bfloat16() if isinstance(found, torch.Tensor) else found


def test_what_a_planner_makes_is_saved(tmp_path: Path) -> None:
    torch_dcp.save(named(1), storage_writer=dcp.StorageWriter(tmp_path / "step-1"), planner=Halves())
    with ckptlib.open(tmp_path / "step", 1) as step:
        names = step.keys()
        assert not [name for name in names if name.startswith("optim")]
        assert step.get_tensor("model/0.weight").equal(named(1)["model"]["0.weight"].bfloat16())
        assert step.values["n"] == 1


def test_planners_that_are_refused(tmp_path: Path) -> None:
    writer = dcp.StorageWriter(tmp_path / "step-1")
    caching = DefaultSavePlanner()
    if "enable_plan_caching" in DefaultSavePlanner.__init__.__code__.co_varnames:
        caching = DefaultSavePlanner(enable_plan_caching=True)
        torch_dcp.save({"w": torch.ones(2)}, storage_writer=dcp.StorageWriter(tmp_path / "step-0"), planner=caching)
        with pytest.raises(CheckpointException, match="enable_plan_caching"):
            torch_dcp.save({"w": torch.ones(2)}, storage_writer=writer, planner=caching)
    with pytest.raises(CheckpointException, match=r"UnsupportedState.*thing"):
        torch_dcp.save({"thing": object()}, storage_writer=writer)
    with pytest.raises(CheckpointException, match="checkpoint_id is needed"):
        torch_dcp.save({"w": torch.ones(2)}, storage_writer=dcp.StorageWriter())


@pytest.fixture(scope="module")
def verdicts(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """All cases in one launch of four ranks; a case that hangs is killed, and those before it have their verdicts."""
    directory = tmp_path_factory.mktemp("four")
    fork_cases("dcp_storage.py", 4, directory, 150)
    return directory


@pytest.mark.timeout(200)
@pytest.mark.parametrize("case", [case.__name__ for case in dcp_storage.CASES])
def test_on_four_ranks(verdicts: Path, case: str) -> None:
    assert_passed(verdicts, case, 4)


def test_a_rank_that_dies_leaves_nothing_listed(tmp_path: Path) -> None:
    codes, output = forked(WORKERS / "dcp_storage.py", 4, tmp_path, 100, "dies", timeout_s=100)
    assert codes[1] == -9, output
    assert not [*ckptlib.checkpoints(tmp_path / "dies" / "step")]
