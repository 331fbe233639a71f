"""Optimizers that keep more than `state` and `param_groups`: refused, since a load would bring back a part of them."""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers.old_torch import has_float4
from onerank import Root, same
from torch import nn, optim

import ckptlib
from ckptlib import UnsupportedState


class Lookahead(optim.Optimizer):
    """As timm and others have it: a state of its own that stays empty, beside that of the optimizer inside."""

    def __init__(self, inner: optim.Optimizer) -> None:
        super().__init__(inner.param_groups, {})
        self.inner = inner
        self.param_groups, self.defaults = inner.param_groups, inner.defaults
        for group in self.param_groups:
            group["turn"] = 0

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        self.inner.step()
        for group in self.param_groups:
            group["turn"] += 1
            for p in group["params"] if group["turn"] % 2 == 0 else ():
                slow = self.inner.state[p].setdefault("slow", p.detach().clone())
                p.copy_(slow.lerp_(p, 0.5))

    def state_dict(self) -> dict[str, Any]:
        return self.inner.state_dict()


class Several(optim.Optimizer):
    """One in front of others; torch's own `state_dict()`, which does not tell of them."""

    def __init__(self, inner: list[optim.Optimizer]) -> None:
        super().__init__([p for one in inner for group in one.param_groups for p in group["params"]], {})
        self.inner = inner

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for one in self.inner:
            one.step()


class Combined(optim.Optimizer):
    """As torchrec's CombinedOptimizer: all that it has is made of what is in those others, whenever it is asked."""

    def __init__(self, inner: list[optim.Optimizer]) -> None:
        self.__dict__.update(_optimizer_step_pre_hooks={}, _optimizer_step_post_hooks={}, defaults={})
        self.inner = [(str(i), one) for i, one in enumerate(inner)]

    @property
    def state(self) -> Any:
        return {param: kept for _, one in self.inner for param, kept in one.state.items()}

    @property
    def param_groups(self) -> Any:
        return [group for _, one in self.inner for group in one.param_groups]

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for _, one in self.inner:
            one.step()


class Counting(optim.AdamW):
    """Adds what it counts to what `state_dict()` gives."""

    def __init__(self, params: Any) -> None:
        super().__init__(params)
        self.count = torch.zeros(1)

    def state_dict(self) -> dict[str, Any]:
        return {**super().state_dict(), "count": self.count}


class Nested(optim.AdamW):
    """Gives the very entries that it has, deeper."""

    def state_dict(self) -> dict[str, Any]:
        told = super().state_dict()
        return {**told, "state": {number: {"inside": entry} for number, entry in told["state"].items()}}


class Scaled(optim.Optimizer):
    """Moments in half precision, by a scale that it keeps beside its state; `state_dict()` gives them in full.

    As TransformerEngine's FusedAdam.
    """

    def __init__(self, params: Any, dtype: torch.dtype = torch.float16) -> None:
        super().__init__(params, {"lr": 0.1})
        self.dtype = dtype
        self.scales: dict[Any, torch.Tensor] = {}

    def moment(self, p: Any) -> torch.Tensor:
        return self.state[p]["exp_avg"].float() * self.scales[p]

    def keep(self, p: Any, moment: torch.Tensor) -> None:
        self.scales[p] = moment.abs().max() / 60000 if self.dtype is torch.float16 else torch.tensor(1.0)
        self.state[p]["exp_avg"] = (moment / self.scales[p]).to(self.dtype)

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for p in self.param_groups[0]["params"]:
            self.keep(p, p.grad if not self.state[p] else self.moment(p).lerp(p.grad, 0.1))
            p.sub_(self.moment(p), alpha=0.1)

    def state_dict(self) -> dict[str, Any]:
        params = self.param_groups[0]["params"]
        entries = {number: {"exp_avg": self.moment(p)} for number, p in enumerate(params) if p in self.state}
        return {**super().state_dict(), "state": entries}

    def load_state_dict(self, state_dict: Any) -> None:
        for number, p in enumerate(self.param_groups[0]["params"]):
            self.keep(p, state_dict["state"][number]["exp_avg"])


class Given:
    """What the message says: an object that calls the optimizer's methods."""

    def __init__(self, optimizer: optim.Optimizer) -> None:
        self.optimizer = optimizer

    def state_dict(self) -> Any:
        return self.optimizer.state_dict()

    def load_state_dict(self, state: Any) -> None:
        self.optimizer.load_state_dict(state)


def hooked(params: Any) -> optim.Optimizer:
    optimizer = optim.AdamW(params)
    optimizer.register_state_dict_post_hook(lambda _, told: {**told, "count": 3})
    return optimizer


def made(make: Callable[[Any], optim.Optimizer], seed: int = 0) -> tuple[nn.Module, Any]:
    torch.manual_seed(seed)
    model = nn.Linear(3, 3)
    return model, make([*model.parameters()])


def train(model: nn.Module, optimizer: Any, first: int, last: int) -> None:
    for step in range(first, last):
        optimizer.zero_grad()
        model(torch.randn(4, 3, generator=torch.Generator().manual_seed(step))).square().mean().backward()
        optimizer.step()


REFUSED: dict[str, tuple[Callable[[Any], optim.Optimizer], str]] = {
    "inside": (lambda p: Lookahead(optim.AdamW(p)), "Lookahead has a AdamW in its attribute 'inner'"),
    "several": (lambda p: Several([optim.AdamW(p[:1]), optim.SGD(p[1:])]), "Several has a AdamW in its attribute"),
    "made anew": (
        lambda p: Combined([optim.AdamW(p[:1]), optim.AdamW(p[1:])]),
        "Combined makes its state anew whenever it is asked, .*; put those that it is made of into the state",
    ),
    "added": (Counting, "of this Counting also gives 'count'"),
    "by a hook": (hooked, "of this AdamW also gives 'count'"),
}


@pytest.mark.parametrize("kind", REFUSED)
def test_refused_before_the_training_begins(tmp_path: Path, kind: str) -> None:
    make, message = REFUSED[kind]
    model, optimizer = made(make)
    with pytest.raises(UnsupportedState, match=f"o: .*{message}"):
        ckptlib.Checkpointer(tmp_path / "root", {"m": model, "o": optimizer}, every=1, arena=tmp_path)


@pytest.mark.parametrize("kind", REFUSED)
def test_a_load_into_it_is_refused_unless_it_is_left_out(root: Root, kind: str) -> None:
    make, message = REFUSED[kind]
    model, plain = made(optim.AdamW)
    train(model, plain, 0, 2)
    root.save({"m": model, "o": plain})
    other, optimizer = made(make, seed=1)
    with pytest.raises(UnsupportedState, match=f"o: .*{message}"):
        root.load({"m": other, "o": optimizer})
    root.load({"m": other, "o": optimizer}, only="m")
    assert same([*other.parameters()], [*model.parameters()])


@pytest.mark.parametrize("beside", [False, True])
def test_the_one_inside_is_saved_in_its_place_or_beside_it(root: Root, beside: bool) -> None:
    def state(model: nn.Module, optimizer: Lookahead) -> dict[str, object]:
        return {"m": model, "i": optimizer.inner, **({"o": optimizer} if beside else {})}

    model, optimizer = made(lambda p: Lookahead(optim.AdamW(p, lr=0.1)))
    train(model, optimizer, 0, 3)
    root.save(state(model, optimizer))
    other, resumed = made(lambda p: Lookahead(optim.AdamW(p, lr=0.5)), seed=1)
    root.load(state(other, resumed))
    train(model, optimizer, 3, 8)
    train(other, resumed, 3, 8)
    assert same([*other.parameters()], [*model.parameters()])


def test_what_gives_the_same_in_another_shape_is_saved(root: Root) -> None:
    model, optimizer = made(Nested)
    train(model, optimizer, 0, 3)
    root.save({"m": model, "o": optimizer})
    other, resumed = made(Nested, seed=1)
    root.load({"m": other, "o": resumed})
    train(model, optimizer, 3, 5)
    train(other, resumed, 3, 5)
    assert same([*other.parameters()], [*model.parameters()])


def test_moments_whose_scales_are_kept_elsewhere_are_refused(root: Root) -> None:
    model, optimizer = made(Scaled)
    train(model, optimizer, 0, 3)
    with pytest.raises(UnsupportedState, match=r"o: .* of this Scaled gives other values of 'exp_avg' than its state"):
        root.save({"m": model, "o": optimizer})
    root.save({"m": model, "o": Given(optimizer)})
    other, resumed = made(Scaled, seed=1)
    root.load({"m": other, "o": Given(resumed)})
    moments = zip(map(resumed.moment, resumed.state), map(optimizer.moment, optimizer.state), strict=True)
    assert all(torch.allclose(*pair) for pair in moments)


def test_moments_that_are_told_in_another_dtype_are_saved(root: Root) -> None:
    model, optimizer = made(lambda p: Scaled(p, torch.bfloat16))
    train(model, optimizer, 0, 3)
    root.save({"m": model, "o": optimizer})
    other, resumed = made(lambda p: Scaled(p, torch.bfloat16), seed=1)
    root.load({"m": other, "o": resumed})
    resumed.scales = dict.fromkeys(resumed.state, torch.tensor(1.0))
    train(model, optimizer, 3, 5)
    train(other, resumed, 3, 5)
    assert same([*other.parameters()], [*model.parameters()])


class Named(optim.AdamW):
    """Tells its state by name, in the order of its parameters, and not in that of their first steps."""

    def state_dict(self) -> dict[str, Any]:
        params = self.param_groups[0]["params"]
        told = {f"p{i}": {**self.state[param]} for i, param in enumerate(params) if param in self.state}
        return {**super().state_dict(), "state": told}


class Coded(optim.Optimizer):
    """Moments in eight bits, with their scales in the state; told in full."""

    def __init__(self, params: Any) -> None:
        super().__init__(params, {"lr": 0.1})

    def step(self) -> None:  # type: ignore[override]
        for param in self.param_groups[0]["params"]:
            if param.grad is not None:
                scale = param.grad.abs().max() / 127
                self.state[param] = {"exp_avg": (param.grad / scale).to(torch.int8), "scale": scale}

    def state_dict(self) -> dict[str, Any]:
        told = super().state_dict()
        entries = told["state"].items()
        return {**told, "state": {i: {"exp_avg": entry["exp_avg"] * entry["scale"]} for i, entry in entries}}


class Packed(Coded):
    """Moments of a dtype that torch turns into no other; `state_dict()` gives copies."""

    def step(self) -> None:  # type: ignore[override]
        for param in self.param_groups[0]["params"]:
            if param.grad is not None:
                self.state[param] = {"exp_avg": param.grad.to(torch.uint8).view(torch.float4_e2m1fn_x2)}

    def state_dict(self) -> dict[str, Any]:
        told = optim.Optimizer.state_dict(self)
        return {**told, "state": copy.deepcopy(told["state"])}


@pytest.mark.parametrize("kind", [Named, Coded, pytest.param(Packed, marks=has_float4)])
def test_what_is_saved_in_full_and_told_otherwise_is_saved(root: Root, kind: type[Any]) -> None:
    model = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3))
    optimizer = kind(model.parameters())
    for layer in model[1], model[0]:  # the second one is stepped first
        layer(torch.arange(3.0)).square().sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    root.save({"model": model, "optim": optimizer})
    other = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3))
    resumed = kind(other.parameters())
    root.load({"model": other, "optim": resumed})
    for mine, its in zip(model.parameters(), other.parameters(), strict=True):
        assert optimizer.state[mine].keys() == resumed.state[its].keys()
        assert same([*optimizer.state[mine].values()], [*resumed.state[its].values()])


def test_state_that_is_of_no_parameter_is_refused_and_saved_by_an_object(root: Root) -> None:
    """As MADGRAD has its count of steps."""
    model, optimizer = made(lambda p: optim.SGD(p, lr=0.1, momentum=0.9))
    train(model, optimizer, 0, 2)
    optimizer.state["k"] = torch.tensor([2])
    with pytest.raises(UnsupportedState, match=r"o: .*under 'k'.*put in its place an object whose state_dict"):
        root.save({"m": model, "o": optimizer})
    root.save({"m": model, "o": Given(optimizer)})
    other, resumed = made(lambda p: optim.SGD(p, lr=0.1, momentum=0.9), seed=1)
    root.load({"m": other, "o": Given(resumed)})
    assert same(resumed.state["k"], torch.tensor([2]))
    train(model, optimizer, 2, 4)
    train(other, resumed, 2, 4)
    assert same([*other.parameters()], [*model.parameters()])
