"""Three ranks that load what two had saved, or one of them alone: rank 0 tells what each had of its own."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent.parent))

import pytest
import torch
import torch.distributed as dist
from onerank import Holder
from torch import nn
from torch.utils.data import DistributedSampler
from torchdata import nodes
from torchdata.stateful_dataloader import StatefulDataLoader
from workers.rank_cases import rank, run_cases, warnings_of_ckptlib

import ckptlib
from ckptlib.format.part import Part
from ckptlib.reading.committed import Committed


def group_of(*ranks: int) -> dist.ProcessGroup:
    group = dist.new_group([*ranks])
    assert group is not None
    return group


def saved_by_two(directory: Path, state: dict[str, Any]) -> dist.ProcessGroup:
    """Returns the group of rank 0 alone."""
    pair, alone = group_of(0, 1), group_of(0)
    if rank() < 2:
        ckptlib.save(directory, state, 1, process_group=pair)
    dist.barrier()
    return alone


def told_by_load(directory: Path, state: dict[str, Any], group: dist.ProcessGroup | None, **options: Any) -> list[str]:
    told: list[str] = []
    if group is None or rank() == 0:
        with warnings_of_ckptlib() as told:
            ckptlib.load(directory, state, process_group=group, **options)
    dist.barrier()
    return told


def of_rank(number: int) -> dict[str, Any]:
    return {
        "w": torch.ones(3),
        "place": Holder({"shard": number, "seed": 7}),
        "rank": number,
        "lr": 0.1,
        "own": ckptlib.PerRank(torch.full((2,), float(number))),
    }


FIRST = "step 1 was saved by 2 ranks, and each rank had its own in own, place, rank. Here are"


def test_more_ranks(directory: Path) -> None:
    saved_by_two(directory, of_rank(rank()))
    state = of_rank(9)
    told = told_by_load(directory, state, None)
    more = f"{FIRST} 3: each has what the one of its number had, and ranks 2 and up have rank 0's"
    assert told == ([] if rank() else [more])
    assert state["rank"] == state["place"].content["shard"] == state["own"].value[1] == rank() % 2


def test_fewer_ranks(directory: Path) -> None:
    alone = saved_by_two(directory, of_rank(rank()))
    state = of_rank(9)
    fewer = f"{FIRST} 1: each has what the one of its number had, and what ranks 1 and up had is loaded nowhere"
    assert told_by_load(directory, state, alone) == ([] if rank() else [fewer])
    assert told_by_load(directory, {"w": torch.ones(3), "lr": 0.2}, alone, only=["w", "lr"]) == [], "it is not loaded"


def test_fewer_ranks_that_are_alike(directory: Path) -> None:
    """Two of three, which were on one host: what the third had is loaded nowhere."""
    pair = group_of(0, 1)
    ckptlib.save(directory, {"w": torch.ones(3), "host": rank() // 2, "lr": 0.1}, 1)
    told: list[str] = []
    if rank() < 2:
        with warnings_of_ckptlib() as told:
            ckptlib.load(directory, {"w": torch.ones(3), "host": 9, "lr": 0.2}, process_group=pair)
    dist.barrier()
    fewer = "step 1 was saved by 3 ranks, and each rank had its own in host. Here are 2: each has what the one of its "
    assert told == ([] if rank() else [f"{fewer}number had, and what ranks 2 and up had is loaded nowhere"])


def test_a_last_part_that_cannot_be_read_ends_no_load(directory: Path) -> None:
    """Whatever the store raises on rank 0, which alone reads it: the others would wait for it."""
    pair = group_of(0, 1)
    ckptlib.save(directory, {"w": torch.ones(3), "host": rank() // 2}, 1)
    state = {"w": torch.zeros(3), "host": 9}
    if rank() < 2:
        with pytest.MonkeyPatch.context() as patch:
            part = Committed.part

            def but_the_last(source: Committed, saved: int) -> Part:
                if saved == 2:
                    raise OSError("of the client's own")
                return part(source, saved)

            patch.setattr(Committed, "part", but_the_last)
            ckptlib.load(directory, state, process_group=pair)
        assert state["host"] == 0
    dist.barrier()


def test_what_is_alike_is_not_told(directory: Path) -> None:
    alone = saved_by_two(directory, {"w": torch.ones(3), "place": Holder({"seed": 7}), "lr": 0.1})
    for group in (None, alone):
        assert told_by_load(directory, {"w": torch.ones(3), "place": Holder({}), "lr": 0.2}, group) == []


def stages(names: list[int]) -> tuple[nn.ModuleDict, torch.optim.Optimizer]:
    """With another learning rate in each."""
    parts = nn.ModuleDict({str(number): nn.Linear(2, 2) for number in names})
    groups = [{"params": [*parts[str(number)].parameters()], "lr": 1.0 + number} for number in names]
    return parts, torch.optim.SGD(groups)


def test_options_of_a_stage_go_with_its_parameters(directory: Path) -> None:
    """The first group of each rank is of other parameters: all that was saved is loaded."""
    model, optim = stages([min(rank(), 1)])
    alone = saved_by_two(directory, {"m": model, "o": optim})
    model, optim = stages([0, 1])
    for group in optim.param_groups:
        group["lr"] = 9.0
    assert told_by_load(directory, {"m": model, "o": optim}, alone) == []
    assert rank() or [group["lr"] for group in optim.param_groups] == [1.0, 2.0]


def loader(world_size: int) -> Any:
    sampler = DistributedSampler(range(12), world_size, min(rank(), world_size - 1), shuffle=False)  # type: ignore[arg-type]
    return StatefulDataLoader(range(12), 2, sampler=sampler)  # type: ignore[arg-type, call-arg]


def loader_of_nodes(world_size: int) -> Any:
    sampler = DistributedSampler(range(12), world_size, min(rank(), world_size - 1), shuffle=False)  # type: ignore[arg-type]
    return nodes.Loader(nodes.Batcher(nodes.SamplerWrapper(sampler), 2))


def test_one_rank_may_stand_for_an_import(directory: Path) -> None:
    alone = group_of(0)
    if rank() == 0:
        ckptlib.save(directory, {"own": ckptlib.PerRank(torch.zeros(2))}, 1, process_group=alone)
    dist.barrier()
    told = told_by_load(directory, {"own": ckptlib.PerRank(torch.ones(2))}, None)
    one = "step 1 was saved by one rank, or imported, and each rank had its own in own. Here are 3: "
    assert rank() or (len(told) == 1 and told[0].startswith(one)), told


def test_a_loader_that_counts_for_each_rank(directory: Path) -> None:
    counts_alone(directory, loader)


def test_a_loader_of_nodes_counts_for_each_rank(directory: Path) -> None:
    counts_alone(directory, loader_of_nodes)


def counts_alone(directory: Path, make: Callable[[int], Any]) -> None:
    """Its state is alike on all ranks, and means another item with another number of them."""
    source = make(2)
    assert len([batch for batch, _ in zip(source, range(1), strict=False)]) == 1
    alone = saved_by_two(directory, {"w": torch.ones(3), "data": source})
    state = {"w": torch.ones(3), "data": make(2)}
    assert told_by_load(directory, state, None) == ([] if rank() else [COUNTED % 3])
    assert told_by_load(directory, {"w": torch.ones(3), "data": make(1)}, alone) == ([] if rank() else [COUNTED % 1])


COUNTED = (
    "step 1 was saved by 2 ranks, and data tells how many batches a single rank had had. Here are %d: unless as many "
    "as before divide the data, items of this epoch are left out or come twice. ckptlib.data.resumable counts the "
    "items of all ranks"
)


if __name__ == "__main__":
    run_cases(
        [
            test_more_ranks,
            test_fewer_ranks,
            test_fewer_ranks_that_are_alike,
            test_a_last_part_that_cannot_be_read_ends_no_load,
            test_what_is_alike_is_not_told,
            test_options_of_a_stage_go_with_its_parameters,
            test_one_rank_may_stand_for_an_import,
            test_a_loader_that_counts_for_each_rank,
            test_a_loader_of_nodes_counts_for_each_rank,
        ]
    )
