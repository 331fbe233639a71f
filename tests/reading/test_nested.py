"""`ckptlib.read`: a step as dicts, nested as it was saved."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from launch import fork_ranks
from onerank import Holder, Root, opened, same, same_modules
from places import DATA
from torch import nn

import ckptlib


@pytest.fixture
def root(tmp_path: Path) -> Iterator[Root]:
    with opened(tmp_path) as made:
        yield made


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
    fork_ranks("own_kinds.py", 2, tmp_path, 120, *cases, timeout_s=120)
    verdicts = {path.name: path.read_text() for path in tmp_path.glob("*.rank?")}
    assert len(verdicts) == 2 * len(cases)
    assert {*verdicts.values()} == {"ok"}, verdicts
