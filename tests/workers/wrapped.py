"""FSDP2 on two ranks: partial loads, names, and wrappers around a model: torchrun wrapped.py <directory> <seconds>.

Writes what was wrong to wrong.rank<n>, as a JSON list.
"""

from __future__ import annotations

import faulthandler
import json
import logging
import os
import re
import sys
import traceback
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

import ckptlib


def model_of(seed: int = 0, width: int = 7) -> nn.Sequential:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(5, width), nn.ReLU(), nn.Linear(width, width), nn.ReLU(), nn.Linear(width, 3))


def sharded(model: nn.Sequential) -> nn.Sequential:
    for layer in model:
        if isinstance(layer, nn.Linear):
            fully_shard(layer)
    fully_shard(model)
    return model


def trained(model: nn.Module, steps: int = 2) -> torch.optim.AdamW:
    optim = torch.optim.AdamW(model.parameters(), lr=1e-2)
    train(model, optim, steps)
    return optim


def train(model: nn.Module, optim: torch.optim.Optimizer, steps: int) -> None:
    for step in range(steps):
        torch.manual_seed(100 + step)
        model(torch.randn(4, 5)).square().mean().backward()
        optim.step()
        optim.zero_grad()


@torch.no_grad()
def whole(model: nn.Module) -> dict[str, torch.Tensor]:
    return {
        name: (t.full_tensor() if isinstance(t, DTensor) else t).detach().clone()
        for name, t in model.state_dict().items()
    }


@torch.no_grad()
def moments(model: nn.Module, optim: torch.optim.Optimizer) -> list[torch.Tensor]:
    return [
        (v.full_tensor() if isinstance(v, DTensor) else v).clone()
        for p in model.parameters()
        for _, v in sorted(optim.state[p].items())
    ]


def equal(left: dict[str, torch.Tensor], right: dict[str, torch.Tensor]) -> bool:
    return left.keys() == right.keys() and all(torch.equal(left[name], right[name]) for name in left)


def saved(url: Path) -> tuple[nn.Sequential, torch.optim.AdamW]:
    model = sharded(model_of())
    optim = trained(model)
    ckptlib.save(url, {"model": model, "optim": optim, "epoch": 3}, 1)
    return model, optim


def names_in(url: Path) -> set[str]:
    """Of the model's tensors in the root's layouts."""
    found: set[str] = set()
    for path in (url / "layouts").iterdir():
        text = path.read_text()
        found |= {word for word in text.split('"') if word.startswith("model/")}
    return found


NAMES = {f"model/{layer}.{kind}" for layer in (0, 2, 4) for kind in ("weight", "bias")}


def a_part_of_the_names(url: Path) -> None:
    model, _ = saved(url)
    expected = whole(model)
    other = sharded(model_of(seed=1))
    before = whole(other)
    state = {"model": other, "epoch": 0}
    ckptlib.load(url, state, only="model/2.*")
    after = whole(other)
    for name in expected:
        assert torch.equal(after[name], (expected if name.startswith("2.") else before)[name]), name
    assert state["epoch"] == 0


def names_that_one_side_lacks(url: Path) -> None:
    model, _ = saved(url)
    with pytest.raises(ckptlib.StateMismatch, match=r"(?s)optim.*: not in the state.*only='model'"):
        ckptlib.load(url, {"model": sharded(model_of(seed=1))})
    other = sharded(model_of(seed=1))
    report = ckptlib.load(url, {"model": other, "new": torch.zeros(2)}, strict=False)
    assert report.missing == ("new",), report.missing
    assert any(name.startswith("optim") for name in report.unexpected), report.unexpected
    assert equal(whole(other), whole(model))


def shapes_that_differ(url: Path) -> None:
    saved(url)
    expected = re.escape("model/2.weight: target is float32[8, 8], checkpoint has float32[7, 7]")
    with pytest.raises(ckptlib.StateMismatch, match=expected):
        ckptlib.load(url, {"model": sharded(model_of(width=8))}, strict=False)


def renamed(url: Path) -> None:
    model, optim = saved(url)
    net = sharded(model_of(seed=1))
    other = torch.optim.AdamW(net.parameters(), lr=0.5)
    old = {"net": "model", "adam": "optim"}

    def rename(name: str) -> str:
        first, slash, rest = name.partition("/")
        return old.get(first, first) + slash + rest

    ckptlib.load(url, {"net": net, "adam": other, "epoch": 0}, map=rename)
    assert equal(whole(net), whole(model))
    assert other.param_groups[0]["lr"] == 1e-2
    for mine, theirs in zip(moments(net, other), moments(model, optim), strict=True):
        assert torch.equal(mine, theirs)
    table = {f"net/{name}": f"model/{name}" for name in whole(model)}
    again = sharded(model_of(seed=2))
    ckptlib.load(url, {"net": again}, map=table, strict=False)
    assert equal(whole(again), whole(model))


def onto_the_meta_device(url: Path) -> None:
    """No memory is taken before the load, not even for a moment."""
    model, optim = saved(url)
    with torch.device("meta"):
        other = sharded(model_of())
    ckptlib.load(url, {"model": other}, only="model")
    assert not any(t.is_meta for t in [*other.parameters(), *other.buffers()])
    assert equal(whole(other), whole(model))
    resumed = torch.optim.AdamW(other.parameters(), lr=0.5)
    ckptlib.load(url, {"model": other, "optim": resumed}, only="optim")
    train(model, optim, 2)
    train(other, resumed, 2)
    assert equal(whole(other), whole(model)), "training goes on differently"


def after_an_eval_forward(url: Path) -> None:
    """The root's parameters are whole then, and are not what an optimizer knows."""
    model = sharded(model_of())
    optim = trained(model)
    model.eval()
    with torch.no_grad():
        model(torch.randn(2, 5))
    ckptlib.save(url, {"model": model, "optim": optim}, 1)
    assert names_in(url) == NAMES, names_in(url)
    expected, expected_moments = whole(model), moments(model, optim)
    other = sharded(model_of(seed=1))
    with torch.no_grad():
        other(torch.randn(2, 5))
    resumed = torch.optim.AdamW(other.parameters())
    ckptlib.load(url, {"model": other, "optim": resumed})
    assert equal(whole(other), expected)
    for mine, theirs in zip(moments(other, resumed), expected_moments, strict=True):
        assert torch.equal(mine, theirs)


def compiled(url: Path) -> None:
    """The names are those of the bare model, so each loads into the other."""
    model = sharded(model_of())
    fast = torch.compile(model, backend="eager")
    optim = trained(fast)
    ckptlib.save(url, {"model": fast, "optim": optim}, 1)
    assert names_in(url) == NAMES, names_in(url)
    bare = sharded(model_of(seed=1))
    resumed = torch.optim.AdamW(bare.parameters())
    ckptlib.load(url, {"model": bare, "optim": resumed})
    assert equal(whole(bare), whole(model))
    back = sharded(model_of(seed=2))
    for layer in back:
        layer.compile(backend="eager")
    ckptlib.load(url, {"model": torch.compile(back, backend="eager"), "optim": torch.optim.AdamW(back.parameters())})
    assert equal(whole(back), whole(model))


def checkpointed(url: Path) -> None:
    """Activation checkpointing wraps layers; the names stay."""

    def wrapped(seed: int) -> nn.Sequential:
        model = model_of(seed)
        for i in (0, 2, 4):
            model[i] = fully_shard(checkpoint_wrapper(model[i]))
        return fully_shard(model)

    model = wrapped(0)
    optim = trained(model)
    ckptlib.save(url, {"model": model, "optim": optim}, 1)
    assert names_in(url) == NAMES, names_in(url)
    bare = sharded(model_of(seed=1))
    ckptlib.load(url, {"model": bare, "optim": torch.optim.AdamW(bare.parameters())})
    mine, theirs = whole(bare), whole(model)
    assert all(torch.equal(mine[name], t) for name, t in zip(mine, theirs.values(), strict=True))
    again = wrapped(1)
    ckptlib.load(url, {"model": again, "optim": torch.optim.AdamW(again.parameters())})
    assert equal(whole(again), theirs)


def moments_of_another_dtype(url: Path) -> None:
    """Moments in float32 of parameters in bfloat16 stay what they are, in an optimizer that has not stepped."""
    model = sharded(model_of().bfloat16())
    optim = torch.optim.AdamW(model.parameters())
    for param in model.parameters():
        optim.state[param] = {
            "step": torch.tensor(7.0),
            "exp_avg": torch.randn_like(param, dtype=torch.float32),
            "exp_avg_sq": torch.rand_like(param, dtype=torch.float32),
        }
    ckptlib.save(url, {"model": model, "optim": optim}, 1)
    other = sharded(model_of(seed=1).bfloat16())
    resumed = torch.optim.AdamW(other.parameters())
    ckptlib.load(url, {"model": other, "optim": resumed})
    assert equal(whole(other), whole(model))
    for mine, theirs in zip(moments(other, resumed), moments(model, optim), strict=True):
        assert mine.dtype == torch.float32
        assert torch.equal(mine, theirs)


class Counted(torch.optim.SGD):
    """Counts the steps of each parameter in a plain int, as optimizers of one's own do."""

    def count(self, steps: int) -> None:
        for group in self.param_groups:
            for param in group["params"]:
                self.state[param] = {"steps": steps, "sum": torch.full_like(param, float(steps))}


class Cache:
    """An object that holds a tensor and a plain value."""

    def __init__(self, number: int = 0) -> None:
        self.content = {"number": number, "tensor": torch.full((3,), number)}

    def state_dict(self) -> dict[str, object]:
        return self.content

    def load_state_dict(self, content: dict[str, object]) -> None:
        self.content = content


def stages_into_one(url: Path) -> None:
    """Each stage's plain values are in the part of its own rank; who takes the whole model gets them all."""
    rank, model = dist.get_rank(), model_of()
    stage = nn.ModuleDict({str(4 * rank): model[4 * rank]})
    optim = Counted(stage.parameters(), lr=0.5 + rank)
    optim.count(3 + rank)
    ckptlib.save(url, {"model": stage, "optim": optim, f"cache{rank}": Cache(7 + rank)}, 1)
    ends = nn.ModuleDict({"0": model_of(seed=1)[0], "4": model_of(seed=1)[4]})
    whole_optim = Counted([{"params": ends[name].parameters(), "lr": 9.0} for name in ("0", "4")])
    caches = {"cache0": Cache(), "cache1": Cache()}
    ckptlib.load(url, {"model": ends, "optim": whole_optim, **caches})
    for i, name in enumerate(("0", "4")):
        assert whole_optim.param_groups[i]["lr"] == 0.5 + i, whole_optim.param_groups[i]
        assert [whole_optim.state[p]["steps"] for p in ends[name].parameters()] == [3 + i, 3 + i], name
        assert all(bool((whole_optim.state[p]["sum"] == 3 + i).all()) for p in ends[name].parameters()), name
        content = caches[f"cache{i}"].content
        assert (content["number"], content["tensor"].tolist()) == (7 + i, [7 + i] * 3), content  # type: ignore[attr-defined]


def optimizers_of_their_own(url: Path) -> None:
    """What is each rank's own may have an optimizer that is, too."""
    rank = dist.get_rank()

    def made(seed: int) -> tuple[nn.Sequential, torch.optim.AdamW, dict[str, object]]:
        model = model_of(seed)
        optim = trained(model, steps=2 + seed)
        optim.param_groups[0]["lr"] = 0.5 + seed
        return model, optim, {"model": ckptlib.PerRank(model), "optim": ckptlib.PerRank(optim)}

    model, optim, state = made(rank)
    ckptlib.save(url, state, 1)
    other, resumed, target = made(5)
    ckptlib.load(url, target)
    assert equal(whole(other), whole(model))
    assert all(map(torch.equal, moments(other, resumed), moments(model, optim)))
    assert resumed.param_groups[0]["lr"] == 0.5 + rank


class Around:
    """What the documents put in the place of an optimizer that ckptlib refuses."""

    def __init__(self, optim: torch.optim.Optimizer) -> None:
        self.optim = optim

    def state_dict(self) -> dict[str, object]:
        return self.optim.state_dict()

    def load_state_dict(self, state: dict[str, object]) -> None:
        self.optim.load_state_dict(state)


def objects_around_optimizers(url: Path) -> None:
    """One that has nothing to fill gets whole tensors, which is told; one that has taken a step gets DTensors."""
    model = sharded(model_of())
    optim = trained(model)
    ckptlib.save(url, {"model": model, "optim": Around(optim)}, 1)
    expected = moments(model, optim)
    for steps in (0, 1):
        told: list[str] = []
        handler = logging.Handler(logging.WARNING)
        handler.emit = lambda record, told=told: told.append(record.getMessage())  # type: ignore[method-assign]
        logging.getLogger("ckptlib.loading").addHandler(handler)
        net = sharded(model_of(seed=1))
        other = trained(net, steps)
        ckptlib.load(url, {"model": net, "optim": Around(other)})
        logging.getLogger("ckptlib.loading").removeHandler(handler)
        got = moments(net, other)
        assert all(map(torch.equal, got, expected)), steps
        is_sharded = all(isinstance(v["exp_avg"], DTensor) for v in other.state.values())
        assert is_sharded == (steps > 0), steps
        words = r"nothing to fill for 12 tensors that were saved as parts .* If it is an optimizer of DTensors"
        is_told = any(re.search(words, text) for text in told)
        assert is_told == (steps == 0 and dist.get_rank() == 0), (steps, told)


CASES: list[Callable[[Path], None]] = [
    a_part_of_the_names,
    names_that_one_side_lacks,
    shapes_that_differ,
    renamed,
    onto_the_meta_device,
    after_an_eval_forward,
    compiled,
    checkpointed,
    moments_of_another_dtype,
    stages_into_one,
    optimizers_of_their_own,
    objects_around_optimizers,
]


def main() -> None:
    directory = Path(sys.argv[1])
    faulthandler.dump_traceback_later(float(sys.argv[2]), exit=True)
    dist.init_process_group("gloo")
    wrong = []
    for case in CASES:
        try:
            case(directory / case.__name__)
        except (Exception, pytest.fail.Exception) as error:
            wrong.append(f"{case.__name__}: {''.join(traceback.format_exception(error))}")
    (directory / f"wrong.rank{dist.get_rank()}").write_text(json.dumps(wrong))
    dist.barrier()
    sys.stdout.flush()
    os._exit(0)  # gloo's threads may abort an interpreter that ends in the ordinary way (torch 2.13)


if __name__ == "__main__":
    torch.set_num_threads(1)
    main()
