"""Values come back with the same types and the same bits."""

from __future__ import annotations

import itertools
import math
import os
from collections import Counter, OrderedDict
from collections.abc import Callable

import numpy as np
import pytest
import torch
from helpers.plain_values import same, through
from hypothesis import given
from hypothesis import strategies as st

from ckptlib.errors import FormatError, UnsupportedState
from ckptlib.format.values import decode, dumps, encode, loads

DTYPES = ["|b1", "|i1", "|u1"] + [
    o + n for o in "<>" for n in ("i2", "i4", "i8", "u2", "u4", "u8", "f2", "f4", "f8", "c8", "c16")
]


@st.composite
def arrays(draw: st.DrawFn) -> np.ndarray:
    dtype = np.dtype(draw(st.sampled_from(DTYPES)))
    shape = draw(st.lists(st.integers(0, 3), max_size=3))
    nbytes = math.prod(shape) * dtype.itemsize
    raw = draw(st.binary(min_size=nbytes, max_size=nbytes))
    return np.ndarray(shape, dtype, bytearray(bytes(b & 1 for b in raw) if dtype.kind == "b" else raw))


texts = st.text(st.characters(exclude_categories=[])) | st.sampled_from(["$int", "$", "\ud83d\ude00", "a.b", ""])
numpy_scalars = arrays().filter(lambda a: a.size and a.dtype.isnative).map(lambda a: a.reshape(-1)[0])
hashables = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(),
    st.integers(-(2**200), 2**200),
    st.sampled_from([2**53 - 1, 2**53, 2**53 + 1, -(2**53), 10**4000]),
    st.floats(),
    st.complex_numbers(),
    texts,
    st.binary(),
    numpy_scalars,
    st.sampled_from([torch.bfloat16, torch.float8_e4m3fn, torch.int64]),
    st.sampled_from([torch.device("cpu"), torch.device("cuda:3"), torch.device("meta")]),
    st.lists(st.integers(0, 2**62), max_size=3).map(torch.Size),
)
keys = st.recursive(hashables, lambda inner: st.lists(inner, max_size=3).map(tuple), max_leaves=4)


def containers(inner: st.SearchStrategy[object]) -> st.SearchStrategy[object]:
    return st.one_of(
        st.lists(inner, max_size=4),
        st.lists(inner, max_size=4).map(tuple),
        st.dictionaries(texts, inner, max_size=4),
        st.dictionaries(keys, inner, max_size=4),
        st.dictionaries(keys, inner, max_size=4).map(OrderedDict),
        st.dictionaries(keys, inner, max_size=4).map(Counter),
        st.sets(keys, max_size=4),
        st.frozensets(keys, max_size=4),
    )


values = st.recursive(hashables | arrays(), containers, max_leaves=12)


@given(values)
def test_round_trip(value: object) -> None:
    assert same(through(value), value)


@given(values)
def test_equal_bytes_after_another_round(value: object) -> None:
    once = dumps(encode(value, ""))
    assert dumps(encode(decode(loads(once)), "")) == once


@pytest.mark.parametrize("size", [(), (0,), (2, 3), (2**62,)])
def test_torch_size(size: tuple[int, ...]) -> None:
    assert same(through(torch.Size(size)), torch.Size(size))


@pytest.mark.parametrize("dtype", sorted({d for d in vars(torch).values() if isinstance(d, torch.dtype)}, key=str))
def test_every_torch_dtype(dtype: torch.dtype) -> None:
    assert through(dtype) is dtype


def test_every_numpy_scalar_type() -> None:
    for dtype in map(np.dtype, DTYPES):
        value = np.ones(1, dtype.newbyteorder("="))[0]
        assert same(through(value), value)


def test_memory_order_is_not_kept_but_values_are() -> None:
    array = np.arange(12, dtype=np.float32).reshape(3, 4)
    for view in (np.asfortranarray(array), array[::2, ::-1], array.T):
        back = through(view)
        assert np.array_equal(back, view)
        assert back.flags.writeable


def test_nan_payloads_in_arrays() -> None:
    array = np.array([0x7FC00001, 0xFFC12345, 0x7F800001], dtype=np.uint32).view(np.float32)
    assert through(array).tobytes() == array.tobytes()


def test_what_it_looks_like() -> None:
    value = {
        "lr": 1e-3,
        "betas": (0.9, 0.95),
        "best": np.float64(0.25),
        "seed": 2**64 - 1,
        "seen": {3, 1, 2},
        0: [True, None, -math.inf],
    }
    assert dumps(encode(value, "")).decode() == (
        '{"$dict":[["lr",0.001],["betas",{"$tuple":[0.9,0.95]}],["best",{"$numpy":{"dtype":"<f8","value":0.25}}],'
        '["seed",{"$int":"0xffffffffffffffff"}],["seen",{"$set":[1,2,3]}],[0,[true,null,{"$float":"-inf"}]]]}'
    )
    assert encode({"a": {"b": 1}}, "") == {"a": {"b": 1}}


def test_order_of_a_dict_is_kept() -> None:
    assert list(through({"b": 1, "a": 2, "c": 3})) == ["b", "a", "c"]
    assert list(through({2: 1, 1: 2})) == [2, 1]


def test_file_names_that_are_no_unicode() -> None:
    name = os.fsdecode(b"shard-\xff\xfe.tar")
    assert through({name: [name]}) == {name: [name]}
    assert b"\\ud" not in dumps(encode({name: [name]}, ""))


def test_ints_of_more_digits_than_python_converts() -> None:
    huge = 10**5000
    assert through({huge: [-huge]}) == {huge: [-huge]}
    with pytest.raises(UnsupportedState, match="huge"):
        encode({(huge,): object()}, "x")
    with pytest.raises(FormatError, match="huge"):
        decode({"$dict": [[{"$int": hex(huge)}, {"$nope": 1}]]}, "x")


def of_one_hash(count: int) -> list[tuple[int, ...]]:
    """In Python -1 and -2 have one."""
    return [*itertools.islice(itertools.product((-1, -2), repeat=14), count)]


IN_CONTAINERS: dict[str, Callable[[list[tuple[int, ...]]], object]] = {
    "set": set,
    "frozenset": frozenset,
    "dict": dict.fromkeys,
    "OrderedDict": OrderedDict.fromkeys,
    "Counter": Counter,
}


@pytest.mark.parametrize("make", IN_CONTAINERS.values(), ids=IN_CONTAINERS)
def test_items_of_one_hash(make: Callable[[list[tuple[int, ...]]], object]) -> None:
    few = make(of_one_hash(512))
    assert same(through(few), few)
    with pytest.raises(UnsupportedState, match=r"^x.seen: too many of its 1,024 items have one hash"):
        encode({"seen": make(of_one_hash(1024))}, "x")


def test_more_items_of_one_hash_where_there_are_many_others() -> None:
    many = {*of_one_hash(2048), *range(30_000)}
    assert through(many) == many
    with pytest.raises(UnsupportedState, match="too many of its 34,096 items"):
        encode({*of_one_hash(4096), *range(30_000)}, "x")
