"""What a state becomes when it is flattened: names, ties, trees, and refusals that say what to do instead."""

from __future__ import annotations

import gc
import itertools
import warnings
import weakref
from collections import OrderedDict, defaultdict, namedtuple
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from helpers.calls import num_calls
from helpers.old_torch import fsdp2_on_the_host
from onerank import Holder, Root
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Partial, Placement, Replicate, Shard, distribute_tensor, init_device_mesh

import ckptlib
from ckptlib import PerRank, Sharded, UnsupportedState
from ckptlib.format.box import Box
from ckptlib.format.layout import ByHand, Mesh, OwnPerRank, Placed
from ckptlib.format.paths import join
from ckptlib.state.collector import Flat
from ckptlib.state.flatten import flatten
from ckptlib.state.leaf import Plain, mesh_of
from ckptlib.state.memo import Memo
from ckptlib.state.rng import RngState


def names(flat: Flat) -> list[str]:
    return sorted(leaf.name for leaf in flat.leaves if leaf.tied is None)


@pytest.fixture
def world() -> Iterator[None]:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


# -- names


def test_paths_of_different_keys_are_different() -> None:
    keys = ["a", "a/b", "a%2Fb", "%", "/", "", "b"]
    paths = [join(join("", x), y) for x in keys if x for y in keys] + [join("", x) for x in keys if x]
    assert len(set(paths)) == len(paths)


def test_names_of_everything() -> None:
    model = nn.Sequential(nn.Linear(2, 3), nn.BatchNorm1d(3))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5, momentum=0.9)
    model(torch.randn(4, 2)).sum().backward()
    optimizer.step()
    flat = flatten(
        {"m": model, "o": optimizer, "n": {"x": [torch.ones(1), 5]}, "h": Holder({"t": torch.ones(1), "v": 2})}
    )
    params = ["0.bias", "0.weight", "1.bias", "1.weight"]
    assert names(flat) == sorted(
        [f"m/{name}" for name in [*params, "1.num_batches_tracked", "1.running_mean", "1.running_var"]]
        + [f"o/m/{name}/momentum_buffer" for name in params]
        + ["n/x/0", "h/t"]
    )
    assert flat.values.keys() == {"n/x/1", "h/v", "o/@group.0"}
    assert flat.objects["h"] == {"dict": [["t", "tensor"], ["v", "value"]]}
    owned = {leaf.name for leaf in flat.leaves if leaf.owner is optimizer}
    assert owned == {name for name in names(flat) if name.startswith("o/") or name[2:] in params}


def lists(depth: int, leaf: object) -> object:
    for _ in range(depth):
        leaf = [leaf]
    return leaf


@pytest.mark.parametrize("inside", [torch.ones(1), [torch.ones(1), {(1,): 2}]])
def test_what_a_load_would_find_too_deep_is_refused_by_name(inside: object) -> None:
    levels = 100 if isinstance(inside, torch.Tensor) else 97
    flatten({"h": Holder(lists(levels, inside))})
    with pytest.raises(UnsupportedState, match=r"h(/0)+.*: nested deeper than 100 levels"):
        flatten({"h": Holder(lists(levels + 1, inside))})


@pytest.mark.parametrize("kind", ["an object", "an object of tensors", "a dict"])
def test_a_state_that_contains_itself_is_refused(kind: str) -> None:
    loop: list[object] = [torch.ones(1)] if kind == "an object of tensors" else [1]
    loop.append(loop)
    ring: dict[str, object] = {}
    ring["ring"] = ring
    with pytest.raises(UnsupportedState, match="does it contain itself"):
        flatten(ring if kind == "a dict" else {"h": Holder(loop)})


def test_two_entries_of_one_name_are_refused() -> None:
    for state in (
        {"a": {1: torch.ones(1), "1": torch.zeros(1)}},
        {"a": {1: 1, "1": 1, "t": torch.ones(1)}},
        {"": {"a": 1}, "a": 2},
        {"a": {1: {"x": torch.ones(1)}, "1": {"y": torch.ones(1)}}},
        {1: {"x": torch.ones(1)}, "1": {"y": 1}},
        {"h": Holder({1: torch.ones(1), "1": torch.ones(2)})},
    ):
        with pytest.raises(UnsupportedState, match="two entries of the state have the same name"):
            flatten(state)


def test_names_that_no_safetensors_file_can_hold_are_refused() -> None:
    for state in ({"a\udcff": torch.ones(1)}, {"h": Holder({"\ud83d\ude00": torch.ones(1)})}):
        with pytest.raises(UnsupportedState, match="is not valid Unicode"):
            flatten(state)


# -- ties


def test_tied_tensors_are_one_leaf() -> None:
    a, b = nn.Linear(3, 3, bias=False), nn.Linear(3, 3, bias=False)
    a.weight = b.weight
    flat = flatten({"a": a, "b": b})
    assert (names(flat), flat.aliases) == (["a/weight"], {"b/weight": "a/weight"})


def test_equal_views_of_one_memory_are_ties_and_different_views_are_not() -> None:
    base = torch.arange(16.0).view(4, 4)
    number = torch.ones(3, dtype=torch.complex64)
    flat = flatten(
        {
            "1": base, "2": base[:], "3": base.t(), "4": base[:2], "5": base[1:3], "6": base.view(torch.int32),
            "c": number, "d": number.conj(), "n": base._neg_view(), "e": base[:0], "f": base[:0],
        }
    )  # fmt: skip
    assert flat.aliases == {"2": "1"}


def test_per_rank_tensors_are_never_ties() -> None:
    base = torch.ones(3)
    flat = flatten({"a": PerRank(base), "b": PerRank([base]), "c": base})
    assert flat.aliases == {}
    assert [type(leaf.held) for leaf in flat.leaves] == [OwnPerRank, OwnPerRank, Plain]


def test_what_an_optimizer_keeps_for_a_parameter_of_each_rank_is_each_ranks_own() -> None:
    own, shared, memo = nn.Linear(3, 2), nn.Linear(3, 2), Memo()
    optim = torch.optim.Adam([*own.parameters(), *shared.parameters()])
    for param in [*own.parameters(), *shared.parameters()]:
        param.grad = torch.ones_like(param)
    optim.step()
    state: dict[str, object] = {"own": PerRank(own), "shared": shared, "optim": optim}
    plain = {"own": own, "shared": shared, "optim": optim}

    def of_each(state: object) -> set[str]:
        leaves = flatten(state, memo).leaves
        assert len(leaves) == 4 * 4
        return {leaf.name for leaf in leaves if isinstance(leaf.held, OwnPerRank)}

    names = {"own/weight", "own/bias"}
    moments = {f"optim/{name}/{key}" for name in names for key in ("step", "exp_avg", "exp_avg_sq")}
    for _ in range(2):  # a pass takes over what the one before it found
        assert of_each(state) == names | moments
        assert of_each(state) == names | moments
        assert of_each(plain) == set()
        assert of_each(plain) == set()


def test_tensors_made_for_the_save_are_never_mixed_up() -> None:
    """Memory and ids of temporaries would be given out again if they were not kept."""
    content = Holder()
    content.state_dict = lambda: [torch.full((50,), i) for i in range(200)]  # type: ignore[method-assign]
    flat = flatten({"h": content, "p": [nn.Parameter(torch.full((5,), float(i))) for i in range(50)]})
    assert flat.aliases == {}
    assert {leaf.name: leaf.pieces[0][1][0].item() for leaf in flat.leaves} == {
        **{f"h/{i}": i for i in range(200)},
        **{f"p/{i}": i for i in range(50)},
    }


# -- the memo


def test_what_has_not_changed_gives_the_same_leaves() -> None:
    memo = Memo()
    model = nn.Linear(3, 3)
    before = {leaf.name: leaf for leaf in flatten({"m": model}, memo).leaves}
    with torch.no_grad():
        model.weight.mul_(2)
    assert all(before[leaf.name] is leaf for leaf in flatten({"m": model}, memo).leaves)
    optimizer = torch.optim.SGD(model.parameters())
    assert all(leaf.owner is optimizer for leaf in flatten({"m": model, "o": optimizer}, memo).leaves)


def test_no_optimizer_alone_writes_to_a_weight_that_a_forward_scales() -> None:
    """Of whatever module has it, at every pass; a parameter beside it and its moments are the optimizer's alone."""
    model = nn.Sequential(nn.Embedding(4, 3, max_norm=1.0), nn.EmbeddingBag(4, 3, max_norm=1.0), nn.Embedding(4, 3))
    optimizer = torch.optim.Adagrad(model.parameters())
    state, memo = {"m": nn.Sequential(model), "o": optimizer, "twice": model[0]}, Memo()
    for _ in range(3):
        leaves = flatten(state, memo).leaves
        assert {leaf.name for leaf in leaves if leaf.owner is None} == {"m/0.0.weight", "m/0.1.weight", "twice/weight"}
        state["more"] = nn.Linear(2, 2)
        optimizer.add_param_group({"params": [*state["more"].parameters()]})


def test_no_optimizer_owns_a_parameter_that_asks_for_no_gradient() -> None:
    """As long as it does not."""
    model = nn.Linear(4, 3)
    optimizer = torch.optim.Adagrad(model.parameters())
    state, memo = {"m": model, "o": optimizer}, Memo()
    for frozen in (False, True, True, False):
        model.weight.requires_grad_(not frozen)
        leaves = flatten(state, memo).leaves
        assert [leaf.name for leaf in leaves if leaf.owner is None] == ["m/weight"] * frozen
        assert [leaf.name for leaf in leaves if leaf.frozen] == ["m/weight"] * frozen


def test_an_optimizer_owns_what_its_step_writes_though_it_asks_for_no_gradient_just_now() -> None:
    """As a GAN's discriminator while the generator trains. What is planned for it stays: its leaves are the same."""
    model = nn.Linear(4, 3)
    optimizer = torch.optim.SGD(model.parameters())
    state, memo = {"m": model, "o": optimizer}, Memo()
    model.weight.grad = torch.ones(3, 4)
    before = flatten(state, memo).leaves
    for frozen in (True, False, True):
        model.weight.requires_grad_(not frozen)
        assert flatten(state, memo).leaves is before
    optimizer.zero_grad()
    assert [leaf.name for leaf in flatten(state, memo).leaves if leaf.owner is None] == ["m/weight"]


@pytest.mark.parametrize("num_beside", [0, 20])
def test_no_optimizer_alone_writes_to_what_is_tied_to_such_a_weight(num_beside: int) -> None:
    """The other name may come first, in a module, in a dict, or by itself."""
    embedding, head = nn.Embedding(4, 3, max_norm=1.0), nn.Linear(3, 4, bias=False)
    head.weight = embedding.weight
    dict_of = {"w": embedding.weight, **{f"{i}": torch.zeros(1) for i in range(num_beside)}}
    state = {"d": dict_of, "head": head, "m": embedding, "o": torch.optim.SGD(head.parameters())}
    memo = Memo()
    for _ in range(3):
        owners = {leaf.name: leaf.owner for leaf in flatten(state, memo).leaves}
        assert [owners[name] for name in ("d/w", "head/weight", "m/weight")] == [None] * 3


def test_moments_of_such_a_weight_are_each_ranks_own_if_the_weight_is() -> None:
    """They were taken for replicas, so that saves on several ranks failed."""
    module = nn.Embedding(4, 3, max_norm=1.0)
    optimizer = torch.optim.Adagrad(module.parameters())
    memo = Memo()
    for _ in range(2):
        leaves = flatten({"m": PerRank(module), "o": optimizer}, memo).leaves
        assert {type(leaf.held) for leaf in leaves} == {OwnPerRank}
        assert [leaf.name for leaf in leaves if leaf.owner is None] == ["m/weight"]


@pytest.mark.parametrize(
    "change",
    [
        lambda t: t.t_(),
        lambda t: t.resize_(2, 2),
        lambda t: setattr(t, "data", torch.zeros(2, 3)),
        lambda t: setattr(t, "data", t.data.view(torch.int32)),
        lambda t: setattr(t, "data", t.data[:1]),
    ],
    ids=["transposed", "resized", "replaced", "another dtype", "cut"],
)
def test_what_changed_in_place_gives_new_leaves(change: Callable[[torch.Tensor], object]) -> None:
    memo = Memo()
    tensor = torch.arange(6.0).view(2, 3)
    flatten({"t": tensor}, memo)
    change(tensor)
    (leaf,) = flatten({"t": tensor}, memo).leaves
    assert (leaf.shape, leaf.dtype) == (tuple(tensor.shape), str(tensor.dtype)[6:])
    assert leaf.pieces[0][1].data_ptr() == tensor.data_ptr()
    (leaf,) = flatten({"t": PerRank(tensor)}, memo).leaves
    assert isinstance(leaf.held, OwnPerRank)


def freed(tensor: torch.Tensor) -> torch.Tensor:
    """As FSDP2 leaves whole parameters behind."""
    tensor.untyped_storage().resize_(0)
    return tensor


@pytest.mark.parametrize("beside", [0, 20])
def test_memory_that_is_freed_between_two_saves_is_never_read(beside: int) -> None:
    memo = Memo()
    tensor = torch.ones(9)[3:]
    state = {"d": {**{str(i): torch.ones(1) for i in range(beside)}, "t": tensor}}
    for _ in range(2):
        flatten(state, memo)
    freed(tensor)
    for _ in range(2):
        with pytest.raises(UnsupportedState, match="d/t: its memory was freed"):
            flatten(state, memo)
    tensor.untyped_storage().resize_(36)
    flatten(state, memo)


def test_random_generators_have_no_tensor_looked_at_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """They are in every save, of which each of maybe 100,000 tensors would take half a microsecond."""
    memo, asked = Memo(), list[str]()
    monkeypatch.setattr("ckptlib.state.flatten.refuse_freed", lambda piece, name: asked.append(name))
    model = nn.Linear(2, 2)
    for _ in range(3):
        asked.clear()
        flatten({"m": model, "@rng": RngState()}, memo)
    assert asked == []
    flatten({"m": model, "ema": Holder({"w": torch.ones(2)})}, memo)
    assert sorted(asked) == ["ema/w", "m/bias", "m/weight"]


@fsdp2_on_the_host
def test_whole_parameters_that_fsdp2_has_freed_are_refused(world: None) -> None:
    model = nn.Linear(3, 3)
    fully_shard(model)
    model(torch.ones(1, 3))
    state = {"p": dict(model.named_parameters())}  # of the whole model, until it is sharded again
    flatten(state)
    model.reshard()
    with pytest.raises(UnsupportedState, match=r"p/weight: its memory was freed.*module.reshard\(\)"):
        flatten(state)
    flatten({"p": dict(model.named_parameters())})


@fsdp2_on_the_host
def test_whole_parameters_that_the_walk_itself_frees_are_refused(world: None, tmp_path: Path) -> None:
    model, memo = nn.Linear(3, 3), Memo()
    fully_shard(model)
    ckptlib.save(tmp_path, {"p": {"weight": torch.ones(3, 3)}, "m": {}}, 1)
    model.unshard()
    state = {"p": {"weight": model.weight}, "m": model}  # whose state_dict() shards it again
    through = {**state, "m": SimpleNamespace(state_dict=model.state_dict, load_state_dict=model.load_state_dict)}
    calls = (
        lambda: flatten(state, memo),
        lambda: flatten(through),
        lambda: ckptlib.load(tmp_path, state, strict=False),
    )
    for call in calls:
        model.unshard()
        with pytest.raises(UnsupportedState, match="p/weight: its memory was freed"):
            call()


def test_a_square_that_is_transposed_in_place_is_another_leaf() -> None:
    memo = Memo()
    tensor = torch.arange(9.0).view(3, 3)
    (before,) = flatten({"t": tensor}, memo).leaves
    tensor.t_()
    (after,) = flatten({"t": tensor}, memo).leaves
    assert after is not before


def test_the_memo_lets_go_of_what_is_gone() -> None:
    memo = Memo()
    tensor = torch.ones(3)
    gone = weakref.ref(tensor)
    flatten({"t": tensor, "u": torch.ones(1)}, memo)
    del tensor
    flatten({"u": torch.ones(1)}, memo)
    gc.collect()
    assert gone() is None
    assert memo.leaves.keys() == {"u"}


# -- holdings


def test_sharded_by_hand() -> None:
    (leaf,) = flatten({"s": Sharded(torch.ones(2, 3), (4, 0), (6, 3))}).leaves
    assert (leaf.shape, leaf.held, leaf.pieces[0][0]) == ((6, 3), ByHand(), Box((4, 0), (2, 3)))
    for offset, shape in [((5, 0), (6, 3)), ((0,), (6, 3)), ((0, 0), (6,)), ((-1, 0), (6, 3))]:
        with pytest.raises(UnsupportedState, match=r"^s: Sharded "):
            flatten({"s": Sharded(torch.ones(2, 3), offset, shape)})


@pytest.mark.parametrize("of", [np.array, torch.tensor, lambda numbers: [*map(np.int32, numbers)]])
def test_integers_of_other_libraries(of: Callable[[Sequence[int]], Any]) -> None:
    """Documents are made of Python's."""
    (leaf,) = flatten({"s": Sharded(torch.ones(2, 3), of((4, 0)), of((6, 3)))}).leaves
    ((box, _),) = leaf.pieces
    assert (leaf.shape, box) == ((6, 3), Box((4, 0), (2, 3)))
    assert {*map(type, (*leaf.shape, *box.offset))} == {int}


@pytest.mark.parametrize("numbers", [(2.0, 3), (np.float64(2), 3), (True, 3), (None, 3), 2, "23"], ids=repr)
def test_what_is_no_box(numbers: Any) -> None:
    for offset, shape in [((0, 0), numbers), (numbers, (9, 9))]:
        with pytest.raises(UnsupportedState, match=r"^s: Sharded has (shape|offset) .*; give a tuple of integers"):
            flatten({"s": Sharded(torch.ones(2, 3), offset, shape)})


def test_a_mesh_is_asked_for_its_ranks_once(world: None) -> None:
    """Each time costs torch as much as all else of a DTensor's leaf."""
    line, square = init_device_mesh("cpu", (1,)), init_device_mesh("cpu", (1, 1))
    first, second = (distribute_tensor(torch.ones(4), line, [Shard(0)]) for _ in range(2))
    other = distribute_tensor(torch.ones(4), square, [Shard(0), Replicate()])
    assert mesh_of(first) is mesh_of(second)
    assert (mesh_of(first), mesh_of(other)) == (Mesh((1,), (0,)), Mesh((1, 1), (0,)))


def test_dtensors_on_a_mesh_of_one(world: None) -> None:
    mesh = init_device_mesh("cpu", (1,))
    tensor = distribute_tensor(torch.arange(12.0).view(4, 3), mesh, [Shard(0)])
    flat = flatten({"s": tensor, "r": distribute_tensor(torch.ones(2), mesh, [Replicate()])})
    assert all(isinstance(leaf.held, Placed) for leaf in flat.leaves)
    assert flat.leaves[0].pieces[0][0] == Box((0, 0), (4, 3))
    with pytest.raises(UnsupportedState, match=r"p: placement Partial\(sum\).*redistribute"):
        flatten({"p": DTensor.from_local(torch.ones(2), mesh, [Partial()])})
    with pytest.raises(UnsupportedState, match=r"p: a DTensor cannot be PerRank; give tensor.to_local\(\)"):
        flatten({"p": PerRank(tensor)})


# -- refusals


class Wrapper(torch.Tensor):
    pass


Pair = namedtuple("Pair", "left right")


def nested() -> torch.Tensor:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return torch.nested.nested_tensor([torch.ones(2), torch.ones(3)])


def quantized() -> torch.Tensor:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return torch.quantize_per_tensor(torch.ones(3), 0.1, 0, torch.quint8)


def optimizer_with(key: object) -> torch.optim.Optimizer:
    weight = nn.Parameter(torch.ones(2))
    optimizer = torch.optim.SGD([weight])
    optimizer.state[weight] = {key: torch.ones(1)}
    return optimizer


def optimizer_without_its_group() -> torch.optim.Optimizer:
    optimizer = optimizer_with("m")
    optimizer.param_groups.clear()
    return optimizer


def foreign_optimizer() -> torch.optim.Optimizer:
    optimizer = torch.optim.SGD([nn.Parameter(torch.ones(2))])
    optimizer.state["global"] = {"x": 1}
    return optimizer


REFUSED: dict[str, tuple[Callable[[], object], str]] = {
    "subclass": (lambda: torch.ones(3).as_subclass(Wrapper), "Wrapper is a tensor subclass.*save the plain tensors"),
    "sparse": (lambda: torch.eye(3).to_sparse(), "torch.sparse_coo; save its parts"),
    "csr": (lambda: torch.eye(3).to_sparse_csr(), "torch.sparse_csr; save its parts"),
    "quantized": (quantized, "quantized; save its parts"),
    "nested": (nested, "nested; save its parts"),
    "meta": (lambda: torch.empty(3, device="meta"), r"has no memory\. Call to_empty\(.*and initialize it"),
    "freed": (lambda: freed(torch.ones(3)), "x: its memory was freed"),
    "freed, by hand": (lambda: Sharded(freed(torch.ones(3)), (0,), (3,)), "x: its memory was freed"),
    "lazy": (lambda: nn.LazyLinear(3), "x/weight: is not initialised yet; run one forward pass"),
    "lazy buffer": (lambda: nn.LazyBatchNorm1d(), "is not initialised yet; run one forward pass"),
    "lazy, by hand": (lambda: Sharded(nn.UninitializedParameter(), (0,), (1,)), "is not initialised yet"),
    "bits": (lambda: torch.zeros(3, dtype=torch.uint8).view(torch.bits8), "dtype torch.bits8.*view\\(torch.uint8\\)"),
    "function": (lambda: lambda: 0, "x: cannot save a builtins.function"),
    "object": (lambda: object(), "x: cannot save a builtins.object.*state_dict"),
    "deep": (lambda: [{"a": (object(),)}], r"x\[0\].a\[0\]: cannot save"),
    "namedtuple": (lambda: Pair(1, 2), "x: cannot save a test_flatten.Pair.*plain tuple"),
    "namedtuple in an object": (lambda: Holder(Pair(torch.ones(1), 2)), "x: a test_flatten.Pair that holds tensors"),
    "defaultdict in an object": (
        lambda: Holder({"d": defaultdict(int, t=torch.ones(1))}),
        "x/d: a collections.defaultdict that holds tensors.*OrderedDict",
    ),
    "parameters as keys": (lambda: {nn.Parameter(torch.ones(1)): torch.ones(1)}, "x: a dict has .*Parameter as a key"),
    "modules as keys": (lambda: {nn.ReLU(): torch.ones(1)}, "x: a dict has .*ReLU as a key.*named_parameters"),
    "objects as keys": (lambda: {object(): torch.ones(1)}, "x: a dict has a builtins.object as a key"),
    "sets as keys": (lambda: {frozenset("ab"): torch.ones(1)}, "x: a dict has a builtins.frozenset as a key"),
    "sets in a set as keys": (
        lambda: {frozenset([frozenset("ab")]): torch.ones(1)},
        "x: a dict has a builtins.frozenset as a key",
    ),
    "sets as keys in an object": (
        lambda: Holder({(1, frozenset("ab")): torch.ones(1)}),
        "x: a dict has a builtins.tuple as a key, by which a restarted job would not find",
    ),
    "optimizer key": (lambda: optimizer_with(0), "x/@0.0: optimizer state has the key 0"),
    "optimizer state that was left": (
        optimizer_without_its_group,
        "x: .*of a parameter of shape .*del optimizer",
    ),
    "optimizer state of its own": (foreign_optimizer, "x: the optimizer keeps state under 'global'"),
}


@pytest.mark.parametrize("kind", REFUSED)
def test_what_cannot_be_saved_is_named_with_a_remedy(kind: str) -> None:
    make, message = REFUSED[kind]
    with pytest.raises(UnsupportedState, match=message):
        flatten({"x": make()})


def test_sets_whose_text_is_the_same_in_each_process_may_be_keys() -> None:
    keys = {1, 2}, "a", {(0, 1), (1, 2.5)}, {np.int64(1), np.int64(9)}, {frozenset({1, 2}), frozenset({3})}
    edges = {frozenset(key): torch.ones(1) for key in keys}
    assert len(flatten({"x": edges, "y": Holder(edges)}).leaves) == 10


FOREIGN = {
    "torch.distributed.fsdp.fully_sharded_data_parallel.FullyShardedDataParallel": (nn.Module, "fully_shard.*dcp.save"),
    "deepspeed.runtime.engine.DeepSpeedEngine": (nn.Module, "engine.module"),
    "megatron.core.distributed.distributed_data_parallel.DistributedDataParallel": (nn.Module, "wrapped module"),
    "torch.distributed.optim.zero_redundancy_optimizer.ZeroRedundancyOptimizer": (torch.optim.SGD, "FSDP2"),
    "deepspeed.runtime.zero.stage3.DeepSpeedZeroOptimizer_Stage3": (Holder, "FSDP2"),
    "deepspeed.runtime.zero.stage_1_and_2.DeepSpeedZeroOptimizer": (Holder, "FSDP2"),
    "deepspeed.runtime.bf16_optimizer.BF16_Optimizer": (Holder, "FSDP2"),
    "megatron.core.optimizer.distrib_optimizer.DistributedOptimizer": (Holder, "FSDP2"),
    "megatron.core.optimizer.optimizer.ChainedOptimizer": (Holder, "FSDP2"),
}


@pytest.mark.parametrize("name", FOREIGN)
def test_frameworks_that_hide_their_parameters_are_refused_by_name(name: str) -> None:
    """Stand-ins of the same name: not all of these can be installed here."""
    base, remedy = FOREIGN[name]
    module, _, cls = name.rpartition(".")
    stand_in = type(cls, (base,), {"__module__": module})
    made = stand_in([nn.Parameter(torch.ones(1))]) if base is torch.optim.SGD else stand_in()
    wrapped = nn.Sequential(made) if base is nn.Module else made
    with pytest.raises(UnsupportedState, match=f"a/x: {cls} .*{remedy}"):
        flatten({"a": {"x": wrapped}})


def test_ordered_dicts_are_told_from_dicts() -> None:
    flat = flatten({"h": Holder(OrderedDict(b=torch.ones(1), a={"c": torch.ones(2)}))})
    assert flat.objects["h"] == {"odict": [["b", "tensor"], ["a", {"dict": [["c", "tensor"]]}]]}


def endless(kind: str) -> object:
    """Nested without an end; where it has branches, there are more ways in it than can be walked."""
    a_list: list[object] = [torch.ones(1)]
    a_list[:0] = [a_list, a_list]
    a_dict: dict[str, object] = {}
    a_dict |= {"x": (a_dict, a_dict), "y": PerRank(a_dict)}
    plain: list[object] = []
    plain += [plain, plain]
    deep: object = 1
    for _ in range(3000):
        deep = [deep]
    optimizer = torch.optim.SGD([nn.Parameter(torch.ones(1))])
    optimizer.param_groups[0]["x"] = plain
    stateful = optimizer_with("x")
    stateful.state[stateful.param_groups[0]["params"][0]]["x"] = a_list
    return {
        "list": a_list,
        "dict": a_dict,
        "plain": plain,
        "deep": deep,
        "object": Holder(a_list),
        "plain object": Holder(plain),
        "group": optimizer,
        "state": stateful,
    }[kind]


@pytest.mark.parametrize("kind", ["list", "dict", "plain", "deep", "object", "plain object", "group", "state"])
def test_what_contains_itself_is_refused(kind: str) -> None:
    with pytest.raises(UnsupportedState, match=r"^there.*nested deeper than 100 levels; does it contain itself\?"):
        flatten({"there": endless(kind)})


@pytest.mark.parametrize("kind", ["list", "dict", "plain", "deep"])
def test_what_contains_itself_is_no_target(root: Root, kind: str) -> None:
    root.save({"x": 1})
    with pytest.raises(UnsupportedState, match=r"^there.*nested deeper than 100 levels; does it contain itself\?$"):
        root.load({"there": endless(kind)})


@pytest.mark.parametrize("placement", [Shard(0), Replicate()])
def test_state_beside_a_dtensor_that_contains_itself_is_refused(world: None, placement: Placement) -> None:
    param = nn.Parameter(distribute_tensor(torch.ones(2), init_device_mesh("cpu", (1,)), [placement]))
    optimizer = torch.optim.SGD([("w", param)])
    optimizer.state[param]["x"] = endless("list")
    with pytest.raises(UnsupportedState, match=r"^there/w/x/0.*deeper than 100 levels; does it contain itself\?"):
        flatten({"there": optimizer})


def test_plain_values_are_looked_at_once() -> None:
    """However deep they lie: there may be 100,000 beside a model, and the training waits for each."""

    def calls(depth: int) -> int:
        state: object = {f"value {i}": i for i in range(200)}
        for _ in range(depth):
            state = {"inner": state}
        return num_calls(lambda: flatten({"meta": state}))

    few, many = calls(2), calls(12)
    assert many - few < 10 * 60
    assert few < 200 * 20


def test_what_is_nested_as_deep_as_may_be(tmp_path: Path) -> None:
    def nested(levels: int, inner: object) -> object:
        for i in range(levels):
            inner = [{"a": inner}, [inner], (inner,), {1: inner}][i % 4]
        return inner

    metrics = {"deep": nested(100, 0.5)}
    state = {"tensor": nested(99, torch.ones(2)), "object": Holder(nested(98, torch.ones(2))), "value": nested(99, 7)}
    ckptlib.save(tmp_path, state, 1, metrics=metrics)
    ckptlib.load(tmp_path, {**state, "tensor": nested(99, torch.zeros(2))})
    (info,) = ckptlib.checkpoints(tmp_path)
    assert info.metrics == metrics
    with pytest.raises(UnsupportedState, match=r"metrics.*nested deeper than 100 levels; does it contain itself"):
        ckptlib.save(tmp_path, state, 2, metrics={"deep": nested(101, 0.5)})


def test_tensors_of_an_object_by_keys_of_one_hash(tmp_path: Path) -> None:
    """In Python -1 and -2 have one: the tree of an object that is saved is one that a load takes."""
    table = {key: torch.full((1,), float(i)) for i, key in enumerate(itertools.product((-1, -2), repeat=7))}
    ckptlib.save(tmp_path, {"q": Holder(table)}, 1)
    ckptlib.load(tmp_path, {"q": (loaded := Holder({}))})
    assert loaded.content == table
    content = dict.fromkeys(itertools.product((-1, -2), repeat=10), 0) | {0: torch.ones(1)}
    with pytest.raises(UnsupportedState, match=r"^q: too many of its 1,025 items have one hash"):
        ckptlib.save(tmp_path, {"q": Holder(content)}, 2)
