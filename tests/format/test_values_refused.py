"""Values that are not saved, and documents that are not believed."""

from __future__ import annotations

import dataclasses
import enum
import io
import json
import math
import re
import subprocess
import sys
import tracemalloc
from collections import defaultdict, deque, namedtuple
from datetime import date, datetime, timedelta, timezone
from pathlib import Path, PurePosixPath
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from helpers.plain_values import same, through
from hypothesis import given
from hypothesis import strategies as st

from ckptlib.errors import FormatError, UnsupportedState
from ckptlib.format.tagged_values import MAX_DEPTH, decode_entries
from ckptlib.format.values import decode, dumps, encode, loads

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


@pytest.mark.parametrize("leaf", [np.float32(1), 1j, torch.Size([1]), np.zeros(1)], ids=str)
def test_what_is_written_a_level_deeper_than_it_looks_is_read_again(leaf: object) -> None:
    def within(depth: int) -> object:
        value = leaf
        for _ in range(depth):
            value = [value]
        return value

    assert same(through(within(MAX_DEPTH - 1)), within(MAX_DEPTH - 1))
    with pytest.raises(UnsupportedState, match="deeper than 100"):
        encode(within(MAX_DEPTH), "x")


def test_a_complex_number_of_numpy_is_written_two_levels_deeper() -> None:
    value: object = np.complex128(1j)
    for _ in range(MAX_DEPTH - 2):
        value = [value]
    assert same(through(value), value)
    with pytest.raises(UnsupportedState, match="deeper than 100"):
        encode([value], "x")


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


OF_ONE_HASH = [{"$int": hex((2**61 - 1) * i)} for i in range(1, 1000)]


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
    *tagged("$set", [1, 1], [1, True], [[1]], [{}], {}, OF_ONE_HASH),
    *tagged("$frozenset", [[]], 1),
    *tagged("$dict", {}, [1], [[1]], [[1, 2, 3]], [[[], 1]], [[1, 2], [1, 3]], [[1, 2], [True, 3]], ["ab"]),
    *tagged("$dict", [[key, None] for key in OF_ONE_HASH]),
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


def printed(data: object) -> str:
    """The same in each process: without the address of an object."""
    return re.sub(" at 0x[0-9a-f]+>", ">", repr(data))[:60].encode("ascii", "replace").decode()


@pytest.mark.parametrize("data", HOSTILE, ids=printed)
def test_malformed_is_refused_with_its_path(data: object) -> None:
    with pytest.raises(FormatError, match=r"^part\.loader\[1\]"):
        decode({"loader": [0, data]}, "part")


def test_a_long_key_costs_no_memory_for_each_entry_below_it() -> None:
    """Paths are as long as the document: with all of them at once, a document of 1 MB took a gigabyte."""
    path, seen = "k" * 2**20, 0
    tracemalloc.start()
    for _, name, _ in decode_entries([[str(i), None] for i in range(200)], path, 0):
        seen += len(name) > len(path)
    _, most = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert seen == 200
    assert most < 10 * len(path)


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


@pytest.mark.parametrize(
    "value",
    [Path("/data"), PurePosixPath("/data"), datetime.now(timezone.utc), date(2026, 1, 2), timedelta(minutes=3)],
    ids=lambda value: type(value).__name__,
)
def test_what_is_best_kept_as_text_is_told_so(value: object) -> None:
    with pytest.raises(
        UnsupportedState, match=rf"config/when: .*{type(value).__name__}.* turn it into text: str\(x\)$"
    ):
        encode(value, "config/when")
    assert through(str(value)) == str(value)


@dataclasses.dataclass
class Progress:
    step: int = 0


class Phase(enum.Enum):
    WARM = "warm"


@pytest.mark.parametrize(
    ("value", "remedy"),
    [
        (Progress(), r"the dict of its attributes, which changes with it: vars\(x\)"),
        (SimpleNamespace(step=0), r"the dict of its attributes, which changes with it: vars\(x\)"),
        (Phase.WARM, r"its value: x\.value"),
        (type("ListConfig", (), {"__module__": "omegaconf.listconfig"})(), r"plain .*OmegaConf\.to_container\(x\)"),
        (io.BytesIO(b"as an extra state"), r"bytes: x\.getvalue\(\)"),
        (torch.optim.lr_scheduler.StepLR(torch.optim.SGD([torch.ones(1)]), 2), r"its own state: x\.state_dict\(\)"),
    ],
    ids=lambda value: type(value).__name__,
)
def test_what_tells_its_content_is_told_how(value: object, remedy: str) -> None:
    """A scheduler around another one has that among its attributes, and torch's `state_dict()` gives these."""
    with pytest.raises(UnsupportedState, match=rf"sched\.after: .*{type(value).__name__}.* turn it into {remedy}$"):
        encode(value, "sched.after")
