"""Optimizer state of tensor subclasses: it comes back bit by bit, and training goes on as if it had never stopped."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from helpers.scaled import Scaled, parts, scaled, train, trained
from onerank import Root, bits
from torch import nn

import ckptlib
from ckptlib import StateMismatch
from ckptlib.state.flatten import flatten


def test_optimizer_state_and_training_goes_on_alike(root: Root) -> None:
    model, optimizer = trained(1, 3)
    other, others = trained(2, 1)
    root.move({"m": model, "o": optimizer}, {"m": other, "o": others})
    for mine, theirs in zip(model.parameters(), other.parameters(), strict=True):
        assert parts(optimizer.state[mine]["momentum"]) == parts(others.state[theirs]["momentum"])
        assert bits(optimizer.state[mine]["step"]) == bits(others.state[theirs]["step"])
    for pair in ((model, optimizer), (other, others)):
        torch.manual_seed(5)
        train(*pair)
    assert all(bits(a) == bits(b) for a, b in zip(model.parameters(), other.parameters(), strict=True))
    owned = [leaf for leaf in flatten({"m": model, "o": optimizer}).leaves if "momentum" in leaf.name]
    assert len(owned) == 4
    assert all(leaf.owner is optimizer for leaf in owned)


def test_an_optimizer_that_has_made_none_is_told_to_step(root: Root) -> None:
    model, optimizer = trained(1, 3)
    root.save({"m": model, "o": optimizer})
    fresh, fresh_optimizer = trained(2, 0)
    with pytest.raises(StateMismatch, match=r"o/m/weight/momentum: .*Scaled, and there is none.*first step"):
        root.load({"m": fresh, "o": fresh_optimizer}, strict=False)
    assert not fresh_optimizer.state


def test_state_of_a_parameter_that_had_no_gradient_yet(root: Root) -> None:
    """An instance of the same class and context is there, of another parameter, and tells how to make one."""
    model, optimizer = trained(1, 3)
    root.save({"m": model, "o": optimizer})
    other, others = trained(2, 1)
    del others.state[other.weight]
    root.load({"m": other, "o": others})
    assert parts(others.state[other.weight]["momentum"]) == parts(optimizer.state[model.weight]["momentum"])
    assert type(others.state[other.weight]["momentum"]) is Scaled
    del others.state[other.weight]
    others.state[other.bias]["momentum"].context = 1
    with pytest.raises(StateMismatch, match=r"o/m/weight/momentum: the checkpoint has a .*first step"):
        root.load({"m": other, "o": others}, only=["m", "o"])
    assert other.weight not in others.state


def test_plain_state_of_a_parameter_that_is_one(root: Root) -> None:
    def made(seed: int) -> tuple[nn.Parameter, torch.optim.Optimizer]:
        param = nn.Parameter(scaled(seed))
        return param, torch.optim.SGD([param], lr=0.1, momentum=0.9)

    (param, optimizer), (other, others) = made(1), made(2)
    optimizer.state[param]["momentum_buffer"] = torch.rand(6, 3)
    root.move({"p": param, "o": optimizer}, {"p": other, "o": others})
    found = others.state[other]["momentum_buffer"]
    assert type(found) is torch.Tensor
    assert bits(found) == bits(optimizer.state[param]["momentum_buffer"])
    assert all(leaf.owner is optimizer for leaf in flatten({"p": param, "o": optimizer}).leaves)


@pytest.mark.parametrize("below", [False, True])
def test_plain_state_where_an_instance_is_now(root: Root, below: bool) -> None:
    def made(momentum: torch.Tensor) -> tuple[nn.Parameter, torch.optim.Optimizer]:
        param = nn.Parameter(torch.zeros(6, 3))
        optimizer = torch.optim.Optimizer([param], {"lr": 0.1})
        optimizer.state[param]["kept"] = {"momentum": momentum} if below else momentum
        return param, optimizer

    (param, optimizer), (other, others) = made(torch.rand(6, 3)), made(scaled(2))
    root.move({"p": param, "o": optimizer}, {"p": other, "o": others})
    saved, found = optimizer.state[param]["kept"], others.state[other]["kept"]
    saved, found = (saved["momentum"], found["momentum"]) if below else (saved, found)
    assert type(found) is torch.Tensor
    assert bits(found) == bits(saved)


def test_a_checkpointer_saves_what_training_has(tmp_path: Path) -> None:
    model, optimizer = trained(1, 0)
    expected: list[bytes] = []
    with ckptlib.Checkpointer(tmp_path / "root", {"m": model, "o": optimizer}, every=2, arena=tmp_path) as ckpt:
        for step in range(1, 5):
            train(model, optimizer)
            if step == 4:
                expected = [part for state in optimizer.state.values() for part in parts(state["momentum"])]
            ckpt.after_step(step)
    other, others = trained(2, 1)
    report = ckptlib.load(str(tmp_path / "root"), {"m": other, "o": others})
    assert report.step == 4
    assert [part for state in others.state.values() for part in parts(state["momentum"])] == expected


def test_torchao_s_optimizer_in_8_bits(root: Root) -> None:
    optim = pytest.importorskip("torchao.optim")

    def made(seed: int, steps: int) -> tuple[nn.Module, Any]:
        torch.manual_seed(seed)
        model = nn.Linear(128, 64)
        optimizer = optim.AdamW8bit(model.parameters(), lr=1e-2)
        for _ in range(steps):
            train(model, optimizer, 128)
        return model, optimizer

    (model, optimizer), (other, others) = made(1, 3), made(2, 1)
    root.move({"m": model, "o": optimizer}, {"m": other, "o": others})
    for key in ("exp_avg", "exp_avg_sq"):
        mine, theirs = optimizer.state[model.weight][key], others.state[other.weight][key]
        assert all(bits(getattr(mine, n)) == bits(getattr(theirs, n)) for n in ("codes", "scale", "qmap"))
    for pair in ((model, optimizer), (other, others)):
        torch.manual_seed(5)
        train(*pair, 128)
    assert bits(model.weight) == bits(other.weight)
