"""Megatron-core's `torch_dist` checkpoints: DCP's files, and a `common.pt` with the data that all ranks share.

Names and shapes are the checkpoint's own: the layers of a model are one tensor with a leading dim, and tensor-parallel
parts are joined.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch

from ckptlib.errors import FormatError
from ckptlib.imports.dcp import METADATA, DcpDirectory
from ckptlib.imports.entries import add_entries
from ckptlib.imports.foreign import Foreign
from ckptlib.imports.mapped import Mapped
from ckptlib.imports.torch_file import Strange, read_torch_file

COMMON = "common.pt"
LATEST = "latest_checkpointed_iteration.txt"
MAX_LATEST_BYTES = 64
MAX_SHOWN = 4

_OPTIMIZER = re.compile(r"(?:chained_\d+\.)?optimizer\.")
_STATE = re.compile(r"(?:chained_\d+\.)?optimizer\.state\.([^.]+)\.(.+)")


def is_megatron(source: Path) -> bool:
    """Returns whether it is the directory of one iteration, or the one above that names its latest."""
    return source.is_dir() and _directory(source) is not None


def read_megatron(source: Path, foreign: Foreign) -> None:
    """Adds the model's tensors as `model`, the optimizer's as `optimizer`, by name of a parameter, and the content of
    `common.pt`. Raises FormatError if anything is damaged or not whole.
    """
    directory = _directory(source)
    assert directory is not None
    path = directory / COMMON
    common = read_torch_file(Mapped(path), classes={"argparse.Namespace": lambda state: state})
    if not isinstance(common, dict):
        raise FormatError(f"{path}: has a {type(common).__name__}, expected the dict that Megatron-core saves")
    tensors, values = DcpDirectory(directory, foreign).flat()
    iteration = common.get("iteration")
    foreign.step = iteration if type(iteration) is int and iteration >= 0 else None
    foreign.add_module({name: tensor for name, tensor in tensors.items() if not _OPTIMIZER.match(name)}, "model")
    optimizer = common.pop("optimizer", None)
    _add_optimizer(tensors, optimizer if isinstance(optimizer, Mapping) else {}, foreign)
    if values:
        some = f"{', '.join(values[:MAX_SHOWN])}{', ...' if len(values) > MAX_SHOWN else ''}"
        foreign.notes.append(f"what is no tensor in the ranks' files is left out: {some}")
    strange = list(_without_strange(common, ""))
    if strange:
        foreign.notes.append(f"objects of classes in {COMMON} are left out: {', '.join(strange[:8])}")
    add_entries(common, foreign)


def _add_optimizer(tensors: Mapping[str, torch.Tensor], common: Mapping[Any, Any], foreign: Foreign) -> None:
    """Adds state that is stored by parameter, as one group: the files do not tell which parameters a group has."""
    state: dict[str, dict[str, Any]] = {}
    buckets = []
    for name, tensor in tensors.items():
        if found := _STATE.fullmatch(name):
            state.setdefault(found[2], {})[found[1]] = tensor
        elif _OPTIMIZER.match(name):
            buckets.append(name)
    if buckets:
        foreign.notes.append(
            f"optimizer: {len(buckets)} tensors that are not stored by parameter are left out, such as "
            f"{buckets[0][:80]}; to have them by parameter, save with distrib_optim_sharding_type='fully_reshardable'"
        )
    shared = common.get("state")
    step = shared.get("common_step") if isinstance(shared, Mapping) else None
    if state:
        for entry in state.values():
            if isinstance(step, torch.Tensor):
                entry["step"] = step.clone()
        foreign.add_tree({"state": state, "param_groups": [{"params": list(state)}]}, "optimizer")
    if "param_groups" in common:
        foreign.add_tree(common["param_groups"], "optimizer_options")


def _without_strange(node: Any, path: str) -> Iterator[str]:
    """Removes objects that only unpickling could make from dicts, and yields their names. Dicts are not shared."""
    for key, value in list(node.items()):
        below = f"{path}/{key}" if path else str(key)
        if isinstance(value, dict):
            yield from _without_strange(value, below)
        elif isinstance(value, Strange):
            yield f"{below} ({value.by})"
            del node[key]


def _directory(source: Path) -> Path | None:
    return next((found for found in (source, *_iterations(source)) if _fits(found)), None)


def _fits(directory: Path) -> bool:
    return (directory / METADATA).is_file() and (directory / COMMON).is_file()


def _iterations(source: Path) -> Iterator[Path]:
    path = source / LATEST
    if path.is_file() and path.stat().st_size <= MAX_LATEST_BYTES:
        told = path.read_text(errors="replace").strip()
        if re.fullmatch(r"[0-9]+", told):
            yield source / f"iter_{int(told):07d}"
        elif told == "release":
            yield source / told
