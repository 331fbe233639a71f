"""Plain Python values as JSON, and back: same types, same bits.

Knows values, not where they are stored and not tensors. What JSON has is itself; everything else is an object with one
key, a tag:

    NaN, infinities          {"$float": "nan"}  "inf"  "-inf"
    ints from 2**53 up       {"$int": "-0x20000000000001"}            JSON tools keep numbers as float64
    str with surrogates      {"$str": base64}                         of UTF-8 with surrogates passed through
    bytes                    {"$bytes": base64}
    complex                  {"$complex": [real, imag]}
    tuple                    {"$tuple": [...]}
    set, frozenset           {"$set": [...]}, {"$frozenset": [...]}   sorted by their encoding
    dict, other keys         {"$dict": [[key, value], ...]}           also when a str key starts with "$"
    OrderedDict              {"$odict": [[key, value], ...]}
    numpy scalar             {"$numpy": {"dtype": "<f4", "value": 0.25}}
    numpy array              {"$ndarray": {"dtype": "<f4", "shape": [2, 3], "data": base64}}   row-major
    torch.Size               {"$torch.Size": [...]}
    torch.dtype              {"$torch.dtype": "bfloat16"}
    torch.device             {"$torch.device": "cuda:0"}

The order of a dict is kept. Which objects were shared is not: a list given twice comes back as two lists.
Types are matched exactly, so that no subclass quietly comes back as its base; all else is refused, never pickled.
Neither numpy nor torch is imported before a value needs it.
"""

from __future__ import annotations

import base64
import binascii
import json
import math
from collections import OrderedDict
from collections.abc import Callable, Hashable, Iterable
from typing import TYPE_CHECKING, NoReturn, TypeAlias, cast

from ckptlib.errors import FormatError, UnsupportedState

if TYPE_CHECKING:
    import numpy as np

Json: TypeAlias = "bool | int | float | str | list[Json] | dict[str, Json] | None"

MAX_DEPTH = 100
"""Levels of containers in a value. Bounds the stack, and is where a value that contains itself ends."""

_BARE_INTS = 2**53  # below this, a float64 holds every int: RFC 8259, section 6

_DTYPES = frozenset(
    ["|b1", "|i1", "|u1"]
    + [order + name for order in "<>" for name in ("i2", "i4", "i8", "u2", "u4", "u8", "f2", "f4", "f8", "c8", "c16")]
)

# The way to a value: (the way to its container, index or key), down to the root's name. Text is made only for errors.
_Where: TypeAlias = "str | tuple[_Where, object]"


def encode(value: object, path: str) -> Json:
    """`value` as JSON. `path` is the value's name in messages.

    Raises UnsupportedState, naming the path within the value, for what does not come back exactly.
    """
    return _encode(value, path, 0)


def decode(data: Json, path: str = "") -> object:
    """The value that `encode` was given. Mutable values are new objects.

    Raises FormatError for what `encode` does not write.
    """
    return _decode(data, path, 0)


def dumps(data: Json) -> bytes:
    """Compact ASCII JSON."""
    return json.dumps(data, separators=(",", ":"), allow_nan=False).encode("ascii")


def loads(data: bytes) -> Json:
    """Reads JSON strictly. Raises FormatError, also for NaN, numbers out of range, and keys given twice."""
    try:
        text = data.decode("utf-8")
        return cast(
            Json,
            json.loads(text, object_pairs_hook=_unique, parse_constant=_refuse_number, parse_float=_finite),
        )
    except RecursionError:
        raise FormatError(f"JSON of {len(data)} bytes is nested too deeply") from None
    except ValueError as error:  # also UnicodeDecodeError, and ints of more digits than Python converts
        raise FormatError(f"not JSON ({error}): {len(data)} bytes that begin with {data[:40]!r}") from None


def _unique(pairs: list[tuple[str, object]]) -> dict[str, object]:
    found = dict(pairs)
    if len(found) != len(pairs):
        keys = [key for key, _ in pairs]
        twice = next(key for key in found if keys.count(key) > 1)
        raise FormatError(f"JSON object has the key {twice[:80]!r} twice")
    return found


def _refuse_number(text: str) -> NoReturn:
    raise FormatError(f"JSON has the number {text[:40]}; NaN and infinities are no JSON")


def _finite(text: str) -> float:
    number = float(text)
    if not math.isfinite(number):  # 1e999
        _refuse_number(text)
    return number


# -- encoding --


def _encode(value: object, where: _Where, depth: int) -> Json:
    if depth > MAX_DEPTH:
        raise UnsupportedState(f"{_text(where)}: nested deeper than {MAX_DEPTH} levels; does it contain itself?")
    encoder = _ENCODERS.get(type(value))
    if encoder is not None:
        return encoder(value, where, depth)
    if type(value).__module__ == "numpy":
        return _encode_numpy(value, where)
    if type(value).__module__ == "torch":
        return _encode_torch(value, where)
    raise _refused(value, where)


def _encode_as_is(value: bool | None, where: _Where, depth: int) -> Json:
    return value


def _encode_int(value: int, where: _Where, depth: int) -> Json:
    # Hex, because Python limits decimal conversion to 4300 digits.
    return value if abs(value) < _BARE_INTS else {"$int": hex(value)}


def _encode_float(value: float, where: _Where, depth: int) -> Json:
    return value if math.isfinite(value) else {"$float": str(value)}


def _encode_str(value: str, where: _Where, depth: int) -> Json:
    # os.fsdecode makes surrogates. As \u escapes, two that are adjacent would come back as one character.
    return value if _is_unicode(value) else {"$str": _base64(value.encode("utf-8", "surrogatepass"))}


def _encode_bytes(value: bytes, where: _Where, depth: int) -> Json:
    return {"$bytes": _base64(value)}


def _encode_complex(value: complex, where: _Where, depth: int) -> Json:
    return {"$complex": [_encode_float(value.real, where, depth), _encode_float(value.imag, where, depth)]}


def _encode_list(value: Iterable[object], where: _Where, depth: int) -> list[Json]:
    return [_encode(item, (where, i), depth + 1) for i, item in enumerate(value)]


def _encode_tuple(value: tuple[object, ...], where: _Where, depth: int) -> Json:
    return {"$tuple": _encode_list(value, where, depth)}


def _encode_set(value: set[object], where: _Where, depth: int) -> Json:
    return {"$set": sorted(_encode_list(value, where, depth), key=dumps)}


def _encode_frozenset(value: frozenset[object], where: _Where, depth: int) -> Json:
    return {"$frozenset": sorted(_encode_list(value, where, depth), key=dumps)}


def _encode_dict(value: dict[object, object], where: _Where, depth: int) -> Json:
    if all(type(key) is str and not key.startswith("$") and _is_unicode(key) for key in value):
        return {cast(str, key): _encode(item, (where, key), depth + 1) for key, item in value.items()}
    return {"$dict": _encode_pairs(value, where, depth)}


def _encode_odict(value: OrderedDict[object, object], where: _Where, depth: int) -> Json:
    return {"$odict": _encode_pairs(value, where, depth)}


def _encode_pairs(value: dict[object, object], where: _Where, depth: int) -> list[Json]:
    return [
        [_encode(key, (where, key), depth + 1), _encode(item, (where, key), depth + 1)] for key, item in value.items()
    ]


_ENCODERS: dict[type, Callable[..., Json]] = {
    type(None): _encode_as_is,
    bool: _encode_as_is,
    int: _encode_int,
    float: _encode_float,
    str: _encode_str,
    bytes: _encode_bytes,
    complex: _encode_complex,
    list: _encode_list,
    tuple: _encode_tuple,
    set: _encode_set,
    frozenset: _encode_frozenset,
    dict: _encode_dict,
    OrderedDict: _encode_odict,
}


def _encode_numpy(value: object, where: _Where) -> Json:
    import numpy as np

    if type(value) is np.ndarray and value.dtype.str in _DTYPES:
        return {
            "$ndarray": {
                "dtype": value.dtype.str,
                "shape": [int(n) for n in value.shape],
                "data": _base64(value.tobytes()),
            }
        }
    if isinstance(value, np.generic) and value.dtype.str in _DTYPES:
        dtype = np.dtype(value.dtype.str)
        if dtype.type is type(value):  # longlong, for one, is not int64 and shares its dtype string
            return {"$numpy": {"dtype": dtype.str, "value": _encode(value.item(), where, 0)}}
    raise _refused(value, where)


def _encode_torch(value: object, where: _Where) -> Json:
    name = type(value).__name__
    if name == "Size":
        return {"$torch.Size": _encode_list(cast("Iterable[object]", value), where, 0)}
    if name == "dtype":
        return {"$torch.dtype": str(value).removeprefix("torch.")}
    if name == "device":
        return {"$torch.device": str(value)}
    raise _refused(value, where)


def _refused(value: object, where: _Where) -> UnsupportedState:
    kind = type(value)
    bases = [base.__name__ for base in _ENCODERS if isinstance(value, base)]
    remedy = f"a plain {bases[0]}" if bases else "plain values"
    return UnsupportedState(
        f"{_text(where)}: cannot save a {kind.__module__}.{kind.__qualname__}, because it would not come back as it "
        f"was; give its owner state_dict() and load_state_dict(), or turn it into {remedy}"
    )


# -- decoding --


def _decode(data: Json, where: _Where, depth: int) -> object:
    if depth > MAX_DEPTH:
        raise FormatError(f"{_text(where)}: nested deeper than {MAX_DEPTH} levels")
    if isinstance(data, dict):
        return _decode_object(data, where, depth)
    if isinstance(data, list):
        return _decode_list(data, where, depth)
    if isinstance(data, str):
        _expect(_is_unicode(data), where, "a string without surrogates", data)
    elif isinstance(data, float):
        _expect(math.isfinite(data), where, "a finite number", data)
    elif isinstance(data, int):
        _expect(abs(data) < _BARE_INTS, where, "an int from 2**53 up as {'$int': ...}: a bare one is rounded", data)
    else:
        _expect(data is None, where, "JSON", data)
    return data


def _decode_object(data: dict[str, Json], where: _Where, depth: int) -> object:
    if not any(key.startswith("$") for key in data):
        return {key: _decode(item, (where, key), depth + 1) for key, item in data.items()}
    _expect(len(data) == 1, where, "one key, because one of them is a tag", data)
    [(tag, body)] = data.items()
    if tag not in _DECODERS:
        raise FormatError(f"{_text(where)}: unknown tag {tag[:80]!r}; is it written by a newer ckptlib?")
    return _DECODERS[tag](body, (where, tag), depth)


def _decode_int(data: Json, where: _Where, depth: int) -> int:
    text = _expect_str(data, where)
    try:
        number = int(text, 16)
    except ValueError:
        number = 0
    _expect(abs(number) >= _BARE_INTS and hex(number) == text, where, "hex of an int from 2**53 up", data)
    return number


def _decode_float(data: Json, where: _Where, depth: int) -> float:
    _expect(data in ("nan", "inf", "-inf"), where, "'nan', 'inf' or '-inf'", data)
    return float(cast(str, data))


def _decode_str(data: Json, where: _Where, depth: int) -> str:
    try:
        return _decode_bytes(data, where, depth).decode("utf-8", "surrogatepass")
    except UnicodeDecodeError:
        raise _malformed(where, "base64 of UTF-8 with surrogates", data) from None


def _decode_bytes(data: Json, where: _Where, depth: int) -> bytes:
    try:
        return base64.b64decode(_expect_str(data, where), validate=True)
    except (binascii.Error, ValueError):
        raise _malformed(where, "base64", data) from None


def _decode_complex(data: Json, where: _Where, depth: int) -> complex:
    parts = [_decode(part, where, depth + 1) for part in _expect_list(data, where)]
    _expect(len(parts) == 2 and all(type(part) is float for part in parts), where, "[float, float]", data)
    real, imag = cast("list[float]", parts)
    return complex(real, imag)


def _decode_list(data: Json, where: _Where, depth: int) -> list[object]:
    return [_decode(item, (where, i), depth + 1) for i, item in enumerate(_expect_list(data, where))]


def _decode_tuple(data: Json, where: _Where, depth: int) -> tuple[object, ...]:
    return tuple(_decode_list(data, where, depth))


def _decode_set(data: Json, where: _Where, depth: int) -> set[object]:
    items = _decode_list(data, where, depth)
    found = {_expect_hashable(item, (where, i)) for i, item in enumerate(items)}
    _expect(len(found) == len(items), where, "no item twice", data)
    return found


def _decode_frozenset(data: Json, where: _Where, depth: int) -> frozenset[object]:
    return frozenset(_decode_set(data, where, depth))


def _decode_pairs(data: Json, where: _Where, depth: int) -> dict[object, object]:
    found: dict[object, object] = {}
    pairs = _expect_list(data, where)
    for i, pair in enumerate(pairs):
        _expect(isinstance(pair, list) and len(pair) == 2, (where, i), "[key, value]", pair)
        key, item = cast("list[Json]", pair)
        name = _expect_hashable(_decode(key, (where, i), depth + 1), (where, i))
        found[name] = _decode(item, (where, name), depth + 1)
    _expect(len(found) == len(pairs), where, "no key twice", data)
    return found


def _decode_odict(data: Json, where: _Where, depth: int) -> OrderedDict[object, object]:
    return OrderedDict(_decode_pairs(data, where, depth))


def _decode_numpy(data: Json, where: _Where, depth: int) -> object:
    import numpy as np

    dtype_name, value = _expect_fields(data, where, "dtype", "value")
    dtype = _dtype(dtype_name, where)
    plain = _decode(value, where, depth + 1)
    expected = f"a value that {dtype.str} holds exactly"
    _expect(isinstance(plain, bool | int | float | complex), where, expected, value)
    try:
        with np.errstate(over="ignore"):  # what does not fit is found below
            scalar = dtype.type(cast(float, plain))
    except (OverflowError, TypeError, ValueError):
        raise _malformed(where, expected, value) from None
    back = scalar.item()
    _expect(type(back) is type(plain) and repr(back) == repr(plain), where, expected, value)
    return scalar


def _decode_ndarray(data: Json, where: _Where, depth: int) -> object:
    import numpy as np

    dtype_name, shape, body = _expect_fields(data, where, "dtype", "shape", "data")
    dtype = _dtype(dtype_name, where)
    dims = _decode_list(shape, where, depth)
    _expect(all(type(n) is int and n >= 0 for n in dims), where, "a shape", shape)
    sizes = cast("list[int]", dims)
    raw = bytearray(_decode_bytes(body, where, depth))  # a bytearray, so that the array is writable
    nbytes = math.prod(sizes) * dtype.itemsize
    _expect(nbytes == len(raw), where, f"{nbytes} bytes for shape {sizes} of {dtype.str}", f"{len(raw)} bytes")
    try:
        return np.ndarray(sizes, dtype, raw)
    except (ValueError, OverflowError):  # too many dims, or a product beyond numpy's despite a 0
        raise _malformed(where, "a shape that numpy can hold", shape) from None


def _dtype(name: Json, where: _Where) -> np.dtype[np.generic]:
    import numpy as np

    _expect(isinstance(name, str) and name in _DTYPES, where, "a dtype of plain numbers, like '<f4'", name)
    return np.dtype(cast(str, name))


def _decode_torch_size(data: Json, where: _Where, depth: int) -> object:
    import torch

    sizes = _decode_list(data, where, depth)
    _expect(all(type(n) is int for n in sizes), where, "a list of ints", data)
    return torch.Size(cast("list[int]", sizes))


def _decode_torch_dtype(data: Json, where: _Where, depth: int) -> object:
    import torch

    name = _expect_str(data, where)
    dtype = vars(torch).get(name)  # not getattr: that may import what the name asks for
    _expect(isinstance(dtype, torch.dtype) and str(dtype) == f"torch.{name}", where, "a dtype of this torch", data)
    return dtype


def _decode_torch_device(data: Json, where: _Where, depth: int) -> object:
    import torch

    name = _expect_str(data, where)
    try:
        device = torch.device(name)
    except (RuntimeError, ValueError):
        raise _malformed(where, "a device that this torch knows", data) from None
    _expect(str(device) == name, where, "a device", data)
    return device


_DECODERS: dict[str, Callable[[Json, _Where, int], object]] = {
    "$int": _decode_int,
    "$float": _decode_float,
    "$str": _decode_str,
    "$bytes": _decode_bytes,
    "$complex": _decode_complex,
    "$tuple": _decode_tuple,
    "$set": _decode_set,
    "$frozenset": _decode_frozenset,
    "$dict": _decode_pairs,
    "$odict": _decode_odict,
    "$numpy": _decode_numpy,
    "$ndarray": _decode_ndarray,
    "$torch.Size": _decode_torch_size,
    "$torch.dtype": _decode_torch_dtype,
    "$torch.device": _decode_torch_device,
}


def _expect_str(data: Json, where: _Where) -> str:
    _expect(isinstance(data, str), where, "a string", data)
    return cast(str, data)


def _expect_list(data: Json, where: _Where) -> list[Json]:
    _expect(isinstance(data, list), where, "a list", data)
    return cast("list[Json]", data)


def _expect_fields(data: Json, where: _Where, *names: str) -> list[Json]:
    if not isinstance(data, dict) or data.keys() != set(names):
        raise _malformed(where, f"an object with {', '.join(names)}", data)
    return [data[name] for name in names]


def _expect_hashable(value: object, where: _Where) -> Hashable:
    try:
        hash(value)
    except TypeError:
        raise _malformed(where, "what can be a key or in a set", type(value).__name__) from None
    return value


def _expect(holds: bool, where: _Where, expected: str, got: object) -> None:
    if not holds:
        raise _malformed(where, expected, got)


def _malformed(where: _Where, expected: str, got: object) -> FormatError:
    return FormatError(f"{_text(where)}: expected {expected}, got {_short(got)}")


# -- text --


def _text(where: _Where) -> str:
    steps: list[str] = []
    while isinstance(where, tuple):
        where, key = where
        steps.append(f".{key}" if isinstance(key, str) and key.isprintable() else f"[{_short(key)}]")
    return (where + "".join(reversed(steps))).removeprefix(".") or "value"


def _short(value: object) -> str:
    try:
        text = repr(value)
    except ValueError:  # an int, at any depth, of more digits than Python converts
        text = f"a huge {type(value).__name__}"
    return text if len(text) <= 80 else text[:77] + "..."


def _is_unicode(text: str) -> bool:
    if text.isascii():
        return True
    try:
        text.encode("utf-8")
    except UnicodeEncodeError:
        return False
    return True


def _base64(data: bytes) -> str:
    return base64.b64encode(data).decode("ascii")
