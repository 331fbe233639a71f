"""Cases of `agreement.py`: state that comes late or is missing, another world size, older steps."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from helpers.inside import settle, snapshots_of
from rank_cases import (
    EVERY,
    PATIENCE_S,
    checkpointer,
    committed,
    content,
    equal,
    everywhere,
    rank,
    save_after,
    warnings_of_ckptlib,
)
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Shard, distribute_tensor

import ckptlib
from ckptlib.errors import SaveFailed, StateError

# State that appears later


def train_with_a_late_expert(url: Path, make: Callable[[], nn.ModuleDict]) -> None:
    """The expert gets no gradient, hence no optimizer state, before the third save."""
    model = make()
    optim = torch.optim.AdamW(model.parameters(), lr=1e-2)
    seen = {}
    with checkpointer(url, {"model": model, "optim": optim}) as ckpt:
        for number in range(1, 6):
            for name, param in model.named_parameters():
                late = name.startswith("expert1")
                param.grad = None if late and number < 3 else torch.ones_like(param) * number
            optim.step()
            last = save_after(ckpt, number)
            seen.update(dict.fromkeys(range(last - EVERY + 1, last + 1), content(model, optim)))
    # the save that finds other tensors gives way to one at the next step, before which all ranks compare
    steps = [EVERY, 2 * EVERY, 3 * EVERY + 1, 4 * EVERY, 5 * EVERY]
    assert committed(url) == steps
    seen = {step: seen[step] for step in steps}
    for step, expected in seen.items():
        late = [
            names for names in everywhere(sorted(expected)) if any("expert1" in n and "exp_avg" in n for n in names)
        ]
        assert bool(late) == (step >= 3 * EVERY), "the state did not come late"
    for step, expected in seen.items():
        for stepped in (False, True):
            other = make()
            resumed = torch.optim.AdamW(other.parameters())
            if stepped:  # state that the checkpoint does not have must go
                for param in other.parameters():
                    param.grad = torch.ones_like(param)
                resumed.step()
            ckptlib.load(url, {"model": other, "optim": resumed}, step)
            assert equal(content(other, resumed), expected), f"step {step}"


def late_expert(url: Path) -> None:
    """Plain tensors, each expert on one rank."""

    def make() -> nn.ModuleDict:
        torch.manual_seed(0)
        return nn.ModuleDict({"shared": nn.Linear(4, 3), f"expert{rank()}": nn.Linear(3, 3 + rank())})

    train_with_a_late_expert(url, make)


def late_sharded_expert(url: Path) -> None:
    """DTensors; the late expert is on two ranks of three."""
    both, all_ = DeviceMesh("cpu", [1, 2]), DeviceMesh("cpu", [0, 1, 2])

    def make() -> nn.ModuleDict:
        torch.manual_seed(0)
        layers = {
            "shared": (nn.Linear(4, 5), all_),
            "expert0": (nn.Linear(5, 4), all_),
            "expert1": (nn.Linear(7, 5), both),
        }
        model = nn.ModuleDict({name: layer for name, (layer, mesh) in layers.items() if rank() in mesh.mesh})
        for name, layer in model.items():
            for key, param in list(layer.named_parameters()):
                cut = distribute_tensor(param.detach(), layers[name][1], [Shard(0)], src_data_rank=None)
                setattr(layer, key, nn.Parameter(cut))
        return model

    train_with_a_late_expert(url, make)


def half_a_tensor(url: Path) -> None:
    """Optimizer state of a DTensor on one of its ranks alone: there is no whole to be saved, and all are told."""
    mesh = DeviceMesh("cpu", [0, 1, 2])
    param = nn.Parameter(distribute_tensor(torch.ones(6, 2), mesh, [Shard(0)]))
    optim = torch.optim.AdamW([("w", param)])

    def train() -> None:
        with checkpointer(url, {"w": param, "optim": optim}) as ckpt:
            for number in range(1, 5):
                param.grad = torch.ones_like(param) if number > 2 or (number == 2 and rank() == 1) else None
                optim.step()
                save_after(ckpt, number)
                if number == 2 and rank() != 1:
                    with pytest.raises(SaveFailed, match=r"rank 1 failed.*\(new: optim/w/step"):
                        ckpt.pending.wait_committed(PATIENCE_S)

    with pytest.raises(SaveFailed, match="w/step is owned by an optimizer and differs between ranks 0 and 1"):
        train()
    assert committed(url) == [EVERY]


# Another world size


def more_ranks(url: Path) -> None:
    """Two ranks save, three go on: the same weights and moments; the third rank's generators are its own."""
    pair = dist.new_group([0, 1])
    meshes = {2: DeviceMesh("cpu", [0, 1]), 3: DeviceMesh("cpu", [0, 1, 2])}

    def make(size: int) -> tuple[nn.Module, torch.optim.AdamW]:
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(5, 7), nn.Linear(7, 3))
        fully_shard(model, mesh=meshes[size])
        return model, torch.optim.AdamW(model.parameters())

    def whole(model: nn.Module, optim: torch.optim.AdamW) -> dict[str, torch.Tensor]:
        found = {name: t.full_tensor().detach() for name, t in model.state_dict().items()}
        for name, param in model.named_parameters():
            found.update({f"{name}/{k}": v.full_tensor() for k, v in optim.state[param].items() if k != "step"})
        return found

    oracle = url.with_suffix(f".rank{rank()}.pt")
    if rank() < 2:
        model, optim = make(2)
        with checkpointer(url, {"model": model, "optim": optim}, 1, process_group=pair) as ckpt:
            for step in ckpt.loop(0, 3):
                torch.manual_seed(100 * step + rank())
                for param in model.parameters():
                    param.grad = param.detach() * (step + 1)
                optim.step()
            ckpt.pending.wait_committed(PATIENCE_S)
        drawn = torch.rand(4)
        torch.save((whole(model, optim), drawn), oracle)
    dist.barrier()
    model, optim = make(3)
    with warnings_of_ckptlib() as warned, checkpointer(url, {"model": model, "optim": optim}, 1) as ckpt:
        assert ckpt.restore().step == 3
        for step in ckpt.loop(3, 4):
            assert step == 3
            drawn = torch.rand(4)
            found = whole(model, optim)
    expected, _ = torch.load(url.with_suffix(".rank0.pt"), weights_only=True)
    assert equal(found, expected)
    draws = everywhere(drawn)
    for other in range(2):
        _, then = torch.load(url.with_suffix(f".rank{other}.pt"), weights_only=True)
        assert torch.equal(draws[other], then), "rank has other random numbers than before"
        assert not torch.equal(draws[2], then), "a new rank draws what another draws"
    named = any("has no RNG state for ranks 2 and up" in text for text in warned)
    assert named == (rank() == 2), warned
    assert committed(url)[-2:] == [3, 4]


def replicas_of_a_state_that_changes(url: Path) -> None:
    """What a holder had copied by the table of before is of no use for a snapshot that has another one."""
    state = {name: torch.full((200_000,), float(n)) for n, name in enumerate("abc")}
    peers = ckptlib.Peers(domain=f"host{rank()}")
    with warnings_of_ckptlib() as warned, checkpointer(url, state, 10**6, peers=peers) as ckpt:
        for step in range(1, 9):
            if step == 5 and rank() == 0:
                state["new"] = torch.ones(300_000)
            ckpt.after_step(step)
            settle(ckpt, PATIENCE_S)
            dist.barrier()
        assert snapshots_of(ckpt).own.newest == 8
    assert not any("sent whole" in text for text in warned), warned


def going_back(url: Path) -> None:
    """All ranks begin a generation where all loaded an older step into what they save, or none does."""

    def steps() -> list[int]:
        return [info.step for info in ckptlib.checkpoints(url)]

    model = nn.Sequential(nn.Linear(8, 6), nn.BatchNorm1d(6), nn.Linear(6, 5))
    for part in (model[0], model[2], model):
        fully_shard(part)
    optim = torch.optim.AdamW(model.parameters())

    def train() -> None:
        model(torch.ones(4, 8)).sum().backward()
        optim.step()
        optim.zero_grad()

    # fresh DTensors and a fresh scalar at each save; the optimizer's moments come after step 1
    def state() -> dict[str, object]:
        return {"model": model, "optim": optim, "weights": model.state_dict(), "loss": torch.ones(()), "n": 1}

    for step in (1, 2, 3):
        ckptlib.save(url, state(), step)
        train()
    ckptlib.load(url, state(), 1)
    train()
    ckptlib.save(url, state(), 4)
    assert steps() == [1, 4]

    a, b = torch.zeros(3), torch.zeros(3)
    url = url.with_name(url.name + "-apart")
    for step in (1, 2, 3):
        ckptlib.save(url, {"a": a, "b": b}, step)
    first, second = torch.zeros(3), torch.zeros(3)
    ckptlib.load(url, {"a": a, "b": b} if rank() == 1 else {"a": first, "b": second}, 1)
    ckptlib.save(url, {"a": a, "b": b}, 4)
    assert steps() == [1, 2, 3, 4]
    ckptlib.load(url, {"a": a, "b": b}, 2)
    ckptlib.save(url, {"a": a, "b": b}, 5)
    assert steps() == [1, 2, 5]

    url = url.with_name(url.name + "-keeper")
    with checkpointer(url, {"a": a}, 1) as ckpt:
        for step in (1, 2, 3):
            ckpt.save(step).wait_committed(PATIENCE_S)
        with pytest.raises(StateError, match="close it, load, and create another"):
            ckptlib.load(url, {"a": a if rank() == 1 else first}, 1)
        assert ckptlib.load(url, {"a": first}, 1).step == 1
        ckpt.save(4).wait_committed(PATIENCE_S)
    assert steps() == [1, 2, 3, 4]


def values_of_one_rank(url: Path) -> None:
    """A plain value that one rank alone has saved, and does not load, is told on all; what it loads is its own."""
    mine = {0: {"losses": [1, 2]}, 1: {"best": {"at": 3}}, 2: {}}[rank()]
    ckptlib.save(url, {"w": torch.ones(2), "h": mine}, 1)
    state = {"w": torch.zeros(2), "h": {}}
    report = ckptlib.load(url, state, 1)
    assert (state["h"], report.unexpected) == (mine, ())
    state = {"w": torch.zeros(2), "h": [] if rank() == 1 else {}}
    with warnings_of_ckptlib() as told:
        report = ckptlib.load(url, state, 1)
    assert report.unexpected == ("h/best/at",)
    assert state["h"] == ([] if rank() == 1 else mine)
    assert rank() != 0 or any("h/best/at" in line for line in told), told


def values_of_other_stages(url: Path) -> None:
    """A state that is named by stage comes back where one process has all stages: values, objects and containers, too,
    each from the rank that saved it."""

    def stage(number: int, fresh: bool) -> dict[str, object]:
        model = nn.Linear(3, 2 + number)
        with torch.no_grad():
            model.weight.fill_(0 if fresh else number)
        optim = torch.optim.SGD(model.parameters(), lr=0.1)
        schedule = torch.optim.lr_scheduler.StepLR(optim, 5)
        if not fresh:
            for _ in range(number + 1):
                optim.step()
                schedule.step()
        history = {} if fresh else {"losses": [number, 0.5], "best": {"val/loss": number}}
        return {"model": model, "optim": optim, "schedule": schedule, "n": 0 if fresh else number, "history": history}

    mine = {f"stage{rank()}": stage(rank(), fresh=False), f"n{rank()}": 10 + rank(), "own": {f"of{rank()}": rank()}}
    ckptlib.save(url, mine, 1)
    alone = [dist.new_group([number]) for number in range(3)][rank()]
    state = {f"stage{number}": stage(number, fresh=True) for number in range(3)}
    state.update({f"n{number}": 0 for number in range(3)}, own={})
    report = ckptlib.load(url, state, 1, process_group=alone)
    for number in range(3):
        found = state[f"stage{number}"]
        assert found["model"].weight.eq(number).all()
        assert (found["schedule"].last_epoch, found["n"], state[f"n{number}"]) == (number + 1, number, 10 + number)
        assert found["history"] == {"losses": [number, 0.5], "best": {"val/loss": number}}
    assert state["own"] == {"of0": 0}, "a container is of one rank"
    assert (report.missing, report.unexpected) == ((), ())
