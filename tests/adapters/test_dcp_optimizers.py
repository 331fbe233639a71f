"""Optimizers that were saved as they are, loaded by `ckptlib.dcp` into what `get_state_dict` gives."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from helpers.registry import close_sessions
from torch import nn
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_optimizer_state_dict, set_optimizer_state_dict

import ckptlib
from ckptlib import dcp

State = dict[str, Any]
FORMS = {"nested": StateDictOptions(), "flat": StateDictOptions(flatten_optimizer_state_dict=True)}


@pytest.fixture(autouse=True)
def _sessions_close() -> Iterator[None]:
    yield
    close_sessions()


def trained(seed: int, named: bool = False) -> tuple[nn.Module, torch.optim.Optimizer]:
    """Its groups are not in the order of the module's parameters."""
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(4, 6), nn.Linear(6, 2))
    params: list[Any] = list(model.named_parameters() if named else model.parameters())
    groups = [{"params": params[2:], "lr": 0.5 / seed}, {"params": params[:2], "lr": 0.25 / seed}]
    optim = torch.optim.AdamW(groups)
    for _ in range(seed):
        model(torch.randn(8, 4)).square().sum().backward()
        optim.step()
        optim.zero_grad()
    return model, optim


def told(optim: torch.optim.Optimizer) -> list[Any]:
    """What an optimizer would do next: by position of its parameters."""
    state = optim.state_dict()
    options = [[group["lr"], group["betas"], group["params"]] for group in state["param_groups"]]
    return [*options, {i: {k: v.tolist() for k, v in entry.items()} for i, entry in state["state"].items()}]


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("saved_as", ["object", "nested in another", "state_dict() with names"])
def test_loads_by_names(tmp_path: Path, form: str, saved_as: str) -> None:
    model, optim = trained(1, named=saved_as.endswith("names"))
    state: State = {"model": model, "optim": optim}
    if saved_as.endswith("names"):
        state = {"model": model.state_dict(), "optim": optim.state_dict()}
    inside = saved_as == "nested in another"
    dcp.save({"app": state} if inside else state, checkpoint_id=tmp_path / "step-1")
    other_model, other = trained(2)
    found = get_optimizer_state_dict(other_model, other, options=FORMS[form])
    target: State = {"optim": found, "model": other_model.state_dict()}
    dcp.load({"app": target} if inside else target, checkpoint_id=tmp_path / "step-1")
    set_optimizer_state_dict(other_model, other, found, options=FORMS[form])
    assert told(other) == told(optim)
    assert told(optim) != told(trained(2)[1])
    assert other_model[1].weight.equal(model[1].weight)  # type: ignore[index]


def test_without_names_the_error_says_what_to_do(tmp_path: Path) -> None:
    _, optim = trained(1)
    dcp.save({"optim": optim.state_dict()}, checkpoint_id=tmp_path / "step-1")
    other_model, other = trained(2)
    state: State = {"optim": get_optimizer_state_dict(other_model, other)}
    with pytest.raises(ckptlib.StateMismatch, match=r"by position alone.*optimizer\.load_state_dict\(\)"):
        dcp.load(state, checkpoint_id=tmp_path / "step-1")
    state = {"optim": other.state_dict()}  # as the error says
    dcp.load(state, checkpoint_id=tmp_path / "step-1")
    other.load_state_dict(state["optim"])
    assert told(other) == told(optim)


def test_an_optimizer_without_its_module_has_no_names(tmp_path: Path) -> None:
    _, optim = trained(1)
    dcp.save({"optim": optim}, checkpoint_id=tmp_path / "step-1")
    model, other = trained(2)
    with pytest.raises(ckptlib.StateMismatch, match="by position alone"):
        dcp.load({"optim": get_optimizer_state_dict(model, other)}, checkpoint_id=tmp_path / "step-1")


def test_parameters_that_were_not_there(tmp_path: Path) -> None:
    model, optim = trained(1)
    dcp.save({"model": model, "optim": optim}, checkpoint_id=tmp_path / "step-1")
    other_model, other = trained(2)
    found = get_optimizer_state_dict(other_model, other)
    found["state"]["2.weight"] = {"exp_avg": torch.full((2,), 7.0)}
    with pytest.raises(ckptlib.StateMismatch, match=r"lacks optim/state/2\.weight/exp_avg"):
        dcp.load({"optim": found}, checkpoint_id=tmp_path / "step-1")
    partial = DefaultLoadPlanner(allow_partial_load=True)
    dcp.load({"optim": found}, checkpoint_id=tmp_path / "step-1", planner=partial)
    assert found["state"]["2.weight"]["exp_avg"].tolist() == [7, 7]
    assert found["state"]["1.bias"]["exp_avg"].equal(optim.state[model[1].bias]["exp_avg"])  # type: ignore[index]


def test_groups_that_were_others(tmp_path: Path) -> None:
    """One group here, of parameters that were in two with different learning rates."""
    model, optim = trained(1)
    dcp.save({"model": model, "optim": optim}, checkpoint_id=tmp_path / "step-1")
    other_model, _ = trained(2)
    other = torch.optim.AdamW(other_model.parameters())
    with pytest.raises(ckptlib.StateMismatch, match="several groups, with different lr"):
        dcp.load({"optim": get_optimizer_state_dict(other_model, other)}, checkpoint_id=tmp_path / "step-1")


@pytest.mark.parametrize("other", [np.array([1.0, 3.0]), 0.5], ids=["array", "number"])
def test_options_that_are_no_equals_of_themselves(tmp_path: Path, other: object) -> None:
    """What is the same in two groups may be that of one; what is not is refused by name."""
    model = nn.Linear(3, 2)
    odd = {"a": math.nan, "b": np.array([1.0, 2.0]), "c": {"d": math.nan}}
    optim = torch.optim.SGD([{"params": [p], "lr": 0.5, **odd} for p in model.parameters()])
    dcp.save({"model": model, "optim": optim}, checkpoint_id=tmp_path / "step-1")
    optim.param_groups[1]["b"] = other
    dcp.save({"model": model, "optim": optim}, checkpoint_id=tmp_path / "step-2")
    one = torch.optim.SGD([{"params": [*model.parameters()], "lr": 0.1, **dict.fromkeys(odd, 0.0)}])
    found = {"optim": get_optimizer_state_dict(model, one)}
    dcp.load(found, checkpoint_id=tmp_path / "step-1")
    (group,) = found["optim"]["param_groups"]
    assert (group["lr"], str(group["a"]), group["b"].tolist(), str(group["c"])) == (0.5, "nan", [1, 2], "{'d': nan}")
    with pytest.raises(ckptlib.StateMismatch, match="several groups, with different b"):
        dcp.load(found, checkpoint_id=tmp_path / "step-2")


TENSORS: dict[str, Callable[[float], State]] = {
    "lr": lambda at: {"lr": torch.tensor(at)},
    "betas": lambda at: {"betas": (torch.tensor(at), torch.tensor(0.97))},
}


def with_tensors(option: str, at: float, seed: int) -> tuple[nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(seed)
    model = nn.Linear(3, 2)
    optim = torch.optim.AdamW(model.parameters(), foreach=False, **TENSORS[option](at))
    model(torch.ones(3)).sum().backward()
    optim.step()
    return model, optim


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("option", TENSORS)
def test_options_that_are_tensors(tmp_path: Path, form: str, option: str) -> None:
    model, optim = with_tensors(option, 0.5, 1)
    dcp.save({"model": model, "optim": optim}, checkpoint_id=tmp_path / "step-1")
    other_model, other = with_tensors(option, 0.25, 2)
    found = get_optimizer_state_dict(other_model, other, options=FORMS[form])
    dcp.load({"optim": found, "model": other_model.state_dict()}, checkpoint_id=tmp_path / "step-1")
    set_optimizer_state_dict(other_model, other, found, options=FORMS[form])
    given = other.param_groups[0][option]
    assert (given if option == "lr" else given[0]).tolist() == 0.5
    assert told(other) == told(optim)
    for each in (optim, other):
        each.step()
    assert all(a.equal(b) for a, b in zip(model.parameters(), other_model.parameters(), strict=True))


@pytest.mark.parametrize("option", TENSORS)
def test_groups_with_other_tensors(tmp_path: Path, option: str) -> None:
    model, other_model = nn.Linear(3, 2), nn.Linear(3, 2)
    groups = [{"params": [p], **TENSORS[option](at)} for p, at in zip(model.parameters(), (0.5, 0.25), strict=True)]
    dcp.save({"model": model, "optim": torch.optim.AdamW(groups, foreach=False)}, checkpoint_id=tmp_path / "step-1")
    other = torch.optim.AdamW(other_model.parameters(), foreach=False, **TENSORS[option](0.5))
    with pytest.raises(ckptlib.StateMismatch, match=f"several groups, with different {option}"):
        dcp.load({"optim": get_optimizer_state_dict(other_model, other)}, checkpoint_id=tmp_path / "step-1")


def test_a_tensor_where_the_state_dict_has_a_number(tmp_path: Path) -> None:
    model, optim = with_tensors("lr", 0.5, 1)
    dcp.save({"model": model, "optim": optim}, checkpoint_id=tmp_path / "step-1")
    other = torch.optim.AdamW(model.parameters())
    with pytest.raises(ckptlib.StateMismatch, match="optim/param_groups/0/lr: is a plain value in the state dict"):
        dcp.load({"optim": get_optimizer_state_dict(model, other)}, checkpoint_id=tmp_path / "step-1")


def test_dtypes_are_converted_if_asked(tmp_path: Path) -> None:
    dcp.save({"w": torch.full((3,), 1.5)}, checkpoint_id=tmp_path / "step-1")
    state: State = {"w": torch.zeros(3, dtype=torch.bfloat16)}
    with pytest.raises(ckptlib.StateMismatch, match="bfloat16"):
        dcp.load(state, checkpoint_id=tmp_path / "step-1")
    dcp.load(state, checkpoint_id=tmp_path / "step-1", cast=True)
    assert state["w"].tolist() == [1.5] * 3
    assert state["w"].dtype == torch.bfloat16


def test_lists_of_version_0_2(tmp_path: Path) -> None:
    """They were kept in a dict."""

    class Old:
        def state_dict(self) -> State:
            return {"value": [0.5, 0.25]}

        def load_state_dict(self, state: State) -> None:
            raise AssertionError

    model, optim = trained(1, named=True)
    raw = optim.state_dict()
    old = Old()
    old.state_dict = lambda: {"value": raw["param_groups"]}  # type: ignore[method-assign]
    saved = {"losses": Old(), "optim": {"state": raw["state"], "param_groups": old}, "model": model.state_dict()}
    ckptlib.save(tmp_path / "step", saved, 1)
    other_model, other = trained(2)
    state: State = {"losses": [], "optim": get_optimizer_state_dict(other_model, other)}
    dcp.load(state, checkpoint_id=tmp_path / "step-1")
    assert state["losses"] == [0.5, 0.25]
    set_optimizer_state_dict(other_model, other, state["optim"])
    assert told(other) == told(optim)
