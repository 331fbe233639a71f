"""What is around the tensors: nesting, plain values, random state, objects that have a state."""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from helpers.random_tensors import any_bits
from onerank import Holder, Root, opened, same
from torch import nn

from ckptlib import (
    PerRank,
    Sharded,
)

# -- structure


def test_nesting_keys_and_names(root: Root) -> None:
    source = {
        "a": {"b": [torch.ones(2), (torch.zeros(1), 3)], "b/c": torch.full((2,), 2.0), "b%2Fc": torch.full((2,), 3.0)},
        1: torch.full((1,), 4.0),
        "": {"x": 5},
        (1, "two"): "tuple key",
    }
    target = {
        "a": {"b": [torch.zeros(2), (torch.ones(1), 0)], "b/c": torch.zeros(2), "b%2Fc": torch.zeros(2)},
        1: torch.zeros(1),
        "": {"x": 0},
        (1, "two"): "",
    }
    root.move(source, target)
    assert same(target, source)


def test_plain_values_come_back_in_place(root: Root) -> None:
    values = {
        "int": 2**80,
        "nan": float("nan"),
        "inner": {"list": [1, "two", None, b"\x00"], "tuple": (1, (2.5, True)), "set": {1, 2}},
        "ranks": PerRank((7, "own")),
        "dtype": torch.bfloat16,
    }
    target = {
        "int": 0,
        "nan": 0.0,
        "inner": {"list": [0, "", 0, b""], "tuple": (0, (0.0, False)), "set": set()},
        "ranks": PerRank((0, "")),
        "dtype": torch.float32,
    }
    inner = target["inner"]
    report = root.move(values, target)
    assert target["inner"] is inner
    assert same({k: v for k, v in target.items() if k != "ranks"}, {k: v for k, v in values.items() if k != "ranks"})
    assert target["ranks"] == values["ranks"]
    assert report.values["inner/tuple"] == (1, (2.5, True))
    assert report.values["int"] == 2**80


def test_tensors_in_tuples_are_filled_and_stay_the_same_objects(root: Root) -> None:
    weight = torch.zeros(2)
    target = {"pair": (weight, 0)}
    root.move({"pair": (torch.ones(2), 9)}, target)
    assert target["pair"] == (weight, 9)
    assert target["pair"][0] is weight
    assert torch.equal(weight, torch.ones(2))


def test_per_rank_and_sharded(root: Root) -> None:
    whole = torch.randn(6, 4)
    target = {"own": PerRank({"t": torch.zeros(3)}), "cut": [Sharded(torch.zeros(3, 4), (0, 0), (6, 4))]}
    root.save({"own": PerRank({"t": torch.arange(3.0)}), "cut": [Sharded(whole, (0, 0), (6, 4))]})
    root.load(target)
    assert torch.equal(target["own"].value["t"], torch.arange(3.0))  # type: ignore[attr-defined]
    assert torch.equal(target["cut"][0].tensor, whole[:3])  # type: ignore[index]


def test_generators_go_on_where_they_stopped(root: Root) -> None:
    generator = torch.Generator().manual_seed(7)
    torch.rand(5, generator=generator)
    root.save({"g": generator})
    expected = torch.rand(5, generator=generator)
    other = torch.Generator()
    root.load({"g": other})
    assert torch.equal(torch.rand(5, generator=other), expected)


def test_random_state_is_put_back_only_when_asked(root: Root) -> None:
    torch.manual_seed(3)
    root.save({"a": 1})
    expected = torch.rand(4)
    root.load({"a": 0}, random=True)
    assert torch.equal(torch.rand(4), expected)
    root.load({"a": 0, "b": 0}, random=True, only="a")
    assert torch.equal(torch.rand(4), expected)
    root.load({"a": 0, "b": 0}, random=True, only=["a"])
    assert torch.equal(torch.rand(4), expected)
    torch.manual_seed(4)
    before = torch.get_rng_state()
    root.load({"a": 0})
    assert torch.equal(torch.get_rng_state(), before)


# -- objects

CONTENTS: dict[str, object] = {
    "values": {"a": 1, 2: [None, (3.0,)]},
    "nothing": None,
    "a tensor": torch.arange(4.0),
    "nested": {"a": [torch.ones(2), {"b": (torch.zeros(1), 5, "x")}], 7: torch.arange(3), "s": {1, 2}, "e": []},
    "ordered": OrderedDict(z=torch.ones(1), a=OrderedDict(b=torch.ones(2))),
    "float8": {"q": any_bits(torch.float8_e4m3fn, 3, 5), "scale": torch.tensor(2.5)},
}


@pytest.mark.parametrize("kind", CONTENTS)
def test_objects_get_back_exactly_what_they_gave(tmp_path: Path, kind: str) -> None:
    source, target = Holder(CONTENTS[kind]), Holder()
    with opened(tmp_path) as root:
        root.save({"o": source})
        assert (source.given, source.taken) == (1, 0)
        root.load({"o": target})
    assert target.taken == 1
    assert same(target.content, CONTENTS[kind])


def test_state_is_taken_on_the_callers_thread(root: Root) -> None:
    class Nosy(Holder):
        def state_dict(self) -> object:
            self.content = threading.current_thread() is threading.main_thread()
            return super().state_dict()

    source, target = Nosy(), Holder()
    root.move({"o": source}, {"o": target})
    assert target.content is True


def test_schedulers_and_scalers_go_on_as_if_nothing_happened(root: Root) -> None:
    from torch.optim import lr_scheduler as lr

    makers: dict[str, Callable[[torch.optim.Optimizer], lr.LRScheduler]] = {
        "lambda": lambda o: lr.LambdaLR(o, lambda step: 0.9**step),
        "milestones": lambda o: lr.MultiStepLR(o, [2, 4, 4, 6]),
        "one cycle": lambda o: lr.OneCycleLR(o, max_lr=0.1, total_steps=20),
        "sequential": lambda o: lr.SequentialLR(
            o, [lr.LinearLR(o, total_iters=3), lr.CosineAnnealingLR(o, 10)], milestones=[3]
        ),
        "chained": lambda o: lr.ChainedScheduler([lr.ConstantLR(o), lr.ExponentialLR(o, 0.9)]),
        "warm restarts": lambda o: lr.CosineAnnealingWarmRestarts(o, 4),
    }

    def make(kind: str, tensor_lr: bool) -> tuple[torch.optim.Optimizer, lr.LRScheduler]:
        rate = torch.tensor(0.1) if tensor_lr else 0.1
        optimizer = torch.optim.SGD([nn.Parameter(torch.zeros(1))], lr=rate, momentum=0.9)
        return optimizer, makers[kind](optimizer)

    def run(optimizer: torch.optim.Optimizer, scheduler: lr.LRScheduler, steps: int) -> list[float]:
        rates = []
        for _ in range(steps):
            optimizer.step()
            scheduler.step()
            rates.append(float(optimizer.param_groups[0]["lr"]))
        return rates

    for kind in makers:
        for tensor_lr in (False, True):
            optimizer, scheduler = make(kind, tensor_lr)
            run(optimizer, scheduler, 5)
            root.save({"o": optimizer, "s": scheduler})
            expected = run(optimizer, scheduler, 6)
            optimizer, scheduler = make(kind, tensor_lr)
            root.load({"o": optimizer, "s": scheduler})
            assert run(optimizer, scheduler, 6) == expected, (kind, tensor_lr)


def test_plateau_and_scaler(root: Root) -> None:
    def make() -> tuple[torch.optim.Optimizer, torch.optim.lr_scheduler.ReduceLROnPlateau, torch.amp.GradScaler]:
        optimizer = torch.optim.SGD([nn.Parameter(torch.zeros(1))], lr=0.1)
        plateau = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, patience=1)
        return optimizer, plateau, torch.amp.GradScaler("cpu", init_scale=1024.0, growth_interval=2)

    optimizer, plateau, scaler = make()
    for loss in (1.0, 2.0, 3.0, 4.0):
        plateau.step(loss)
    scaler.scale(torch.ones(1))
    scaler.update(256.0)
    state = {"o": optimizer, "p": plateau, "s": scaler}
    root.save(state)
    fresh = dict(zip("ops", make(), strict=True))
    root.load(fresh)
    assert fresh["p"].state_dict() == plateau.state_dict()  # type: ignore[attr-defined]
    assert fresh["s"].state_dict() == scaler.state_dict()  # type: ignore[attr-defined]
    assert fresh["o"].param_groups[0]["lr"] == optimizer.param_groups[0]["lr"] < 0.1  # type: ignore[attr-defined]
