"""Two ranks with an optimizer that divides its parameters between them, as Muon may: each steps its own, and has state
of these alone."""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent.parent))

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from typing_extensions import override
from workers.rank_cases import committed, content, equal, rank, run_cases

import ckptlib
from ckptlib.errors import ReplicasDiffer


class Divided(torch.optim.Optimizer):
    def __init__(self, params: object, size: int = 2) -> None:
        super().__init__(params, {"lr": 0.1})  # type: ignore[arg-type]
        self.size = size

    @override
    @torch.no_grad()
    def step(self) -> None:  # type: ignore[override]
        for i, param in enumerate(self.param_groups[0]["params"]):
            if i % self.size == rank():
                state = self.state[param]
                momentum = state.setdefault("momentum", torch.zeros_like(param)).lerp_(param.grad, 0.1)
                param.sub_(momentum, alpha=0.1)
            dist.broadcast(param.data, i % self.size)


def make(seed: int) -> tuple[nn.Module, Divided]:
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(5, 4), nn.Linear(4, 2))
    return model, Divided(model.parameters())


def train(model: nn.Module, optim: Divided, steps: range) -> None:
    for step in steps:
        torch.manual_seed(step)
        model(torch.randn(3, 5)).square().sum().backward()
        optim.step()
        optim.zero_grad()


def saved(directory: Path) -> tuple[nn.Module, Divided]:
    model, optim = make(1)
    train(model, optim, range(3))
    ckptlib.save(directory, {"m": model, "o": optim}, 1)
    return model, optim


def test_goes_on_as_if_it_had_never_stopped(directory: Path) -> None:
    model, optim = saved(directory)
    resumed, resumed_optim = make(2)
    ckptlib.load(directory, {"m": resumed, "o": resumed_optim})
    assert equal(content(resumed, resumed_optim), content(model, optim))
    assert len(resumed_optim.state) == 2
    for number in (2, 3):  # each save compares what the ranks have
        for of in ((model, optim), (resumed, resumed_optim)):
            train(*of, range(3 * number, 3 * number + 3))
        ckptlib.save(directory, {"m": resumed, "o": resumed_optim}, number)
    assert equal(content(resumed, resumed_optim), content(model, optim))
    assert committed(directory) == [1, 2, 3]


def test_what_is_sharded_is_stepped_by_all(directory: Path) -> None:
    """As many ranks as before, that divide each parameter now, and not the parameters."""
    saved(directory)
    model, _ = make(2)
    fully_shard(model, mesh=init_device_mesh("cpu", (2,)))
    optim = Divided(model.parameters())
    ckptlib.load(directory, {"m": model, "o": optim})
    assert len(optim.state) == 4


def test_what_the_optimizer_has_is_filled(directory: Path) -> None:
    model, _ = saved(directory)
    other, optim = make(2)
    for param in other.parameters():
        optim.state[param]["momentum"] = torch.full_like(param, float("nan"))
    ckptlib.load(directory, {"m": other, "o": optim})
    assert equal(dict(other.named_parameters()), dict(model.named_parameters()))
    assert not any(state["momentum"].isnan().any() for state in optim.state.values())


def test_another_number_of_ranks_gets_all_of_it(directory: Path) -> None:
    """Which of them will step a parameter, nobody knows. A save says what to do about it."""
    saved(directory)
    alone = [dist.new_group([number]) for number in range(2)][rank()]
    model, optim = make(2)
    ckptlib.load(directory, {"m": model, "o": optim}, process_group=alone)
    assert len(optim.state) == 4
    train(model, optim, range(1))
    with pytest.raises(ReplicasDiffer, match="for a parameter that one rank alone steps, the others must drop it"):
        ckptlib.save(directory / "again", {"m": model, "o": optim}, 1)
    for param in list(model.parameters())[1 - rank() :: 2]:
        optim.state.pop(param)
    ckptlib.save(directory / "again", {"m": model, "o": optim}, 2)


if __name__ == "__main__":
    run_cases(
        [
            test_goes_on_as_if_it_had_never_stopped,
            test_what_is_sharded_is_stepped_by_all,
            test_what_the_optimizer_has_is_filled,
            test_another_number_of_ranks_gets_all_of_it,
        ]
    )
