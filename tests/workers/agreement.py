"""What one rank alone knows, hangs nobody: torchrun agreement.py <directory> <seconds> <case> ..., on three ranks.

Every rank writes to <directory>/<case>.rank<n> "ok", or what was wrong.
"""

from __future__ import annotations

import faulthandler
import json
import logging
import os
import resource
import signal
import sys
import time
import traceback
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import contextmanager, suppress
from datetime import timedelta
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from helpers.inside import arena_of, num_failures, settle, snapshots_of, writer_of
from helpers.registry import session_at
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Shard, distribute_tensor

import ckptlib
from ckptlib.checkpointer import MAX_FAILURES
from ckptlib.errors import AgreementFailed, SaveFailed, StateError, UnsupportedState
from ckptlib.saving.registry import registry
from ckptlib.saving.session import WHOLE_EVERY

PATIENCE = timedelta(seconds=30)
"""Long enough for a busy machine; whoever waits for it has found a bug."""

PATIENCE_S = PATIENCE.total_seconds()

EVERY = 3
"""A step is saved, one passes until its snapshot is known to be ready everywhere, another until the slots are free."""


def rank() -> int:
    return dist.get_rank()


def everywhere(value: object) -> list[object]:
    """What every rank has."""
    found: list[object] = [None] * dist.get_world_size()
    dist.all_gather_object(found, value)
    return found


def checkpointer(
    url: object, state: dict[str, object], every: object = EVERY, **options: object
) -> ckptlib.Checkpointer:
    return ckptlib.Checkpointer(url, state, every=every, timeout=PATIENCE, **options)


def save_after(ckpt: ckptlib.Checkpointer, number: int) -> int:
    """Says that EVERY steps are done, so that the last is saved, and none found the slots taken; returns it."""
    for step in range(number * EVERY - EVERY + 1, number * EVERY + 1):
        if ckpt.pending is not None:
            with suppress(SaveFailed):
                ckpt.pending.wait_committed(PATIENCE_S)
        ckpt.after_step(step)
    return step


def committed(url: object) -> list[int]:
    return [info.step for info in ckptlib.checkpoints(url)]


@contextmanager
def warnings_of_ckptlib():
    found: list[str] = []
    handler = logging.Handler(logging.WARNING)
    handler.emit = lambda record: found.append(record.getMessage())
    logging.getLogger("ckptlib").addHandler(handler)
    try:
        yield found
    finally:
        logging.getLogger("ckptlib").removeHandler(handler)


def plain(tensor: torch.Tensor) -> torch.Tensor:
    local = tensor.to_local() if isinstance(tensor, DTensor) else tensor
    return local.detach().clone()


def content(model: nn.Module, optim: torch.optim.Optimizer) -> dict[str, torch.Tensor]:
    """Everything that this rank holds."""
    found = {name: plain(t) for name, t in model.state_dict().items()}
    for name, param in model.named_parameters():
        found.update({f"{name}/{key}": plain(value) for key, value in optim.state.get(param, {}).items()})
    return found


def equal(left: dict[str, torch.Tensor], right: dict[str, torch.Tensor]) -> bool:
    return left.keys() == right.keys() and all(torch.equal(left[name], right[name]) for name in left)


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


# Policies, signals, steps


class DueAt:
    """A clock that goes differently on every rank."""

    def __init__(self, *steps: int) -> None:
        self._steps = steps

    def due(self, step: int) -> bool:
        return step in self._steps


def clocks_that_differ(url: Path) -> None:
    policy = [DueAt(2), DueAt(5), DueAt()][rank()]
    state = {"w": torch.zeros(3)}
    with checkpointer(url, state, policy) as ckpt:
        for step in range(1, 8):
            state["w"].fill_(step)
            ckpt.after_step(step)
            if ckpt.pending is not None:
                ckpt.pending.wait_committed(PATIENCE_S)
    assert committed(url) == [2, 5]
    for step in (2, 5):
        ckptlib.load(url, state, step)
        assert torch.equal(state["w"], torch.full((3,), float(step)))


def sigterm_at_different_steps(url: Path) -> None:
    """A slow rank gets it later; all stop at one step, which is saved, though nothing was due."""
    state = {"w": torch.zeros(3), "own": ckptlib.PerRank(torch.zeros(2))}
    last = 0
    with checkpointer(url, state, every=1000) as ckpt:
        for step in ckpt.loop(0, 100):
            if step == 2 + 3 * rank():
                os.kill(os.getpid(), signal.SIGTERM)
            state["w"].fill_(step + 1)
            state["own"].value.fill_(10 * (step + 1) + rank())
            last = step + 1
        assert ckpt.stopping
    lasts = everywhere(last)
    assert len(set(lasts)) == 1, lasts
    assert 3 <= last <= 5, last
    assert committed(url) == [last]
    found = {"w": torch.zeros(3), "own": ckptlib.PerRank(torch.zeros(2))}
    ckptlib.load(url, found)
    assert torch.equal(found["w"], torch.full((3,), float(last)))
    assert torch.equal(found["own"].value, torch.full((2,), 10.0 * last + rank()))


def steps_that_differ(url: Path) -> None:
    """One rank counts wrongly: all are told, and none waits for a rank that has left."""

    def train() -> None:
        with checkpointer(url, {"w": torch.zeros(3)}) as ckpt:
            for step in range(1, 20):
                ckpt.after_step(step if rank() != 1 or step < 4 else step + 3)

    began = time.monotonic()
    with pytest.raises(AgreementFailed, match=r"every rank must call after_step with the same") as caught:
        train()
    assert time.monotonic() - began < PATIENCE_S / 2, "some waited for the time-out"
    assert "4" in str(caught.value)


# Saves that fail


def fail_on_rank_1(plan: Path, active: bool) -> None:
    dist.barrier()
    if rank() == 0:
        rule = {"op": "commit", "key": r"packs/.*/000001-", "action": "error"}
        plan.write_text(json.dumps([rule] if active else []))
    dist.barrier()


def a_store_that_fails_one_rank(url: Path) -> None:
    plan = url.with_suffix(".plan")
    fault = f"fault+file://{url}?plan={plan}"
    state = {"w": torch.zeros(3)}
    raised_at = 0

    def train() -> None:
        nonlocal raised_at
        with checkpointer(fault, state) as ckpt:
            for number in range(1, 4):
                fail_on_rank_1(plan, number == 2)
                state["w"].fill_(number)
                save_after(ckpt, number)
                if number == 2:
                    with pytest.raises(SaveFailed, match="an error, as planned"):
                        ckpt.pending.wait_committed(PATIENCE_S)
                else:
                    ckpt.pending.wait_committed(PATIENCE_S)
            assert committed(url) == [EVERY, 3 * EVERY]
            fail_on_rank_1(plan, True)
            for number in range(4, 100):
                raised_at = number
                save_after(ckpt, number)

    with pytest.raises(SaveFailed, match="in a row failed"):
        train()
    numbers = everywhere(raised_at)
    assert len(set(numbers)) == 1, numbers
    assert raised_at == 4 + MAX_FAILURES
    assert committed(url) == [EVERY, 3 * EVERY]
    ckptlib.load(url, state)
    assert torch.equal(state["w"], torch.full((3,), 3.0))


class Growing:
    """State of this rank, of any size."""

    def __init__(self) -> None:
        self.nbytes = 8

    def state_dict(self) -> dict[str, object]:
        return {"bytes": ckptlib.PerRank(torch.ones(self.nbytes, dtype=torch.uint8))}

    def load_state_dict(self, state: dict[str, object]) -> None:
        pass


def no_room_on_one_rank(url: Path) -> None:
    """The kernel refuses one rank a larger slot, once; the saves after that go on, far past the next whole digest."""
    growing, before = Growing(), resource.getrlimit(resource.RLIMIT_FSIZE)
    state = {"w": torch.zeros(3), "growing": growing}
    numbers = range(1, WHOLE_EVERY + 5)
    with checkpointer(url, state) as ckpt:
        for number in numbers:
            state["w"].fill_(number)
            if number == 3 and rank() == 1:
                growing.nbytes = 32 << 20
                resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 20, before[1]))
            if number == 4:  # all ranks compare at its first step, since rank 1's state has changed
                with warnings_of_ckptlib() as warned:
                    ckpt.after_step(3 * EVERY + 1)
                assert any("File too large" in text for text in warned), warned
                resource.setrlimit(resource.RLIMIT_FSIZE, before)
                ckpt.after_step(3 * EVERY + 2)
                ckpt.after_step(4 * EVERY)
            else:
                save_after(ckpt, number)
            if number != 3:
                ckpt.pending.wait_committed(PATIENCE_S)
                assert ckpt.pending.step == number * EVERY, "saved without a slot"
    assert committed(url) == [number * EVERY for number in numbers if number != 3]
    found = torch.zeros(3)
    ckptlib.load(url, {"w": found}, strict=False)
    assert torch.equal(found, state["w"])


def a_state_that_one_rank_cannot_save(url: Path) -> None:
    """It raises on all ranks at one step, though one knows of it a step earlier."""
    state: dict[str, object] = {"w": torch.zeros(3), "extra": 1}
    raised_at = 0

    def train() -> None:
        nonlocal raised_at
        with checkpointer(url, state) as ckpt:
            for number in range(1, 10):
                raised_at = number
                if number == 3 and rank() == 2:
                    state["extra"] = object()
                save_after(ckpt, number)

    with pytest.raises(UnsupportedState, match="extra"):
        train()
    numbers = everywhere(raised_at)
    assert numbers == [4, 4, 4], numbers
    assert committed(url) == [EVERY, 2 * EVERY]


# Calls that one rank makes alone


def alone(url: Path) -> None:
    """As the first call of all, and again later; what all do together goes well in between."""
    state, soon = {"w": torch.ones(3)}, timedelta(seconds=2)

    def call_alone(who: int, step: int) -> None:
        if rank() == who:
            others = sorted({0, 1, 2} - {who})
            began = time.monotonic()
            with pytest.raises(AgreementFailed) as caught:
                ckptlib.save(url, state, step, timeout=soon)
            assert f"rank(s) {others} did not come within 2 s" in str(caught.value), caught.value
            assert time.monotonic() - began < 10
        dist.barrier()

    call_alone(1, 1)
    ckptlib.save(url, state, 1)
    call_alone(0, 2)
    call_alone(2, 2)
    state["w"].fill_(2)
    ckptlib.save(url, state, 2)
    assert committed(url) == [1, 2]
    with pytest.raises(AgreementFailed, match="rank 1 called save of step 4"):
        ckptlib.save(url, state, 3 if rank() != 1 else 4)
    state["w"].fill_(0)
    assert ckptlib.load(url, state).step == 2
    assert torch.equal(state["w"], torch.full((3,), 2.0))
    assert committed(url) == [1, 2]


def a_part_of_the_world(url: Path) -> None:
    """Ranks 0 and 2 save; rank 1 knows nothing of it. Groups of ranks that are in different numbers of them work."""
    pair, other = dist.new_group([0, 2]), dist.new_group([0, 1])
    for name, group, ranks in (("a", pair, (0, 2)), ("b", other, (0, 1)), ("c", pair, (0, 2))):
        if rank() in ranks:
            state = {"w": torch.full((4,), 7.0), "own": ckptlib.PerRank(torch.tensor(rank()))}
            ckptlib.save(url / name, state, 1, process_group=group)
            found = {"w": torch.zeros(4), "own": ckptlib.PerRank(torch.tensor(-1))}
            ckptlib.load(url / name, found, process_group=group)
            assert torch.equal(found["w"], state["w"])
            assert int(found["own"].value) == rank()
            assert next(iter(ckptlib.checkpoints(url / name))).world_size == 2


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
    assert len(session_at(url).holdings.arena.slots) == 1
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
    with pytest.raises(UnsupportedState, match=r"w is not the same tensor on ranks \[0, 1, 2\]"):
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
    named = any("rank 2 has no saved random state" in text for text in warned)
    assert named == (rank() == 2), warned
    assert committed(url)[-2:] == [3, 4]


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
            while arena.has_others:  # the job before was in these very processes, and lets go of replicas, too
                arena.reclaim()
                assert time.monotonic() < deadline
            dist.barrier()
        assert report.in_memory
        with checkpointer(url, found, 10**6) as ckpt:
            assert not ckpt.restore().in_memory
    finally:
        torch.set_default_device(None)
    assert report.step == 5
    assert all(torch.equal(found[name], state[name]) for name in state)


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


def impatient(url: Path) -> None:
    """Who did not want to wait for a commit may ask again: nothing has failed."""
    state = {"w": torch.ones(3)}
    with warnings_of_ckptlib() as warned, checkpointer(url, state, 10**6) as ckpt:
        ckpt.after_step(1)
        if rank() == 2:
            os.kill(writer_of(ckpt).pid, signal.SIGSTOP)
        pending = ckpt.save(2)
        for _ in range(2):
            with pytest.raises(ckptlib.errors.WaitTimeout):
                pending.wait_committed(0.5)
            time.sleep(0.5)
        ckpt.after_step(2)
        dist.barrier()
        if rank() == 2:
            os.kill(writer_of(ckpt).pid, signal.SIGCONT)
        pending.wait_committed(PATIENCE_S)
        assert num_failures(ckpt) == 0
    assert warned == [], warned
    assert committed(url) == [2]


def saved_again_after_one_rank_failed(url: Path) -> None:
    """The rank that has no save of this step does not go into another one alone."""
    state = {"w": torch.ones(3)}
    with checkpointer(url, state, 2) as ckpt:
        for step in range(1, 5):
            ckpt.after_step(step, metrics={"loss": object() if (step, rank()) == (4, 1) else 1.0})
            if step == 2:
                ckpt.pending.wait_committed(PATIENCE_S)
        with pytest.raises(SaveFailed, match="step 4 could not be saved on some rank"):
            ckpt.save(4)
        ckpt.save(5).wait_committed(PATIENCE_S)
    assert committed(url) == [2, 5]


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
        with pytest.raises(StateError, match="close it, load, and make another one"):
            ckptlib.load(url, {"a": a if rank() == 1 else first}, 1)
        assert ckptlib.load(url, {"a": first}, 1).step == 1
        ckpt.save(4).wait_committed(PATIENCE_S)
    assert steps() == [1, 2, 3, 4]


CASES = [
    going_back,
    late_expert,
    late_sharded_expert,
    half_a_tensor,
    clocks_that_differ,
    sigterm_at_different_steps,
    steps_that_differ,
    a_store_that_fails_one_rank,
    no_room_on_one_rank,
    a_state_that_one_rank_cannot_save,
    alone,
    a_part_of_the_world,
    batch_norm_by_rank,
    weights_by_rank,
    replicas_once,
    one_slot,
    meshes_that_hold_the_same,
    silent_corruption,
    another_default_device,
    replicas_of_a_state_that_changes,
    impatient,
    saved_again_after_one_rank_failed,
    more_ranks,
]


def run_cases(cases: Sequence[Callable[[Path], None]]) -> None:
    """Those that the command line names, or all; a verdict of each rank for each."""
    torch.set_num_threads(1)
    directory, names = Path(sys.argv[1]), sys.argv[3:]
    faulthandler.dump_traceback_later(float(sys.argv[2]), exit=True)
    dist.init_process_group("gloo")
    for case in cases:
        if names and case.__name__ not in names:
            continue
        verdict = directory / f"{case.__name__}.rank{rank()}"
        try:
            case(directory / case.__name__)
            verdict.write_text("ok")
        except (Exception, pytest.fail.Exception) as error:
            verdict.write_text("".join(traceback.format_exception(error)))
        dist.barrier()
    sys.stdout.flush()
    os._exit(0)  # gloo's threads may abort an interpreter that ends in the ordinary way (torch 2.13)


if __name__ == "__main__":
    run_cases(CASES)
