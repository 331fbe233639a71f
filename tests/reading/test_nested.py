"""`ckptlib.read`: a step as dicts, nested as it was saved."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers.verdicts import assert_cases_pass
from onerank import Holder, Root, same, same_modules
from places import DATA
from torch import nn

import ckptlib
from ckptlib.reading.nested import nested


def net() -> nn.Sequential:
    found = nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Linear(8, 4))
    found[2].bias = found[2].bias
    return found


def trained() -> tuple[nn.Sequential, torch.optim.Optimizer]:
    model = net()
    optim = torch.optim.AdamW([{"params": model[0].parameters(), "lr": 0.5}, {"params": model[2].parameters()}])
    model(torch.randn(3, 4)).sum().backward()
    optim.step()
    return model, optim


def test_everything_comes_back_as_it_was(root: Root) -> None:
    torch.manual_seed(0)
    model, optim = trained()
    held = {"a": [torch.ones(2), 5, (torch.zeros(3), "x")], 7: OrderedDict(b=torch.arange(3)), "a/b%": {"c": None}}
    state = {
        "model": model,
        "optim": optim,
        "holder": Holder(held),
        "plain holder": Holder({"k": [1, (2,)]}),
        "config": {"lr": 0.1, "betas": [0.9, (1, {2})], "a/b": {"c%2F": torch.tensor(3)}},
        "tensors": [torch.ones(1), torch.zeros(2)],
        "epoch": 3,
    }
    root.save(state)
    drawn = torch.get_rng_state()
    found = ckptlib.read(root.url)
    assert same(found["@rng"]["torch"], drawn)
    assert same(found["model"], dict(model.state_dict()))
    other = net()
    other.load_state_dict(found["model"])
    assert same_modules(model, other)
    assert same(found["holder"], held)
    assert found["plain holder"] == {"k": [1, (2,)]}
    assert same(found["config"], {"lr": 0.1, "betas": [0.9, (1, {2})], "a/b": {"c%2F": torch.tensor(3)}})
    assert same(found["tensors"], [torch.ones(1), torch.zeros(2)])
    assert found["epoch"] == 3
    assert found.keys() == {*state, "@rng"}


def test_an_optimizer_comes_back_by_names(root: Root) -> None:
    torch.manual_seed(0)
    model, optim = trained()
    root.save({"model": model, "optim": optim})
    found = ckptlib.read(root.url, only="optim")
    assert found.keys() == {"optim"}
    names = {param: f"model/{name}" for name, param in model.named_parameters()}
    assert same(found["optim"]["state"], {names[p]: dict(s) for p, s in optim.state.items()})
    expected = [{**g, "params": [names[p] for p in g["params"]]} for g in optim.param_groups]
    assert same(found["optim"]["param_groups"], expected)


def test_lists_and_tuples_of_tensors_in_an_optimizer(root: Root) -> None:
    torch.manual_seed(0)
    model = nn.Linear(3, 2)
    betas = torch.tensor(0.9), torch.tensor(0.99)
    adam = torch.optim.Adam(model.parameters(), lr=torch.tensor(0.1), betas=betas, foreach=False)
    lbfgs = torch.optim.LBFGS(model.parameters(), max_iter=4)

    def loss() -> torch.Tensor:
        lbfgs.zero_grad()
        found = model(torch.ones(1, 3)).pow(4).sum()  # is not at its end in a step or two, however sums are rounded
        found.backward()
        return found

    lbfgs.step(loss)  # type: ignore[no-untyped-call]
    loss()
    adam.step()
    root.save({"model": model, "adam": adam, "lbfgs": lbfgs})
    found = ckptlib.read(root.url)
    assert same(found["adam"]["param_groups"][0]["betas"], betas)
    assert same(found["adam"]["param_groups"][0]["lr"], torch.tensor(0.1))
    (expected,) = lbfgs.state.values()
    assert isinstance(expected["old_dirs"], list)
    assert len(expected["old_dirs"]) > 1
    assert same(found["lbfgs"]["state"]["model/weight"], dict(expected))


def test_a_part(root: Root) -> None:
    model, optim = trained()
    root.save(
        {
            "model": model,
            "optim": optim,
            "holder": Holder([torch.ones(2), 4]),
            "xs": [1, 2],
            "mixed": [1, torch.ones(1)],
        }
    )
    assert ckptlib.read(root.url, only="model/0.*").keys() == {"model"}
    assert ckptlib.read(root.url, only=["model/0.*", "mixed/1"])["model"].keys() == {"0.weight", "0.bias"}
    assert same(
        ckptlib.read(root.url, only=["mixed/0", "holder/0"]), {"mixed": {"0": 1}, "holder": {"0": torch.ones(2)}}
    )
    assert ckptlib.read(root.url, only=["xs"]) == {"xs": [1, 2]}
    exp_avg = ckptlib.read(root.url, only="optim/model/0.weight/exp_avg")
    assert same(exp_avg["optim"]["model"]["0.weight"]["exp_avg"], optim.state[model[0].weight]["exp_avg"])
    with pytest.raises(ckptlib.StateMismatch, match=r"'modle'.*at its top are @rng, holder, mixed, model, optim, xs"):
        ckptlib.read(root.url, only=["model", "modle"])


def test_tied_weights_are_one(root: Root) -> None:
    model = nn.Sequential(nn.Embedding(5, 3), nn.Linear(3, 5, bias=False))
    model[1].weight = model[0].weight
    root.save({"model": model})
    found = ckptlib.read(root.url)["model"]
    assert found["0.weight"] is found["1.weight"]


@pytest.mark.parametrize("name", ["written-by-0.1", "written-by-0.2"])
def test_of_two_ranks(name: str) -> None:
    found = ckptlib.read(DATA / name / "root", rank=1)
    assert found["mine"].tolist() == [1, 10]
    assert same(found["tied"], [torch.ones(3), torch.ones(3), [1, "two", 3.5]])
    assert found["optim"]["param_groups"][0]["lr"] == 0.01
    assert found["optim"]["state"].keys() == {*found["optim"]["param_groups"][0]["params"]}


def test_a_tensor_of_one_rank_where_another_has_a_value(tmp_path: Path) -> None:
    cases = (
        "test_read_gives_what_the_rank_had",
        "test_an_optimizer_of_each_rank_with_a_list_of_tensors",
        "test_an_export_for_dcp_has_the_tensors_of_rank_0",
    )
    assert_cases_pass("own_kinds.py", 2, tmp_path, len(cases), *cases)


class Name(str):
    """Counts what it is compared with."""

    __slots__ = ()
    looks = 0

    def startswith(self, head: Any, *within: Any) -> bool:
        Name.looks += len(head) if isinstance(head, tuple) else 1
        return super().startswith(head, *within)


class Optimizers:
    """A step with one for each parameter, as where the backward pass steps them."""

    step = 1

    def __init__(self, number: int) -> None:
        self.trees: dict[str, Any] = {Name(f"o/p{i}"): {"optimizer": {"groups": [[f"p{i}"]]}} for i in range(number)}
        self.values = {Name(f"{path}/@group.0"): {"lr": 0.1} for path in self.trees}

    def keys(self) -> list[str]:
        return sorted(Name(f"{path}/{path[2:]}/exp_avg") for path in self.trees)

    def groups(self, path: str) -> dict[str, int]:
        return {path[2:]: 0}

    def get_tensors(self, names: Sequence[str]) -> dict[str, Any]:
        return dict.fromkeys(names, 5)


def test_thousands_of_optimizers_do_not_look_at_one_anothers_names() -> None:
    found = nested(Optimizers(200))
    expected = {"state": {"p7": {"exp_avg": 5}}, "param_groups": [{"lr": 0.1, "params": ["p7"]}]}
    assert found["o"]["p7"] == expected
    assert Name.looks < 10 * 200
