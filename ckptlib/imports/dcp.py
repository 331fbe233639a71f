"""torch.distributed.checkpoint (DCP): a `.metadata` pickle says where each box of each tensor is.

The pickle is read as data.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from ckptlib.errors import FormatError
from ckptlib.format.box import Box
from ckptlib.imports.entries import add_entries
from ckptlib.imports.foreign import Foreign, is_optimizer
from ckptlib.imports.mapped import Mapped, dtype_named, inside, sized
from ckptlib.imports.pickled import MAX_BYTES, Global, Made, read_pickle
from ckptlib.imports.torch_file import MAX_DEPTH, read_torch_file

METADATA = ".metadata"
_MODULE = "torch.distributed.checkpoint"


def read_dcp(directory: Path, foreign: Foreign) -> None:
    """Adds everything that a directory of DCP holds. Raises FormatError if it is damaged or not whole."""
    tree = DcpDirectory(directory, foreign).tree()
    tensors = {key: value for key, value in tree.items() if isinstance(value, torch.Tensor)}
    if tensors and "model" not in tree:  # torchtitan keeps its model's tensors beside the other entries
        foreign.add_module(tensors, "model")
        tree = {key: value for key, value in tree.items() if key not in tensors}
    add_entries(tree, foreign)


class DcpDirectory:
    """One directory of DCP, whose metadata it has read."""

    def __init__(self, directory: Path, foreign: Foreign) -> None:
        self._directory, self._foreign = directory, foreign
        self._what = str(directory / METADATA)
        self._files: dict[str, Mapped] = {}
        metadata = Mapped(directory / METADATA)
        if metadata.nbytes > MAX_BYTES:
            raise FormatError(f"{self._what}: {metadata.nbytes} bytes of metadata")
        self._fields = self._of(read_pickle(metadata.bytes(0, metadata.nbytes, "the metadata"), self._what), "Metadata")

    def flat(self) -> tuple[dict[str, torch.Tensor], list[str]]:
        """Returns its tensors by their names in the directory, and the names of all else, which it does not read."""
        places = self._places()
        kinds = {str(name): kind for name, kind in self._dict("state_dict_metadata").items()}
        values = [name for name, kind in kinds.items() if _is_value(kind)]
        return {
            name: self._entry(name, kind, places.get(name, [])) for name, kind in kinds.items() if not _is_value(kind)
        }, values

    def _places(self) -> dict[str, list[tuple[tuple[int, ...] | None, dict[str, Any]]]]:
        """Returns the offset and the file of each shard, by entry."""
        places: dict[str, list[tuple[tuple[int, ...] | None, dict[str, Any]]]] = {}
        for key, value in self._dict("storage_data").items():
            index, info = self._of(key, "MetadataIndex"), self._of(value, "_StorageInfo")
            offset = index.get("offset")
            at = None if offset is None else self._size(offset)
            places.setdefault(str(index.get("fqn")), []).append((at, info))
        return places

    def tree(self) -> dict[Any, Any]:
        """Returns the entries, nested as they were given to dcp.save."""
        places = self._places()
        paths = self._fields.get("planner_data")
        paths = paths if isinstance(paths, dict) else {}
        root: dict[Any, Any] = {}
        for name, kind in self._dict("state_dict_metadata").items():
            path = paths.get(name, (name,))
            if not isinstance(path, tuple) or not 0 < len(path) <= MAX_DEPTH or not _are_keys(path):
                raise FormatError(f"{self._what}: {str(name)[:200]} has a path that is none")
            self._put(root, path, self._entry(str(name), kind, places.get(str(name), [])))
        return {key: _lists(_unflattened(value), key) for key, value in root.items()}

    def _entry(self, name: str, kind: Any, places: list[tuple[tuple[int, ...] | None, dict[str, Any]]]) -> Any:
        if not places:
            raise FormatError(f"{self._what}: {name[:200]} is named, but is in no file")
        if _is_value(kind):
            return self._read(name, places[0][1])
        fields = self._of(kind, "TensorStorageMetadata")
        shape = self._size(fields.get("size"))
        chunks = {}
        for chunk in fields.get("chunks", ()):
            sizes = self._of(chunk, "ChunkStorageMetadata")
            chunks[self._size(sizes.get("offsets"))] = self._size(sizes.get("sizes"))
        pieces = []
        for at, info in places:
            at = (0,) * len(shape) if at is None else at
            tensor = self._read(name, info)
            if not isinstance(tensor, torch.Tensor) or at not in chunks or tuple(tensor.shape) != chunks[at]:
                raise FormatError(f"{self._what}: {name[:200]}: the shard at {at} is not what the metadata says")
            pieces.append((Box(at, chunks[at]), tensor))
        if len(pieces) == 1 and tuple(pieces[0][1].shape) == shape:
            return pieces[0][1]
        return self._foreign.in_boxes(self._dtype(fields.get("properties"), name), shape, pieces)

    def _dtype(self, properties: Any, name: str) -> torch.dtype:
        """Returns the dtype. TensorProperties pickles itself as a tuple with the dtype first."""
        match properties:
            case Made(state=(Global(dtype), *_)) | Made(state={"dtype": Global(dtype)}):
                return dtype_named(dtype.removeprefix("torch."), name)
            case _:
                raise FormatError(f"{self._what}: {name[:200]} has no dtype")

    def _read(self, name: str, info: dict[str, Any]) -> Any:
        if info.get("transform_descriptors"):
            raise FormatError(
                f"{self._what}: {name[:200]} was saved through {str(info['transform_descriptors'])[:80]}, which is not "
                "read here; load it with torch.distributed.checkpoint and save it without"
            )
        path, offset, length = info.get("relative_path"), info.get("offset"), info.get("length")
        if not isinstance(path, str) or type(offset) is not int or type(length) is not int:
            raise FormatError(f"{self._what}: {name[:200]} has no place in a file")
        if path not in self._files:
            self._files[path] = Mapped(inside(self._directory, path))
        return read_torch_file(self._files[path], offset, length)

    def _put(self, root: dict[Any, Any], path: tuple[str | int, ...], value: Any) -> None:
        at = root
        for part in path[:-1]:
            at = at.setdefault(part, {})
            if type(at) is not dict:
                raise FormatError(f"{self._what}: {str(path)[:200]} lies below a value")
        if path[-1] in at:
            raise FormatError(f"{self._what}: {str(path)[:200]} stands twice")
        at[path[-1]] = value

    def _of(self, node: Any, name: str) -> dict[str, Any]:
        """Returns the fields of an object of DCP's class `name`."""
        if not isinstance(node, Made) or not node.by.startswith(_MODULE) or not node.by.endswith(f".{name}"):
            raise FormatError(f"{self._what}: has a {getattr(node, 'by', type(node).__name__)}, expected DCP's {name}")
        states = node.state if isinstance(node.state, tuple) else (node.state,)
        return {key: value for state in states if isinstance(state, dict) for key, value in state.items()}

    def _dict(self, name: str) -> dict[Any, Any]:
        found = self._fields.get(name)
        if not isinstance(found, dict):
            raise FormatError(f"{self._what}: has no {name}; the save that wrote it did not come to its end")
        return found

    def _size(self, node: Any) -> tuple[int, ...]:
        given = node.arguments[0] if isinstance(node, Made) and node.by == "torch.Size" and node.arguments else node
        return sized(given, self._what)


def _are_keys(path: tuple[Any, ...]) -> bool:
    return all(isinstance(part, (str, int)) for part in path)


def _is_value(kind: Any) -> bool:
    """Returns whether an entry is not a tensor."""
    return isinstance(kind, Made) and kind.by.endswith(".BytesStorageMetadata")


def _unflattened(node: Any) -> Any:
    """Nests an optimizer's state again that `flatten_optimizer_state_dict` flattened."""
    if not isinstance(node, dict) or not node or not all(isinstance(key, str) for key in node):
        return node
    if not all(key.startswith(("state.", "param_groups.")) for key in node):
        return node
    state: dict[str, dict[str, Any]] = {}
    options: dict[str, dict[str, Any]] = {}
    for key, value in node.items():
        kind, _, rest = key.partition(".")
        param, _, option = rest.rpartition(".")
        (state if kind == "state" else options).setdefault(param, {})[option] = value
    groups: list[dict[str, Any]] = []
    for param, values in options.items():
        same = next((g for g in groups if {k: v for k, v in g.items() if k != "params"} == values), None)
        if same is None:
            groups.append(same := {**values, "params": []})
        same["params"].append(param)
    return {"state": state, "param_groups": groups}


def _lists(node: Any, key: Any) -> Any:
    """Turns dicts into lists where paths have indices; parameters in an optimizer's state may have numbers, too."""
    if type(node) is not dict:
        return node
    made = {inner: _lists(value, inner) for inner, value in node.items()}
    if made and key != "state" and all(type(inner) is int for inner in made) and set(made) == set(range(len(made))):
        return [made[i] for i in range(len(made))]
    return _numbered(made)


def _numbered(node: dict[Any, Any]) -> dict[Any, Any]:
    """Gives an optimizer's own state its parameters' numbers back: DCP makes keys text, and omits an empty state."""
    whole = {"state": {}, **node}
    if not is_optimizer(whole):
        return node
    params = (param for group in whole["param_groups"] for param in group["params"])
    numbers = {str(param): param for param in params if type(param) is int}
    return {**whole, "state": {numbers.get(key, key): entry for key, entry in whole["state"].items()}}
