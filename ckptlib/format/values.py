"""Encodes plain Python values as JSON and decodes them: same types, same bits.

Knows neither tensors nor where values are stored. Values that JSON has are themselves; every other value is an object
with one key, a tag:

    NaN, infinities          {"$float": "nan"}  "inf"  "-inf"
    ints from 2**53 up       {"$int": "-0x20000000000001"}            JSON tools keep numbers as float64
    str with surrogates      {"$str": base64}                         of UTF-8 with surrogates passed through
    bytes                    {"$bytes": base64}
    complex                  {"$complex": [real, imag]}
    tuple                    {"$tuple": [...]}
    set, frozenset           {"$set": [...]}, {"$frozenset": [...]}   sorted by their encoding
    dict, other keys         {"$dict": [[key, value], ...]}           also when a str key starts with "$"
    OrderedDict              {"$odict": [[key, value], ...]}
    Counter                  {"$counter": [[key, value], ...]}        torch's MultiStepLR has one
    numpy scalar             {"$numpy": {"dtype": "<f4", "value": 0.25}}
    numpy array              {"$ndarray": {"dtype": "<f4", "shape": [2, 3], "data": base64}}   row-major
    torch.Size               {"$torch.Size": [...]}
    torch.dtype              {"$torch.dtype": "bfloat16"}
    torch.device             {"$torch.device": "cuda:0"}
    a container of a state   {"$nest": ...}                           saved whole; an object's state has no such tag

The order of a dict is kept. Sharing is not: a list that occurs twice comes back as two lists. Types are matched
exactly, so that no subclass quietly comes back as its base; any other type is refused, never pickled. Imports neither
numpy nor torch before a value needs it.
"""

from __future__ import annotations

import base64
import dataclasses
import io
import json
import math
from collections import Counter, OrderedDict
from collections.abc import Callable, Collection, Hashable, Iterable, Mapping
from enum import Enum
from typing import NoReturn, TypeAlias, cast

from ckptlib.errors import FormatError, UnsupportedState
from ckptlib.format import tagged_values
from ckptlib.format.tagged_values import BARE_INTS, DTYPES, MAX_DEPTH, NEST, Where, are_spread, is_unicode, text_of

MAX_BYTES = 2**29
"""The most bytes of a bytes object or an array: half of a document's, as base64 makes four of three."""

Json: TypeAlias = "bool | int | float | str | list[Json] | dict[str, Json] | None"


def encode(value: object, path: str, depth: int = 0) -> Json:
    """Returns `value` as JSON. `path` names it in messages; `depth` is the number of containers in which it lies.

    Raises UnsupportedState, naming the path within the value, if it would not come back exactly.
    """
    return _encode(value, path, depth)


def encode_nest(value: object, path: str) -> Json:
    """Encodes a container that is a node of the state itself; otherwise like `encode`."""
    return {NEST: _encode(value, path, 1)}


def is_nest(data: object) -> bool:
    """Returns whether `encode_nest` wrote it."""
    return isinstance(data, dict) and NEST in data


def require_spread(items: Collection[Hashable], where: Where) -> None:
    """Raises UnsupportedState if so many keys of a dict, or items of a set, share a hash that `decode` refuses them."""
    if not are_spread(items):
        raise UnsupportedState(
            f"{text_of(where)}: too many of its {len(items):,} items have one hash, which makes every dict or set of "
            "them slow (-1 and -2 have the same one in Python, and tuples of them, too); keep them in a list, or with "
            "keys such as text"
        )


def decode(data: Json, path: str = "", depth: int = 0) -> object:
    """Returns the value that `encode` was given, in as many levels of containers. Mutable values are new objects.

    Raises FormatError for anything that `encode` does not write.
    """
    return tagged_values.decode(data, path, depth)


def dumps(data: Json) -> bytes:
    """Returns compact ASCII JSON."""
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
        twice, _ = Counter(key for key, _ in pairs).most_common(1)[0]
        raise FormatError(f"JSON object has the key {twice[:80]!r} twice")
    return found


def _refuse_number(text: str) -> NoReturn:
    raise FormatError(f"JSON has the number {text[:40]}; NaN and infinities are no JSON")


def _finite(text: str) -> float:
    number = float(text)
    if not math.isfinite(number):  # 1e999
        _refuse_number(text)
    return number


def _encode(value: object, where: Where, depth: int) -> Json:
    encoder = _ENCODERS.get(type(value))
    within = encoder is None or encoder is _encode_complex  # these are written as a list or dict, a level deeper
    if depth + within > MAX_DEPTH:
        raise UnsupportedState(f"{text_of(where)}: nested deeper than {MAX_DEPTH} levels; does it contain itself?")
    if encoder is not None:
        return encoder(value, where, depth)
    if type(value).__module__ == "numpy":
        return _encode_numpy(value, where, depth)
    if type(value).__module__ == "torch":
        return _encode_torch(value, where)
    raise _refused(value, where)


def _encode_int(value: int, where: Where, depth: int) -> Json:
    # Hex, because Python limits decimal conversion to 4300 digits.
    return value if abs(value) < BARE_INTS else {"$int": hex(value)}


def _encode_float(value: float, where: Where, depth: int) -> Json:
    return value if math.isfinite(value) else {"$float": str(value)}


def _encode_str(value: str, where: Where, depth: int) -> Json:
    # os.fsdecode makes surrogates. As \u escapes, two that are adjacent would come back as one character.
    return value if is_unicode(value) else {"$str": _base64(value.encode("utf-8", "surrogatepass"), where)}


def _encode_complex(value: complex, where: Where, depth: int) -> Json:
    return {"$complex": [_encode_float(value.real, where, depth), _encode_float(value.imag, where, depth)]}


def _encode_list(value: Iterable[object], where: Where, depth: int) -> list[Json]:
    if depth < MAX_DEPTH and {*map(type, value)} == {float} and all(map(math.isfinite, cast("Iterable[float]", value))):
        return cast("list[Json]", [*value])  # a history may have a million of them
    return [_encode(item, (where, i), depth + 1) for i, item in enumerate(value)]


def _encode_items(value: Collection[Hashable], where: Where, depth: int) -> list[Json]:
    require_spread(value, where)
    return sorted(_encode_list(value, where, depth), key=dumps)


def _encode_dict(value: dict[object, object], where: Where, depth: int) -> Json:
    if _are_bare(value):
        return {cast(str, key): _encode(item, (where, key), depth + 1) for key, item in value.items()}
    return {"$dict": _encode_pairs(value, where, depth)}


def _are_bare(keys: Collection[object]) -> bool:
    """Returns whether these can be keys of a JSON object as they are."""
    if not {*map(type, keys)} <= {str}:
        return False
    texts = cast("Collection[str]", keys)
    together = "".join(texts)
    return (together.isascii() and "$" not in together) or all(
        is_unicode(text) and not text.startswith("$") for text in texts
    )


def _encode_pairs(value: Mapping[object, object], where: Where, depth: int) -> list[Json]:
    require_spread(value, where)
    return [
        [_encode(key, (where, key), depth + 1), _encode(item, (where, key), depth + 1)] for key, item in value.items()
    ]


_ENCODERS: dict[type, Callable[..., Json]] = {
    type(None): lambda value, where, depth: None,
    bool: lambda value, where, depth: value,
    int: _encode_int,
    float: _encode_float,
    str: _encode_str,
    bytes: lambda value, where, depth: {"$bytes": _base64(value, where)},
    complex: _encode_complex,
    list: _encode_list,
    tuple: lambda value, where, depth: {"$tuple": _encode_list(value, where, depth)},
    set: lambda value, where, depth: {"$set": _encode_items(value, where, depth)},
    frozenset: lambda value, where, depth: {"$frozenset": _encode_items(value, where, depth)},
    dict: _encode_dict,
    OrderedDict: lambda value, where, depth: {"$odict": _encode_pairs(value, where, depth)},
    Counter: lambda value, where, depth: {"$counter": _encode_pairs(value, where, depth)},
}


def _encode_numpy(value: object, where: Where, depth: int) -> Json:
    import numpy as np

    if type(value) is np.ndarray and value.dtype.str in DTYPES:
        _require_small(value.nbytes, where)
        return {
            "$ndarray": {
                "dtype": value.dtype.str,
                "shape": [int(n) for n in value.shape],
                "data": _base64(value.tobytes(), where),
            }
        }
    if isinstance(value, np.generic) and value.dtype.str in DTYPES:
        dtype = np.dtype(value.dtype.str)
        if dtype.type is type(value):  # longlong, for one, is not int64 and shares its dtype string
            return {"$numpy": {"dtype": dtype.str, "value": _encode(value.item(), where, depth + 1)}}
    raise _refused(value, where)


def _encode_torch(value: object, where: Where) -> Json:
    name = type(value).__name__
    if name == "Size":
        return {"$torch.Size": _encode_list(cast("Iterable[object]", value), where, 0)}
    if name == "dtype":
        return {"$torch.dtype": str(value).removeprefix("torch.")}
    if name == "device":
        return {"$torch.device": str(value)}
    raise _refused(value, where)


def _refused(value: object, where: Where) -> UnsupportedState:
    kind = type(value)
    bases = [base.__name__ for base in _ENCODERS if isinstance(value, base)]
    remedy = f"a plain {bases[0]}" if bases else "plain values"
    if kind.__module__.partition(".")[0] in ("pathlib", "datetime"):
        remedy = "text: str(x)"
    elif isinstance(value, io.BytesIO):
        remedy = "bytes: x.getvalue()"
    elif isinstance(value, Enum) and not bases:
        remedy = "its value: x.value"
    elif (dataclasses.is_dataclass(kind) or kind.__module__ in ("argparse", "types")) and hasattr(value, "__dict__"):
        remedy = "the dict of its attributes, which changes with it: vars(x)"
    elif kind.__module__.partition(".")[0] == "omegaconf":
        remedy = "plain values: OmegaConf.to_container(x)"
    elif callable(getattr(kind, "state_dict", None)):
        remedy = "its own state: x.state_dict()"
    return UnsupportedState(
        f"{text_of(where)}: cannot save a {kind.__module__}.{kind.__qualname__}, because it would not come back as it "
        f"was; give its owner state_dict() and load_state_dict(), or turn it into {remedy}"
    )


def _require_small(nbytes: int, where: Where) -> None:
    if nbytes > MAX_BYTES:
        raise UnsupportedState(
            f"{text_of(where)}: {nbytes:,} bytes are too many for a value, which has at most {MAX_BYTES:,}; keep them "
            "as a tensor, torch.from_numpy(array) or torch.frombuffer(data, dtype=torch.uint8)"
        )


def _base64(data: bytes, where: Where) -> str:
    _require_small(len(data), where)
    return base64.b64encode(data).decode("ascii")
