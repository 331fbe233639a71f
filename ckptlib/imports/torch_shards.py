"""torch.save files in shards, with an index: older models of transformers, ColossalAI's models and optimizers."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ckptlib.errors import FormatError
from ckptlib.imports.foreign import Foreign
from ckptlib.imports.index_file import document_of, has_files, index_of, read_indexed
from ckptlib.imports.mapped import Mapped, inside
from ckptlib.imports.safetensors_files import has_model, read_safetensors
from ckptlib.imports.torch_file import read_torch_file

MODEL = "*model.bin.index.json"
OPTIMIZER = "*optim.bin.index.json"
MODEL_DIRECTORY, OPTIMIZER_DIRECTORY = "modeling", "optimizer"
"""Directories of ColossalAI's examples, side by side."""


def is_torch_shards(source: Path) -> bool:
    """Returns whether a directory has an index of such files, or two directories that have one each."""
    return source.is_dir() and any(_index(directory, pattern) for directory, pattern in _places(source))


def read_torch_shards(source: Path, foreign: Foreign) -> None:
    """Adds the model as `model`, and the optimizer, whose parameters are numbered, as `optimizer`.

    Raises FormatError.
    """
    for directory, pattern in _places(source):
        index = _index(directory, pattern)
        if index is None and pattern == MODEL and any(directory.glob("*.safetensors")):
            foreign.add_module(read_safetensors(directory), "model")
        elif index is not None and pattern == MODEL:
            foreign.add_module(read_indexed(index, _read), "model")
        elif index is not None:
            foreign.add_tree(_optimizer(index), "optimizer")


def _places(source: Path) -> list[tuple[Path, str]]:
    inner = [(source / MODEL_DIRECTORY, MODEL), (source / OPTIMIZER_DIRECTORY, OPTIMIZER)]
    return [(source, MODEL), (source, OPTIMIZER), *inner]


def _index(directory: Path, pattern: str) -> Path | None:
    """Returns the index, or None if transformers would load safetensors instead. Also returns None if none of the files
    is there, as when somebody downloads only a model's safetensors and JSON files."""
    if pattern == MODEL and has_model(directory):
        return None
    index = index_of(directory, pattern)
    is_idle = index is not None and pattern == MODEL and any(directory.glob("*.safetensors")) and not has_files(index)
    return None if is_idle else index


def _optimizer(index: Path) -> dict[str, Any]:
    """Returns the optimizer's state_dict(). The index names the file of its parameter groups."""
    state = read_indexed(index, _read)
    metadata = document_of(index).get("metadata")
    name = metadata.get("param_groups") if isinstance(metadata, dict) else None
    if not isinstance(name, str) or not all(number.isdecimal() for number in state):
        raise FormatError(f"{index}: names no file of param_groups, or its entries are no numbers of parameters")
    groups = read_torch_file(Mapped(inside(index.parent, name)))
    return {"state": {int(number): entry for number, entry in state.items()}, "param_groups": groups}


def _read(path: Path) -> Mapping[Any, Any]:
    found = read_torch_file(Mapped(path))
    if not isinstance(found, Mapping):
        raise FormatError(f"{path}: has a {type(found).__name__}, expected a dict")
    return found
