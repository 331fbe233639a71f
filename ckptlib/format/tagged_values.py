"""Decodes values from their JSON, tag by tag.

Refuses anything that `ckptlib.format.values`, which lists the tags, would not write. Imports neither numpy nor torch
before a value needs it.
"""

from __future__ import annotations

import base64
import binascii
import math
import reprlib
from collections import Counter, OrderedDict
from collections.abc import Callable, Collection, Hashable, Iterator
from typing import TYPE_CHECKING, TypeAlias, cast

from typing_extensions import override

from ckptlib.errors import FormatError
from ckptlib.format.paths import join

if TYPE_CHECKING:
    import numpy as np

MAX_DEPTH = 100
"""Levels of containers in a value. Bounds the stack; a value that contains itself ends here."""

BARE_INTS = 2**53  # below this, a float64 holds every int: RFC 8259, section 6

NEST = "$nest"
"""The tag of a container that was a node of the state itself, and was saved whole."""

MAX_COMPARED = 100
"""How many others with the same hash each key of a dict, or item of a set, is compared with on average. Python compares
it with all that came before: n items that are made to share a hash cost n**2."""

FEW = 2_000
"""A smaller dict or set may take as many comparisons as one of this many items: all of 600 may have one hash. That
costs 0.01 s for tuples of ten items, and a second or two for the longest that a document of a megabyte has room for."""

MAX_NDIM = 64  # numpy's own

DTYPES = frozenset(
    ["|b1", "|i1", "|u1"]
    + [order + name for order in "<>" for name in ("i2", "i4", "i8", "u2", "u4", "u8", "f2", "f4", "f8", "c8", "c16")]
)

# The path to a value: (the path to its container, index or key), down to the root's name. Only errors make it text.
Where: TypeAlias = "str | tuple[Where, object]"


def decode(data: object, where: Where, depth: int) -> object:
    """Returns the value. Raises FormatError for anything that `ckptlib.format.values` does not write."""
    if depth > MAX_DEPTH:
        raise FormatError(f"{text_of(where)}: nested deeper than {MAX_DEPTH} levels")
    if isinstance(data, dict):
        return _decode_object(data, where, depth)
    if isinstance(data, list):
        return _decode_list(data, where, depth)
    if isinstance(data, str):
        _expect(is_unicode(data), where, "a string without surrogates", data)
    elif isinstance(data, float):
        _expect(math.isfinite(data), where, "a finite number", data)
    elif isinstance(data, int):
        _expect(abs(data) < BARE_INTS, where, "an int from 2**53 up as {'$int': ...}: a bare one is rounded", data)
    else:
        _expect(data is None, where, "JSON", data)
    return data


def _decode_object(data: dict[str, object], where: Where, depth: int) -> object:
    if not any(key.startswith("$") for key in data):
        return {key: decode(item, (where, key), depth + 1) for key, item in data.items()}
    _expect(len(data) == 1, where, "one key, because one of them is a tag", data)
    [(tag, body)] = data.items()
    if tag not in _DECODERS:
        raise FormatError(f"{text_of(where)}: unknown tag {tag[:80]!r}; did a newer ckptlib write it? Update this one")
    return _DECODERS[tag](body, (where, tag), depth)


def _decode_int(data: object, where: Where, depth: int) -> int:
    text = _expect_str(data, where)
    try:
        number = int(text, 16)
    except ValueError:
        number = 0
    _expect(abs(number) >= BARE_INTS and hex(number) == text, where, "hex of an int from 2**53 up", data)
    return number


def _decode_float(data: object, where: Where, depth: int) -> float:
    _expect(data in ("nan", "inf", "-inf"), where, "'nan', 'inf' or '-inf'", data)
    return float(cast(str, data))


def _decode_str(data: object, where: Where, depth: int) -> str:
    try:
        return _decode_bytes(data, where, depth).decode("utf-8", "surrogatepass")
    except UnicodeDecodeError:
        raise _malformed(where, "base64 of UTF-8 with surrogates", data) from None


def _decode_bytes(data: object, where: Where, depth: int) -> bytes:
    try:
        return base64.b64decode(_expect_str(data, where), validate=True)
    except (binascii.Error, ValueError):
        raise _malformed(where, "base64", data) from None


def _decode_complex(data: object, where: Where, depth: int) -> complex:
    parts = [decode(part, where, depth + 1) for part in _expect_list(data, where)]
    _expect(len(parts) == 2 and all(type(part) is float for part in parts), where, "[float, float]", data)
    real, imag = cast("list[float]", parts)
    return complex(real, imag)


def _decode_list(data: object, where: Where, depth: int) -> list[object]:
    return [decode(item, (where, i), depth + 1) for i, item in enumerate(_expect_list(data, where))]


def _decode_set(data: object, where: Where, depth: int) -> set[object]:
    items = _decode_list(data, where, depth)
    hashable = [expect_hashable(item, (where, i)) for i, item in enumerate(items)]
    _expect_spread(hashable, where)
    found: set[object] = set(hashable)
    _expect(len(found) == len(items), where, "no item twice", data)
    return found


def _decode_pairs(data: object, where: Where, depth: int) -> dict[object, object]:
    pairs = decode_keys(data, where, depth)
    return {name: decode(item, (where, name), depth + 1) for name, item in pairs}


def decode_keys(data: object, where: Where, depth: int) -> list[tuple[Hashable, object]]:
    """Returns pairs of a key and the undecoded item beside it. Refuses a key that occurs twice."""
    pairs = []
    for i, pair in enumerate(_expect_list(data, where)):
        _expect(isinstance(pair, list) and len(pair) == 2, (where, i), "[key, value]", pair)
        key, item = cast("list[object]", pair)
        pairs.append((expect_hashable(decode(key, (where, i), depth + 1), (where, i)), item))
    names = [name for name, _ in pairs]
    _expect_spread(names, where)
    _expect(len({*names}) == len(names), where, "no key twice", data)
    return pairs


def decode_entries(pairs: object, path: str, depth: int) -> Iterator[tuple[Hashable, str, object]]:
    """Yields each key of a tree's dict, the path of its entry, and the undecoded item beside it.

    One by one: a path may be long, and a hostile dict of a few megabytes has many entries below it.
    """
    for key, item in decode_keys(pairs, path, depth):
        try:
            name = join(path, key)
        except ValueError as error:  # an int of more digits than Python converts
            raise FormatError(f"{path[:80]}: the layout's tree of this object has a key that is no name") from error
        yield key, name, item


def _decode_counter(data: object, where: Where, depth: int) -> Counter[object]:
    found: Counter[object] = Counter()
    for key, count in _decode_pairs(data, where, depth).items():  # one by one; Counter's own update adds them up
        found[key] = cast(int, count)
    return found


def _decode_numpy(data: object, where: Where, depth: int) -> object:
    import numpy as np

    dtype_name, value = _expect_fields(data, where, "dtype", "value")
    dtype = _dtype(dtype_name, where)
    plain = decode(value, where, depth + 1)
    expected = f"a value that {dtype.str} holds exactly"
    _expect(isinstance(plain, bool | int | float | complex), where, expected, value)
    try:
        with np.errstate(over="ignore"):  # a value that does not fit is found below
            scalar = dtype.type(cast(float, plain))
    except (OverflowError, TypeError, ValueError):
        raise _malformed(where, expected, value) from None
    back = scalar.item()
    _expect(type(back) is type(plain) and repr(back) == repr(plain), where, expected, value)
    return scalar


def _decode_ndarray(data: object, where: Where, depth: int) -> object:
    import numpy as np

    dtype_name, shape, body = _expect_fields(data, where, "dtype", "shape", "data")
    dtype = _dtype(dtype_name, where)
    dims = _decode_list(shape, where, depth)
    bounded = len(dims) <= MAX_NDIM and all(type(n) is int and 0 <= n < BARE_INTS for n in dims)
    _expect(bounded, where, f"a shape of at most {MAX_NDIM} dims", shape)
    sizes = cast("list[int]", dims)
    raw = bytearray(_decode_bytes(body, where, depth))  # a bytearray, so that the array is writable
    nbytes = math.prod(sizes) * dtype.itemsize
    _expect(nbytes == len(raw), where, f"{nbytes} bytes for shape {sizes} of {dtype.str}", f"{len(raw)} bytes")
    try:
        return np.ndarray(sizes, dtype, raw)
    except (ValueError, OverflowError):  # too many dims, or a product beyond numpy's despite a 0
        raise _malformed(where, "a shape that numpy can hold", shape) from None


def _dtype(name: object, where: Where) -> np.dtype[np.generic]:
    import numpy as np

    _expect(isinstance(name, str) and name in DTYPES, where, "a dtype of plain numbers, like '<f4'", name)
    return np.dtype(cast(str, name))


def _decode_torch_size(data: object, where: Where, depth: int) -> object:
    import torch

    sizes = _decode_list(data, where, depth)
    _expect(all(type(n) is int for n in sizes), where, "a list of ints", data)
    return torch.Size(cast("list[int]", sizes))


def _decode_torch_dtype(data: object, where: Where, depth: int) -> object:
    import torch

    name = _expect_str(data, where)
    dtype = vars(torch).get(name)  # not getattr: that may import what the name asks for
    _expect(isinstance(dtype, torch.dtype) and str(dtype) == f"torch.{name}", where, "a dtype of this torch", data)
    return dtype


def _decode_torch_device(data: object, where: Where, depth: int) -> object:
    import torch

    name = _expect_str(data, where)
    try:
        device = torch.device(name)
    except (RuntimeError, ValueError):
        raise _malformed(where, "a device that this torch knows", data) from None
    _expect(str(device) == name, where, "a device", data)
    return device


def _decode_nest(data: object, where: Where, depth: int) -> object:
    _expect(depth == 0, where, "no nest within a value", data)
    value = decode(data, where, 1)
    _expect(isinstance(value, list | tuple | dict), where, "a container", data)
    return value


_DECODERS: dict[str, Callable[[object, Where, int], object]] = {
    NEST: _decode_nest,
    "$int": _decode_int,
    "$float": _decode_float,
    "$str": _decode_str,
    "$bytes": _decode_bytes,
    "$complex": _decode_complex,
    "$tuple": lambda data, where, depth: tuple(_decode_list(data, where, depth)),
    "$set": _decode_set,
    "$frozenset": lambda data, where, depth: frozenset(_decode_set(data, where, depth)),
    "$dict": _decode_pairs,
    "$odict": lambda data, where, depth: OrderedDict(_decode_pairs(data, where, depth)),
    "$counter": _decode_counter,
    "$numpy": _decode_numpy,
    "$ndarray": _decode_ndarray,
    "$torch.Size": _decode_torch_size,
    "$torch.dtype": _decode_torch_dtype,
    "$torch.device": _decode_torch_device,
}


def _expect_str(data: object, where: Where) -> str:
    _expect(isinstance(data, str), where, "a string", data)
    return cast(str, data)


def _expect_list(data: object, where: Where) -> list[object]:
    _expect(isinstance(data, list), where, "a list", data)
    return cast("list[object]", data)


def _expect_fields(data: object, where: Where, *names: str) -> list[object]:
    if not isinstance(data, dict) or data.keys() != set(names):
        raise _malformed(where, f"an object with {', '.join(names)}", data)
    return [data[name] for name in names]


def are_spread(items: Collection[Hashable]) -> bool:
    """Returns whether Python quickly makes a dict or a set of different items: whether few enough share a hash."""
    most = MAX_COMPARED * max(len(items), FEW)
    return _pairs(len(items)) <= most or sum(map(_pairs, Counter(map(hash, items)).values())) <= most


def _pairs(count: int) -> int:
    return count * (count - 1) // 2


def _expect_spread(items: list[Hashable], where: Where) -> None:
    _expect(are_spread(items), where, "fewer items that have one hash", f"{len(items)} items")


def expect_hashable(value: object, where: Where) -> Hashable:
    try:
        hash(value)
    except TypeError:
        raise _malformed(where, "what can be a key or in a set", type(value).__name__) from None
    return value


def _expect(holds: bool, where: Where, expected: str, got: object) -> None:
    if not holds:
        raise _malformed(where, expected, got)


def _malformed(where: Where, expected: str, got: object) -> FormatError:
    return FormatError(f"{text_of(where)}: expected {expected}, got {brief(got)}")


def text_of(where: Where) -> str:
    steps: list[str] = []
    while isinstance(where, tuple):
        where, key = where
        steps.append(f".{key}" if isinstance(key, str) and key.isprintable() else f"[{brief(key)}]")
    return (where + "".join(reversed(steps))).removeprefix(".") or "value"


class _Brief(reprlib.Repr):
    """Looks at a few items of a few levels, however long and deep a value is."""

    def __init__(self) -> None:
        super().__init__()
        self.maxlevel, self.maxdict, self.maxlist, self.maxtuple = 4, 4, 8, 8
        self.maxstring = self.maxother = self.maxlong = 80

    @override
    def repr_int(self, x: int, level: int) -> str:
        return repr(x) if x.bit_length() < 1024 else "a huge int"  # Python does not convert thousands of digits

    @override
    def repr_str(self, x: str, level: int) -> str:
        return super().repr_str(x[:100], level)


_BRIEF = _Brief()


def brief(value: object) -> str:
    """Returns a value as text for messages, at most 80 characters long."""
    text = _BRIEF.repr(value)
    return text if len(text) <= 80 else text[:77] + "..."


def is_unicode(text: str) -> bool:
    if text.isascii():
        return True
    try:
        text.encode("utf-8")
    except UnicodeEncodeError:
        return False
    return True
