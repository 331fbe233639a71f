"""Groups of an optimizer that are not those it was saved with: cut, joined, frozen, empty, with other options."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch
from helpers.runs import model_of, options_of, params, train
from onerank import Root, same
from torch import nn, optim
from torch.overrides import TorchFunctionMode

from ckptlib import StateMismatch
from ckptlib.loading import match_optimizers


def grouped(p: list[nn.Parameter], *groups: list[int], **options: Any) -> optim.AdamW:
    return optim.AdamW([{"params": [p[i] for i in group]} for group in groups], **options)


@pytest.mark.parametrize("groups", [[[0, 1, 2, 3]], [[3, 2, 1, 0]], [[1], [3, 0], [2]]], ids=str)
@pytest.mark.parametrize("saved_groups", [[[0, 1, 2, 3]], [[2, 0], [3, 1]]], ids=str)
def test_groups_may_be_cut_and_joined(root: Root, groups: list[list[int]], saved_groups: list[list[int]]) -> None:
    model, other = model_of(), model_of(seed=1)
    optimizer = grouped(list(model.parameters()), *saved_groups, lr=0.05)
    train(model, optimizer, 0, 3)
    resumed = grouped(list(other.parameters()), *groups, lr=0.7)
    root.move({"m": model, "o": optimizer}, {"m": other, "o": resumed})
    assert {group["lr"] for group in resumed.param_groups} == {0.05}
    train(model, optimizer, 3, 6)
    train(other, resumed, 3, 6)
    assert same(params(other), params(model))


def test_groups_that_differ_cannot_be_joined(root: Root) -> None:
    model = model_of()
    p = list(model.parameters())
    optimizer = optim.AdamW([{"params": p[:2], "lr": 0.1}, {"params": p[2:], "lr": 0.2}])
    root.save({"m": model, "o": optimizer})
    with pytest.raises(StateMismatch, match="o: group 0 holds parameters that were saved in groups \\[0, 1\\]"):
        root.load({"m": model, "o": optim.AdamW(p)})
    swapped = optim.AdamW([{"params": p[2:]}, {"params": p[:1]}, {"params": p[1:2]}])
    root.load({"m": model, "o": swapped})
    assert [group["lr"] for group in swapped.param_groups] == [0.2, 0.1, 0.1]


def test_options_that_are_no_equals_of_themselves(root: Root) -> None:
    """A step that was saved with a NaN in a group, or an array, loads."""
    model = model_of()
    optimizer = grouped(list(model.parameters()), [0, 1], [2, 3])
    for group in optimizer.param_groups:
        group |= {"d": float("nan"), "scales": np.arange(3.0)}
    root.save({"m": model, "o": optimizer})
    for groups in ([[0, 1], [2, 3]], [[3, 1, 2, 0]]):
        resumed = grouped(list(model.parameters()), *groups)
        root.load({"m": model, "o": resumed})
        assert all(math.isnan(group["d"]) for group in resumed.param_groups)
        assert [group["scales"].tolist() for group in resumed.param_groups] == [[0.0, 1.0, 2.0]] * len(groups)


def test_adamw_goes_on_from_adam_as_itself(root: Root) -> None:
    """As by torch's own load: with the state and the options of Adam, but for the one that would make it Adam."""
    model, other = model_of(), model_of()
    optimizer = optim.Adam(model.parameters(), lr=0.05, weight_decay=0.1)
    train(model, optimizer, 0, 3)
    saved = optimizer.state_dict()
    resumed = optim.AdamW(other.parameters(), lr=0.7)
    root.move({"m": model, "o": optimizer}, {"m": other, "o": resumed})
    oracle = optim.AdamW(model.parameters())
    oracle.load_state_dict(saved)
    train(model, oracle, 3, 6)
    train(other, resumed, 3, 6)
    assert same(params(other), params(model))


def test_tensor_options_of_groups_are_told_apart(root: Root) -> None:
    model = model_of()
    p = list(model.parameters())

    def make(*rates: float) -> optim.Optimizer:
        return optim.Adam([{"params": p[i : i + 2], "lr": torch.tensor(r)} for i, r in zip((0, 2), rates, strict=True)])

    shared = torch.tensor(0.5)
    root.save({"m": model, "o": make(0.1, 0.2)})
    with pytest.raises(StateMismatch, match="saved in groups"):
        root.load({"m": model, "o": optim.Adam(p, lr=shared)})
    both = optim.Adam([{"params": p[:2]}, {"params": p[2:]}], lr=shared)
    assert both.param_groups[0]["lr"] is both.param_groups[1]["lr"]
    root.load({"m": model, "o": both})
    assert [same(g["lr"], torch.tensor(r)) for g, r in zip(both.param_groups, (0.1, 0.2), strict=True)] == [True, True]
    shared.fill_(0.75)
    root.save({"m": model, "o": optim.Adam([{"params": p[:2]}, {"params": p[2:]}], lr=shared)})
    joined = optim.Adam(p)
    root.load({"m": model, "o": joined})
    assert same(joined.param_groups[0]["lr"], torch.tensor(0.75))


def test_tensor_options_by_any_key(root: Root) -> None:
    """Keys with signs of paths, and keys that are no text, stay what they are."""
    model = model_of()

    def make(fill: float) -> optim.Optimizer:
        odd: dict[Any, Any] = {
            "a/b": torch.full((2,), fill),
            "50%": [torch.full((1,), fill)],
            7: torch.full((1,), fill),
        }
        return optim.SGD([{"params": model.parameters(), **odd}], lr=0.1)  # type: ignore[dict-item]

    target = make(2.0)
    root.move({"m": model, "o": make(1.0)}, {"m": model, "o": target})
    assert same(options_of(target), options_of(make(1.0)))


def test_an_option_that_is_no_text_is_told_by_its_name(root: Root) -> None:
    model = model_of()
    odd: dict[Any, Any] = {"params": model.parameters(), 7: 1, "seven": 2}
    root.save({"m": model, "o": optim.SGD([odd], lr=0.1)})
    with pytest.raises(StateMismatch, match=r"o/@group\.0/7: not in the state"):
        root.load({"m": model, "o": optim.Adam(model.parameters())})


def test_a_tensor_lr_and_a_float_take_each_others_value(root: Root) -> None:
    model = model_of()
    rate = torch.tensor(0.5)
    resumed = optim.SGD(model.parameters(), lr=rate)
    root.move({"m": model, "o": optim.SGD(model.parameters(), lr=0.25)}, {"m": model, "o": resumed})
    assert resumed.param_groups[0]["lr"] is rate
    assert rate == 0.25
    resumed = optim.SGD(model.parameters(), lr=0.5)
    root.move({"m": model, "o": optim.SGD(model.parameters(), lr=torch.tensor(0.125))}, {"m": model, "o": resumed})
    assert same(resumed.param_groups[0]["lr"], torch.tensor(0.125))


def test_groups_that_share_a_tensor_take_their_own_numbers(root: Root) -> None:
    model = model_of()
    p = list(model.parameters())

    def cut(lr: float | torch.Tensor) -> optim.Optimizer:
        return optim.SGD([{"params": p[:1]}, {"params": p[1:2]}, {"params": p[2:]}], lr=lr)

    saved, rate = cut(0.5), torch.tensor(0.75)
    for group, number in zip(saved.param_groups, (0.5, 2, 0.25), strict=True):
        group["lr"] = number
    resumed = cut(rate)
    assert all(group["lr"] is rate for group in resumed.param_groups)
    root.move({"m": model, "o": saved}, {"m": model, "o": resumed})
    rates = [group["lr"] for group in resumed.param_groups]
    assert same(rates, [torch.tensor(0.5), torch.tensor(2.0), torch.tensor(0.25)])
    assert rates[0] is rate


def test_frozen_parameters_and_empty_groups(root: Root) -> None:
    def make(seed: int) -> tuple[nn.Module, optim.Optimizer]:
        model = model_of(seed=seed)
        p = list(model.parameters())
        p[0].requires_grad_(False)
        optimizer = optim.AdamW([{"params": p[:1]}, {"params": p[1:]}], lr=0.1)
        optimizer.add_param_group({"params": [], "lr": 9.0 - seed})
        return model, optimizer

    model, optimizer = make(0)
    train(model, optimizer, 0, 3)
    other, resumed = make(1)
    root.move({"m": model, "o": optimizer}, {"m": other, "o": resumed})
    assert list(resumed.state) == list(other.parameters())[1:]
    assert resumed.param_groups[2]["lr"] == 9.0
    train(model, optimizer, 3, 5)
    train(other, resumed, 3, 5)
    assert same(params(other), params(model))


def test_hyper_parameters_that_one_side_alone_has_are_no_other_kind(root: Root) -> None:
    """An older torch's, without one that came later; and those of a scheduler that is made after the load."""
    model = model_of()
    adam = optim.AdamW(model.parameters(), lr=0.5)
    optim.lr_scheduler.OneCycleLR(adam, max_lr=1.0, total_steps=9)
    adam.param_groups[0].pop("decoupled_weight_decay", None)  # which torch 2.6 does not know
    root.save({"o": adam})
    root.load({"o": optim.AdamW(model.parameters())})
    adam.param_groups[0]["tag"] = "of the user"
    root.save({"o": adam})
    other = optim.AdamW(model.parameters())
    other.param_groups[0]["tag"] = ""
    root.load({"o": other})
    assert other.param_groups[0]["tag"] == "of the user"


class Wrapper(optim.Optimizer):
    """Lends the groups and the state of another one, and never runs `Optimizer.__init__`, as `_NamedOptimizer` does."""

    def __init__(self, inner: optim.Optimizer) -> None:
        self.inner, self.param_groups, self.state = inner, inner.param_groups, inner.state

    def step(self, closure: Any = None) -> None:
        self.inner.step(closure)

    def zero_grad(self, set_to_none: bool = True) -> None:
        self.inner.zero_grad(set_to_none)


def test_a_wrapper_that_has_no_defaults(root: Root) -> None:
    model, other = model_of(), model_of()
    optimizer, resumed = (Wrapper(optim.SGD(m.parameters(), lr=0.1, momentum=0.9)) for m in (model, other))
    train(model, optimizer, 0, 3)
    optimizer.param_groups[0]["lr"] = 0.2
    root.move({"m": model, "o": optimizer}, {"m": other, "o": resumed})
    train(model, optimizer, 3, 5)
    train(other, resumed, 3, 5)
    assert same(params(other), params(model))
    assert resumed.param_groups[0]["lr"] == 0.2


class Made(TorchFunctionMode):
    """Of each new tensor, the device that it was asked for."""

    def __init__(self) -> None:
        super().__init__()
        self.asked: list[tuple[torch.Tensor, object]] = []

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        made = func(*args, **(kwargs or {}))
        if func is torch.empty:
            self.asked.append((made, (kwargs or {}).get("device")))
        return made


@pytest.mark.parametrize("option", ["fused", "capturable"])
@pytest.mark.parametrize("stepped", [False, True])
def test_steps_are_counted_where_the_saved_options_ask_for_it(
    root: Root, monkeypatch: pytest.MonkeyPatch, option: str, stepped: bool
) -> None:
    """As by torch's own load: a fused kernel takes no counts that are in the host's memory."""
    device = torch.device("cpu", 0)  # unlike torch.device("cpu"), and yet tensors are made there
    monkeypatch.setattr(match_optimizers, "_device_of", lambda param: device)
    for then, now in [(True, False), (False, True)]:
        model, other = model_of(), model_of(seed=1)
        optimizer, resumed = optim.AdamW(model.parameters()), optim.AdamW(other.parameters())
        train(model, optimizer, 0, 3)
        if stepped:
            train(other, resumed, 0, 1)
        optimizer.param_groups[0][option], resumed.param_groups[0][option] = then, now
        root.save({"m": model, "o": optimizer})
        with Made() as made:
            root.load({"m": other, "o": resumed})
        assert resumed.param_groups[0][option] is then
        steps = [state["step"] for state in resumed.state.values()]
        assert [float(step) for step in steps] == [3.0] * 4
        places = {str(place) for tensor, place in made.asked if any(tensor is step for step in steps)}
        assert places == ({"cpu:0"} if then else set() if stepped else {"cpu"})
