"""Dicts of many tensors, which are asked about together. The oracle is a pass without a memo that asks one by one."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from test_memo import seen, where
from torch import nn

from ckptlib import PerRank, Sharded, UnsupportedState
from ckptlib.state import flatten as module
from ckptlib.state.collector import Flat
from ckptlib.state.flatten import SECTION_FROM, flatten
from ckptlib.state.memo import Memo

State = dict[str, Any]


@pytest.fixture
def one_by_one(monkeypatch: pytest.MonkeyPatch) -> Callable[[State], Flat]:
    def apply(state: State) -> Flat:
        with monkeypatch.context() as patch:
            patch.setattr(module, "SECTION_FROM", 1 << 30)
            return flatten(state)

    return apply


def make_state() -> State:
    many = {f"w{i}": torch.full((i % 3, 2), float(i)) for i in range(SECTION_FROM + 4)}
    params = {f"p/{i}%": nn.Parameter(torch.ones(2)) for i in range(SECTION_FROM)}
    model = nn.Linear(3, 3)
    optimizer = torch.optim.SGD([*params.values(), *model.parameters()], momentum=0.9)
    for p in (*params.values(), *model.parameters()):
        p.grad = torch.ones_like(p)
    optimizer.step()
    return {"first": torch.ones(3), "many": many, "params": params, "m": model, "o": optimizer, "n": {"x": 1}}


def rename(state: State) -> None:
    many = state["many"]
    state["many"] = {"other" if key == "w3" else key: value for key, value in many.items()}


def swap(state: State) -> None:
    many = state["many"]
    many["w4"], many["w7"] = many["w7"], many["w4"]


def grow(state: State) -> None:
    state["many"]["w4"].resize_(3, 2)


CHANGES: dict[str, Callable[[State], object]] = {
    "nothing": lambda s: None,
    "a tensor replaced": lambda s: s["many"].update(w1=torch.zeros(1, 2)),
    "memory": lambda s: setattr(s["many"]["w1"], "data", torch.zeros(1, 2)),
    "dtype": lambda s: setattr(s["many"]["w1"], "data", s["many"]["w1"].data.view(torch.int32)),
    "resized": grow,
    "an entry added": lambda s: s["many"].update(new=torch.ones(5)),
    "a number added": lambda s: s["many"].update(new=5),
    "an entry removed": lambda s: s["many"].pop("w5"),
    "most removed": lambda s: s.update(many={"w1": s["many"]["w1"]}),
    "an entry renamed": rename,
    "entries swapped": swap,
    "another order": lambda s: s["many"].update(w0=s["many"].pop("w0")),
    "tied inside": lambda s: s["many"].update(w1=s["many"]["w4"]),
    "tied to what stands before": lambda s: s["many"].update(w1=s["first"]),
    "tied to a module": lambda s: s["many"].update(w1=s["m"].weight),
    "tied to another dict": lambda s: s["many"].update(w1=s["params"]["p/3%"]),
    "per rank": lambda s: s.update(many=PerRank(s["many"])),
    "one per rank": lambda s: s["many"].update(w1=PerRank(s["many"]["w1"])),
    "one cut by hand": lambda s: s["many"].update(w1=Sharded(s["many"]["w1"], (1, 0), (4, 2))),
    "a module in its place": lambda s: s.update(many=nn.Linear(2, 2)),
    "another path": lambda s: s.update(more=s.pop("many")),
    "no optimizer": lambda s: s.pop("o"),
    "another optimizer": lambda s: s.update(o=torch.optim.SGD(list(s["params"].values()))),
    "numbers for keys": lambda s: s.update(many=dict(enumerate(s["many"].values()))),
    "gone": lambda s: s.pop("many"),
}


@pytest.mark.parametrize("change", CHANGES)
def test_a_change_is_seen_by_the_next_pass(change: str, one_by_one: Callable[[State], Flat]) -> None:
    state, memo = make_state(), Memo()
    before = flatten(state, memo).leaves
    assert seen(flatten(state, memo)) == seen(one_by_one(state))
    assert flatten(state, memo).leaves == before
    places = {id(leaf): where(leaf) for leaf in before}
    CHANGES[change](state)
    changed = flatten(state, memo)
    assert seen(changed) == seen(one_by_one(state))
    assert [leaf.name for leaf in changed.leaves] == [leaf.name for leaf in one_by_one(state).leaves]
    assert all(where(leaf) == places.get(id(leaf), where(leaf)) for leaf in changed.leaves)


@pytest.mark.parametrize("change", [c for c in CHANGES if c != "nothing"])
def test_the_changes_are_changes(change: str) -> None:
    """Or the test above would prove nothing."""
    state = make_state()
    before = [(leaf.name, leaf.owner, leaf.dtype, where(leaf), leaf.held) for leaf in flatten(state).leaves]
    CHANGES[change](state)
    after = flatten(state)
    assert before != [(leaf.name, leaf.owner, leaf.dtype, where(leaf), leaf.held) for leaf in after.leaves] or (
        change == "a number added" and "many/new" in after.values
    )


def test_keys_that_are_equal_and_not_the_same_text_are_other_names() -> None:
    tensors = [torch.full((1,), float(i)) for i in range(SECTION_FROM + 2)]
    memo = Memo()
    names = [leaf.name for leaf in flatten({"d": dict(enumerate(tensors))}, memo).leaves]
    assert names[1] == "d/1"
    other = dict(zip((0, True, *range(2, len(tensors))), tensors, strict=True))
    assert flatten({"d": other}, memo).leaves[1].name == "d/True"


def test_a_name_that_stands_twice_is_refused() -> None:
    state, memo = make_state(), Memo()
    flatten(state, memo)
    with pytest.raises(UnsupportedState, match="two entries of the state have the same name"):
        flatten({**state, "": {"many": {"w1": torch.ones(1)}}}, memo)


@pytest.mark.parametrize("bad", [torch.ones(2, 2).to_sparse(), torch.ones(2, device="meta")], ids=["sparse", "meta"])
def test_what_cannot_be_saved_is_refused_by_name(bad: torch.Tensor) -> None:
    state, memo = make_state(), Memo()
    flatten(state, memo)
    state["many"]["w7"] = bad
    for _ in range(2):
        with pytest.raises(UnsupportedState, match="many/w7: "):
            flatten(state, memo)


def test_what_is_the_same_is_taken_as_it_was_found() -> None:
    state, memo = make_state(), Memo()
    flatten(state, memo)
    sections = dict(memo.sections)
    assert {("many", False), ("params", False)} <= sections.keys()
    state["n"] = copy.copy(state["n"])
    flatten(state, memo)
    assert memo.sections == sections
