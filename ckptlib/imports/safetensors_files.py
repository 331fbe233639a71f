"""safetensors: one file, or a directory of them as Hugging Face writes it, with an index that says what is where."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path

import torch

from ckptlib.errors import FormatError
from ckptlib.imports.index_file import SUFFIX, has_files, index_of, json_of, read_indexed
from ckptlib.imports.mapped import Mapped, numel_of, sized

MAX_HEADER = 100_000_000
"""The format's own limit."""

WHOLE = "model.safetensors"
"""transformers' name for the only file of a model."""
INDEX = f"*.safetensors{SUFFIX}"

_DTYPES = {
    "BOOL": torch.bool,
    "U8": torch.uint8,
    "I8": torch.int8,
    "U16": torch.uint16,
    "I16": torch.int16,
    "U32": torch.uint32,
    "I32": torch.int32,
    "U64": torch.uint64,
    "I64": torch.int64,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "F32": torch.float32,
    "F64": torch.float64,
    "C64": torch.complex64,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
    "F8_E4M3FNUZ": torch.float8_e4m3fnuz,
    "F8_E5M2FNUZ": torch.float8_e5m2fnuz,
    **({"F8_E8M0": torch.float8_e8m0fnu} if hasattr(torch, "float8_e8m0fnu") else {}),  # torch 2.7
}


def has_model(directory: Path) -> bool:
    """Returns whether transformers would load safetensors from a directory, whatever else it has."""
    return (directory / WHOLE).exists() or any(map(has_files, directory.glob(INDEX)))


def read_safetensors(source: Path) -> dict[str, torch.Tensor]:
    """Returns all tensors of a file, an index or a directory, as views of the files. Raises FormatError."""
    if source.is_file() and source.suffix != ".json":
        return _read_file(source)
    index = source if source.is_file() else index_of(source, INDEX)
    if index is not None:
        return read_indexed(index, _read_file)
    files = sorted(source.glob("*.safetensors"))
    _check_all_there(files)
    found: dict[str, torch.Tensor] = {}
    for file in files:
        for name, tensor in _read_file(file).items():
            if name in found:
                raise FormatError(f"{file}: has {name[:200]!r}, which another file of {source} has as well")
            found[name] = tensor
    return found


def _check_all_there(files: Sequence[Path]) -> None:
    """Raises FormatError if numbered names tell of files that are not there."""
    names = {file.name for file in files}
    for file in files:
        numbered = re.fullmatch(r"(.+)-[0-9]{5}-of-([0-9]{5})", file.stem)
        if numbered is None:
            continue
        of = int(numbered[2])
        lacking = (n for n in range(1, of + 1) if f"{numbered[1]}-{n:05d}-of-{of:05d}.safetensors" not in names)
        if (number := next(lacking, None)) is not None:
            raise FormatError(f"{file}: is one of {of} files, and number {number} is not there; were all copied?")


def _read_file(path: Path) -> dict[str, torch.Tensor]:
    mapped = Mapped(path)
    nbytes = int.from_bytes(mapped.bytes(0, 8, "the header's size"), "little")
    if nbytes > min(MAX_HEADER, mapped.nbytes - 8):
        raise FormatError(f"{path}: a header of {nbytes} bytes in a file of {mapped.nbytes}; is it a safetensors file?")
    header = json_of(mapped.bytes(8, nbytes, "the header"), str(path))
    header.pop("__metadata__", None)
    begin, end, found = 8 + nbytes, 0, {}
    for name, entry in sorted(header.items(), key=lambda item: _offsets(item, path)):
        first, last = _offsets((name, entry), path)
        dtype, shape = _DTYPES.get(str(entry.get("dtype"))), sized(entry.get("shape"), f"{path}: {name[:200]}")
        if dtype is None:
            raise FormatError(f"{path}: {name[:200]} has the dtype {str(entry.get('dtype'))[:80]!r}, which is unknown")
        if first != end or last - first != numel_of(shape) * dtype.itemsize:
            raise FormatError(
                f"{path}: {name[:200]} is {dtype}{list(shape)} at [{first}, {last}), behind bytes that end at {end}; "
                "entries must follow one another without gap or overlap, each of its own size"
            )
        end = last
        found[name] = mapped.tensor(begin + first, numel_of(shape), dtype, name[:200]).view(shape)
    if begin + end != mapped.nbytes:
        raise FormatError(f"{path}: has {mapped.nbytes} bytes, its header tells of {begin + end}; was it copied whole?")
    return {name: found[name] for name in header}


def _offsets(item: tuple[str, object], path: Path) -> tuple[int, int]:
    name, entry = item
    match entry:
        case {"data_offsets": [int(first), int(last)]} if 0 <= first <= last < 2**63:
            return first, last
        case _:
            raise FormatError(f"{path}: {name[:200]} has no data_offsets that can be")
