"""Lays out the files of an export: safetensors headers, and which tensor goes into which file. Pure."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from ckptlib.errors import UnsupportedState
from ckptlib.exporting.names import Chosen
from ckptlib.format import dtypes

MAX_HEADER = 100_000_000
"""The most bytes of a header that safetensors reads."""

_UNITS = {"": 1, "b": 1, "kb": 10**3, "mb": 10**6, "gb": 10**9, "kib": 2**10, "mib": 2**20, "gib": 2**30}


@dataclass(frozen=True, slots=True)
class Item:
    """A tensor to be written."""

    chosen: Chosen
    dtype_saved: str
    dtype: str
    """Its dtype in the file."""
    shape: tuple[int, ...]

    @property
    def numel(self) -> int:
        return math.prod(self.shape)

    @property
    def nbytes(self) -> int:
        """Its bytes in the file."""
        return self.numel * dtypes.itemsize(self.dtype)


@dataclass(frozen=True, slots=True)
class FilePlan:
    """The layout of one file."""

    items: tuple[Item, ...]
    head: bytes
    offsets: tuple[int, ...]
    """The offset of each item in the file."""
    nbytes: int
    """Bytes of the whole file."""


def parse_size(text: str | int) -> int:
    """Returns the bytes of a size such as "5GB", "200MiB" or 1000. Raises ValueError."""
    found = re.fullmatch(r"(\d{1,20}(?:\.\d{1,20})?)\s*([a-z]*)", str(text).strip().lower())
    if found is None or found[2] not in _UNITS or not float(found[1]):
        raise ValueError(f"size {text!r}: expected a number of bytes, or one such as 5GB or 200MiB")
    return int(float(found[1]) * _UNITS[found[2]])


def plan_file(items: Sequence[Item], metadata: Mapping[str, str]) -> FilePlan:
    """Lays out a safetensors file. Tensors with the widest elements come first, so that all are aligned to their size.

    Raises UnsupportedState for a dtype that safetensors lacks.
    """
    ordered = sorted(items, key=lambda item: -dtypes.itemsize(item.dtype))
    rows: dict[str, object] = {}
    at, starts = 0, []
    ties: dict[str, str] = {}
    for item in ordered:
        if not dtypes.has_own_word(item.dtype):
            raise UnsupportedState(
                f"{item.chosen.saved}: safetensors has no {item.dtype}; leave it out with only=, or export to torch"
            )
        starts.append(at)
        rows[item.chosen.name] = {
            "dtype": dtypes.safetensors_name(item.dtype),
            "shape": list(item.shape),
            "data_offsets": [at, at + item.nbytes],
        }
        ties.update(dict.fromkeys(item.chosen.ties, item.chosen.name))
        at += item.nbytes
    told = {**ties, **metadata}  # as safetensors' own save_model writes it
    text = json.dumps({"__metadata__": told, **rows}, separators=(",", ":"), ensure_ascii=False).encode()
    text += b" " * (-(len(text) + 8) % 4096)  # so that data begins on a page
    if len(text) > MAX_HEADER:
        raise UnsupportedState(f"a header of {len(text):,} bytes for {len(items):,} tensors; use --max-shard-size")
    head = len(text).to_bytes(8, "little") + text
    return FilePlan(tuple(ordered), head, tuple(len(head) + start for start in starts), len(head) + at)


def cut(items: Sequence[Item], most: int) -> list[list[Item]]:
    """Cuts items into groups, in order, each of at most `most` bytes, or of one tensor."""
    groups: list[list[Item]] = [[]]
    filled = 0
    for item in items:
        if groups[-1] and filled + item.nbytes > most:
            groups.append([])
            filled = 0
        groups[-1].append(item)
        filled += item.nbytes
    return groups


def shard_names(number: int) -> list[str]:
    """Returns the names that transformers gives its files."""
    if number == 1:
        return ["model.safetensors"]
    return [f"model-{i:05d}-of-{number:05d}.safetensors" for i in range(1, number + 1)]


INDEX = "model.safetensors.index.json"


def index_of(plans: Mapping[str, FilePlan]) -> bytes:
    """Returns the index of which tensor is in which file, as transformers reads it."""
    weights = {item.chosen.name: file for file, plan in plans.items() for item in plan.items}
    total = sum(item.nbytes for plan in plans.values() for item in plan.items)
    document = {"metadata": {"total_size": total}, "weight_map": dict(sorted(weights.items()))}
    return (json.dumps(document, indent=2) + "\n").encode()
