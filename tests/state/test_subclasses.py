"""Tensor subclasses: what they are made of is saved and filled, bit by bit, and nothing is read as another kind."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from helpers.scaled import Config, Mode, Other, Quantized, Scaled, around, parts, scaled
from onerank import Holder, Root, bits, opened
from rankthreads import run_ranks
from torch import nn
from torch.distributed.tensor import DTensor, Replicate, Shard, init_device_mesh
from typing_extensions import override

from ckptlib import PerRank, Sharded, StateMismatch, UnsupportedState
from ckptlib.errors import ReplicasDiffer
from ckptlib.format.layout import OwnPerRank
from ckptlib.saving.agreement import agree, rows_of
from ckptlib.state.collector import Flat
from ckptlib.state.flatten import flatten
from ckptlib.state.memo import Memo


def named(flat: Flat) -> list[str]:
    return sorted(leaf.name for leaf in flat.leaves)


@pytest.fixture
def root_of_ranks(world: None, tmp_path: Path) -> Iterator[Root]:
    """Of a job with a process group."""
    with opened(tmp_path) as found:
        yield found


@pytest.fixture
def world() -> Iterator[None]:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


CONTEXTS: dict[str, Callable[[], object]] = {
    "none": lambda: None,
    "list": lambda: [True, torch.float32, (6, 3)],
    "config": lambda: {"mm": Config(Mode.ROWS, fast=True), "dtype": torch.bfloat16},
    "size": lambda: (torch.Size([3]), torch.strided, torch.contiguous_format),
}


@pytest.mark.parametrize("context", CONTEXTS)
def test_an_entry_comes_back_bit_by_bit(root: Root, context: str) -> None:
    make = CONTEXTS[context]
    source, target = scaled(1, context=make()), scaled(2, context=make())
    codes, scale = target.codes, target.scale
    root.move({"x": {"y": source}}, {"x": {"y": target}})
    assert parts(target) == parts(source)
    assert target.codes is codes
    assert target.scale is scale
    assert root.nbytes_of("x/y/codes") == 18
    assert root.nbytes_of("x/y/scale") == 4


def test_one_within_another_comes_back(root: Root) -> None:
    source, target = around(1), around(2)
    root.move({"x": source}, {"x": target})
    assert parts(target) == parts(source)
    assert len(parts(source)) == 3
    assert named(flatten({"x": source})) == ["x/codes/codes", "x/codes/scale", "x/scale"]
    with pytest.raises(StateMismatch, match=r"x: target is a helpers.scaled.Around of another kind.*tensors"):
        root.load({"x": around(2, context=1)})


class Model(nn.Module):
    def __init__(self, seed: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(scaled(seed))
        self.plain = nn.Parameter(torch.full((2,), float(seed)))
        self.register_buffer("average", scaled(seed + 10))


def test_parameters_and_buffers_of_a_module(root: Root) -> None:
    source, target = Model(1), Model(2)
    weight = target.weight
    root.move({"m": source}, {"m": target})
    assert target.weight is weight
    for name in ("weight", "plain", "average"):
        assert parts(getattr(target, name)) == parts(getattr(source, name))
    root.load({"n": target}, map={"n": "m"})
    root.load({"m": Model(3)}, only="m/weight")


def test_a_module_whose_state_dict_copies_them_is_refused() -> None:
    """What was loaded into the copy would never arrive."""
    model = Model(1)
    model.register_state_dict_post_hook(
        lambda _, state, prefix, __: state.update(
            {f"{prefix}weight": Scaled(model.weight.codes.clone(), torch.ones(()))}
        )
    )
    with pytest.raises(UnsupportedState, match=r"m: state_dict\(\) returns a copy of 'weight'"):
        flatten({"m": model})


def test_a_module_without_memory_is_given_some(root: Root) -> None:
    source = Model(1)
    with torch.device("meta"):
        target = Model(2)
        target.weight = nn.Parameter(Scaled(torch.empty(6, 3, dtype=torch.int8), torch.empty(())))
        target.average = Scaled(torch.empty(6, 3, dtype=torch.int8), torch.empty(()))
    root.move({"m": source}, {"m": target})
    assert isinstance(target.weight, nn.Parameter)
    assert isinstance(target.weight, Scaled)
    assert target.weight.device.type == "cpu"
    assert parts(target.weight) == parts(source.weight)
    assert parts(target.average) == parts(source.average)


def test_an_object_keeps_its_own(root: Root) -> None:
    source, target = Holder({"ema": [scaled(1), 5]}), Holder({"ema": [scaled(2), 0]})
    mine = target.content["ema"][0]  # type: ignore[index]
    root.move({"h": source}, {"h": target})
    assert target.content["ema"][0] is mine
    assert target.content["ema"][1] == 5
    assert parts(mine) == parts(scaled(1))
    with pytest.raises(StateMismatch, match=r"h/ema/0: the checkpoint has a helpers.scaled.Scaled, and there is none"):
        root.load({"h": Holder({"ema": [torch.ones(6, 3), 0]})})


MISMATCHES: dict[str, tuple[Callable[[], object], str]] = {
    "context": (lambda: scaled(2, context=False), r'context \{"value":false\}, saved \{"value":true\}'),
    "1 is not True": (lambda: scaled(2, context=1), "context"),
    "class": (lambda: scaled(2, cls=Other), "class helpers.scaled.Other, saved helpers.scaled.Scaled"),
    "shape": (lambda: scaled(2, n=7), r"shape \[7, 3\], saved \[6, 3\]"),
    "inner dtype": (lambda: Scaled(torch.zeros(6, 3, dtype=torch.uint8), torch.ones(())), "x/codes: target is uint8"),
    "inner shape": (lambda: Scaled(torch.zeros(6, 3, dtype=torch.int8), torch.ones(2)), r"x/scale: .*\[2\]"),
    "plain": (lambda: torch.zeros(6, 3), "x: target is a plain tensor, the checkpoint has a helpers.scaled.Scaled"),
}


@pytest.mark.parametrize("case", MISMATCHES)
def test_nothing_is_read_as_another_kind(root: Root, case: str) -> None:
    make, message = MISMATCHES[case]
    root.save({"x": scaled(1)})
    target = make()
    before = parts(target)  # type: ignore[arg-type]
    with pytest.raises(StateMismatch, match=message):
        root.load({"x": target}, cast=True, strict=False)
    assert parts(target) == before  # type: ignore[arg-type]


def test_a_plain_tensor_is_not_read_as_one(root: Root) -> None:
    root.save({"x": torch.zeros(6, 3)})
    with pytest.raises(StateMismatch, match=r"x: target is a helpers.scaled.Scaled, the checkpoint has a plain"):
        root.load({"x": scaled(1)})
    root.save({"y": scaled(1)})
    with pytest.raises(StateMismatch, match="x: not in the checkpoint"):
        root.load({"x": scaled(1)})
    with pytest.raises(StateMismatch, match="y: not in the state"):
        root.load({})


class Unknown(nn.Parameter):
    """A parameter of a class that cannot be taken apart."""


class Silent(Scaled):
    __tensor_flatten__ = None  # type: ignore[assignment]


class ShardedTensor(Silent):
    """By its name torch's, which needs a process group."""


class Copies(Scaled):
    @property
    def twice(self) -> torch.Tensor:
        return self.scale.clone()

    @override
    def __tensor_flatten__(self) -> tuple[list[str], object]:
        return ["codes", "twice"], None


class Lacks(Scaled):
    @override
    def __tensor_flatten__(self) -> tuple[list[str], object]:
        return ["codes", "absent"], None


def endless() -> Scaled:
    found = scaled(1)
    found.codes = found
    return found


REFUSED: dict[str, tuple[Callable[[], object], str]] = {
    "no __tensor_flatten__": (lambda: scaled(1, cls=Silent), "x: test_subclasses.Silent is a tensor subclass that"),
    "torchrec's": (lambda: scaled(1, cls=ShardedTensor), r"test_subclasses.ShardedTensor .* by ckptlib\.dcp\.save"),
    "context": (
        lambda: scaled(1, context=[object()]),
        "x: the context of helpers.scaled.Scaled has a builtins.obj",
    ),
    "copies": (lambda: scaled(1, cls=Copies), "x: test_subclasses.Copies returns a copy of its inner tensor 'twice'"),
    "lacks": (lambda: scaled(1, cls=Lacks), "names an inner tensor 'absent', which is a NoneType"),
    "endless": (endless, "x: over 8 tensor subclasses within each other"),
    "by hand": (lambda: Sharded(scaled(1), (0, 0), (12, 3)), "x: helpers.scaled.Scaled is a tensor subclass"),
    "in an object": (lambda: Holder({"a": [endless()]}), "x/a/0: over 8"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_cannot_be_taken_apart_is_named(case: str) -> None:
    make, message = REFUSED[case]
    with pytest.raises(UnsupportedState, match=message):
        flatten({"x": make()})


def test_a_frozen_weight_need_not_be_saved_to_train_adapters() -> None:
    """As bitsandbytes' Int8Params, of which a base is made."""
    model = nn.Module()
    model.base = torch.Tensor._make_subclass(Unknown, torch.ones(2), False)  # as bitsandbytes does
    model.adapter = nn.Parameter(torch.ones(2))
    with pytest.raises(UnsupportedState, match=r"x.base: .*Unknown is .* since it is frozen, .* if p.requires_grad\}$"):
        flatten({"x": model})
    assert [leaf.name for leaf in flatten({n: p for n, p in model.named_parameters() if p.requires_grad}).leaves] == [
        "adapter"
    ]


def test_torch_s_own_are_refused(world: None) -> None:
    from torch.distributed._functional_collectives import AsyncCollectiveTensor

    with pytest.raises(UnsupportedState, match="AsyncCollectiveTensor is a tensor subclass that ckptlib cannot take"):
        flatten({"x": AsyncCollectiveTensor(torch.ones(3))})


def test_two_of_one_name_are_refused() -> None:
    with pytest.raises(UnsupportedState, match="the same name 'x/a'"):
        flatten({"x": {"a": scaled(1)}, "": {"x": {"a": 1}}})


def test_a_later_pass_sees_what_was_replaced() -> None:
    """The outer tensor is the same object then, in the same module and optimizer."""
    model, memo = Model(1), Memo()
    optimizer = Quantized([model.plain])
    optimizer.state[model.plain]["momentum"] = momentum = scaled(4)
    state = {"m": model, "o": optimizer}

    def held() -> dict[str, torch.Tensor]:
        return {leaf.name: leaf.pieces[0][1] for leaf in flatten(state, memo).leaves}

    first, again = held(), held()
    assert all(first[name] is again[name] for name in first)
    model.weight.codes = torch.zeros_like(model.weight.codes)
    momentum.scale = torch.ones(())
    later = held()
    assert later["m/weight/codes"] is model.weight.codes
    assert later["o/m/plain/momentum/scale"] is momentum.scale
    kinds = flatten(state, memo).objects
    momentum.context = 1  # equal to True
    assert json.dumps(flatten(state, memo).objects) != json.dumps(kinds)
    assert flatten(state, memo).objects != kinds


def test_ties_are_kept(root: Root) -> None:
    source, target = scaled(1), scaled(2)
    flat = flatten({"a": source, "b": source})
    assert flat.aliases == {"b/codes": "a/codes", "b/scale": "a/scale"}
    root.move({"a": source, "b": source}, {"a": target, "b": target})
    assert parts(target) == parts(source)
    root.save({"a": scaled(1), "b": scaled(3)})
    with pytest.raises(StateMismatch, match="b/codes: is tied to what a/codes fills"):
        root.load({"a": target, "b": target})


def test_state_of_each_rank_s_own(root: Root) -> None:
    target = scaled(2)
    assert {type(leaf.held) for leaf in flatten({"x": PerRank(target)}).leaves} == {OwnPerRank}
    root.move({"x": PerRank(scaled(1))}, {"x": PerRank(target)})
    assert parts(target) == parts(scaled(1))


def test_what_differs_between_ranks_is_found_in_what_it_is_made_of() -> None:
    def on_rank(seeds: Sequence[int]) -> Callable[[Any], dict[str, Any]]:
        def run(group: Any) -> dict[str, Any]:
            param = nn.Parameter(scaled(seeds[group.rank]))
            optimizer = torch.optim.SGD([param])
            leaves = flatten({"p": param, "o": optimizer}).leaves
            return dict(agree(leaves, rows_of(leaves, group), group).holdings)

        return run

    for holdings in run_ranks(2, on_rank([1, 1])):
        assert holdings.keys() == {"p/codes", "p/scale"}
        assert not any(isinstance(holding, OwnPerRank) for holding in holdings.values())
    with pytest.raises(ReplicasDiffer, match="p/"):
        run_ranks(2, on_rank([1, 2]))


def test_a_dtensor_around_one_is_of_its_own_mesh(root_of_ranks: Root, monkeypatch: pytest.MonkeyPatch) -> None:
    mesh = init_device_mesh("cpu", (1,))

    def placed(seed: int, placement: Any) -> DTensor:
        return DTensor.from_local(scaled(seed), mesh, [placement], run_check=False)

    source, target = placed(1, Shard(0)), placed(2, Shard(0))
    assert {type(leaf.held) for leaf in flatten({"x": source}).leaves} == {OwnPerRank}
    root_of_ranks.move({"x": source}, {"x": target})
    assert parts(target) == parts(source)
    for other in (placed(2, Replicate()), placed(2, Shard(1)), scaled(2)):
        before = parts(other)
        with pytest.raises(StateMismatch, match=r"x: .*placed.*cannot be resharded"):
            root_of_ranks.load({"x": other})
        assert parts(other) == before
    monkeypatch.setattr(type(mesh), "get_coordinate", lambda _: [1])  # the second rank of a group, given the first's
    with pytest.raises(StateMismatch, match="x: the checkpoint keeps another shard of it for this rank"):
        root_of_ranks.load({"x": target})


def test_torchao_s_float8_weight(root: Root) -> None:
    fsdp = pytest.importorskip("torchao.float8.fsdp_utils")
    config = pytest.importorskip("torchao.float8.float8_training_tensor").LinearMMConfig

    def made(seed: int) -> nn.Module:
        torch.manual_seed(seed)
        model = nn.Linear(8, 4, bias=False)
        wrapped = fsdp.WeightWithDynamicFloat8CastTensor(model.weight.detach(), config(), torch.float8_e4m3fn)
        model.weight = nn.Parameter(wrapped)
        return model

    source, target = made(1), made(2)
    root.move({"m": source}, {"m": target})
    assert bits(target.weight._tensor) == bits(source.weight._tensor)  # type: ignore[operator, union-attr, arg-type]
