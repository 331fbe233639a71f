"""Optimizers: the run that was resumed equals the run that was not, bit for bit, for every one that torch has."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from helpers.old_torch import adamw_is_adam
from helpers.runs import model_of, options_of, params, state_of, train
from onerank import Root, opened, same
from torch import nn, optim

from ckptlib import StateMismatch, UnsupportedState

Make = Callable[[Any], optim.Optimizer]


def matrices(p: Any) -> list[nn.Parameter]:
    return [q for q in p if q.ndim == 2]


OPTIMIZERS: dict[str, Make] = {
    "SGD": lambda p: optim.SGD(p, lr=0.1),
    "SGD momentum": lambda p: optim.SGD(p, lr=0.1, momentum=0.9, nesterov=True, weight_decay=0.1),
    "SGD fused": lambda p: optim.SGD(p, lr=0.1, momentum=0.9, fused=True),
    "Adam": lambda p: optim.Adam(p, lr=0.1),
    "Adam foreach": lambda p: optim.Adam(p, lr=0.1, foreach=True),
    "Adam fused": lambda p: optim.Adam(p, lr=0.1, fused=True),
    "Adam differentiable": lambda p: optim.Adam(p, lr=0.1, differentiable=False, maximize=True),
    "Adam tensor lr": lambda p: optim.Adam(p, lr=torch.tensor(0.1), foreach=False),
    "Adam fused tensor lr": lambda p: optim.Adam(p, lr=torch.tensor(0.1), fused=True),
    "Adam tensor betas": lambda p: optim.Adam(p, lr=0.1, betas=(torch.tensor(0.9), torch.tensor(0.99)), foreach=False),
    "AdamW": lambda p: optim.AdamW(p, lr=0.1),
    "AdamW amsgrad": lambda p: optim.AdamW(p, lr=0.1, amsgrad=True),
    "Adamax": lambda p: optim.Adamax(p, lr=0.1),
    "NAdam": lambda p: optim.NAdam(p, lr=0.1),
    "RAdam": lambda p: optim.RAdam(p, lr=0.1),
    "Adadelta": lambda p: optim.Adadelta(p, lr=0.5),
    "Adagrad": lambda p: optim.Adagrad(p, lr=0.1, initial_accumulator_value=0.3),
    "Adagrad fused": lambda p: optim.Adagrad(p, lr=0.1, fused=True),
    "Adafactor": lambda p: optim.Adafactor(p, lr=0.1),
    "ASGD": lambda p: optim.ASGD(p, lr=0.1, t0=2),
    "RMSprop": lambda p: optim.RMSprop(p, lr=0.01, centered=True, momentum=0.5),
    "Rprop": lambda p: optim.Rprop(p, lr=0.01),
    **({"Muon": lambda p: optim.Muon(matrices(p), lr=0.1)} if hasattr(optim, "Muon") else {}),  # torch 2.9
    "LBFGS": lambda p: optim.LBFGS(p, lr=0.1, max_iter=3, history_size=4),
    "LBFGS wolfe": lambda p: optim.LBFGS(p, max_iter=3, line_search_fn="strong_wolfe"),
}


def test_no_optimizer_of_torch_is_forgotten() -> None:
    everything = [getattr(optim, name) for name in dir(optim)]
    classes = {c.__name__ for c in everything if isinstance(c, type) and issubclass(c, optim.Optimizer)}
    assert classes - {kind.split()[0] for kind in OPTIMIZERS} == {"Optimizer", "SparseAdam"}


@pytest.mark.parametrize("kind", OPTIMIZERS)
@pytest.mark.parametrize("stepped", [False, True], ids=["fresh", "used"])
def test_a_resumed_run_equals_one_that_never_stopped(root: Root, kind: str, stepped: bool) -> None:
    model = model_of()
    optimizer = OPTIMIZERS[kind](list(model.parameters()))
    train(model, optimizer, 0, 3)
    root.save({"m": model, "o": optimizer})
    saved, options = [dict(s) for s in _cloned(state_of(optimizer))], options_of(optimizer)
    other = model_of(seed=1)
    resumed = OPTIMIZERS[kind](list(other.parameters()))
    if stepped:
        train(other, resumed, 50, 55)
    root.load({"m": other, "o": resumed})
    assert same(state_of(resumed), saved)
    assert same(options_of(resumed), options)
    train(model, optimizer, 3, 7)
    train(other, resumed, 3, 7)
    assert same(params(other), params(model))
    assert same(state_of(resumed), state_of(optimizer))


def _cloned(node: Any) -> Any:
    if isinstance(node, torch.Tensor):
        return node.clone()
    if isinstance(node, dict):
        return {k: _cloned(v) for k, v in node.items()}
    if isinstance(node, (list, tuple)):
        return type(node)(_cloned(v) for v in node)
    return node


def test_sparse_adam(root: Root) -> None:
    def make(seed: int) -> tuple[nn.Embedding, optim.Optimizer]:
        torch.manual_seed(seed)
        table = nn.Embedding(10, 3, sparse=True)
        return table, optim.SparseAdam(list(table.parameters()), lr=0.1)

    def step(table: nn.Embedding, optimizer: optim.Optimizer, row: int) -> None:
        optimizer.zero_grad()
        table(torch.tensor([row, row + 1])).sum().backward()
        optimizer.step()

    table, optimizer = make(0)
    step(table, optimizer, 1)
    other, resumed = make(1)
    root.move({"m": table, "o": optimizer}, {"m": other, "o": resumed})
    step(table, optimizer, 2)
    step(other, resumed, 2)
    assert same(params(other), params(table))
    assert [type(state["step"]) for state in resumed.state.values()] == [int]


class OwnAdam(optim.Optimizer):
    """Moments in float32 for parameters in bfloat16, made at the first step."""

    def __init__(self, p: Any, lr: float = 0.1) -> None:
        super().__init__(p, {"lr": lr})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        with torch.enable_grad():
            closure()
        for group in self.param_groups:
            for p in group["params"]:
                state = self.state[p]
                if not state:
                    state["master"], state["moment"], state["count"] = p.float(), torch.zeros_like(p).float(), 0
                state["count"] += 1
                state["moment"].lerp_(p.grad.float(), 0.1)
                state["master"].sub_(state["moment"], alpha=group["lr"])
                p.copy_(state["master"])


def test_moments_keep_their_dtype(root: Root) -> None:
    model = model_of(torch.bfloat16)
    optimizer = OwnAdam(model.parameters())
    train(model, optimizer, 0, 3)
    other = model_of(torch.bfloat16, seed=1)
    resumed = OwnAdam(other.parameters())
    root.move({"m": model, "o": optimizer}, {"m": other, "o": resumed})
    assert {s["moment"].dtype for s in resumed.state.values()} == {torch.float32}
    train(model, optimizer, 3, 6)
    train(other, resumed, 3, 6)
    assert same(params(other), params(model))
    assert same(state_of(resumed), state_of(optimizer))


@pytest.mark.parametrize("make", [optim.AdamW, optim.Adafactor, OwnAdam], ids=lambda make: make.__name__)
def test_moments_are_cast_with_their_parameters(root: Root, make: Any) -> None:
    """As torch's own load does it, whose optimizers cannot step otherwise; of other classes they are left alone."""
    model, other = model_of(), model_of(torch.bfloat16)
    optimizer, resumed = make(model.parameters()), make(other.parameters())
    train(model, optimizer, 0, 3)
    train(other, resumed, 0, 1)
    for moments in resumed.state.values():
        moments.update({key: value.float() for key, value in moments.items() if isinstance(value, torch.Tensor)})
    root.move({"m": model, "o": optimizer}, {"m": other, "o": resumed}, cast=True)
    dtype = torch.float32 if make is OwnAdam else torch.bfloat16
    for state, saved in zip(resumed.state.values(), optimizer.state.values(), strict=True):
        whole = {key: value.to(dtype) for key, value in saved.items() if isinstance(value, torch.Tensor) and value.ndim}
        assert same({**saved, **whole}, state)
    train(other, resumed, 3, 4)


def test_the_history_of_lbfgs_is_cast_with_its_parameters(root: Root) -> None:
    """Lists of tensors, which it multiplies with gradients. As torch's own load has them."""
    model, other, reference = model_of(torch.float64), model_of(), model_of()
    optimizer = optim.LBFGS(model.parameters(), max_iter=4)
    train(model, optimizer, 0, 2)
    resumed, expected = optim.LBFGS(other.parameters(), max_iter=4), optim.LBFGS(reference.parameters(), max_iter=4)
    root.move({"m": model, "o": optimizer}, {"m": other, "o": resumed}, cast=True)
    reference.load_state_dict(model.state_dict())
    expected.load_state_dict(optimizer.state_dict())
    (found,), (wanted,) = resumed.state.values(), expected.state.values()
    assert found["old_dirs"]
    assert same([found[key] for key in ("old_dirs", "old_stps")], [wanted[key] for key in ("old_dirs", "old_stps")])
    train(other, resumed, 2, 4)
    train(reference, expected, 2, 4)
    assert same(params(other), params(reference))


class CountsInInts(optim.Adam):
    """Steps by itself, and counts so."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for p in self.param_groups[0]["params"]:
            state = self.state[p]
            state["step"] = state.get("step", 0) + 1


def test_numbers_of_a_class_of_its_own_stay_numbers(root: Root) -> None:
    model, other = model_of(), model_of()
    optimizer, resumed = CountsInInts(model.parameters()), CountsInInts(other.parameters())
    for _ in range(3):
        optimizer.step()
    root.move({"m": model, "o": optimizer}, {"m": other, "o": resumed})
    assert same(state_of(resumed), [{"step": 3}] * 4)


class Counted(optim.Optimizer):
    """All parameters have one count of steps, made at the first step, which is counted up once."""

    def __init__(self, p: Any) -> None:
        super().__init__(p, {"lr": 0.1})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        with torch.enable_grad():
            closure()
        params = self.param_groups[0]["params"]
        count = self.state[params[0]].get("step", torch.zeros(()))
        count += 1
        for p in params:
            self.state[p]["step"] = self.state[p].get("step", count)
            p.sub_(p.grad, alpha=0.1 / float(self.state[p]["step"]))


@pytest.mark.parametrize("stepped", [False, True])
def test_state_that_parameters_share_stays_shared(root: Root, stepped: bool) -> None:
    model = model_of()
    optimizer = Counted(model.parameters())
    train(model, optimizer, 0, 3)
    others = [model_of(seed=seed) for seed in (1, 2)]
    resumed = [Counted(other.parameters()) for other in others]
    if stepped:
        for other, own in zip(others, resumed, strict=True):
            train(other, own, 5, 6)
    root.save({"m": model, "o": optimizer})
    root.load(
        {"m": others[0], "o": resumed[0], "also": {"m": others[1], "o": resumed[1]}},
        map={"also/m": "m", "also/o": "o"},
    )
    train(model, optimizer, 3, 6)
    for other, own in zip(others, resumed, strict=True):
        train(other, own, 3, 6)
        assert same(params(other), params(model))
        assert len({id(state["step"]) for state in own.state.values()}) == 1
    assert resumed[0].state[next(others[0].parameters())] is not resumed[1].state[next(others[1].parameters())]


def test_foreign_state_is_kept(root: Root) -> None:
    def content() -> dict[str, object]:
        return {
            "state1": torch.randint(0, 256, (17,), dtype=torch.uint8),
            "absmax1": torch.rand(2),
            "qmap": torch.rand(256),
            "list": [torch.rand(2), None, {"a": torch.rand(1), "b/c": (1, torch.rand(()))}],
            "dict": {},
            "none": None,
            "text": "x",
            "count/all": 3,
            "step": torch.tensor(4.0),
            "block": torch.rand(7, 5).t(),
        }

    model, other = model_of(), model_of()
    optimizer, resumed = optim.SGD(model.parameters()), optim.SGD(other.parameters())
    for p in model.parameters():
        optimizer.state[p] = content()
    root.move({"m": model, "o": optimizer}, {"m": other, "o": resumed})
    assert same(state_of(resumed), state_of(optimizer))


def test_state_that_the_checkpoint_lacks_is_emptied(root: Root) -> None:
    """Else a run that goes back to before its first step would keep the moments of its future."""
    model, fresh = model_of(), model_of()
    optimizer = optim.Adam(model.parameters())
    root.save({"m": model, "o": optimizer})
    train(model, optimizer, 0, 3)
    root.load({"m": model, "o": optimizer})
    assert all(not state for state in state_of(optimizer))
    train(model, optimizer, 0, 3)
    train(fresh, optim.Adam(fresh.parameters()), 0, 3)
    assert same(params(model), params(fresh))


# -- names


@pytest.mark.parametrize("named", [True, False], ids=["named", "by position"])
def test_optimizers_without_their_module(root: Root, named: bool) -> None:
    def make(model: nn.Module) -> optim.Optimizer:
        return optim.Adam(model.named_parameters() if named else model.parameters(), lr=0.1)

    model, other = model_of(), model_of()
    optimizer, resumed = make(model), make(other)
    train(model, optimizer, 0, 3)
    root.move({"o": optimizer}, {"o": resumed})
    assert same(state_of(resumed), state_of(optimizer))
    _, layout = root.saved()
    first = "o/0.weight" if named else "o/@0.0"
    assert f"{first}/exp_avg" in layout.index


def test_a_group_that_was_added_in_mid_training_is_told(root: Root) -> None:
    model = model_of()
    first, *others = model.parameters()
    grown = optim.Adam([first])
    grown.add_param_group({"params": others, "lr": 0.5})
    train(model, grown, 0, 1)
    root.save({"m": model, "o": grown})
    with pytest.raises(StateMismatch, match=r"o/m/2\.bias: not in the state: the saved .* add_param_group\(\)"):
        root.load({"m": model, "o": optim.Adam([first])})
    excused = root.load({"m": model, "o": optim.Adam([first])}, optional=["o/m/0.bias", "o/m/2.*"])
    assert excused.unexpected == ("o/m/0.bias", "o/m/2.bias", "o/m/2.weight")
    root.load({"o": optim.Adam([first])}, strict=False)


def test_a_parameter_that_one_side_lacks_is_named(root: Root) -> None:
    model = model_of()
    p = list(model.named_parameters())
    whole = optim.Adam(p)
    train(model, whole, 0, 1)
    root.save({"o": whole})
    with pytest.raises(StateMismatch, match=r"o/2\.bias: not in the state"):
        root.load({"o": optim.Adam(p[:3])})
    assert root.load({"o": optim.Adam(p[:3])}, strict=False).unexpected == ("o/2.bias",)
    root.save({"o": optim.Adam(p[:3])})
    with pytest.raises(StateMismatch, match=r"o/2\.bias: not in the checkpoint"):
        root.load({"o": whole})


def test_an_optimizer_of_another_kind_is_told(root: Root) -> None:
    """It would go on without a momentum, and with the other's learning rate."""
    model = model_of()
    adam = optim.AdamW(model.parameters(), lr=0.5)
    train(model, adam, 0, 2)
    root.save({"o": adam})
    sgd = optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    with pytest.raises(StateMismatch, match=r"(?s)@group.0/momentum: not in the ch.*@group.0/betas: not in the state"):
        root.load({"o": sgd})
    assert (sgd.param_groups[0]["lr"], dict(sgd.state)) == (0.1, {})
    report = root.load({"o": sgd}, strict=False)
    assert "o/@group.0/momentum" in report.missing
    assert "o/@group.0/betas" in report.unexpected


def test_names_given_twice_are_refused(root: Root) -> None:
    one, two = nn.Linear(2, 2), nn.Linear(2, 2)
    optimizer = optim.SGD([{"params": one.named_parameters()}, {"params": two.named_parameters(), "lr": 0.2}], lr=0.1)
    with pytest.raises(UnsupportedState, match="two parameters of this SGD have the name 'weight'"):
        root.save({"o": optimizer})
    root.save({"one": one, "two": two, "o": optimizer})
    root.load({"one": one, "two": two, "o": optimizer})
    assert [group["lr"] for group in optimizer.param_groups] == [0.1, 0.2]
    with pytest.raises(UnsupportedState, match="two parameters of this SGD have the name 'weight'"):
        root.load({"o": optimizer})


def test_names_of_other_parameters_than_a_group_has(root: Root) -> None:
    """One was put into the group by hand since the names were given."""
    model = model_of()
    first, *others = model.parameters()
    optimizer = optim.SGD([*model.named_parameters()][:1], lr=0.1)
    optimizer.param_groups[0]["params"] += others
    root.save({"o": optimizer, "m": model})
    root.load({"o": optimizer, "m": model})
    assert optimizer.param_groups[0]["params"][0] is first


def test_two_optimizers_of_one_model(root: Root) -> None:
    model, other = model_of(), model_of(seed=1)
    p, q = list(model.parameters()), list(other.parameters())
    state = {"m": model, "os": [optim.SGD(p[:2], momentum=0.9), optim.Adam(p[2:])]}
    target = {"m": other, "os": [optim.SGD(q[:2]), optim.Adam(q[2:])]}
    for optimizer in state["os"]:  # type: ignore[attr-defined]
        train(model, optimizer, 0, 2)
    root.move(state, target)
    for mine, theirs in zip(state["os"], target["os"], strict=True):  # type: ignore[call-overload]
        assert same(state_of(theirs), state_of(mine))
        assert same(options_of(theirs), options_of(mine))


# -- kinds

KINDS = [kind for kind in OPTIMIZERS if kind in ("SGD momentum", "AdamW amsgrad") or " " not in kind]
SAME = {frozenset({"Adam", "AdamW"}), frozenset({"Adam", "AdamW amsgrad"}), frozenset({"AdamW", "AdamW amsgrad"})} | {
    frozenset({"SGD", "SGD momentum"})
}
"""Pairs of which each goes on with what the other kept, hyper-parameters included, as the other would have."""


@pytest.fixture(scope="module")
def saved_by_kind(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Root, dict[str, int]]]:
    with opened(tmp_path_factory.mktemp("kinds")) as root:
        steps = {}
        for kind, make in OPTIMIZERS.items():
            if kind in KINDS:
                model = model_of()
                optimizer = make(list(model.parameters()))
                train(model, optimizer, 0, 2)
                steps[kind] = root.save({"m": model, "o": optimizer})
        yield root, steps


@pytest.mark.parametrize("kind", [pytest.param(k, marks=adamw_is_adam) if k == "Adam" else k for k in KINDS])
@pytest.mark.parametrize("stepped", [False, True], ids=["fresh", "used"])
def test_every_kind_into_every_other(saved_by_kind: tuple[Root, dict[str, int]], kind: str, stepped: bool) -> None:
    """Refused by name, or it goes on as the saved one would have; never a step that fails, or begins anew unsaid."""
    root, steps = saved_by_kind
    for other, step in steps.items():
        model = model_of(seed=1)
        optimizer = OPTIMIZERS[kind](list(model.parameters()))
        if stepped:
            train(model, optimizer, 50, 52)
        root.step = step
        if other != kind and frozenset({kind, other}) not in SAME:
            before = _cloned((state_of(optimizer), options_of(optimizer)))
            with pytest.raises(StateMismatch, match=r"not in the checkpoint|not in the state|means nothing to"):
                root.load({"m": model, "o": optimizer})
            assert same((state_of(optimizer), options_of(optimizer)), before), (kind, other)
            report = root.load({"m": model, "o": optimizer}, strict=False)
            assert report.missing or report.unexpected
            train(model, optimizer, 2, 4)
            assert all(p.isfinite().all() for p in params(model)), (kind, other)
            continue
        root.load({"m": model, "o": optimizer})
        train(model, optimizer, 2, 4)
        reference = model_of()
        uninterrupted = OPTIMIZERS[other](list(reference.parameters()))
        train(reference, uninterrupted, 0, 4)
        assert same(params(model), params(reference)), (kind, other)
