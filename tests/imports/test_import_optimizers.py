"""Optimizers of which torch.save's files have more than a tensor for each parameter."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from sources import assert_same_state, same
from torch import nn

import ckptlib


class OfTheUsers(torch.optim.Optimizer):
    """Takes whatever state it is given."""


def test_an_optimizer_whose_group_has_a_tuple_of_tensors(tmp_path: Path) -> None:
    param = nn.Parameter(torch.ones(3))
    optimizer = torch.optim.Adam([param], betas=(torch.tensor(0.8), torch.tensor(0.97)))
    param.grad = torch.ones(3)
    optimizer.step()
    torch.save({"w": param.detach(), "optimizer": optimizer.state_dict()}, tmp_path / "betas.pt")
    ckptlib.convert(tmp_path / "betas.pt", tmp_path / "root", params={"optimizer": ["w"]})
    other = nn.Parameter(torch.zeros(3))
    fresh = torch.optim.Adam([other], betas=(torch.tensor(0.5), torch.tensor(0.5)))
    ckptlib.load(tmp_path / "root", {"w": other, "optimizer": fresh})
    assert_same_state(optimizer.state[param], fresh.state[other])
    found = fresh.param_groups[0]["betas"]
    assert type(found) is tuple
    for a, b in zip(optimizer.param_groups[0]["betas"], found, strict=True):
        assert same(a, b)


class OwnAdam(torch.optim.Adam):
    """Steps as torch's does."""


COUNTING = {
    "Adam": torch.optim.Adam,
    "of the user's": OwnAdam,
    "AdamW": torch.optim.AdamW,
    "AdamW fused": lambda params: torch.optim.AdamW(params, fused=True),
    "NAdam": torch.optim.NAdam,
    "ASGD": torch.optim.ASGD,
}


@pytest.mark.parametrize("make", COUNTING.values(), ids=COUNTING)
def test_scalars_that_are_numbers_become_tensors(
    tmp_path: Path, make: Callable[[list[nn.Parameter]], torch.optim.Optimizer]
) -> None:
    """As torch before 1.12 kept them, and DeepSpeed's optimizers do; the next step fails with a number."""
    param, other = nn.Parameter(torch.ones(3)), nn.Parameter(torch.zeros(3))
    optimizer, fresh = make([param]), make([other])
    param.grad = other.grad = torch.ones(3)
    optimizer.step()
    state = optimizer.state_dict()
    numbers = {key: value if value.ndim else value.item() for key, value in state["state"][0].items()}
    kept = {**numbers, "step": int(numbers["step"])}
    torch.save({"w": param.detach(), "optimizer": {**state, "state": {0: kept}}}, tmp_path / "old.pt")
    ckptlib.convert(tmp_path / "old.pt", tmp_path / "root", params={"optimizer": ["w"]})
    ckptlib.load(tmp_path / "root", {"w": other, "optimizer": fresh})
    assert_same_state(optimizer.state[param], fresh.state[other])
    optimizer.step()
    fresh.step()
    assert same(param, other)


def test_a_list_in_an_optimizers_state_that_is_left_out(tmp_path: Path) -> None:
    """Nothing of it comes, so that a load does not look for its tensors."""
    state = {0: {"factors": [torch.ones(2), torch.zeros(2)], "m": torch.ones(3)}}
    optimizer = {"state": state, "param_groups": [{"lr": 0.1, "params": [0]}]}
    torch.save({"w": torch.zeros(3), "optimizer": optimizer}, tmp_path / "list.pt")
    name = "optimizer/w/factors"
    report = ckptlib.convert(tmp_path / "list.pt", tmp_path / "root", skip=name, params={"optimizer": ["w"]})
    assert (report.left_out, report.tensors) == ((name,), 2)
    param = nn.Parameter(torch.ones(3))
    fresh = OfTheUsers([param], {"lr": 0.5})
    ckptlib.load(tmp_path / "root", {"w": param, "optimizer": fresh})
    assert_same_state({"m": torch.ones(3)}, fresh.state[param])


def test_the_same_import_with_other_names_of_parameters(tmp_path: Path) -> None:
    """No moments tell them apart yet: which group each is in is all that differs."""
    params = [nn.Parameter(torch.ones(2)), nn.Parameter(torch.zeros(2))]
    optimizer = torch.optim.SGD([{"params": params[:1], "lr": 0.5}, {"params": params[1:]}], lr=0.1)
    torch.save({"a": params[0].data, "b": params[1].data, "optimizer": optimizer.state_dict()}, tmp_path / "sgd.pt")
    ckptlib.convert(tmp_path / "sgd.pt", tmp_path / "root", params={"optimizer": ["b", "a"]})
    with pytest.raises(ckptlib.CorruptData, match=r"which parameters an optimizer has.*Import into a new root"):
        ckptlib.convert(tmp_path / "sgd.pt", tmp_path / "root", params={"optimizer": ["a", "b"]})
    ckptlib.convert(tmp_path / "sgd.pt", tmp_path / "root", params={"optimizer": ["b", "a"]})


def test_the_same_import_of_less(tmp_path: Path) -> None:
    torch.save({"a": torch.ones(2), "b": torch.zeros(2)}, tmp_path / "two.pt")
    ckptlib.convert(tmp_path / "two.pt", tmp_path / "root")
    with pytest.raises(ckptlib.CorruptData, match="b: step 0 is not what the source has now"):
        ckptlib.convert(tmp_path / "two.pt", tmp_path / "root", skip="model/b")


@pytest.mark.parametrize("imported", [True, False], ids=["convert", "init_from"])
def test_parameters_that_have_no_names_in_the_source(tmp_path: Path, imported: bool) -> None:
    """More of them than an error tells of: it says why none is found, and what to do."""
    layers = nn.Sequential(*[nn.Linear(1, 1) for _ in range(25)])
    optimizer = torch.optim.Adam(layers.parameters())
    torch.save({"model": layers.state_dict(), "optimizer": optimizer.state_dict()}, tmp_path / "it.pt")
    state = {"model": layers, "optimizer": optimizer}
    told = r"optimizer/model/0.weight: not in the checkpoint, .* by position alone, .* import it again with params="
    if imported:
        ckptlib.convert(tmp_path / "it.pt", tmp_path / "root")
        with pytest.raises(ckptlib.StateMismatch, match=told):
            ckptlib.load(tmp_path / "root", state)
        ckptlib.load(tmp_path / "root", {"optimizer": optimizer}, strict=False)  # as it says
        return
    with (
        ckptlib.Checkpointer(tmp_path / "root", state, every=9, init_from=tmp_path / "it.pt") as ckpt,
        pytest.raises(ckptlib.StateMismatch, match=told),
    ):
        ckpt.restore()


def test_one_parameter_without_a_name_is_not_all_of_them(tmp_path: Path) -> None:
    """Else one is told to load by position what has names."""
    ckptlib.save(tmp_path / "root", layers_and_a_scale(1), 1)
    with pytest.raises(ckptlib.StateMismatch, match=r"optimizer/model/1.weight: not in the checkpoint\n") as raised:
        ckptlib.load(tmp_path / "root", layers_and_a_scale(2))
    assert "by position" not in str(raised.value)


def layers_and_a_scale(num_layers: int) -> dict[str, object]:
    """The scale is in no module, so that nothing names it."""
    layers = nn.Sequential(*[nn.Linear(1, 1) for _ in range(num_layers)])
    return {"model": layers, "optimizer": torch.optim.Adam([*layers.parameters(), nn.Parameter(torch.ones(1))])}
