"""Modules and optimizers that are as they were are not asked again, and nothing that changes is missed for it."""

from __future__ import annotations

import weakref
from collections import OrderedDict
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from helpers.changed_states import CHANGES, Block, State, bits, expected, make_state, weight
from helpers.old_torch import fsdp2_on_the_host
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

from ckptlib.format.values import decode
from ckptlib.state.collector import Flat
from ckptlib.state.flatten import flatten
from ckptlib.state.memo import Memo
from ckptlib.state.structure import structure_of


def found(flat: Flat) -> tuple[dict[str, tuple[object, ...]], dict[str, str]]:
    """What a snapshot of it holds."""
    tensors = {}
    for leaf in flat.leaves:
        dtype = getattr(torch, leaf.dtype)
        parts = [bits(tensor) for _, tensor in leaf.pieces]
        assert all(part[0] == dtype for part in parts)
        tensors[leaf.name] = dtype, leaf.shape, b"".join(part[2] for part in parts)  # type: ignore[misc]
    return tensors, {name: repr(decode(value, name)) for name, value in flat.values.items()}


def check(state: State, memo: Memo) -> None:
    tensors, values = expected(state)
    flat = flatten(state, memo)
    assert found(flat) == ({name: bits(tensor) for name, tensor in tensors.items()}, values)
    assert whole(flat) == whole(flatten(state))


def whole(flat: Flat) -> object:
    """What a layout is made of."""
    leaves = [(leaf.name, leaf.held, id(leaf.owner), leaf.tied) for leaf in flat.leaves]
    return leaves, flat.objects, {path: id(optimizer) for path, optimizer in flat.optimizers.items()}


def known() -> tuple[State, Memo]:
    """A state that is known so well that nothing is asked."""
    state, memo = make_state(), Memo()
    for _ in range(3):
        check(state, memo)
    assert memo.modules.keys() == {("m", False)}
    assert memo.optimizers.keys() == {("o", False), ("p", False)}
    return state, memo


@pytest.mark.parametrize("change", CHANGES)
def test_what_changes_is_found(change: str) -> None:
    state, memo = known()
    CHANGES[change](state)
    for _ in range(4):
        check(state, memo)
    with torch.no_grad():
        for tensor in expected(state)[0].values():
            if tensor.is_floating_point():
                tensor.add_(1)
    check(state, memo)


def test_the_changes_are_changes() -> None:
    """Or the test above would prove nothing."""
    same = []
    for name, change in CHANGES.items():
        state = make_state()
        before = flatten(state)
        held = found(before), whole(before)
        change(state)
        after = flatten(state)
        if (found(after), whole(after)) == held:
            same.append(name)
    assert same == [
        "nothing",
        "frozen",
        "a cache replaced",
        "activation checkpoints",
        "no hook of a wrapper",
        "state loaded",
    ]


@pytest.mark.parametrize("change", ["nothing", "memory", "a buffer added", "a key added", "state replaced"])
def test_a_path_that_held_something_else_in_between(change: str) -> None:
    state, memo = known()
    module, optimizer = state["m"], state["o"]
    state["m"] = {f"x{i}": torch.full((i,), float(i)) for i in range(20)}
    state["o"] = {f"x{i}": torch.full((i,), float(i)) for i in range(20)}
    flatten(state, memo)
    state["m"], state["o"] = module, optimizer
    CHANGES[change](state)
    for _ in range(3):
        check(state, memo)


def test_nothing_is_asked_of_what_is_as_it_was(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without this the tests above would pass for a memo that keeps nothing."""
    state, memo = known()
    calls: list[nn.Module] = []

    def asked(module: nn.Module, path: str) -> Any:
        calls.append(module)
        return iter(())

    monkeypatch.setattr("ckptlib.state.flatten.named_state", asked)
    for _ in range(2):
        tensors, _ = expected(state)
        assert found(flatten(state, memo))[0] == {name: bits(tensor) for name, tensor in tensors.items()}
        weight(state).data.add_(1)
    assert not calls
    weight(state).data = torch.randn(4, 4)
    flatten(state, memo)
    assert calls == [state["m"]]


def test_the_first_pass_makes_a_state_known() -> None:
    """It is that of the construction: the first save does not ask thousands of modules again."""
    state, memo = make_state(), Memo()
    check(state, memo)
    assert memo.modules.keys() == {("m", False)}
    assert memo.optimizers.keys() == {("o", False), ("p", False)}


def test_state_that_another_parameter_has_now() -> None:
    """All columns stay as they were, but for the lengths of entries."""
    state, memo = make_state(), Memo()
    first, second = list(state["p"].state)[:2]
    state["p"].state[second].clear()
    for _ in range(3):
        check(state, memo)
    state["p"].state[second].update(state["p"].state[first])
    state["p"].state[first].clear()
    check(state, memo)


def test_a_buffer_that_is_not_saved_is_not_kept() -> None:
    state, memo = known()
    cache = weakref.ref(state["m"][0].cache)
    state["m"][0].cache = torch.ones(3)
    assert cache() is None
    assert memo.modules["m", False].structure.stands(state["m"])


def test_torch_s_own_that_was_replaced(monkeypatch: pytest.MonkeyPatch) -> None:
    state, memo = known()
    own = nn.Module._save_to_state_dict

    def save(self: nn.Module, destination: Any, prefix: str, keep_vars: bool) -> None:
        own(self, destination, prefix, keep_vars)
        destination.pop(f"{prefix}kept", None)

    with monkeypatch.context() as patch:
        patch.setattr(nn.Module, "_save_to_state_dict", save)
        assert "m/0.kept" not in expected(state)[0]
        check(state, memo)
    check(state, memo)
    with monkeypatch.context() as patch:
        patch.setattr(nn.Linear, "get_extra_state", lambda module: 5, raising=False)
        check(state, memo)
    kept = torch.zeros(9)
    with monkeypatch.context() as patch:
        patch.setattr(Block, "_buffers", property(lambda module: {"kept": kept}), raising=False)
        check(state, memo)
    check(state, memo)


def test_structures_of_what_is_not_known() -> None:
    """None of these is ever taken for known."""

    class Dict(OrderedDict[str, Any]):
        pass

    block = Block()
    assert structure_of(block) is not None
    for change in ("own state_dict", "own _save_to_state_dict", "a class that saves less", "a class with other names"):
        state = make_state()
        CHANGES[change](state)
        assert structure_of(state["m"]) is None, change
    for change in ("a class with extra state", "a hook", "a public hook", "a hook before"):
        state = make_state()
        CHANGES[change](state)
        assert structure_of(state["m"]) is None, change
    for name in ("_parameters", "_buffers", "_modules", "_state_dict_hooks"):
        block = Block()
        object.__setattr__(block, name, Dict(getattr(block, name)))
        assert structure_of(block) is None, name
    block = Block()
    block._modules["first"] = "no module"  # type: ignore[assignment]
    assert structure_of(block) is None


def test_an_order_of_hooks_or_entries_that_an_ordered_dict_keeps() -> None:
    block = Block()
    block._buffers = OrderedDict(block._buffers)
    structure = structure_of(block)
    assert structure is not None
    assert structure.stands(block)
    block._buffers.move_to_end("kept")
    assert not structure.stands(block)


@pytest.fixture
def world() -> Iterator[None]:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


@fsdp2_on_the_host
def test_fsdp2_is_asked_where_it_is_not_sharded(world: None) -> None:
    model, memo = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4)), Memo()
    fully_shard(model[0])
    fully_shard(model)
    state = {"m": model}
    for _ in range(3):
        model(torch.ones(1, 4)).sum().backward()
        flatten(state, memo)
    ((structure, _),) = memo.modules.values()
    assert structure.stands(model)
    model(torch.ones(1, 4))  # the root stays as it is until the backward
    assert not structure.stands(model)
    names = {name: value.to_local() for name, value in model.state_dict().items()}
    assert structure.stands(model)
    model(torch.ones(1, 4))
    held = {leaf.name: leaf.pieces[0][1] for leaf in flatten(state, memo).leaves}
    assert {name: bits(t) for name, t in held.items()} == {f"m/{name}": bits(t) for name, t in names.items()}


def test_wrappers_put_on_between_saves(world: None) -> None:
    for wrap in (DistributedDataParallel, lambda m: torch.compile(m, backend="eager")):
        state, memo = known()
        state["m"] = wrap(state["m"])
        for _ in range(3):
            check(state, memo)
        assert memo.modules
        state["m"].get_submodule(next(name for name, _ in state["m"].named_modules() if name.endswith("0"))).kept += 1
        check(state, memo)
