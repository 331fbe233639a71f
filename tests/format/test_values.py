"""Values come back with the same types and the same bits, or are refused by name."""

from __future__ import annotations

import dataclasses
import enum
import json
import math
import os
import struct
import subprocess
import sys
from collections import Counter, OrderedDict, defaultdict, deque, namedtuple

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from ckptlib.errors import FormatError, UnsupportedState
from ckptlib.format.tagged_values import MAX_DEPTH
from ckptlib.format.values import decode, dumps, encode, loads


def through(value: object) -> object:
    return decode(loads(dumps(encode(value, "root"))))


def same(a: object, b: object) -> bool:
    """Equal types and bits, all the way down. NaN payloads of Python floats are not compared."""
    if type(a) is not type(b):
        return False
    if isinstance(a, np.ndarray):
        return a.dtype.str == b.dtype.str and a.shape == b.shape and a.tobytes() == b.tobytes()
    if isinstance(a, np.generic):
        return a.dtype == b.dtype and same(a.item(), b.item())
    if isinstance(a, float):
        return (math.isnan(a) and math.isnan(b)) or struct.pack("<d", a) == struct.pack("<d", b)
    if isinstance(a, complex):
        return same(a.real, b.real) and same(a.imag, b.imag)
    if isinstance(a, dict):
        return same(list(a.items()), list(b.items()))
    if isinstance(a, set | frozenset):
        rest = list(b)
        for item in a:
            match = next((i for i, other in enumerate(rest) if same(item, other)), None)
            if match is None:
                return False
            rest.pop(match)
        return not rest
    if isinstance(a, list | tuple):
        return len(a) == len(b) and all(same(x, y) for x, y in zip(a, b, strict=True))
    return a == b


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


# -- refusals --


class Color(enum.Enum):
    RED = 1


class Level(enum.IntEnum):
    LOW = 1


class MyStr(str):
    __slots__ = ()


class MyDict(dict):
    pass


@dataclasses.dataclass
class Config:
    lr: float = 0.1


Point = namedtuple("Point", "x y")

REFUSED = [
    Color.RED,
    Level.LOW,
    MyStr("a"),
    MyDict(a=1),
    Config(),
    Point(1, 2),
    defaultdict(int),
    deque([1]),
    bytearray(b"a"),
    range(3),
    object(),
    int,
    len,
    torch.zeros(2),
    torch.nn.Parameter(torch.zeros(2)),
    torch.contiguous_format,
    torch.Generator(),
    np.array([object()]),
    np.array(["a"]),
    np.str_("a"),
    np.datetime64("2020-01-01"),
    np.longlong(1) if np.longlong is not np.int64 else np.str_("a"),
    np.longdouble(1) if np.dtype(np.longdouble).itemsize > 8 else np.str_("a"),
    np.zeros(2, dtype=[("a", "i4")]),
    np.ma.array([1], mask=[True]),
    np.dtype("f4"),
]


@pytest.mark.parametrize("value", REFUSED, ids=lambda v: type(v).__name__)
def test_refused_with_path_type_and_remedy(value: object) -> None:
    with pytest.raises(UnsupportedState) as caught:
        encode({"loader": [0, {"state": value}]}, "extra")
    message = str(caught.value)
    assert message.startswith("extra.loader[1].state: ")
    assert type(value).__qualname__ in message
    assert "state_dict()" in message


def test_refused_keys_and_set_items_are_named() -> None:
    with pytest.raises(UnsupportedState, match=r"^x\[<Color.RED: 1>\]: .*Color"):
        encode({Color.RED: 1}, "x")
    with pytest.raises(UnsupportedState, match=r"^x\[0\]: .*Color"):
        encode({Color.RED}, "x")
    with pytest.raises(UnsupportedState, match=r"^value: .*object"):
        encode(object(), "")


def test_a_subclass_is_told_its_base() -> None:
    with pytest.raises(UnsupportedState, match="a plain int"):
        encode(Level.LOW, "x")
    with pytest.raises(UnsupportedState, match="a plain dict"):
        encode(defaultdict(int), "x")


def nested(depth: int) -> list[object]:
    value: list[object] = []
    for _ in range(depth):
        value = [value]
    return value


def test_depth_is_bounded_both_ways() -> None:
    assert through(nested(MAX_DEPTH)) == nested(MAX_DEPTH)
    with pytest.raises(UnsupportedState, match="deeper than 100"):
        encode(nested(MAX_DEPTH + 1), "x")
    with pytest.raises(FormatError, match="deeper than 100"):
        decode(nested(MAX_DEPTH + 1), "x")
    pairs: object = {}
    for _ in range(MAX_DEPTH):
        pairs = {0: pairs}
    assert through(pairs) == pairs


def test_cycles_are_refused() -> None:
    cycle: dict[str, object] = {}
    cycle["self"] = [cycle]
    with pytest.raises(UnsupportedState, match="contain itself"):
        encode(cycle, "x")


# -- hostile input --


def tagged(tag: str, *bodies: object) -> list[dict[str, object]]:
    return [{tag: body} for body in bodies]


def array_of(dtype: object = "<f4", shape: object = (), data: object = "AAAAAA==") -> dict[str, object]:
    return {"dtype": dtype, "shape": list(shape) if isinstance(shape, tuple) else shape, "data": data}


def scalar_of(dtype: object, value: object) -> dict[str, object]:
    return {"dtype": dtype, "value": value}


HOSTILE = [
    {"$nope": 1},
    {"$": 1},
    {"$enum": "os.system"},
    {"$int": "0x20000000000000", "a": 1},
    {"$a": 1, "$b": 2},
    math.nan,
    math.inf,
    2**53,
    -(2**53),
    "\ud800",
    (1, 2),
    object(),
    *tagged("$int", 5, "5", "0x5", "", "0x", "0X20000000000000", " 0x20000000000000", "0x2_0000000000000", "1e99"),
    *tagged("$float", 1.0, "NaN", "infinity", "1.0", None),
    *tagged("$str", 1, "????", "/w==", "AA"),
    *tagged("$bytes", 1, "A", "AA", "A===", "AA==\n", "\u00e9"),
    *tagged("$complex", [1.0], [1, 2], [1.0, 2.0, 3.0], {}, [1.0, "2"], "1j"),
    *tagged("$tuple", 1, {}, "ab"),
    *tagged("$set", [1, 1], [1, True], [[1]], [{}], {}),
    *tagged("$frozenset", [[]], 1),
    *tagged("$dict", {}, [1], [[1]], [[1, 2, 3]], [[[], 1]], [[1, 2], [1, 3]], [[1, 2], [True, 3]], ["ab"]),
    *tagged("$odict", {}, [[{}, 1]], [["a", 1], ["a", 2]]),
    *tagged("$counter", {}, [[{}, 1]], [["a", 1], ["a", 2]]),
    *tagged(
        "$ndarray",
        array_of(dtype="|O"),
        array_of(dtype="O"),
        array_of(dtype="f4"),
        array_of(dtype="<f4,<f4"),
        array_of(dtype=["<f4"]),
        array_of(shape=(2,)),
        array_of(shape=(-1,)),
        array_of(shape=(-1, -1)),
        array_of(shape=(1.0,)),
        array_of(shape=(True,)),
        array_of(shape=1),
        array_of(shape=(2**62, 2**62, 0), data=""),
        array_of(shape=(0, {"$int": hex(2**80)}), data=""),
        array_of(shape=(1,) * 99),
        array_of(data="AAAA"),
        array_of(data=None),
        {"dtype": "<f4", "shape": []},
        {**array_of(), "more": 1},
        [],
    ),
    *tagged(
        "$numpy",
        scalar_of("<f4", 0.1),
        scalar_of("<f4", 1e300),
        scalar_of("<f4", 1),
        scalar_of("<f2", {"$complex": [1.0, 1.0]}),
        scalar_of("<c8", {"$complex": [1e300, 1.0]}),
        scalar_of("|i1", 128),
        scalar_of("|u1", -1),
        scalar_of("<i8", {"$int": hex(2**63)}),
        scalar_of("<i8", {"$float": "nan"}),
        scalar_of("<i8", 1.0),
        scalar_of("|b1", 1),
        scalar_of("<i4", True),
        scalar_of("<f8", "1.0"),
        scalar_of("<f8", None),
        scalar_of("<f8", [1.0, 2.0]),
        scalar_of("<f8", scalar_of("<f8", 1.0)),
        scalar_of("<f8", {"$numpy": scalar_of("<f8", 1.0)}),
        scalar_of("|O", 1),
        scalar_of("<M8[ns]", 1),
        scalar_of(8, 1),
        {"dtype": "<f8"},
    ),
    *tagged("$torch.Size", 1, [1.0], ["a"], [True], [[1]]),
    *tagged("$torch.dtype", "float", "double", "torch.float32", "load", "onnx", "_dynamo", "__class__", "", 1, None),
    *tagged("$torch.device", "", "abc", "cuda:-1", "cuda:01", "cuda:99999", " cpu", 0, None, "cpu:0:0"),
]


@pytest.mark.parametrize("data", HOSTILE, ids=lambda d: repr(d)[:60].encode("ascii", "replace").decode())
def test_malformed_is_refused_with_its_path(data: object) -> None:
    with pytest.raises(FormatError, match=r"^part\.loader\[1\]"):
        decode({"loader": [0, data]}, "part")


json_like = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8) | st.sampled_from(["<f4", "cpu"]),
    lambda inner: st.one_of(
        st.lists(inner, max_size=3),
        st.dictionaries(st.text(max_size=3), inner, max_size=3),
        st.tuples(st.sampled_from(["$int", "$set", "$dict", "$numpy", "$complex", "$torch.Size", "$str"]), inner).map(
            lambda pair: dict([pair])
        ),
        st.fixed_dictionaries({"dtype": inner, "value": inner}),
    ),
    max_leaves=10,
)


@given(json_like)
def test_anything_else_decodes_or_is_a_format_error(data: object) -> None:
    try:
        value = decode(data)
    except FormatError:
        return
    assert same(through(value), value)


@pytest.mark.parametrize(
    "text",
    [
        b"",
        b"{",
        b"1 2",
        b"NaN",
        b"[Infinity]",
        b"-Infinity",
        b"1e999",
        b'{"a":1,"a":2}',
        b'[{"b":{"a":1,"a":1}}]',
        b"\xff\xfe",
        b"\xef\xbb\xbf1",
        '{"a":1}'.encode("utf-16"),
        b"[" * 100_000,
        b"9" * 5000,
        b"'a'",
        b'"\n"',
    ],
    ids=lambda t: repr(t[:20]),
)
def test_loads_is_strict(text: bytes) -> None:
    with pytest.raises(FormatError):
        loads(text)


def test_dumps_is_plain_json() -> None:
    data = {"a": [1, 0.1, None, True, "\u00e9"], "": {}}
    assert dumps(data) == b'{"a":[1,0.1,null,true,"\\u00e9"],"":{}}'
    assert json.loads(dumps(data)) == data
    with pytest.raises(ValueError, match="not JSON compliant"):
        dumps([math.nan])


def test_no_torch_and_no_numpy_before_they_are_needed() -> None:
    code = (
        "import sys; from ckptlib.format.values import *\n"
        "from ckptlib.format.values import encode, decode, dumps, loads\n"
        "assert decode(loads(dumps(encode({'a': (1, 2.5, b'x')}, 'x')))) == {'a': (1, 2.5, b'x')}\n"
        "assert not {'torch', 'numpy'} & sys.modules.keys()\n"
        "import numpy; encode(numpy.float32(1), 'x'); decode(encode(numpy.zeros(2), 'x'))\n"
        "assert 'torch' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=120)
