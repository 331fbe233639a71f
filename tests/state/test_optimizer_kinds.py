"""Kinds: the table of what torch's optimizers keep is what they do keep; what they would not understand is refused."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from helpers.old_torch import adamw_is_adam
from onerank import Root, same
from test_optimizers import OPTIMIZERS, model_of, options_of, params, state_of, train
from torch import nn, optim

import ckptlib
from ckptlib import StateMismatch
from ckptlib.state import flatten
from ckptlib.state.optimizer_kinds import kind_of


@pytest.mark.parametrize("name", OPTIMIZERS)
@pytest.mark.parametrize("steps", [1, 3])
def test_the_table_is_true(name: str, steps: int) -> None:
    model = model_of()
    optimizer = OPTIMIZERS[name](list(model.parameters()))
    train(model, optimizer, 0, steps)
    for group in optimizer.param_groups:
        for p in group["params"]:
            kind = kind_of(optimizer, group, tuple(p.shape))
            assert kind is not None
            kept = optimizer.state.get(p, {})
            assert kind.strange(kept) == []
            assert kind.lacks(kept, stateful=True) == []
            for key, value in kept.items():
                assert not isinstance(value, torch.Tensor) or tuple(value.shape) == kind.shapes.get(key, value.shape)


@pytest.mark.parametrize("name", [name for name in OPTIMIZERS if "LBFGS" not in name])
def test_what_the_table_calls_needed_is(name: str) -> None:
    """A step without it fails."""
    model = model_of()
    optimizer = OPTIMIZERS[name](list(model.parameters()))
    train(model, optimizer, 0, 1)
    p = next(p for group in optimizer.param_groups for p in group["params"])
    kind = kind_of(optimizer, optimizer.param_groups[0], tuple(p.shape))
    assert kind is not None
    for key in kind.needed:
        kept = optimizer.state[p].pop(key)
        with pytest.raises((KeyError, AssertionError)):
            train(model, optimizer, 1, 2)
        optimizer.state[p][key] = kept


def test_of_other_classes_nothing_is_known() -> None:
    class AdamW(optim.AdamW):
        pass

    assert kind_of(AdamW([nn.Parameter(torch.ones(2))]), {}, (2,)) is None


# -- shapes


def linear(rows: int, columns: int, make: Any = optim.AdamW) -> dict[str, Any]:
    model = nn.Sequential(nn.Linear(columns, rows))
    optimizer = make(model.parameters())
    model(torch.randn(2, columns)).square().sum().backward()
    optimizer.step()
    return {"m": model, "o": optimizer}


class Factored(optim.SGD):
    """A custom optimizer that keeps a row and a column, and a block of its own form."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for p in self.param_groups[0]["params"]:
            kept = self.state[p]
            kept["row"], kept["scale"] = p.grad.sum(-1, keepdim=True), torch.tensor(2.0)
            kept["block"] = torch.arange(4.0)


@pytest.mark.parametrize("make", [optim.AdamW, optim.Adafactor, Factored], ids=lambda make: make.__name__)
@pytest.mark.parametrize(("saved", "wanted"), [((4, 3), (5, 3)), ((4, 1), (4, 3)), ((3, 4), (4, 3)), ((1, 1), (4, 1))])
def test_state_of_another_shape_is_refused(root: Root, make: Any, saved: tuple[int, int], wanted: Any) -> None:
    """Where the parameters are not loaded with it, nothing else would tell; some shapes would be broadcast."""
    root.save(linear(*saved, make))
    target = linear(*wanted, make)
    before = state_of(target["o"])
    with pytest.raises(StateMismatch, match=rf"o/m/0.weight/\w+: is \[.*for a parameter of \[{wanted[0]}, {wanted[1]}"):
        root.load(target, only=["o"])
    with pytest.raises(StateMismatch, match=rf"it was saved for one of \[{saved[0]}, {saved[1]}\]"):
        root.load(target, only=["o"], strict=False)
    assert same(state_of(target["o"]), before)
    target = linear(*saved, make)
    root.load(target, only=["o"])


@pytest.mark.parametrize("make", [optim.AdamW, optim.Adafactor], ids=lambda make: make.__name__)
def test_state_of_another_shape_is_refused_where_no_parameter_was_saved(root: Root, make: Any) -> None:
    root.save({"o": linear(4, 1, make)["o"]})
    with pytest.raises(StateMismatch, match=r"(?m)o/@0.0/\w+: is \[.*for a parameter of \[4, 3\]$") as raised:
        root.load({"o": linear(4, 3, make)["o"]})
    assert "it was saved" not in str(raised.value)
    root.load({"o": linear(4, 1, make)["o"]})


def test_lbfgs_knows_how_many_parameters_it_had(root: Root) -> None:
    model, other = model_of(), nn.Sequential(nn.Linear(5, 7), nn.Tanh(), nn.Linear(7, 2))
    optimizer = optim.LBFGS(model.parameters())
    train(model, optimizer, 0, 1)
    root.save({"o": optimizer})
    with pytest.raises(StateMismatch, match=r"o/@0.0/prev_flat_grad: is \[50\]"):
        root.load({"o": optim.LBFGS(other.parameters())})


def test_a_parameter_without_state_may_change_its_shape(root: Root) -> None:
    def make(rows: int) -> dict[str, Any]:
        model = nn.Linear(3, rows)
        return {"m": model, "o": optim.AdamW(model.parameters())}

    root.save(make(4))
    root.load(make(5), only=["o"])


# -- kinds


def _cautious(self: optim.AdamW, p: Any) -> None:
    optim.AdamW.__init__(self, p)
    self.defaults["cautious"] = self.param_groups[0]["cautious"] = False


class OwnAdamW(optim.AdamW):
    """With an option of its own."""

    __init__ = _cautious  # type: ignore[assignment]


def jobs(*makes: Any) -> Iterator[dict[str, Any]]:
    for make in makes:
        model = model_of()
        optimizer = make(model.parameters())
        train(model, optimizer, 0, 2)
        yield {"m": model, "o": optimizer}


def test_a_class_takes_from_those_it_inherits_from(root: Root) -> None:
    plain, own = jobs(optim.AdamW, OwnAdamW)
    root.move(plain, own)
    assert own["o"].param_groups[0]["cautious"] is False
    root.save(own)
    with pytest.raises(StateMismatch, match=r"o/@group.0/cautious: not in the state"):
        root.load(plain)
    report = root.load(plain, strict=False)
    assert report.unexpected == ("o/@group.0/cautious",)
    assert same(state_of(plain["o"]), state_of(own["o"]))
    assert "cautious" not in plain["o"].param_groups[0]


def test_a_class_may_be_renamed(root: Root) -> None:
    mine, renamed = jobs(OwnAdamW, type("Other", (optim.AdamW,), {"__init__": _cautious}))
    assert OwnAdamW.__name__ not in {cls.__name__ for cls in type(renamed["o"]).__mro__}
    root.move(mine, renamed)
    assert same(state_of(renamed["o"]), state_of(mine["o"]))


@adamw_is_adam
def test_a_checkpoint_that_tells_no_class(root: Root, monkeypatch: pytest.MonkeyPatch) -> None:
    """As earlier versions wrote it. Only what the hyper-parameters and the state tell is known then."""
    monkeypatch.setattr(flatten, "_describe", lambda optimizer, names: {"groups": names})
    adam, nadam, adamax, radam = jobs(optim.AdamW, optim.NAdam, optim.Adamax, optim.RAdam)
    root.save(nadam)
    with pytest.raises(StateMismatch, match=r"o/m/0.weight/mu_product: means nothing to RAdam"):
        root.load(radam)
    report = root.load(radam, strict=False)
    assert "o/m/0.weight/mu_product" in report.unexpected
    assert set(radam["o"].state[radam["m"][0].weight]) == {"step", "exp_avg", "exp_avg_sq"}
    root.save(adam)
    with pytest.raises(StateMismatch, match=r"o/m/0.weight/exp_inf: not in the checkpoint"):
        root.load(adamax)
    before = state_of(adamax["o"])
    report = root.load(adamax, strict=False)
    assert "o/m/0.weight/exp_inf" in report.missing
    assert same(state_of(adamax["o"]), before), "what it cannot use is left out whole"
    root.load(radam)
    assert same(
        [s["exp_avg_sq"] for s in radam["o"].state.values()], [s["exp_avg_sq"] for s in adam["o"].state.values()]
    )


# -- order


def test_keys_keep_their_order(root: Root) -> None:
    """Of the state of parameters that differ in it, and of groups."""
    model, other = model_of(), model_of()
    optimizer, resumed = optim.SGD(model.parameters()), optim.SGD(other.parameters())
    p = list(model.parameters())
    optimizer.state[p[0]] = {"z": torch.ones(1), "step": 3, "a/b": [torch.ones(1)], "m": None}
    optimizer.state[p[1]] = {"z": torch.ones(1), "extra": 1, "step": torch.ones(()), "m": "x"}
    optimizer.state[p[3]] = {"m": torch.ones(2)}
    optimizer.param_groups[0] |= {"zeta": 1, "initial_lr": 0.5, "alpha": 2}
    root.move({"m": model, "o": optimizer}, {"m": other, "o": resumed})
    assert [list(kept) for kept in state_of(resumed)] == [list(kept) for kept in state_of(optimizer)]
    assert [list(group) for group in resumed.param_groups] == [list(group) for group in optimizer.param_groups]
    assert same(state_of(resumed), state_of(optimizer))


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_keys_have_torchs_order(root: Root, name: str) -> None:
    model, other = model_of(), model_of()
    optimizer, resumed = (OPTIMIZERS[name](list(m.parameters())) for m in (model, other))
    train(model, optimizer, 0, 2)
    root.move({"m": model, "o": optimizer}, {"m": other, "o": resumed})
    assert list(map(list, state_of(resumed))) == list(map(list, state_of(optimizer)))  # type: ignore[call-overload]
    assert list(map(list, options_of(resumed))) == list(map(list, options_of(optimizer)))
    assert list(resumed.state_dict()["state"]) == list(optimizer.state_dict()["state"])


# -- names


def told(caplog: pytest.LogCaptureFixture, text: str = "by their position") -> list[str]:
    found = [r.message for r in caplog.records if text in r.message and r.levelno == logging.WARNING]
    caplog.clear()
    return found


def test_positions_are_warned_of_once(root: Root, caplog: pytest.LogCaptureFixture) -> None:
    optimizer = optim.AdamW(model_of().parameters())
    for _ in range(3):
        root.save({"a": {"o": optimizer}})
    (warning,) = told(caplog)
    assert warning.startswith("a/o: the state of 4 parameters is saved by their position")
    assert "named_parameters()" in warning
    for _ in range(2):
        root.load({"a": {"o": optimizer}})
    assert [text[:50] for text in told(caplog)] == ["a/o: the state of 4 parameters is loaded by their "]


def test_names_and_a_single_parameter_are_no_positions(root: Root, caplog: pytest.LogCaptureFixture) -> None:
    model = model_of()
    states: list[dict[str, object]] = [
        {"m": model, "o": optim.AdamW(model.parameters())},
        {"o": optim.AdamW(model.named_parameters())},
        {"o": optim.AdamW([nn.Parameter(torch.ones(3))])},
    ]
    for each in states:
        root.move(each, each)
    assert told(caplog) == []
    with ckptlib.Checkpointer(root.path.parent / "other", states[0], every=1):
        pass
    assert told(caplog) == []


def test_a_resumed_run_after_the_order_of_names_changed(root: Root) -> None:
    """The remedy that the warning names is one."""
    model = model_of()
    optimizer = optim.AdamW(model.named_parameters())
    train(model, optimizer, 0, 3)
    other = model_of()
    resumed = optim.AdamW(reversed(list(other.named_parameters())))
    root.move({"o": optimizer, "m": params(model)}, {"o": resumed, "m": params(other)})
    for mine, theirs in zip(model.parameters(), other.parameters(), strict=True):
        assert same(resumed.state[theirs], optimizer.state[mine])


def test_parameters_that_nothing_saves_are_warned_of_once(root: Root, caplog: pytest.LogCaptureFixture) -> None:
    model, scale, bias = model_of(), nn.Parameter(torch.ones(3)), nn.Parameter(torch.ones(2))
    optimizer = optim.AdamW([*model.named_parameters(), ("scale", scale), ("bias", bias)])
    for _ in range(2):
        root.save({"m": model, "o": optimizer, "mine": {"bias": bias.detach()}})
    (warning,) = told(caplog, "not saved")
    assert warning.startswith("o: updates 1 parameters that are nowhere else in the state")
    assert "program makes: scale [3]. Put" in warning


def test_parameters_that_are_saved_somehow_are_not_warned_of(root: Root, caplog: pytest.LogCaptureFixture) -> None:
    model, scale = model_of(), nn.Parameter(torch.ones(3))
    every = [*model.parameters(), scale]
    frozen = nn.Parameter(torch.ones(2), requires_grad=False)
    states: list[dict[str, object]] = [
        {"m": model, "o": optim.AdamW(every), "scale": scale},
        {"m": model, "o": optim.AdamW(every), "view": scale.data.view(3, 1)},
        {"m": model, "o": optim.AdamW([*model.parameters(), frozen])},
        {"m": model.state_dict(), "o": optim.AdamW(every)},
        {"o": optim.AdamW(every)},
    ]
    for state in states:
        root.save(state)
    assert told(caplog, "not saved") == []
