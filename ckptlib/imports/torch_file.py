"""Reads a file of `torch.save`: its objects, with tensors that are views of the file.

The pickle inside is read as data (`ckptlib.imports.pickled`): no class is imported, no function called. This module
knows the few names by which torch and numpy make tensors, arrays and plain values.
"""

from __future__ import annotations

import struct
import sys
import zipfile
from collections import Counter, OrderedDict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from ckptlib.errors import FormatError
from ckptlib.imports.mapped import Mapped, aligned, dtype_named, numel_of, sized, strided
from ckptlib.imports.pickled import Global, Made, Persistent, read_pickle

MAGIC = b"PK\x03\x04"
MAX_DEPTH = 100
MAX_PICKLE = 2**30

_STORAGES = {
    "DoubleStorage": "float64",
    "FloatStorage": "float32",
    "HalfStorage": "float16",
    "LongStorage": "int64",
    "IntStorage": "int32",
    "ShortStorage": "int16",
    "CharStorage": "int8",
    "ByteStorage": "uint8",
    "BoolStorage": "bool",
    "BFloat16Storage": "bfloat16",
    "ComplexFloatStorage": "complex64",
    "ComplexDoubleStorage": "complex128",
    "UntypedStorage": "uint8",
}


@dataclass(frozen=True, slots=True)
class Strange:
    """An object of a class that is not known here. It was not made."""

    by: str


def is_torch_file(path: Path) -> bool:
    """Returns whether it begins like a file of torch.save since torch 1.6."""
    with path.open("rb") as file:
        return file.read(4) == MAGIC


Classes = Mapping[str, Callable[[Any], Any]]
"""By name of a class: a function from an object's saved state to what replaces the object."""


def read_torch_file(mapped: Mapped, begin: int = 0, nbytes: int | None = None, classes: Classes | None = None) -> Any:
    """Returns the object given to torch.save: dict, list, tuple, plain values, tensors that view the file, `Strange`.

    A contiguous tensor may begin at any byte: see `aligned`.

    `begin`, `nbytes`: the range of the file, if not all of it; `classes`: further classes that are not Strange. Raises
    FormatError if the file is none of torch.save, or damaged.
    """
    return _TorchFile(mapped, begin, mapped.nbytes - begin if nbytes is None else nbytes, classes or {}).objects()


class _Window:
    """A part of a mapped file, with the interface that zipfile needs."""

    def __init__(self, mapped: Mapped, begin: int, nbytes: int) -> None:
        self._mapped, self._begin, self._nbytes, self._at = mapped, begin, nbytes, 0

    def seekable(self) -> bool:
        return True

    def tell(self) -> int:
        return self._at

    def seek(self, offset: int, whence: int = 0) -> int:
        at = offset + (0, self._at, self._nbytes)[whence]
        if at < 0:
            raise OSError("before the beginning")
        self._at = at
        return at

    def read(self, size: int | None = -1) -> bytes:
        left = max(0, self._nbytes - self._at)
        size = left if size is None or size < 0 else min(size, left)
        data = self._mapped.bytes(self._begin + self._at, size, "a part of the archive")
        self._at += size
        return data


class _TorchFile:
    def __init__(self, mapped: Mapped, begin: int, nbytes: int, classes: Classes) -> None:
        self._mapped, self._begin, self._classes = mapped, begin, classes
        self._what = str(mapped.path)
        mapped.bytes(begin, 0, "an entry")
        mapped.tensor(begin, nbytes, torch.uint8, "an entry")
        try:
            self._zip = zipfile.ZipFile(_Window(mapped, begin, nbytes))
        except (zipfile.BadZipFile, OSError, ValueError, struct.error, NotImplementedError) as error:
            raise FormatError(
                f"{self._what}: is no whole file of torch.save ({error}). If torch.load(..., weights_only=True) reads "
                "it, it is of a torch before 1.6: torch.save what that gives again, and import the new file"
            ) from None
        pickles = [name for name in self._zip.namelist() if name.endswith("/data.pkl")]
        if len(pickles) != 1:
            scripted = any(name.endswith("/constants.pkl") for name in self._zip.namelist())
            hint = "; it is a TorchScript archive: save the state_dict() of what torch.jit.load gives" * scripted
            raise FormatError(f"{self._what}: {len(pickles)} pickles in a file of torch.save; expected one{hint}")
        self._prefix = pickles[0].removesuffix("data.pkl")
        self._storages: dict[str, tuple[torch.Tensor, int]] = {}
        self._known: dict[int, Any] = {}
        self._keep: list[Any] = []
        if f"{self._prefix}byteorder" in self._zip.namelist():
            order = self._entry(f"{self._prefix}byteorder", 16).decode("ascii", "replace")
            if order != sys.byteorder:
                raise FormatError(f"{self._what}: was written by a {order}-endian machine; save it again on this one")

    def objects(self) -> Any:
        tree = read_pickle(self._entry(f"{self._prefix}data.pkl", MAX_PICKLE), self._what)
        return self._real(tree, 0)

    def _entry(self, name: str, limit: int) -> bytes:
        info = self._zip.getinfo(name)
        if info.file_size > limit or info.compress_type != zipfile.ZIP_STORED:
            raise FormatError(f"{self._what}: {name} has {info.file_size} bytes, at most {limit} uncompressed expected")
        offset = self._data_offset(info)
        return self._mapped.bytes(offset, info.file_size, name)

    def _data_offset(self, info: zipfile.ZipInfo) -> int:
        """Returns where an entry's bytes begin: behind its own header, whose size the directory does not give."""
        header = self._mapped.bytes(self._begin + info.header_offset, 30, info.filename)
        if header[:4] != MAGIC:
            raise FormatError(f"{self._what}: {info.filename} is not where the archive's directory says")
        name, extra = struct.unpack("<HH", header[26:30])
        return self._begin + info.header_offset + 30 + int(name) + int(extra)

    # Objects

    def _real(self, node: Any, depth: int) -> Any:
        if depth > MAX_DEPTH:
            raise FormatError(f"{self._what}: objects nested deeper than {MAX_DEPTH} levels, or within themselves")
        kind = type(node)
        if kind in (dict, list, tuple, Made):
            key = id(node)
            if key not in self._known:
                self._known[key] = self._container(node, depth)
                self._keep.append(node)  # so that no other node gets its id
            return self._known[key]
        if kind is Global:
            return self._named(node.name)
        if kind is Persistent:
            return self._storage(node)[0]
        return node

    def _container(self, node: Any, depth: int) -> Any:
        def real(inner: Any) -> Any:
            return self._real(inner, depth + 1)

        if isinstance(node, dict):
            return {_key(real(key)): real(value) for key, value in node.items()}
        if isinstance(node, list):
            return [real(item) for item in node]
        if isinstance(node, tuple):
            return tuple(real(item) for item in node)
        maker = _MAKERS.get(node.by)
        if node.by in self._classes:
            return self._classes[node.by](real(node.state))
        if maker is None:
            return Strange(node.by)
        try:
            return maker(self, node, real)
        except (TypeError, ValueError, IndexError, RuntimeError, OverflowError, AttributeError) as error:
            raise FormatError(f"{self._what}: {node.by} with what it does not take: {str(error)[:200]}") from None

    def _named(self, name: str) -> Any:
        if name.startswith("torch.") and isinstance(getattr(torch, name[6:], None), torch.dtype):
            return getattr(torch, name[6:])
        return Strange(name)

    # Tensors

    def _storage(self, node: Any) -> tuple[torch.Tensor, torch.dtype]:
        """Returns all of a storage as bytes, 1-d, and its dtype."""
        match node:
            case Persistent(("storage", Global(name), str(key), _, int(numel))) if name.startswith("torch."):
                word = name.rpartition(".")[2]
            case _:
                raise FormatError(f"{self._what}: a storage that is described in another way than torch does")
        if word not in _STORAGES:
            raise FormatError(f"{self._what}: a {name}, which cannot be imported; save its dequantized values")
        dtype = dtype_named(_STORAGES[word], self._what)
        if key not in self._storages:
            entry = f"{self._prefix}data/{key}"
            try:
                info = self._zip.getinfo(entry)
            except KeyError:
                raise FormatError(f"{self._what}: has no {entry[:200]}, which a tensor needs") from None
            if info.compress_type != zipfile.ZIP_STORED or info.file_size != info.compress_size:
                raise FormatError(f"{self._what}: {entry} is compressed, which torch never does; save it with torch")
            raw = self._mapped.tensor(self._data_offset(info), info.file_size, torch.uint8, entry)
            self._storages[key] = raw, info.file_size
        raw, nbytes = self._storages[key]
        if numel < 0 or numel * dtype.itemsize > nbytes:
            raise FormatError(
                f"{self._what}: storage {key[:80]} is said to have {numel} elements of {dtype}, but has {nbytes} bytes"
            )
        return raw[: numel * dtype.itemsize], dtype

    def tensor(
        self, storage: Any, offset: Any, shape: Any, stride: Any, dtype: torch.dtype | None = None
    ) -> torch.Tensor:
        raw, own = self._storage(storage)
        dtype = own if dtype is None else dtype
        sizes, steps = sized(shape, self._what), strided(stride, self._what)
        if len(sizes) != len(steps) or type(offset) is not int or offset < 0:
            raise FormatError(f"{self._what}: a tensor of shape {sizes} with the strides {steps}")
        if not numel_of(sizes):
            return torch.empty(sizes, dtype=dtype)
        last = offset + sum((size - 1) * step for size, step in zip(sizes, steps, strict=True))
        if (last + 1) * dtype.itemsize > raw.numel():
            raise FormatError(f"{self._what}: a tensor of shape {sizes} reaches beyond its storage")
        if numel_of(sizes) * dtype.itemsize > raw.numel():
            raise FormatError(
                f"{self._what}: a tensor of shape {sizes} shares memory with itself (expand); save tensor.contiguous()"
            )
        typed = raw[: raw.numel() // dtype.itemsize * dtype.itemsize].view(dtype)
        found = typed.as_strided(sizes, steps, offset)
        return found if found.is_contiguous() else aligned(found)  # a save computes with strided ones


def _key(key: Any) -> Any:
    if isinstance(key, tuple):
        return tuple(map(_key, key))
    known = isinstance(key, (str, int, float, bool, bytes, type(None), torch.dtype, np.generic, Strange))
    return key if known else Strange(str(key)[:80])


Real = Callable[[Any], Any]


def _tensor(file: _TorchFile, node: Made, real: Real) -> Any:
    storage, offset, shape, stride = node.arguments[:4]
    return _with_bits(file.tensor(storage, offset, real(shape), real(stride)), node.arguments[6:], real)


def _tensor_v3(file: _TorchFile, node: Made, real: Real) -> Any:
    storage, offset, shape, stride = node.arguments[:4]
    dtype = real(node.arguments[6])
    if not isinstance(dtype, torch.dtype):
        raise TypeError("no dtype")
    return _with_bits(file.tensor(storage, offset, real(shape), real(stride), dtype), node.arguments[7:], real)


def _with_bits(tensor: torch.Tensor, last: Sequence[Any], real: Real) -> torch.Tensor:
    """Applies the bits of a conjugate or negative view: it shares the memory of its original, and torch saves the bits
    as the last argument."""
    bits = real(last[0]) if last else None
    if not bits:
        return tensor
    if not isinstance(bits, Mapping) or {*bits} - {"conj", "neg"}:
        raise TypeError(f"unknown properties: {bits!r}")
    tensor = aligned(tensor)
    tensor = tensor.conj() if bits.get("conj") else tensor
    tensor = torch._neg_view(tensor) if bits.get("neg") else tensor
    return tensor.resolve_conj().resolve_neg()


def _with_attributes(file: _TorchFile, node: Made, real: Real) -> Any:
    """Returns a tensor without the attributes that somebody set on it. A subclass, whose elements may mean something
    else, becomes Strange."""
    match node.arguments:
        case (Global(made_by), Global("torch.Tensor" | "torch.nn.parameter.Parameter"), tuple(arguments), _):
            return real(Made(made_by, arguments))
        case (_, Global(name), *_):
            return Strange(name)
        case _:
            raise ValueError("other arguments than torch gives")


def _ordered(file: _TorchFile, node: Made, real: Real) -> Any:
    given = real(node.arguments[0]) if node.arguments else []
    return OrderedDict([*given, *((_key(real(key)), real(value)) for key, value in node.items.items())])


def _counter(file: _TorchFile, node: Made, real: Real) -> Any:
    (counts,) = node.arguments
    return Counter(dict(real(counts)))


def _set(file: _TorchFile, node: Made, real: Real) -> Any:
    return set(real(node.arguments[0])) if node.arguments else set()


def _no_bytes(file: _TorchFile, node: Made, real: Real) -> Any:
    """Returns empty bytes, as protocol 2 writes them, also in empty arrays."""
    if node.arguments:
        raise ValueError("arguments for bytes that are empty")
    return b""


def _encoded(file: _TorchFile, node: Made, real: Real) -> Any:
    """Returns bytes, as protocol 2 writes them."""
    text, encoding = node.arguments
    if encoding not in ("latin1", "latin-1"):
        raise ValueError(encoding)
    return text.encode("latin-1")


def _numpy_dtype(file: _TorchFile, node: Made, real: Real) -> Any:
    name = node.arguments[0]
    order = node.state[1] if isinstance(node.state, tuple) and len(node.state) > 1 else "="
    found = np.dtype(name if isinstance(name, str) else "")
    found = found.newbyteorder(">") if order == ">" else found
    if found.kind not in "biufc":
        raise ValueError(f"numpy's dtype {name!r}")
    return found


def _numpy_scalar(file: _TorchFile, node: Made, real: Real) -> Any:
    dtype, data = real(node.arguments[0]), real(node.arguments[1])
    return np.frombuffer(data, dtype=dtype, count=1)[0]


def _numpy_array(file: _TorchFile, node: Made, real: Real) -> Any:
    _, shape, dtype, is_fortran, data = node.state
    found = np.frombuffer(real(data), dtype=real(dtype))
    return found.reshape(sized(shape, "numpy"), order="F" if is_fortran else "C")


def _path(file: _TorchFile, node: Made, real: Real) -> Any:
    return "/".join(map(str, node.arguments)).replace("//", "/")


_MAKERS: dict[str, Callable[[_TorchFile, Made, Real], Any]] = {
    "torch._utils._rebuild_tensor": _tensor,
    "torch._utils._rebuild_tensor_v2": _tensor,
    "torch._utils._rebuild_tensor_v3": _tensor_v3,
    "torch._tensor._rebuild_from_type_v2": _with_attributes,
    "torch._utils._rebuild_parameter": lambda file, node, real: real(node.arguments[0]),
    "torch._utils._rebuild_parameter_with_state": lambda file, node, real: real(node.arguments[0]),
    "collections.OrderedDict": _ordered,
    "collections.defaultdict": lambda file, node, real: {_key(real(k)): real(v) for k, v in node.items.items()},
    "collections.Counter": _counter,
    "torch.Size": lambda file, node, real: torch.Size(real(node.arguments[0])),
    "torch.device": lambda file, node, real: torch.device(*node.arguments),
    "builtins.set": _set,
    "__builtin__.set": _set,
    "__builtin__.frozenset": lambda file, node, real: frozenset(_set(file, node, real)),
    "__builtin__.complex": lambda file, node, real: complex(*node.arguments),
    "builtins.complex": lambda file, node, real: complex(*node.arguments),
    "__builtin__.bytes": _no_bytes,
    "_codecs.encode": _encoded,
    "numpy.dtype": _numpy_dtype,
    "numpy.core.multiarray.scalar": _numpy_scalar,
    "numpy._core.multiarray.scalar": _numpy_scalar,
    "numpy.core.multiarray._reconstruct": _numpy_array,
    "numpy._core.multiarray._reconstruct": _numpy_array,
    "pathlib.PosixPath": _path,
    "pathlib.Path": _path,
    "pathlib._local.PosixPath": _path,
}
