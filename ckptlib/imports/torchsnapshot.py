"""torchsnapshot: a `.snapshot_metadata` manifest in JSON, and the files that it names."""

from __future__ import annotations

import base64
import binascii
import json
import struct
from pathlib import Path
from typing import Any

import torch

from ckptlib.errors import FormatError
from ckptlib.format.box import Box
from ckptlib.format.paths import join, key_of
from ckptlib.imports.entries import add_entries
from ckptlib.imports.foreign import Foreign
from ckptlib.imports.mapped import Mapped, dtype_named, inside, numel_of, sized
from ckptlib.imports.torch_file import read_torch_file

METADATA = ".snapshot_metadata"
MAX_BYTES = 2**31
MAX_DEPTH = 100


def read_torchsnapshot(directory: Path, foreign: Foreign) -> None:
    """Adds what rank 0 saved, and the shards of all ranks for sharded tensors. Raises FormatError."""
    snapshot = _Snapshot(directory, foreign)
    add_entries(snapshot.tree(), foreign)
    if snapshot.own_elsewhere:
        some = ", ".join(snapshot.own_elsewhere[:3])
        foreign.notes.append(f"what ranks other than 0 kept for themselves is left out: {some}, ...")


class _Snapshot:
    def __init__(self, directory: Path, foreign: Foreign) -> None:
        self._directory, self._foreign, self._what = directory, foreign, str(directory / METADATA)
        self._files: dict[str, Mapped] = {}
        metadata = Mapped(directory / METADATA)
        try:
            document = json.loads(metadata.bytes(0, min(metadata.nbytes, MAX_BYTES), "the manifest"))
        except (ValueError, RecursionError) as error:
            raise FormatError(f"{self._what}: its JSON cannot be read: {str(error)[:200]}") from None
        manifest = document.get("manifest") if isinstance(document, dict) else None
        if not isinstance(manifest, dict) or not all(isinstance(entry, dict) for entry in manifest.values()):
            raise FormatError(f"{self._what}: has no manifest")
        self._manifest: dict[str, dict[str, Any]] = manifest
        self._below: dict[str, list[str]] = {}
        for path in manifest:
            above, _, key = path.rpartition("/")
            self._below.setdefault(above, []).append(key)
        self.own_elsewhere = [
            path
            for path, entry in manifest.items()
            if not path.startswith("0/") and entry.get("replicated") is False and f"0/{_apart(path)}" not in manifest
        ]

    def tree(self) -> dict[str, Any]:
        """Returns the entries by the keys of the app state that torchsnapshot was given."""
        keys = self._below.get("0", [])
        if not keys:
            raise FormatError(f"{self._what}: tells of nothing that rank 0 saved")
        return {key_of(key): self._node(f"0/{key}", 0) for key in keys}

    def _node(self, path: str, depth: int) -> Any:
        if depth > MAX_DEPTH:
            raise FormatError(f"{self._what}: nested deeper than {MAX_DEPTH} levels")
        entry = self._manifest.get(path)
        if entry is None:
            raise FormatError(f"{self._what}: {path[:200]} is named, but is not in the manifest")
        kind = entry.get("type")
        if kind in ("dict", "OrderedDict"):
            return {key: self._node(join(path, key), depth + 1) for key in entry.get("keys", ())}
        if kind == "list":
            items = sorted(self._below.get(path, []), key=lambda key: (len(key), key))
            if items != [str(i) for i in range(len(items))]:
                raise FormatError(f"{self._what}: {path[:200]} is a list of which items are missing")
            return [self._node(f"{path}/{key}", depth + 1) for key in items]
        if kind == "Tensor":
            return self._tensor(entry, path)
        if kind in ("ShardedTensor", "ChunkedTensor", "DTensor"):
            return self._in_boxes(path, str(kind))
        if kind == "object":
            return read_torch_file(self._file(entry))
        return self._plain(entry, path)

    def _plain(self, entry: dict[str, Any], path: str) -> Any:
        text = entry.get("serialized_value")
        try:
            match entry.get("type"), text:
                case "int", str():
                    return int(text)
                case "str", str():
                    return text
                case "bool", "True" | "False":
                    return text == "True"
                case "bytes", str():
                    return base64.b64decode(text, validate=True)
                case "float", str():
                    return struct.unpack("<d", base64.b64decode(text, validate=True))[0]
        except (ValueError, struct.error, binascii.Error):
            pass
        raise FormatError(f"{self._what}: {path[:200]} is a {str(entry.get('type'))[:80]} that cannot be read")

    def _tensor(self, entry: dict[str, Any], path: str) -> torch.Tensor:
        mapped = self._file(entry)
        shape = sized(entry.get("shape"), path)
        dtype = dtype_named(str(entry.get("dtype")).removeprefix("torch."), path)
        match entry.get("byte_range"):
            case None:
                begin, end = 0, mapped.nbytes
            case [int(begin), int(end)]:
                pass
            case _:
                raise FormatError(f"{self._what}: {path[:200]} has no byte_range that can be")
        if entry.get("serializer") == "torch_save":
            found = read_torch_file(mapped, begin, end - begin)
            if not isinstance(found, torch.Tensor) or tuple(found.shape) != shape or found.dtype != dtype:
                raise FormatError(f"{self._what}: {path[:200]} is not what the manifest says")
            return found
        if entry.get("serializer") != "buffer_protocol" or end - begin != numel_of(shape) * dtype.itemsize:
            raise FormatError(f"{self._what}: {path[:200]} has {end - begin} bytes for {dtype}{list(shape)}")
        return mapped.tensor(begin, numel_of(shape), dtype, path).view(shape)

    def _in_boxes(self, path: str, kind: str) -> torch.Tensor:
        """Returns a tensor from the shards of all ranks, each of which lists those that it wrote. A ChunkedTensor that
        is not replicated is rank 0's own, and whole."""
        name = _apart(path)
        own = kind == "ChunkedTensor" and self._manifest[path].get("replicated") is False
        pieces: dict[Box, torch.Tensor] = {}
        ends: list[tuple[int, ...]] = []
        for rank in ["0"] if own else sorted({path.partition("/")[0] for path in self._manifest}):
            entry = self._manifest.get(f"{rank}/{name}", {})
            for shard in entry.get("chunks" if kind == "ChunkedTensor" else "shards", ()):
                offset, sizes = sized(shard.get("offsets"), path), sized(shard.get("sizes"), path)
                tensor = self._tensor(shard.get("tensor", {}), path)
                pieces[Box(offset, sizes)] = tensor.view(sizes) if tensor.numel() == numel_of(sizes) else tensor
                ends.append(tuple(a + b for a, b in zip(offset, sizes, strict=True)))
        told = self._manifest[path].get("shape")
        if not pieces or (told is None and not ends):
            raise FormatError(f"{self._what}: {path[:200]} has no shards")
        shape = tuple(map(max, zip(*ends, strict=True))) if told is None else sized(told, path)
        return self._foreign.in_boxes(next(iter(pieces.values())).dtype, shape, list(pieces.items()))

    def _file(self, entry: dict[str, Any]) -> Mapped:
        location = entry.get("location")
        if not isinstance(location, str):
            raise FormatError(f"{self._what}: an entry has no location")
        if location not in self._files:
            self._files[location] = Mapped(inside(self._directory, location))
        return self._files[location]


def _apart(path: str) -> str:
    """Returns a path without its rank."""
    return path.partition("/")[2]
