"""Ranks that save and load through DCP's own functions, with `ckptlib.dcp`'s storage:

    torchrun dcp_storage.py <directory> <seconds that it may take> [<case>...]

Each rank writes its verdict of each case: see `rank_cases`.
"""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import wraps
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as torch_dcp
from helpers.registry import close_sessions
from rank_cases import run_cases
from torch.distributed._shard.metadata import ShardMetadata
from torch.distributed._shard.sharded_tensor import Shard as LocalShard
from torch.distributed._shard.sharded_tensor import ShardedTensor, ShardedTensorMetadata, TensorProperties
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.default_planner import (
    DefaultLoadPlanner,
    DefaultSavePlanner,
    create_default_global_save_plan,
)
from torch.distributed.checkpoint.planner import SavePlan
from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

import ckptlib
from ckptlib import dcp

WHOLE = torch.arange(8400.0).reshape(120, 70)
NBYTES = 4 * WHOLE.nbytes


def state(shift: float = 0.0) -> dict[str, Any]:
    """On four ranks: sharded, sharded and replicated (HSDP), replicated, plain, and values."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicas", "shards"))
    both = init_device_mesh("cpu", (4,))
    return {
        "model": {
            "sharded": distribute_tensor(WHOLE + shift, both, [Shard(0)]),
            "hsdp": distribute_tensor(WHOLE + 100 + shift, mesh, [Replicate(), Shard(1)]),
            "replicated": distribute_tensor(WHOLE + 200 + shift, mesh, [Replicate(), Replicate()]),
            "plain": WHOLE + 300 + shift,
        },
        "losses": [0.5] if not shift else [],
        "step": 7 if not shift else 0,
    }


def full(tensors: dict[str, Any]) -> dict[str, list[Any]]:
    return {name: (t.full_tensor() if isinstance(t, DTensor) else t).tolist() for name, t in tensors["model"].items()}


def saves_and_loads(directory: Path) -> None:
    want = full(state())
    torch_dcp.save(state(), storage_writer=dcp.StorageWriter(directory / "step-1"))
    found = state(1)
    torch_dcp.load(found, storage_reader=dcp.StorageReader(directory / "step-1"))
    assert full(found) == want
    assert (found["losses"], found["step"]) == ([0.5], 7)
    found = state(1)
    dcp.load(found, checkpoint_id=directory / "step-1")
    assert full(found) == want
    future = torch_dcp.async_save(state(2), storage_writer=dcp.StorageWriter(directory / "step-2"))
    future.result()
    mesh = init_device_mesh("cpu", (4,))
    other = {"model": {"sharded": distribute_tensor(torch.zeros(120, 70), mesh, [Shard(1)])}}
    torch_dcp.load(other, storage_reader=dcp.StorageReader(directory / "step-2"))
    assert other["model"]["sharded"].full_tensor().equal(WHOLE + 2)
    packs = sum(path.stat().st_size for path in (directory / "step" / "packs").rglob(f"*{1:012d}*/*"))
    assert dist.get_rank() or NBYTES < packs < 1.7 * NBYTES, "replicas are written once"


class Planner(DefaultSavePlanner):
    """Does one thing wrong, on rank 1 or at the coordinator."""

    wrong = ""

    def create_local_plan(self) -> SavePlan:
        plan = super().create_local_plan()
        if self.wrong == "drops a shard" and dist.get_rank() == 1:
            return replace(plan, items=[i for i in plan.items if i.index.fqn != "model.sharded"])
        if self.wrong == "doubles an item" and dist.get_rank() == 1:
            return replace(plan, items=[*plan.items, plan.items[0]])
        return plan

    def create_global_plan(self, all_plans: list[SavePlan]) -> tuple[list[SavePlan], Any]:
        if self.wrong == "keeps replicas":
            return all_plans, super().create_global_plan(all_plans)[1]
        # what DCP's own planner does but for its check, so that ours is what finds it
        plans, metadata = create_default_global_save_plan(self._dedup_save_plans(all_plans))
        if self.wrong == "drops a tensor":
            plans = [replace(p, items=[i for i in p.items if i.index.fqn != "model.hsdp"]) for p in plans]
        if self.wrong == "moves an item":
            first = next(i for i in plans[0].items if i.index.fqn == "model.sharded")
            plans[0].items.remove(first)
            plans[1].items.append(first)
        return plans, metadata

    def finish_plan(self, new_plan: SavePlan) -> SavePlan:
        plan = super().finish_plan(new_plan)
        if self.wrong == "finishes another" and dist.get_rank() == 1:
            return replace(plan, items=plan.items[:-1])
        return plan

    def resolve_data(self, write_item: Any) -> Any:
        if self.wrong == "fails" and dist.get_rank() == 1:
            raise OSError("no such data")
        if self.wrong == "dies" and dist.get_rank() == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        if self.wrong == "replicas differ" and dist.get_rank() == 3 and write_item.index.fqn == "model.hsdp":
            return super().resolve_data(write_item) + 1
        return super().resolve_data(write_item)


SAYS = {
    "drops a shard": "model/sharded",
    "doubles an item": "twice in the plan of one rank",
    "drops a tensor": "create_global_plan drops it",
    "moves an item": "that does not hold it",
    "finishes another": "finish_plan changes the items",
    "replicas differ": "model/hsdp",
    "fails": "no such data",
}


def wrong_planners(directory: Path) -> None:
    """Each is refused on all ranks, lists nothing, and does not disturb the next save."""
    good: list[int] = []
    for number, (wrong, says) in enumerate(SAYS.items()):
        Planner.wrong = wrong
        writer = dcp.StorageWriter(directory / f"step-{2 * number}")
        with pytest.raises(CheckpointException, match=says):
            torch_dcp.save(state(), storage_writer=writer, planner=Planner())
        Planner.wrong = ""
        good.append(2 * number + 1)
        writer = dcp.StorageWriter(directory / f"step-{good[-1]}")
        torch_dcp.save(state(), storage_writer=writer, planner=Planner())
        assert [info.step for info in ckptlib.checkpoints(directory / "step")] == good, wrong
    Planner.wrong = "keeps replicas"  # nothing is wrong with that here: they are proved alike, and written once
    torch_dcp.save(state(), storage_writer=dcp.StorageWriter(directory / "step-100"), planner=Planner())
    found = state(1)
    torch_dcp.load(found, storage_reader=dcp.StorageReader(directory / "step-100"))
    assert full(found) == full(state())


def dies(directory: Path) -> None:
    Planner.wrong = "dies"
    torch_dcp.save(state(), storage_writer=dcp.StorageWriter(directory / "step-1"), planner=Planner())


def other_steps(directory: Path) -> None:
    """A rank that would read another save than the others stops all of them."""
    for step in (1, 2):
        torch_dcp.save(state(), storage_writer=dcp.StorageWriter(directory / f"step-{step}"))
    reader = dcp.StorageReader(directory / f"step-{1 + (dist.get_rank() == 1)}")
    with pytest.raises(CheckpointException, match="ranks read different saves"):
        torch_dcp.load(state(1), storage_reader=reader, planner=DefaultLoadPlanner())


def alone(directory: Path) -> None:
    """One rank of the job saves by itself."""
    groups = [dist.new_group([rank]) for rank in range(dist.get_world_size())]
    mine, tensors = groups[dist.get_rank()], {"w": torch.full((3,), float(dist.get_rank()))}
    place = directory / str(dist.get_rank()) / "step-1"
    with pytest.raises(CheckpointException, match="give StorageWriter the process_group="):
        torch_dcp.save(tensors, storage_writer=dcp.StorageWriter(place), process_group=mine)
    torch_dcp.save(tensors, storage_writer=dcp.StorageWriter(place, process_group=mine), process_group=mine)
    dist.barrier()
    for rank in range(dist.get_world_size()):
        found = {"w": torch.zeros(3)}
        reader = dcp.StorageReader(directory / str(rank) / "step-1")
        torch_dcp.load(found, storage_reader=reader, no_dist=True)
        assert found["w"].eq(rank).all()


def sharded_tensors(directory: Path) -> None:
    """As of FSDP1 and torchrec: a box on each rank, and none on the last. Saved and loaded by either way."""
    rows = [(0, 50), (50, 30), (80, 40)]
    for number, (save, load) in enumerate(
        [
            (dcp.save, dcp.load),
            (
                lambda state, checkpoint_id: torch_dcp.save(state, storage_writer=dcp.StorageWriter(checkpoint_id)),
                lambda state, checkpoint_id: torch_dcp.load(state, storage_reader=dcp.StorageReader(checkpoint_id)),
            ),
        ]
    ):
        place = directory / f"step-{number}"
        save({"m": {"w": cut(rows, WHOLE), "n": 3}}, checkpoint_id=place)
        found = cut([(0, 10), (10, 20), (30, 90)], torch.zeros_like(WHOLE))
        load({"m": {"w": found}}, checkpoint_id=place)
        for shard in found.local_shards():
            first, length = shard.metadata.shard_offsets[0], shard.metadata.shard_sizes[0]
            assert shard.tensor.equal(WHOLE[first : first + length])
        plain = {"m": {"w": torch.zeros_like(WHOLE), "n": 0}}
        load(plain, checkpoint_id=place)
        assert plain["m"]["w"].equal(WHOLE)  # type: ignore[attr-defined]
    several = cut([(0, 30), (30, 30), (60, 30), (90, 30)], WHOLE, ranks=[0, 0, 1, 2])
    with pytest.raises(ckptlib.UnsupportedState, match="ShardedTensor"):
        dcp.save({"w": several}, checkpoint_id=directory / "step-2")


def cut(rows: list[tuple[int, int]], whole: torch.Tensor, ranks: Sequence[int] = (0, 1, 2)) -> ShardedTensor:
    """By first row and number of rows."""
    shards = [
        ShardMetadata([at, 0], [n, whole.shape[1]], f"rank:{r}/cpu") for (at, n), r in zip(rows, ranks, strict=True)
    ]
    mine = [
        LocalShard(whole[m.shard_offsets[0] :][: m.shard_sizes[0]].clone(), m)
        for m, r in zip(shards, ranks, strict=True)
        if r == dist.get_rank()
    ]
    properties = TensorProperties(dtype=whole.dtype)
    meta = ShardedTensorMetadata(shards, whole.size(), properties)
    return ShardedTensor._init_from_local_shards_and_global_metadata(mine, meta)


def optimizers_of_some_ranks(directory: Path) -> None:
    """Rank 0 loads an optimizer that was saved in another form, and the others have none: none waits for another."""
    torch.manual_seed(0)
    model = torch.nn.Linear(4, 2)
    optim = torch.optim.AdamW(model.parameters())
    model(torch.ones(1, 4)).sum().backward()
    optim.step()
    want = get_optimizer_state_dict(model, optim)
    dcp.save({"model": model, "optim": optim, "w": WHOLE}, checkpoint_id=directory / "step-1")
    named = {"model": model.state_dict(), "optim": want, "w": WHOLE}
    dcp.save(named, checkpoint_id=directory / "step-2")
    other = torch.nn.Linear(4, 2)
    fresh = torch.optim.AdamW(other.parameters())
    blank = get_optimizer_state_dict(other, fresh)
    for step, mine in (1, {"optim": blank}), (2, {"model": other, "optim": fresh}):
        state = mine if dist.get_rank() == 0 else {"w": torch.zeros_like(WHOLE)}
        dcp.load(state, checkpoint_id=directory / f"step-{step}")
        if dist.get_rank():
            assert state["w"].equal(WHOLE)  # type: ignore[union-attr]
    if dist.get_rank() == 0:
        assert str(blank) == str(want)
        assert str(get_optimizer_state_dict(other, fresh)) == str(want)


class Together:
    """Its state_dict() and load_state_dict() are collectives: ranks that came to two of them in two orders would see
    each other's names."""

    def __init__(self, name: str) -> None:
        self.name = name

    def state_dict(self) -> dict[str, Any]:
        told: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(told, self.name)
        assert {*told} == {self.name}, told
        return {"name": self.name}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        assert self.state_dict() == state


def orders(directory: Path) -> None:
    """Ranks have the same entries in different orders."""
    objects = [(name, Together(name)) for name in "abcd"]
    state = dict(objects if dist.get_rank() else reversed(objects))
    dcp.save(state, checkpoint_id=directory / "step-1")
    dcp.load(state, checkpoint_id=directory / "step-1")


def as_a_process(case: Callable[[Path], None]) -> Callable[[Path], None]:
    """What it began ends with it."""

    @wraps(case)
    def run(directory: Path) -> None:
        try:
            case(directory)
        finally:
            close_sessions()

    return run


CASES = [
    saves_and_loads,
    sharded_tensors,
    optimizers_of_some_ranks,
    orders,
    wrong_planners,
    other_steps,
    alone,
]
DIES = [dies]
"""Alone, by its name."""

if __name__ == "__main__":
    run_cases([as_a_process(case) for case in (DIES if sys.argv[3:] else CASES)])
