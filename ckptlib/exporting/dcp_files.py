"""Writes a directory of torch.distributed.checkpoint: nested as the state was, with optimizer state by parameter name,
and with plain values.

torch's own writer makes the index, a pickle that is never read here. Only functions of this file need torch.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np

from ckptlib.errors import StateMismatch, UnsupportedState
from ckptlib.exporting.casting import target_of
from ckptlib.exporting.direct_file import DirectFile
from ckptlib.exporting.files import Item
from ckptlib.exporting.names import OWN, Chosen, Naming
from ckptlib.exporting.outputs import Outputs
from ckptlib.exporting.stream import BATCH_BYTES, Wanted, converted, read
from ckptlib.exporting.torch_file import save_into
from ckptlib.format import dtypes
from ckptlib.format.box import Box
from ckptlib.format.paths import key_of
from ckptlib.reading.arrays import Raw, raw_dtype
from ckptlib.reading.frameworks import TORCH, framework_of, present
from ckptlib.reading.nested import nested
from ckptlib.reading.opened import CheckpointReader
from ckptlib.stores.flushing import flush_path

DATA = "__0_0.distcp"
"""The name that torch gives the first file of rank 0."""

INDEX = ".metadata"

Path = tuple[Any, ...]
"""Keys of dicts and positions in lists, from the root to a leaf."""


class Leaf(NamedTuple):
    """A tensor or plain value that the directory holds under one name."""

    name: str
    path: Path
    value: Any
    """A tensor of the meta device stands for one that is read later."""


def write_dcp(
    opened: CheckpointReader,
    name: str,
    naming: Naming,
    dtype: str | None,
    files: Outputs,
    progress: Callable[[int], None],
    expect: Callable[[int], None],
) -> list[Item]:
    """Streams tensors into a partial directory, which gets its name when it is published. Returns the tensors."""
    framework_of(TORCH)
    found = StandIns(opened)
    leaves = leaves_of(nested(found, naming.only), found, naming)
    if not leaves:
        raise StateMismatch(f"step {found.step}: nothing of it is exported; see only=")
    by_saved: dict[str, list[str]] = {}
    for leaf in leaves:
        if (saved := found.saved_as(leaf.value)) is not None:
            by_saved.setdefault(saved, []).append(leaf.name)
    items = []
    for saved, names in by_saved.items():
        spec = opened.spec(saved)
        items.append(Item(Chosen(saved, names[0], (*names[1:],)), spec.dtype, target_of(spec.dtype, dtype), spec.shape))
    total = sum(item.nbytes for item in items)
    expect(total)
    files.make_room(total, name)
    for item in items:
        opened.check_there(item.chosen.saved)
    _write(opened, files.beside(name), items, leaves, found, progress)
    return items


class StandIns:
    """An opened step as `nested` sees it, with empty meta tensors in the place of the saved ones."""

    def __init__(self, opened: CheckpointReader) -> None:
        import torch

        self._opened = opened
        self.step, self.trees, self.values = opened.step, opened.trees, opened.values
        self.keys, self.groups = opened.keys, opened.groups
        aliases = opened.aliases()
        names = opened.keys()
        self._first = {name: aliases.get(name, name) for name in names}
        self._made: dict[str, Any] = {}
        for name in self._first.values():
            spec = opened.spec(name)
            self._made[name] = torch.empty(spec.shape, dtype=getattr(torch, spec.dtype), device="meta")
        self._names = {id(tensor): name for name, tensor in self._made.items()}

    def get_tensors(self, names: Sequence[str]) -> dict[str, Any]:
        return {name: self._made[self._first[name]] for name in names}

    def saved_as(self, value: object) -> str | None:
        """Returns the name of the saved tensor that this stands for; None for a plain value."""
        return self._names.get(id(value))

    def filled(self, value: Any) -> Any:
        """Returns a leaf with tensors in place of their stand-ins: torch takes a tuple for one leaf, whatever is in
        it."""
        if (saved := self.saved_as(value)) is not None:
            whole = Box.whole(self._opened.spec(saved).shape)
            return present(TORCH, saved, self._opened.get_raw({saved: whole})[saved])
        if isinstance(value, dict):
            return {key: self.filled(entry) for key, entry in value.items()}
        return type(value)(map(self.filled, value)) if isinstance(value, (list, tuple)) else value


def leaves_of(tree: dict[str, Any], found: StandIns, naming: Naming) -> list[Leaf]:
    """Returns the leaves of the tree, flattened as torch does. Raises StateMismatch if an option matches nothing,
    UnsupportedState for names that clash or are empty."""
    from torch.distributed.checkpoint._nested_dict import flatten_state_dict

    if naming.only is None:
        tree = {key: value for key, value in tree.items() if not key.startswith(OWN)}
    for path, described in found.trees.items():
        if isinstance(described, dict) and "optimizer" in described:
            name_parameters(tree, path)
    try:
        _, paths = flatten_state_dict(tree)
    except ValueError as error:  # {"a.b": ...} beside {"a": {"b": ...}}
        raise UnsupportedState(f"step {found.step}: {error}; choose with only=") from error
    leaves: dict[str, Leaf] = {}
    joined = ["/".join(map(str, path)) for path in paths.values()]
    naming.check_used(joined, f"step {found.step}")
    for given, whole in zip(paths.values(), joined, strict=True):
        renamed = naming.rename(whole)
        kept: Path = given if renamed == whole else (*renamed.split("/"),)
        name = ".".join(map(str, kept))
        if name in leaves or (not name and renamed != whole):
            raise UnsupportedState(f"{whole}: would be called {name!r}, as another is, or nothing; choose with only=")
        leaves[name] = Leaf(name, kept, _at(tree, given))
    return [*leaves.values()]


def _at(tree: Any, path: Sequence[Any]) -> Any:
    """Returns the node at a path. `path`: as torch gives it, with keys of dicts as text."""
    for key in path:
        if isinstance(tree, dict) and key not in tree:
            key = next((other for other in tree if str(other) == key), key)
        tree = tree[key]
    return tree


def name_parameters(tree: dict[str, Any], path: str) -> None:
    """Names an optimizer's parameters as `get_optimizer_state_dict` does, without the path of the module."""
    try:
        node = _at(tree, [key_of(segment) for segment in path.split("/")])
        groups, state = node["param_groups"], node["state"]
    except (KeyError, IndexError, TypeError):  # not asked for, or only in part
        return
    names = [name for group in groups for name in group["params"]]
    modules = [name.split("/")[:-1] for name in (*names, *state)]
    home = 0
    while modules and all(len(module) > home and module[home] == modules[0][home] for module in modules):
        home += 1

    def short(name: str) -> str:
        return ".".join(name.split("/")[home:])

    node["state"] = {short(name): entries for name, entries in state.items()}
    for group in groups:
        group["params"] = [*map(short, group["params"])]


def _chunks(items: Sequence[Item]) -> Iterator[Wanted]:
    """Yields parts of tensors, each of which is written as one object."""
    for item in items:
        for box in Box.whole(item.shape).split(BATCH_BYTES // dtypes.itemsize(item.dtype_saved)):
            yield Wanted(item, box.shape, ((0, box),))


def _write(
    opened: CheckpointReader,
    directory: Any,
    items: Sequence[Item],
    leaves: Sequence[Leaf],
    found: StandIns,
    progress: Callable[[int], None],
) -> None:
    import torch
    from torch.distributed.checkpoint.filesystem import FileSystemWriter, _StorageInfo
    from torch.distributed.checkpoint.metadata import (
        BytesStorageMetadata,
        ChunkStorageMetadata,
        Metadata,
        MetadataIndex,
        TensorProperties,
        TensorStorageMetadata,
    )
    from torch.distributed.checkpoint.storage import WriteResult

    known: dict[str, Any] = {}
    results: list[Any] = []
    directory.mkdir()
    with open(directory / DATA, "xb") as opened_file, DirectFile(opened_file.fileno()) as file:

        def put(value: object, *indices: Any) -> None:
            at = file.nbytes
            save_into(file, value)
            nbytes = file.nbytes - at
            results.extend(WriteResult(index, nbytes, _StorageInfo(DATA, at, nbytes)) for index in indices)

        tensors = {name for item in items for name in (item.chosen.name, *item.chosen.ties)}
        for leaf in leaves:
            if leaf.name not in tensors:
                known[leaf.name] = BytesStorageMetadata()
                put(found.filled(leaf.value), MetadataIndex(leaf.name))
        for item in items:
            properties = TensorProperties(dtype=getattr(torch, item.dtype))
            for name in (item.chosen.name, *item.chosen.ties):
                known[name] = TensorStorageMetadata(properties, torch.Size(item.shape), [])
        for one, raw in read(opened, _chunks(items)):
            item, ((_, box),) = one.item, one.boxes
            names = (item.chosen.name, *item.chosen.ties)
            for name in names:
                chunk = ChunkStorageMetadata(torch.Size(box.offset), torch.Size(box.shape))
                known[name].chunks.append(chunk)
            tensor = present(TORCH, item.chosen.saved, _converted(raw, item))
            put(tensor, *(MetadataIndex(name, torch.Size(box.offset)) for name in names))
            progress(tensor.nbytes)
        file.finish()
        os.fsync(opened_file.fileno())
    paths = {leaf.name: leaf.path for leaf in leaves}
    FileSystemWriter(directory).finish(Metadata(known, planner_data=paths), [results])
    flush_path(directory / INDEX)  # torch syncs it before Python's buffer is written to it
    flush_path(directory)


def _converted(raw: Raw, item: Item) -> Raw:
    if raw.dtype == item.dtype:
        return raw
    found, at = np.empty(raw.array.size, raw_dtype(item.dtype)), 0
    for some in converted(item, raw):
        found[at : at + some.array.size] = some.array
        at += some.array.size
    return Raw(found.reshape(raw.array.shape), item.dtype)
