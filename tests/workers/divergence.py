"""Ranks whose replicas come to differ: torchrun divergence.py <directory> <seconds> <case> ..., on two ranks.

The oracle is what each rank had in memory at each step: every step that is committed gives that back, bit for bit, on
every rank, or it is not committed.
"""

from __future__ import annotations

import copy
import re
from collections.abc import Callable, Mapping
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from helpers.inside import settle
from rank_cases import PATIENCE_S, checkpointer, committed, everywhere, rank, run_cases, warnings_of_ckptlib
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate

import ckptlib
from ckptlib.errors import ReplicasDiffer, SaveFailed
from ckptlib.saving.agreement import DIVERGED

LARGE = 40_000
"""Elements: more than what is copied before after_step returns."""

State = dict[str, object]


def contents(state: Mapping[str, object]) -> dict[str, torch.Tensor]:
    """What this rank has, by name."""
    found: dict[str, torch.Tensor] = {}
    for name, value in state.items():
        if isinstance(value, nn.Module):
            found.update(contents({f"{name}/{key}": t for key, t in value.state_dict().items()}))
        elif isinstance(value, DTensor):
            found[name] = value.to_local().detach().clone()
        elif isinstance(value, torch.Tensor):
            found[name] = value.detach().clone()
    return found


def same(left: dict[str, torch.Tensor], right: dict[str, torch.Tensor]) -> list[str]:
    """The names that are not."""
    assert left.keys() == right.keys()
    return [name for name in left if not torch.equal(left[name], right[name])]


def check_all(url: Path, state: State, seen: dict[int, dict[str, torch.Tensor]]) -> list[int]:
    """Every committed step gives back what this rank had; returns the steps."""
    steps = committed(url)
    for step in steps:
        target = copy.deepcopy({name: value for name, value in state.items() if name != "optim"})
        for value in target.values():
            for tensor in value.state_dict().values() if isinstance(value, nn.Module) else [value]:
                (tensor.to_local() if isinstance(tensor, DTensor) else tensor).detach().fill_(-7)
        ckptlib.load(url, target, step, strict=False)
        assert not (lost := same(contents(target), seen[step])), f"step {step}: {lost}"
    return steps


def train(
    url: Path, state: State, steps: range, body: Callable[[int], None], **options: object
) -> dict[int, dict[str, torch.Tensor]]:
    """Saves at every step; what this rank had behind each."""
    seen = {}
    with checkpointer(url, state, 1, **options) as ckpt:
        ckpt.restore(strict=False)
        for step in ckpt.loop(steps.start, steps.stop):
            body(step)
            seen[step + 1] = contents(state)
            rest(ckpt)
    return seen


def rest(ckpt: ckptlib.Checkpointer) -> None:
    """Until what was begun is done, so that there is a slot for the next step on every rank."""
    settle(ckpt, PATIENCE_S, persisted=True)
    dist.barrier()


def refused(url: Path, state: State, body: Callable[[int], None], why: str) -> None:
    """Training ends by a failed save that says so, long before it is done."""
    with pytest.raises(SaveFailed, match=re.escape(why)):
        train(url, state, range(40), body)


# What no optimizer owns


def an_accumulator(url: Path) -> None:
    """Alike at the first save, another one on each rank from then on."""
    state: State = {"acc": torch.zeros(3), "big": torch.zeros(LARGE), "same": torch.ones(LARGE)}

    def body(step: int) -> None:
        if step >= 2:
            state["acc"] += 1 + rank()
            state["big"][-1] += rank()  # one element of many
        state["same"] += 1

    with warnings_of_ckptlib() as warned:
        seen = train(url, state, range(12), body)
    steps = check_all(url, state, seen)
    assert {1, 2, 12} <= {*steps}, steps
    assert any(2 < step < 12 for step in steps), "it went on at the last step only"
    if rank() == 0:
        assert any("acc differs between ranks 0 and 1" in text for text in warned), warned
        assert any("big differs between ranks 0 and 1" in text for text in warned), warned


def batch_norm(url: Path) -> None:
    """DDP leaves each rank its own running statistics; saved by one process first, then restored with peers."""

    def make() -> nn.Module:
        torch.manual_seed(0)
        return nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Linear(8, 8), nn.BatchNorm1d(8), nn.Linear(8, 1))

    model = nn.parallel.DistributedDataParallel(make())
    optim = torch.optim.SGD(model.parameters(), lr=0.01)
    torch.manual_seed(10 + rank())
    state: State = {"model": model, "optim": optim}

    def body(step: int) -> None:
        model(torch.randn(8, 4)).square().mean().backward()
        optim.step()
        optim.zero_grad()

    for peers in (None, ckptlib.Peers(copies=0)):
        root = url / str(peers is None)
        ckptlib.save(root, state, 0)
        with checkpointer(root, state, 1, peers=peers) as ckpt:
            ckpt.restore()
            seen = {0: contents({"model": model.module})}
            for step in ckpt.loop(0, 8):
                rest(ckpt)
                body(step)
                seen[step + 1] = contents({"model": model.module})
        steps = check_all(root, {"model": make()}, seen)
        assert {0, 8} <= {*steps}, steps
        assert any(0 < step < 8 for step in steps), "it went on at the last step only"


def moving_average(url: Path) -> None:
    """Parameters without a gradient that change nonetheless, on one rank in another way."""
    ema, base = nn.Linear(200, 200), nn.Linear(200, 200)
    for module in (ema, base):
        nn.init.ones_(module.weight)
        nn.init.ones_(module.bias)
        module.requires_grad_(False)
    state: State = {"ema": ema, "base": base}

    def body(step: int) -> None:
        ema.weight += 1
        if step >= 5 and rank() == 1:
            ema.weight[7, 11] += 1  # no sample is likely to see it

    seen = train(url, state, range(12), body)
    steps = check_all(url, state, seen)
    assert {1, 12} <= {*steps}, steps


def functions(url: Path) -> None:
    acc = torch.zeros(3)
    seen = {}
    for step in range(1, 6):
        ckptlib.save(url, {"acc": acc}, step)
        seen[step] = {"acc": acc.clone()}
        acc += 1 + rank() * (step > 2)
    assert check_all(url, {"acc": acc}, seen) == [1, 2, 3, 4, 5]


# What one does


def parameters(url: Path) -> None:
    """Weights that drift apart: nothing is committed from then on, and the job ends by a word that names them."""
    model = nn.Linear(300, 300)
    nn.init.ones_(model.weight)
    nn.init.ones_(model.bias)
    optim = torch.optim.SGD(model.parameters(), lr=0.1)
    state: State = {"model": model, "optim": optim}
    seen = {}

    def body(step: int) -> None:
        model.weight.grad = torch.full_like(model.weight, 1.0 + (rank() if step >= 3 else 0))
        optim.step()
        seen[step + 1] = contents({"model": model})

    why = "model/weight is owned by an optimizer and differs between ranks 0 and 1, though nothing shards it. "
    refused(url, state, body, f"{why}If it should be the same there, {DIVERGED}. If these are different tensors")
    assert check_all(url, {"model": model}, seen) == [1, 2, 3]


def parameters_that_one_rank_alone_steps(url: Path) -> None:
    """As ZeRO-1 by hand, or the optimizer within a ZeroRedundancyOptimizer: nothing differs, and each step is kept."""
    model = nn.Sequential(nn.Linear(300, 300), nn.Linear(300, 2))
    for param in model.parameters():
        nn.init.ones_(param)
    params = [*model.parameters()]
    optim = torch.optim.AdamW([param for i, param in enumerate(params) if i % 2 == rank()])

    def body(step: int) -> None:
        for param in params:
            param.grad = torch.full_like(param, step % 5 - 1.5)
        optim.step()
        for i, param in enumerate(params):
            dist.broadcast(param.data, i % 2)

    with warnings_of_ckptlib() as warned:
        seen = train(url, {"model": model, "optim": optim}, range(8), body)
    assert check_all(url, {"model": model}, seen) == [*range(1, 9)]
    assert not warned, warned


def parameters_at_the_end(url: Path) -> None:
    """Too late for three failures in a row: the last save is the only one that finds out, and is no success."""
    model = nn.Linear(300, 300)
    nn.init.ones_(model.weight)
    nn.init.ones_(model.bias)
    optim = torch.optim.SGD(model.parameters(), lr=0.1)

    def train() -> None:
        with checkpointer(url, {"model": model, "optim": optim}, 4) as ckpt:
            for step in ckpt.loop(0, 6):
                model.weight.grad = torch.full_like(model.weight, 1.0 + (rank() if step == 5 else 0))
                optim.step()
                rest(ckpt)

    with pytest.raises(SaveFailed, match="step 6 was to be saved and is not, nor is a later one: model/weight"):
        train()
    assert committed(url) == [4]


def hybrid_shards(url: Path) -> None:
    """A DTensor on a mesh of replicas: each rank's copy changed alone."""
    mesh = DeviceMesh("cpu", [0, 1])
    weight = DTensor.from_local(torch.ones(300, 300), mesh, [Replicate()], run_check=False)
    state: State = {"weight": weight, "whole": torch.ones(2)}
    seen = {}

    def body(step: int) -> None:
        weight.to_local().add_(1 + (rank() if step >= 3 else 0))
        seen[step + 1] = contents(state)

    refused(url, state, body, "weight on ranks 0 and 1")
    assert check_all(url, state, seen) == [1, 2, 3]
    with pytest.raises(ReplicasDiffer, match=rf"^1 DTensor\(s\).* on ranks 0 and 1; {re.escape(DIVERGED)}$"):
        ckptlib.save(url, state, 100)


# Memory


def killed_before_the_verdict(url: Path) -> None:
    """Snapshots in memory that the ranks had no time to vote upon: what comes back is one step, as each rank had it."""
    for last in range(3, 7):
        state: State = {"acc": torch.zeros(3), "big": torch.zeros(LARGE), "w": torch.zeros(5)}
        seen, root = {}, url / str(last)
        ckptlib.save(root, state, 0)
        try:
            with checkpointer(root, state, 10**6, peers=ckptlib.Peers(copies=0)) as ckpt:
                ckpt.restore()
                seen[0] = contents(state)
                for step in ckpt.loop(0, 100):
                    if step >= 2:
                        state["acc"] += 1 + rank()
                        state["big"][step] += rank()
                    state["w"] += 1
                    seen[step + 1] = contents(state)
                    if step == last:
                        raise KeyboardInterrupt
        except KeyboardInterrupt:
            pass
        for tensor in state.values():
            tensor.fill_(-7)
        dist.barrier()
        with checkpointer(root, state, 10**6, peers=ckptlib.Peers(copies=0)) as ckpt:
            report = ckpt.restore()
        assert not (lost := same(contents(state), seen[report.step])), (report.step, lost)
        assert len({*everywhere(report.step)}) == 1


def never_held(url: Path) -> None:
    """What differs is not held by all ranks, and the snapshot before it stays until a better one is there."""
    state: State = {"acc": torch.zeros(3), "w": torch.ones(LARGE)}
    held: list[int | None] = []
    with checkpointer(url, state, 10**6, peers=ckptlib.Peers(copies=0)) as ckpt:
        for step in range(1, 20):
            state["acc"] += 1 + (rank() if step > 4 else 0)
            ckpt.after_step(step)
            rest(ckpt)
            held.append(ckpt.coverage.step)
    steps = [step for step in held if step is not None]
    assert 5 not in steps, held
    assert 6 not in steps, held
    assert steps == sorted(steps), held
    assert steps[-1] >= 16, held


CASES = [
    an_accumulator,
    batch_norm,
    moving_average,
    functions,
    parameters,
    parameters_that_one_rank_alone_steps,
    parameters_at_the_end,
    hybrid_shards,
    killed_before_the_verdict,
    never_held,
]

if __name__ == "__main__":
    run_cases(CASES)
