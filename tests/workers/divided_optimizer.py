"""Two ranks with an optimizer that divides its parameters between them, as Muon may: each steps its own, and has state
of these alone."""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent.parent))

import pytest
import torch
import torch.distributed as dist
from helpers.fault_log import operations
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from typing_extensions import override
from workers.rank_cases import committed, content, equal, everywhere, rank, run_cases

import ckptlib
from ckptlib.errors import ReplicasDiffer
from ckptlib.testing import write_plan


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


class Whole(Divided):
    """Each rank steps all of its parameters."""


class Counted(Divided):
    """Each rank counts the steps of all parameters, in two ways; and whoever steps one, its own of it."""

    @override
    def step(self) -> None:  # type: ignore[override]
        super().step()
        for i, param in enumerate(self.param_groups[0]["params"]):
            state = self.state[param]
            state["steps"] = state.get("steps", 0) + 1
            state.setdefault("seen", torch.zeros(())).add_(1)
            if i % self.size == rank():
                state["own"] = state.get("own", 10 * i) + 1
                state.setdefault("nested", [torch.zeros(2), i])[0].add_(i)


def make(seed: int, cls: type[Divided] = Divided) -> tuple[nn.Module, Divided]:
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(5, 4), nn.Linear(4, 2))
    return model, cls(model.parameters())


def train(model: nn.Module, optim: Divided, steps: range) -> None:
    for step in steps:
        torch.manual_seed(step)
        model(torch.randn(3, 5)).square().sum().backward()
        optim.step()
        optim.zero_grad()


def saved(directory: Path, cls: type[Divided] = Divided) -> tuple[nn.Module, Divided]:
    model, optim = make(1, cls)
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


def written(optim: Divided) -> list[str]:
    """The state of each parameter on this rank, in order."""
    return [repr(optim.state.get(param, {})) for param in optim.param_groups[0]["params"]]


def test_a_rank_that_counts_for_all_has_no_more_than_it_had(directory: Path) -> None:
    """It had something of each parameter, and not what is kept by the one that steps it."""
    _, optim = saved(directory, Counted)
    resumed, resumed_optim = make(2, Counted)
    ckptlib.load(directory, {"m": resumed, "o": resumed_optim})
    assert written(resumed_optim) == written(optim)
    train(resumed, resumed_optim, range(3, 6))
    ckptlib.save(directory, {"m": resumed, "o": resumed_optim}, 2)
    assert committed(directory) == [1, 2]


def test_another_number_of_ranks_gets_the_counts_of_all_of_them(directory: Path) -> None:
    """Plain values, too, that one rank alone had, beside the momenta that came from it."""
    _, optim = saved(directory, Counted)
    alone = [dist.new_group([number]) for number in range(2)][rank()]
    resumed, resumed_optim = make(2, Counted)
    ckptlib.load(directory, {"m": resumed, "o": resumed_optim}, process_group=alone)
    by_rank = everywhere(written(optim))
    assert written(resumed_optim) == [by_rank[i % 2][i] for i in range(4)]


def test_a_parameter_of_its_own_that_a_rank_never_stepped(directory: Path) -> None:
    """As of an expert that got no token: another rank's nested state of the name is not this one's."""
    param = nn.Parameter(torch.full((3,), float(rank())))
    optim = Divided([param])
    if rank():
        optim.state[param] = {"momentum": torch.ones(3), "steps": 1, "nested": [torch.ones(2), 2]}
    ckptlib.save(directory, {"m": {"w": ckptlib.PerRank(param)}, "o": optim}, 1)
    alone = [dist.new_group([number]) for number in range(2)][rank()]
    other = nn.Parameter(torch.ones(3))
    resumed = Divided([other])
    ckptlib.load(directory, {"m": {"w": ckptlib.PerRank(other)}, "o": resumed}, process_group=alone)
    assert torch.equal(other, torch.zeros(3))
    assert written(resumed) == ["{}"]


def test_what_is_sharded_is_stepped_by_all(directory: Path) -> None:
    """As many ranks as before, that divide each parameter now, and not the parameters."""
    saved(directory)
    model, _ = make(2)
    fully_shard(model, mesh=init_device_mesh("cpu", (2,)))
    optim = Divided(model.parameters())
    ckptlib.load(directory, {"m": model, "o": optim})
    assert len(optim.state) == 4


def by_hand(whole: torch.Tensor, sizes: tuple[int, int]) -> tuple[nn.Parameter, ckptlib.Sharded]:
    """This rank's rows of it."""
    first, rows = sum(sizes[: rank()]), sizes[rank()]
    piece = nn.Parameter(whole[first : first + rows].clone())
    return piece, ckptlib.Sharded(piece, (first, *[0] * (whole.ndim - 1)), tuple(whole.shape))


def test_what_is_cut_by_hand_is_stepped_by_all(directory: Path) -> None:
    saved(directory)
    cut = {name: by_hand(p.detach(), (1, len(p) - 1)) for name, p in make(2)[0].named_parameters()}
    optim = Divided([piece for piece, _ in cut.values()])
    ckptlib.load(directory, {"m": {name: sharded for name, (_, sharded) in cut.items()}, "o": optim})
    assert len(optim.state) == 4


def test_a_rank_whose_piece_was_empty_has_state_of_what_it_has_now(directory: Path) -> None:
    """Cut by hand otherwise, or not at all, by as many ranks."""
    piece, sharded = by_hand(torch.arange(6.0), (6, 0))
    optim = torch.optim.SGD([piece], momentum=0.9)
    if len(piece):
        piece.grad = torch.arange(6.0)
        optim.step()
    ckptlib.save(directory, {"w": sharded, "o": optim}, 1)
    piece, sharded = by_hand(torch.zeros(6), (3, 3))
    optim = torch.optim.SGD([piece], momentum=0.9)
    ckptlib.load(directory, {"w": sharded, "o": optim})
    assert torch.equal(optim.state[piece]["momentum_buffer"], torch.arange(6.0)[3 * rank() :][:3])
    whole = nn.Parameter(torch.zeros(6))
    optim = torch.optim.SGD([whole], momentum=0.9)
    ckptlib.load(directory, {"w": whole, "o": optim})
    assert torch.equal(optim.state[whole]["momentum_buffer"], torch.arange(6.0))


def test_an_optimizer_that_divides_nothing_has_all(directory: Path) -> None:
    """As many ranks as before, each of which steps all of it now: replicas would drift apart."""
    saved(directory)
    model, _ = make(2)
    optim = Whole(model.parameters())
    ckptlib.load(directory, {"m": model, "o": optim})
    assert len(optim.state) == 4


def test_replicas_that_become_stages_have_all_of_theirs(directory: Path) -> None:
    """Of what another rank stepped before, nobody else would have anything."""
    model, optim = saved(directory)
    momenta: list[dict[str, torch.Tensor]] = [{}, {}]
    dist.all_gather_object(
        momenta, {n: optim.state[p]["momentum"] for n, p in model.named_parameters() if p in optim.state}
    )
    stage = nn.ModuleDict({str(rank()): make(2)[0][rank()]})
    optim = Divided(stage.parameters())
    ckptlib.load(directory, {"m": stage, "o": optim})
    for name, param in stage.named_parameters():
        assert torch.equal(optim.state[param]["momentum"], (momenta[0] | momenta[1])[name])


def test_what_the_optimizer_has_is_filled(directory: Path) -> None:
    model, _ = saved(directory)
    other, optim = make(2)
    for param in other.parameters():
        optim.state[param]["momentum"] = torch.full_like(param, float("nan"))
    ckptlib.load(directory, {"m": other, "o": optim})
    assert equal(dict(other.named_parameters()), dict(model.named_parameters()))
    assert not any(state["momentum"].isnan().any() for state in optim.state.values())


def test_what_other_parameters_had_beside_it_is_asked_of_no_other_stage(directory: Path) -> None:
    """As with Shampoo, of which a matrix has more state than a bias. Each stage has a layout and a part of its own."""
    stage = nn.ModuleDict({str(rank()): nn.Linear(2, 2)})
    params = [*stage[str(rank())].parameters()]
    optim = Divided(params)
    for param in params:
        optim.state[param] = {"momentum": param.detach() + 1, **({"factor": torch.ones(2)} if param.dim() == 2 else {})}
    ckptlib.save(directory / "root", {"m": stage, "o": optim}, 1)
    plan = directory / f"plan{rank()}.json"
    write_plan(plan, [])
    alone = [dist.new_group([number]) for number in range(2)][rank()]
    resumed = nn.ModuleDict({"0": nn.Linear(2, 2)})
    resumed_optim = Divided(resumed.parameters())
    url = f"fault+file://{directory}/root?plan={plan}"
    ckptlib.load(url, {"m": resumed, "o": resumed_optim}, process_group=alone, strict=False)
    assert [len(resumed_optim.state[param]) for param in resumed.parameters()] == [2, 1]
    read = {line["key"] for line in operations(plan) if line["op"].startswith("get") and "parts/" in line["key"]}
    assert len(read) == 1, read


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
            test_a_rank_that_counts_for_all_has_no_more_than_it_had,
            test_another_number_of_ranks_gets_the_counts_of_all_of_them,
            test_a_parameter_of_its_own_that_a_rank_never_stepped,
            test_what_is_sharded_is_stepped_by_all,
            test_what_is_cut_by_hand_is_stepped_by_all,
            test_a_rank_whose_piece_was_empty_has_state_of_what_it_has_now,
            test_an_optimizer_that_divides_nothing_has_all,
            test_replicas_that_become_stages_have_all_of_theirs,
            test_what_the_optimizer_has_is_filled,
            test_another_number_of_ranks_gets_all_of_it,
            test_what_other_parameters_had_beside_it_is_asked_of_no_other_stage,
        ]
    )
