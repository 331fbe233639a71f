"""Indexes: JSON files that say which file beside them has which tensor, as transformers and ColossalAI write them."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, TypeVar

from ckptlib.errors import FormatError
from ckptlib.imports.mapped import Mapped, inside

MAX_BYTES = 100_000_000

SUFFIX = ".index.json"
"""Suffix of an index's name, after the name that one file with everything would have."""

T = TypeVar("T")


def read_indexed(index: Path, read: Callable[[Path], Mapping[Any, T]]) -> dict[str, T]:
    """Returns everything in the files of an index, by name. `read` returns the content of one file.

    Raises FormatError if the index and the files do not have the same names.
    """
    places = _places(index)
    files = {
        name: {str(key): value for key, value in read(inside(index.parent, name)).items()}
        for name in sorted(set(places.values()))
    }
    found: dict[str, T] = {}
    for name, file in places.items():
        if name not in files[file]:
            raise FormatError(f"{index}: says that {name[:200]!r} is in {file}, which does not have it")
        found[name] = files[file][name]
    extra = {name for entries in files.values() for name in entries} - found.keys()
    if extra:
        raise FormatError(f"{index}: does not name {min(extra)[:200]!r}, which a file of it has")
    return found


def index_of(directory: Path, pattern: str) -> Path | None:
    """Returns the index of a directory, or None. Raises FormatError if there are several, or also one file with the
    name of the whole, which transformers would take: either may be of an earlier save."""
    found = sorted(directory.glob(pattern))
    if len(found) > 1:
        names = ", ".join(index.name for index in found)
        raise FormatError(f"{directory}: has several indexes ({names}); give a path that has only the one meant")
    if not found:
        return None
    whole = directory / found[0].name.removesuffix(SUFFIX)
    if not whole.exists() or whole.name in _places(found[0]).values():
        return found[0]
    if has_files(found[0]):
        raise FormatError(
            f"{directory}: has {whole.name}, and the files of {found[0].name}; give a path that has only what is meant"
        )
    return None  # transformers removes the files of an earlier save, but not their index


def has_files(index: Path) -> bool:
    """Returns whether any file of an index is there. Raises FormatError."""
    return any(os.path.exists(index.parent / name) for name in set(_places(index).values()))  # False for any nonsense


def _places(index: Path) -> dict[str, str]:
    """Returns the file of each name."""
    places = document_of(index).get("weight_map")
    if not isinstance(places, dict) or not all(isinstance(file, str) for file in places.values()):
        raise FormatError(f"{index}: has no weight_map from names to files")
    return places


def document_of(index: Path) -> dict[str, Any]:
    """Returns the content of an index. Raises FormatError if it is no regular file: a link to a device never ends."""
    mapped = Mapped(index)
    nbytes = mapped.nbytes if mapped.nbytes <= MAX_BYTES else 0
    return json_of(mapped.bytes(0, nbytes, "the index"), str(index))


def json_of(data: bytes, what: str) -> dict[str, Any]:
    """Returns a JSON object. Raises FormatError if it is none, or has a name twice."""

    def unique(pairs: list[tuple[str, object]]) -> dict[str, object]:
        found = dict(pairs)
        if len(found) != len(pairs):
            raise ValueError("a name stands twice")
        return found

    try:
        found = json.loads(data, object_pairs_hook=unique)
    except (ValueError, RecursionError) as error:
        raise FormatError(f"{what}: its JSON cannot be read: {str(error)[:200]}") from None
    if not isinstance(found, dict):
        raise FormatError(f"{what}: its JSON is no object")
    return found
