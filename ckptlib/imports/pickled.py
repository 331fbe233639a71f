"""Reads a pickle as data: records what it would make, and imports, calls and makes nothing.

A checkpoint of another library describes its content in a pickle. Loading one runs code; parsing one does not. Classes
and functions become their names, and calls become a `Made`. The reader of a format decides which names mean something;
all others stay names.
"""

from __future__ import annotations

import pickletools
from collections.abc import Callable
from dataclasses import dataclass, field
from io import BytesIO
from typing import Any

from ckptlib.errors import FormatError

MAX_BYTES = 2**31
"""The most bytes of a pickle without the data of its tensors."""

MAX_WEIGHT = 2**27
"""The most values that a walk meets. A pickle of a few hundred bytes can name one list so often that it is 2**100."""

MAX_KEY_WEIGHT = 1000
"""The same limit for keys of a dict and members of a set: hashing them cannot be interrupted."""

MAX_INT_BITS = 2**13
"""Python writes no int of more than 4,300 digits in decimal, as names and messages do."""

MAX_DEPTH = 300


@dataclass(frozen=True, slots=True)
class Global:
    """A class or function, by name. Nothing of that name is looked up."""

    name: str
    """With its module: `torch.FloatStorage`."""


@dataclass(slots=True, eq=False)
class Made:
    """Record of a call, and of what it would have returned."""

    by: str
    """Name of the class or function."""
    arguments: tuple[Any, ...]
    state: Any = None
    """The state that `__setstate__` would have got."""
    items: dict[Any, Any] = field(default_factory=dict)
    """The items that would have been set in it by key."""
    appended: list[Any] = field(default_factory=list)
    """The items that would have been appended to it."""


@dataclass(frozen=True, slots=True)
class Persistent:
    """An object that the pickle leaves to its reader to find, such as a tensor's storage."""

    id: Any


class _Mark:
    """Marks where a container's items begin on the stack."""


_MARK = _Mark()

_GIVEN = {
    *("BININT", "BININT1", "BININT2", "INT", "LONG", "LONG1", "LONG4", "FLOAT", "BINFLOAT"),
    *("BINUNICODE", "SHORT_BINUNICODE", "BINUNICODE8", "UNICODE", "BINBYTES", "SHORT_BINBYTES", "BINBYTES8"),
    *("BYTEARRAY8", "STRING", "BINSTRING", "SHORT_BINSTRING"),
}
_MADE: dict[str, Callable[[], Any]] = {
    "NONE": lambda: None,
    "NEWTRUE": lambda: True,
    "NEWFALSE": lambda: False,
    "EMPTY_TUPLE": tuple,
    "EMPTY_LIST": list,
    "EMPTY_DICT": dict,
    "EMPTY_SET": set,
    "MARK": lambda: _MARK,
}
_TUPLES = {"TUPLE1": 1, "TUPLE2": 2, "TUPLE3": 3}


def read_pickle(data: bytes, what: str) -> Any:
    """Returns the content of a pickle as dict, list, tuple, plain values, `Global`, `Made` and `Persistent`.

    `what`: the source, for errors. Raises FormatError if `data` is no whole pickle, or too large.
    """
    if len(data) > MAX_BYTES:
        raise FormatError(f"{what}: a pickle of {len(data)} bytes; expected at most {MAX_BYTES} beside the tensors")
    try:
        found = _read(data)
        _weight(found, {}, 0)
        return found
    except (ValueError, IndexError, KeyError, TypeError, UnicodeError, RecursionError, OverflowError) as error:
        raise FormatError(
            f"{what}: not a whole pickle ({type(error).__name__}: {str(error)[:200]}); was it copied whole?"
        ) from None


def _read(data: bytes) -> Any:
    stack: list[Any] = []
    memo: dict[int, Any] = {}
    for opcode, argument, _ in pickletools.genops(BytesIO(data)):
        name = opcode.name
        if name in ("PROTO", "FRAME"):
            continue
        if name == "STOP":
            break
        if name in _GIVEN:
            if isinstance(argument, int) and argument.bit_length() > MAX_INT_BITS:
                raise ValueError(f"an int of {argument.bit_length()} bits")
            stack.append(argument)
        elif name in _MADE:
            stack.append(_MADE[name]())
        elif name in _TUPLES:
            count = _TUPLES[name]
            if len(stack) < count:
                raise ValueError("a tuple of more than there is")
            stack[-count:] = [tuple(stack[-count:])]
        elif name in ("GET", "BINGET", "LONG_BINGET"):
            stack.append(memo[_number(argument)])
        elif name in ("PUT", "BINPUT", "LONG_BINPUT"):
            memo[_number(argument)] = stack[-1]
        elif name == "MEMOIZE":
            memo[len(memo)] = stack[-1]
        else:
            _apply(name, argument, stack)
    if len(stack) != 1:
        raise ValueError(f"{len(stack)} values are left where one is expected")
    return stack[0]


def _weight(node: Any, known: dict[int, int], depth: int) -> int:
    """Returns how many values a walk through a node meets. Raises ValueError if the walk would take too long."""
    if depth > MAX_DEPTH:
        raise ValueError(f"nested deeper than {MAX_DEPTH} levels")
    inner: list[Any]
    if isinstance(node, dict):
        inner = [*node.keys(), *node.values()]
    elif isinstance(node, (list, tuple, set, frozenset)):
        inner = list(node)
    elif isinstance(node, Made):
        inner = [node.arguments, node.state, node.items, node.appended]
    elif isinstance(node, Persistent):
        inner = [node.id]
    else:
        return 1
    if id(node) not in known:
        known[id(node)] = 1  # for a container that contains itself; a walk through it has a limit of levels
        known[id(node)] = total = 1 + sum(_weight(item, known, depth + 1) for item in inner)
        if total > MAX_WEIGHT:
            raise ValueError(f"more than {MAX_WEIGHT} values, one within the other")
    return known[id(node)]


def _apply(name: str, argument: Any, stack: list[Any]) -> None:
    """Applies an opcode that takes from the stack."""
    match name:
        case "POP":
            stack.pop()
        case "DUP":
            stack.append(stack[-1])
        case "POP_MARK":
            _since_mark(stack)
        case "TUPLE":
            stack.append(tuple(_since_mark(stack)))
        case "LIST":
            stack.append(_since_mark(stack))
        case "DICT":
            stack.append(_pairs(_since_mark(stack)))
        case "FROZENSET":
            stack.append(frozenset(map(_hashable, _since_mark(stack))))
        case "ADDITEMS":
            items = _since_mark(stack)
            stack[-1].update(map(_hashable, items))
        case "APPEND":
            item = stack.pop()
            _list_of(stack[-1]).append(item)
        case "APPENDS":
            items = _since_mark(stack)
            _list_of(stack[-1]).extend(items)
        case "SETITEM":
            value, key = stack.pop(), stack.pop()
            _dict_of(stack[-1])[_hashable(key)] = value
        case "SETITEMS":
            pairs = _pairs(_since_mark(stack))
            _dict_of(stack[-1]).update(pairs)
        case "GLOBAL":
            stack.append(Global(argument.replace(" ", ".", 1)))
        case "STACK_GLOBAL":
            attribute, module = stack.pop(), stack.pop()
            stack.append(Global(f"{_text(module)}.{_text(attribute)}"))
        case "REDUCE" | "NEWOBJ":
            arguments, made_by = stack.pop(), stack.pop()
            stack.append(_made(made_by, arguments))
        case "NEWOBJ_EX":
            _, arguments, made_by = stack.pop(), stack.pop(), stack.pop()
            stack.append(_made(made_by, arguments))
        case "BUILD":
            state = stack.pop()
            if not isinstance(stack[-1], Made):
                raise ValueError("a state for what was not made by a call")
            stack[-1].state = state
        case "BINPERSID":
            stack.append(Persistent(stack.pop()))
        case _:
            raise ValueError(f"the opcode {name} is none that torch or Python's own containers write")


def _made(made_by: Any, arguments: Any) -> Made:
    if not isinstance(made_by, Global) or not isinstance(arguments, tuple):
        raise ValueError("a call of what is no class or function by name")
    return Made(made_by.name, arguments)


def _number(value: Any) -> int:
    return int(value)


def _text(value: Any) -> str:
    if not isinstance(value, str):
        raise ValueError("a name that is no text")
    return value


def _since_mark(stack: list[Any]) -> list[Any]:
    items: list[Any] = []
    while (item := stack.pop()) is not _MARK:
        items.append(item)
    return items[::-1]


def _pairs(items: list[Any]) -> dict[Any, Any]:
    if len(items) % 2:
        raise ValueError("a key without a value")
    return {_hashable(key): value for key, value in zip(items[::2], items[1::2], strict=True)}


def _hashable(key: Any) -> Any:
    """Checks and returns a key as it is. A `Made` is hashed by identity: two that are alike stay two."""
    if not isinstance(key, (str, int)) and _weight(key, {}, 0) > MAX_KEY_WEIGHT:
        raise ValueError(f"a key of more than {MAX_KEY_WEIGHT} values")
    hash(key)
    return key


def _dict_of(target: Any) -> dict[Any, Any]:
    if isinstance(target, Made):
        return target.items
    if not isinstance(target, dict):
        raise ValueError("items for what is no dict")
    return target


def _list_of(target: Any) -> list[Any]:
    if isinstance(target, Made):
        return target.appended
    if not isinstance(target, list):
        raise ValueError("items for what is no list")
    return target
