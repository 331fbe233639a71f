"""What a pass takes from the one before: nothing that has changed since. The oracle is a pass without a memo."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from onerank import Holder
from torch import nn
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor, init_device_mesh

from ckptlib import PerRank, Sharded, UnsupportedState
from ckptlib.state import findings, visitor
from ckptlib.state.collector import Flat
from ckptlib.state.flatten import flatten
from ckptlib.state.leaf import Leaf
from ckptlib.state.memo import Fingerprint, Memo, Section

State = dict[str, Any]


class Buffers(nn.Module):
    """Two buffers beside a layer, and some state of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(3, 3)
        self.register_buffer("square", torch.arange(9.0).view(3, 3))
        self.register_buffer("complex", torch.ones(3, dtype=torch.complex64))
        self.calls = 0
        self.kept = torch.ones(2)

    def get_extra_state(self) -> object:
        self.calls += 1
        return {"calls": self.calls, "kept": self.kept}

    def set_extra_state(self, state: Any) -> None:
        self.kept = state["kept"]


def make_state() -> State:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4), Buffers())
    first, second, last = (list(module.parameters()) for module in model)
    optimizer = torch.optim.AdamW([{"params": first}, {"params": second, "lr": 0.5}])
    other = torch.optim.SGD(last, momentum=0.9)
    for p in model.parameters():
        p.grad = torch.randn_like(p)
    optimizer.step()
    other.step()
    return {"h": Holder({"n": 0}), "m": model, "o": optimizer, "p": other, "r": Holder(torch.arange(3))}


def where(leaf: Leaf) -> object:
    """All that a copy of a leaf depends upon."""
    return [(box, t.data_ptr(), t.shape, t.stride(), t.dtype, t.is_conj(), t.is_neg()) for box, t in leaf.pieces]


def seen(flat: Flat) -> object:
    """All that a snapshot depends upon."""
    leaves = {leaf.name: (leaf.dtype, leaf.shape, leaf.held, id(leaf.owner), where(leaf)) for leaf in flat.leaves}
    assert len(leaves) == len(flat.leaves)
    plain = {name: value for name, value in flat.values.items() if not name.endswith("calls")}
    return leaves, plain, flat.aliases, flat.objects, {path: id(o) for path, o in flat.optimizers.items()}


def weight(state: State) -> nn.Parameter:
    found: nn.Parameter = state["m"][0].weight
    return found


def entry(state: State) -> dict[str, Any]:
    found: dict[str, Any] = state["o"].state[weight(state)]
    return found


def replace_entry(state: State) -> None:
    entry(state)["exp_avg"] = entry(state)["exp_avg"].clone()


def rename_entry(state: State) -> None:
    entry(state)["exp_avg_2"] = entry(state).pop("exp_avg")


def swap_entries(state: State) -> None:
    moments = entry(state)
    moments["exp_avg"], moments["exp_avg_sq"] = moments["exp_avg_sq"], moments["exp_avg"]


def trade_kinds(state: State) -> None:
    """The same tensors in the same order, under the same keys, and a number in the place of one of them."""
    moments = entry(state)
    moments["step"], moments["count"] = 1, moments["step"]


def move_param(state: State) -> None:
    groups = state["o"].param_groups
    groups[1]["params"].insert(0, groups[0]["params"].pop())


def own_otherwise(state: State) -> None:
    """The second optimizer gets what the first one had, state and all."""
    one, other = state["o"], state["p"]
    other.add_param_group(one.param_groups.pop())
    for p in other.param_groups[-1]["params"]:
        other.state[p] = one.state.pop(p)


def new_optimizer(state: State) -> None:
    state["o"] = torch.optim.SGD([p for group in state["o"].param_groups for p in group["params"]])


def load_optimizer(state: State) -> None:
    state["o"].load_state_dict(copy.deepcopy(state["o"].state_dict()))


def another_parameter(state: State) -> None:
    state["m"][0].weight = nn.Parameter(torch.randn(4, 4))


@torch.no_grad()
def transpose(state: State) -> None:
    weight(state).t_()


def trade_state(state: State) -> None:
    """What the first parameter had is the second one's, and the other way round; both lie in the same order."""
    found = state["o"].state
    (p, first), (q, second), *rest = found.items()
    found.clear()
    found.update([(q, first), (p, second), *rest])


def resize(state: State) -> None:
    state["m"][2].square.resize_(2, 2)


def as_view(change: Callable[[torch.Tensor], torch.Tensor], name: str) -> Callable[[State], None]:
    def apply(state: State) -> None:
        buffer = getattr(state["m"][2], name)
        buffer.data = change(buffer.data)

    return apply


CHANGES: dict[str, Callable[[State], object]] = {
    "nothing": lambda s: None,
    "memory of a parameter": lambda s: setattr(weight(s), "data", torch.randn(4, 4)),
    "dtype of a parameter": lambda s: setattr(weight(s), "data", weight(s).data.view(torch.bfloat16)),
    "a parameter transposed": lambda s: setattr(weight(s), "data", weight(s).data.t()),
    "a parameter transposed in place": transpose,
    "a parameter cut": lambda s: setattr(weight(s), "data", weight(s).data[:2]),
    "requires_grad": lambda s: weight(s).requires_grad_(False),
    "another parameter": another_parameter,
    "another parameter in the same memory": lambda s: setattr(s["m"][0], "weight", nn.Parameter(weight(s).data)),
    "a module of another dtype": lambda s: s["m"].double(),
    "a module replaced": lambda s: s["m"].__setitem__(1, nn.Linear(4, 4)),
    "a module added": lambda s: s["m"].append(nn.Linear(2, 2)),
    "a module removed": lambda s: s["m"].__delitem__(1),
    "tied": lambda s: setattr(s["m"][1], "weight", weight(s)),
    "a buffer resized": resize,
    "a buffer conjugated": as_view(torch.conj, "complex"),
    "a buffer negated": as_view(lambda t: t._neg_view(), "square"),
    "per rank": lambda s: s.update(m=PerRank(s["m"])),
    "a path": lambda s: s.update(n=s.pop("m")),
    "a path of an optimizer": lambda s: s.update(q=s.pop("o")),
    "an entry replaced": replace_entry,
    "an entry with other memory": lambda s: setattr(entry(s)["exp_avg"], "data", torch.zeros(4, 4)),
    "an entry that grew": lambda s: setattr(entry(s)["step"], "data", torch.zeros(2)),
    "an entry added": lambda s: entry(s).update(max=torch.zeros(4, 4)),
    "a number added": lambda s: entry(s).update(count=5),
    "an entry removed": lambda s: entry(s).pop("exp_avg"),
    "an entry renamed": rename_entry,
    "entries swapped": swap_entries,
    "an entry that became a number": trade_kinds,
    "state removed": lambda s: s["o"].state.pop(weight(s)),
    "state cleared": lambda s: s["o"].state.clear(),
    "state traded between parameters": trade_state,
    "state loaded": load_optimizer,
    "a parameter in another group": move_param,
    "a group of another optimizer": own_otherwise,
    "a group added": lambda s: s["o"].add_param_group({"params": [nn.Parameter(torch.ones(2))]}),
    "a hyper-parameter": lambda s: s["o"].param_groups[0].update(lr=0.25),
    "a hyper-parameter that is a tensor": lambda s: s["o"].param_groups[0].update(lr=torch.tensor(0.25)),
    "hyper-parameters that hold tensors": lambda s: s["o"].param_groups[0].update(betas=(torch.ones(1), 0.9)),
    "another optimizer": new_optimizer,
    "an optimizer removed": lambda s: s.pop("o"),
    "an object that ties": lambda s: s.update(h=Holder({"w": weight(s)})),
    "an object that ties to state": lambda s: s.update(h=Holder({"w": entry(s)["exp_avg"]})),
    "an object that cuts": lambda s: s.update(h=Holder({"w": Sharded(weight(s), (4, 0), (8, 4))})),
    "a tensor of the user": lambda s: s.update(a=weight(s)),
}


@pytest.mark.parametrize("change", CHANGES)
def test_what_changes_between_two_passes_is_seen_by_the_second(change: str) -> None:
    state, memo = make_state(), Memo()
    before = flatten(state, memo).leaves
    places = {id(leaf): where(leaf) for leaf in before}
    CHANGES[change](state)
    changed = flatten(state, memo)
    assert seen(changed) == seen(flatten(state))
    # a leaf that is the same is copied from where it was
    assert all(where(leaf) == places.get(id(leaf), where(leaf)) for leaf in changed.leaves)


@pytest.mark.parametrize("change", [c for c in CHANGES if c not in ("nothing", "requires_grad")])
def test_the_changes_are_changes(change: str) -> None:
    """Or the test above would prove nothing."""
    state = make_state()
    before = seen(flatten(state))
    CHANGES[change](state)
    assert seen(flatten(state)) != before


def test_a_change_undone_is_seen_as_well() -> None:
    state, memo = make_state(), Memo()
    before, whole = seen(flatten(state, memo)), weight(state).data
    weight(state).data = whole[:2]
    flatten(state, memo)
    weight(state).data = whole
    assert seen(flatten(state, memo)) == before


@pytest.mark.parametrize("path", ["m", "o"])
def test_a_name_that_stands_twice_is_refused_at_every_pass(path: str) -> None:
    state, memo = make_state(), Memo()
    name = next(leaf.name for leaf in flatten(state, memo).leaves if leaf.name.startswith(f"{path}/"))
    # no path of nested dicts is that of an entry, unless a key is empty
    parts = name.split("/")
    clash: Any = torch.ones(1)
    for part in reversed(parts):
        clash = {part: clash}
    with pytest.raises(UnsupportedState, match="two entries of the state have the same name"):
        flatten({"": clash, **state}, memo)


def test_state_of_what_is_no_parameter_is_refused_at_every_pass() -> None:
    state, memo = make_state(), Memo()
    flatten(state, memo)
    state["o"].state["global"] = 5
    with pytest.raises(UnsupportedState, match="the optimizer keeps state under 'global'"):
        flatten(state, memo)


def test_a_module_that_is_gone_is_let_go_of() -> None:
    state, memo = make_state(), Memo()
    flatten(state, memo)
    assert memo.sections.keys() == {("m", False), ("o", False), ("p", False)}
    del state["o"]
    flatten(state, memo)
    assert memo.sections.keys() == {("m", False), ("p", False)}
    flatten({"x": 1}, memo)
    assert not memo.sections
    assert not memo.leaves


def test_sections_are_taken_as_they_were_found() -> None:
    """Without this the tests above would pass for a memo that keeps nothing."""
    state, memo = make_state(), Memo()
    flatten(state, memo)
    before = dict(memo.sections)
    state["h"].content = {"n": 1}
    state["o"].param_groups[0]["lr"] = 0.125
    flatten(state, memo)
    assert memo.sections == before


@pytest.fixture
def world() -> Iterator[None]:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def test_a_dtensor_that_is_cut_otherwise_in_the_same_memory(world: None) -> None:
    mesh = init_device_mesh("cpu", (1,))
    model, memo = nn.Linear(4, 4, bias=False), Memo()
    model.weight = nn.Parameter(distribute_tensor(torch.randn(4, 4), mesh, [Shard(0)]))
    (before,) = flatten({"m": model}, memo).leaves
    local = model.weight.to_local().detach()
    torch.utils.swap_tensors(model.weight, nn.Parameter(DTensor.from_local(local, mesh, [Replicate()])))
    (after,) = flatten({"m": model}, memo).leaves
    assert before.pieces[0][1].data_ptr() == after.pieces[0][1].data_ptr()
    assert before.held != after.held
    assert seen(flatten({"m": model}, memo)) == seen(flatten({"m": model}))


def test_a_dtensor_with_other_local_memory(world: None) -> None:
    mesh = init_device_mesh("cpu", (1,))
    model, memo = nn.Linear(4, 4, bias=False), Memo()
    model.weight = nn.Parameter(distribute_tensor(torch.randn(4, 4), mesh, [Shard(0)]))
    flatten({"m": model}, memo)
    model.weight._local_tensor = torch.zeros(4, 4)
    assert seen(flatten({"m": model}, memo)) == seen(flatten({"m": model}))


def test_a_sight_is_compared_by_what_it_holds() -> None:
    tensors, thing = [torch.ones(2), torch.ones(2)], object()
    section = Section(Fingerprint(["a", "b"], [thing], tensors), "made")
    assert section.shows(Fingerprint(["a", "b"], [thing], list(tensors)))
    assert not section.shows(Fingerprint(["a", "c"], [thing], tensors))
    assert not section.shows(Fingerprint(["a", "b"], [object()], tensors))
    assert not section.shows(Fingerprint(["a", "b"], [thing, thing], tensors))
    assert not section.shows(Fingerprint(["a", "b"], [thing], tensors[::-1]))
    assert not section.shows(Fingerprint(["a", "b"], [thing], tensors[:1]))


def test_a_state_that_is_as_it_was_gives_the_very_list() -> None:
    model, memo = nn.Linear(3, 2), Memo()
    state: dict[str, object] = {"model": model, "optim": torch.optim.SGD(model.parameters(), 0.1), "x": torch.ones(2)}
    first = flatten(state, memo).leaves
    assert flatten(state, memo).leaves is first
    state["one more"] = torch.ones(3)
    second = flatten(state, memo).leaves
    assert second is not first
    assert {leaf.name for leaf in second} == {*(leaf.name for leaf in first), "one more"}
    assert flatten(state, memo).leaves is second


def test_an_optimizer_for_each_parameter_is_not_compared_with_all_others(monkeypatch: pytest.MonkeyPatch) -> None:
    """There may be thousands, and what is asked of each may not grow with them."""
    params = {f"p{n}": nn.Parameter(torch.ones(2)) for n in range(150)}
    state: State = {"p": params, "o": {name: torch.optim.Adagrad([param]) for name, param in params.items()}}
    known: list[object] = []
    monkeypatch.setattr(visitor, "refuse_hidden", lambda optimizer, path, others: known.append(others))
    memo = Memo()
    names = [[leaf.name for leaf in flatten(state, memo).leaves] for _ in range(3)]
    assert all(others is known[0] for others in known[:150])
    assert len(memo.trace.sections) <= findings.MOST_SECTIONS
    assert flatten(state, memo).leaves is memo.last
    assert [sorted(found) for found in names] == [sorted(leaf.name for leaf in flatten(state).leaves)] * 3
    params["p7"].data = torch.zeros(3)
    assert {leaf.name: leaf.shape for leaf in flatten(state, memo).leaves}["p/p7"] == (3,)
