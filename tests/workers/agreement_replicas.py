"""Cases of `agreement.py`: what ranks hold alike, or should."""

from __future__ import annotations

import time
from collections import Counter
from contextlib import suppress
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from helpers.inside import arena_of
from helpers.registry import session_at
from rank_cases import (
    EVERY,
    PATIENCE_S,
    checkpointer,
    committed,
    equal,
    everywhere,
    plain,
    rank,
    save_after,
    warnings_of_ckptlib,
)
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Shard, distribute_tensor

import ckptlib
from ckptlib.errors import SaveFailed, UnsupportedState
from ckptlib.saving.session import WHOLE_EVERY

# Replicas


def batch_norm_by_rank(url: Path) -> None:
    """FSDP2 does not reduce statistics: every rank's own is kept, and a warning says which."""

    def make() -> nn.Sequential:
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(4, 6), nn.BatchNorm1d(6))
        fully_shard(model[0])
        return fully_shard(model)

    model = make()
    torch.manual_seed(rank())
    model(torch.randn(8, 4)).sum().backward()
    expected = {name: plain(t) for name, t in model.state_dict().items()}
    means = everywhere(expected["1.running_mean"])
    assert not torch.equal(means[0], means[1])
    with warnings_of_ckptlib() as warned:
        ckptlib.save(url, {"model": model}, 1)
    named = [text for text in warned if "1.running_mean differs between ranks 0 and 1" in text]
    assert len(named) == (1 if rank() == 0 else 0), warned
    other = make()
    ckptlib.load(url, {"model": other})
    assert equal({name: plain(t) for name, t in other.state_dict().items()}, expected)


def weights_by_rank(url: Path) -> None:
    """What an optimizer owns must be a replica, or say what it is."""
    param = nn.Parameter(torch.full((3,), float(rank())))
    state = {"w": param, "optim": torch.optim.SGD([param], lr=0.1)}
    with pytest.raises(UnsupportedState, match=r"w is owned by an optimizer and differs(?s:.*)DTensor.*PerRank"):
        ckptlib.save(url, state, 1)
    with torch.no_grad():
        param.fill_(1)
    ckptlib.save(url, state, 2)
    assert committed(url) == [2]


def experts_by_rank(url: Path) -> None:
    """Each rank has an expert of its own; one optimizer steps it beside what all ranks hold."""

    def make(seed: int) -> tuple[dict[str, object], list[torch.Tensor]]:
        shared = nn.Parameter(torch.full((3,), float(seed)))
        expert = nn.Linear(3, 2)
        with torch.no_grad():
            expert.bias.fill_(seed + rank())
        optim = torch.optim.SGD([shared, *expert.parameters()], lr=0.1, momentum=0.9)
        shared.grad = shared.detach().clone()
        for param in expert.parameters():
            param.grad = param.detach() + rank()
        optim.step()
        state = {"w": shared, "expert": ckptlib.PerRank(expert), "optim": optim}
        return state, [shared, *expert.parameters(), *(entry["momentum_buffer"] for entry in optim.state.values())]

    state, held = make(1)
    expected = [tensor.detach().clone() for tensor in held]
    ckptlib.save(url, state, 1)
    state, held = make(5)
    ckptlib.load(url, state, 1)
    assert all(map(torch.equal, held, expected))
    moments = everywhere(expected[-1].tolist())
    assert len({*map(str, moments)}) == 3


def replicas_once(url: Path) -> None:
    """Together the ranks write each byte once, and about as much each."""
    torch.manual_seed(0)
    model = nn.parallel.DistributedDataParallel(nn.Sequential(*(nn.Linear(128, 128) for _ in range(12))))
    optim = torch.optim.AdamW(model.parameters())
    model(torch.randn(4, 128)).sum().backward()
    optim.step()
    ckptlib.save(url, {"model": model, "optim": optim}, 1)
    nbytes: Counter[str] = Counter()
    for path in (url / "packs").rglob("*.safetensors"):
        nbytes[path.name[:6]] += path.stat().st_size
    whole = 3 * sum(p.nbytes for p in model.parameters())
    assert len(nbytes) == 3, nbytes
    assert whole <= sum(nbytes.values()) <= 1.1 * whole, (nbytes, whole)
    assert max(nbytes.values()) <= 1.15 * min(nbytes.values()), nbytes


def one_slot(url: Path) -> None:
    """Saves that are waited for take memory for one snapshot, on every rank."""
    for step in range(1, 4):
        ckptlib.save(url, {"own": ckptlib.PerRank({"t": torch.full((1 << 20,), float(step + rank()))})}, step)
    assert len(session_at(url).snapshots.arena.slots) == 1
    for step in range(1, 4):
        found = torch.zeros(1 << 20)
        ckptlib.load(url, {"own": ckptlib.PerRank({"t": found})}, step)
        assert (found == step + rank()).all()


def meshes_that_hold_the_same(url: Path) -> None:
    """As FSDP beside tensor parallelism leaves what the latter does not know: one tensor, on a mesh for each rank."""
    meshes = [DeviceMesh("cpu", [r]) for r in range(3)]
    expected = torch.arange(30000.0).view(100, 300)
    state = {"w": distribute_tensor(expected.clone(), meshes[rank()], [Shard(0)])}
    ckptlib.save(url, state, 1)
    nbytes = sum(path.stat().st_size for path in (url / "packs").rglob("*.safetensors"))
    assert expected.nbytes <= nbytes < 1.5 * expected.nbytes, nbytes
    state["w"].to_local().zero_()
    ckptlib.load(url, state)
    assert torch.equal(state["w"].to_local(), expected)
    if rank() == 2:
        state["w"].to_local()[50, 50] += 1
    with pytest.raises(UnsupportedState, match=r"w is not the same .* with different values\. .* ranks have diverged"):
        ckptlib.save(url, state, 2)
    assert committed(url) == [1]


def silent_corruption(url: Path) -> None:
    """A replica that one rank's memory has altered is found when its place is sampled, at save 20 at the latest."""
    params = [nn.Parameter(torch.ones(50) * i) for i in range(4)]
    optim = torch.optim.SGD(params, lr=0.1)
    raised_at = 0

    def train() -> None:
        nonlocal raised_at
        with checkpointer(url, {"p": dict(enumerate(params)), "optim": optim}) as ckpt:
            for number in range(1, 40):
                raised_at = number
                if number == 5 and rank() == 2:
                    params[3].data.view(torch.uint8)[41] ^= 4
                save_after(ckpt, number)

    with pytest.raises(SaveFailed, match="p/3 is owned by an optimizer and differs between ranks 0 and 2"):
        train()
    numbers = everywhere(raised_at)
    assert len({*numbers}) == 1, numbers
    assert 5 <= numbers[0] <= WHOLE_EVERY + 2, numbers
    steps = committed(url)
    assert steps == [number * EVERY for number in range(1, len(steps) + 1)]
    assert len(steps) >= 4


def another_default_device(url: Path) -> None:
    """What scripts set so that their tensors are on a GPU: ranks talk from host memory all the same."""
    state = {name: torch.full((40_000,), float(n)) for n, name in enumerate("ab")}
    found = {name: torch.zeros_like(tensor) for name, tensor in state.items()}
    peers = ckptlib.Peers(domain=f"host{rank()}")
    torch.set_default_device("meta")
    try:
        with suppress(KeyError), checkpointer(url, state, 10**6, peers=peers) as ckpt:
            for step in ckpt.loop(ckpt.restore().step, 4):
                ckpt.save(step + 1)
            ckpt.save(5).wait_committed(PATIENCE_S)
            dist.barrier()
            raise KeyError("the trainer's own trouble")
        with checkpointer(url, found, 10**6, peers=peers) as ckpt:
            report = ckpt.restore()
            arena, deadline = arena_of(ckpt), time.monotonic() + PATIENCE_S
            while arena.others.any_earlier:  # the job before was in these very processes, and lets go of replicas, too
                arena.others.reclaim()
                assert time.monotonic() < deadline
            dist.barrier()
        assert report.in_memory
        with checkpointer(url, found, 10**6) as ckpt:
            assert not ckpt.restore().in_memory
    finally:
        torch.set_default_device(None)
    assert report.step == 5
    assert all(torch.equal(found[name], state[name]) for name in state)
