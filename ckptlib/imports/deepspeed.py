"""DeepSpeed: checkpoints of its engine's `save_checkpoint`, ZeRO 0 to 3, and universal checkpoints made from them."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch

from ckptlib.errors import FormatError
from ckptlib.imports.entries import add_entries
from ckptlib.imports.foreign import Foreign
from ckptlib.imports.mapped import Mapped, numel_of, sized
from ckptlib.imports.torch_file import read_torch_file
from ckptlib.imports.zero import CONVERT, Trained, dict_of

LATEST = ("latest", "latest_universal")
UNIVERSAL = "zero"
MAX_TAG_BYTES = 4096
MAX_SHOWN = 8

_MODEL = re.compile(r"(?:zero_pp_rank_(\d+)_)?mp_rank_(\d+)_model_states\.pt")
_OPTIM = re.compile(r"(?:[a-z0-9]+_)?zero_pp_rank_(\d+)_mp_rank_(\d+)_optim_states\.pt")
_CLASSES = {
    "deepspeed.utils.tensor_fragment.fragment_address": lambda state: state,
    "deepspeed.runtime.fp16.loss_scaler.LossScaler": lambda state: state,
    "deepspeed.runtime.fp16.loss_scaler.DynamicLossScaler": lambda state: state,
}
_APART = {
    *("module", "optimizer", "lr_scheduler", "param_shapes", "buffer_names", "frozen_param_shapes", "shared_params"),
    *("frozen_param_fragments", "dp_world_size", "mp_world_size", "checkpoint_parallel_dimensions"),
    *("universal_checkpoint_info", "sparse_tensor_module_names"),
}
"""Entries of a file of model states that are not imported as they are."""


def is_deepspeed(source: Path) -> bool:
    """Returns whether it is the directory of a tag, or the one above that names its latest tag."""
    return source.is_dir() and _directory(source) is not None


def read_deepspeed(source: Path, foreign: Foreign) -> None:
    """Adds the module as `model`, with its fp32 weights if an optimizer of ZeRO has them; the optimizer as
    `optimizer`; the scheduler as `scheduler`, and what the engine and its caller saved besides. Raises FormatError.
    """
    directory = _directory(source)
    assert directory is not None
    checkpoint = _Checkpoint(directory)
    steps = checkpoint.first.get("global_steps")
    foreign.step = steps if type(steps) is int and steps >= 0 else None
    trained = checkpoint.trained()
    model = checkpoint.untrained() | (trained.weights(foreign) if trained is not None else {})
    foreign.add_module(model, "model")
    for name, first in checkpoint.shared.items():
        foreign.add_alias(f"model/{name}", f"model/{first}")
    missing = [name for name in checkpoint.names if name not in model and name not in checkpoint.shared]
    if missing:
        some = ", ".join(missing[:MAX_SHOWN])
        foreign.notes.append(
            f"{some}: the module has them, the files do not: ZeRO 3 stores tied weights under one name. Say which: "
            "--tie model/NAME=model/NAME"
        )
    if trained is not None:
        foreign.add_tree(trained.state(foreign), "optimizer")
    add_entries(checkpoint.rest(), foreign)


def _directory(source: Path) -> Path | None:
    return next((found for found in (source, *_tags(source)) if _has_states(found)), None)


def _has_states(directory: Path) -> bool:
    return any(_MODEL.fullmatch(path.name) for path in directory.glob("*_model_states.pt"))


def _tags(source: Path) -> Iterator[Path]:
    """Yields the directories that DeepSpeed's files name as the latest."""
    for name in LATEST:
        path = source / name
        if path.is_file() and path.stat().st_size <= MAX_TAG_BYTES:
            tag = path.read_text(errors="replace").strip()
            if tag not in ("", ".", "..") and not set(tag) & set("/\\\0"):
                yield source / tag


class _Checkpoint:
    """The files of one tag."""

    def __init__(self, directory: Path) -> None:
        """Raises FormatError for a model in parallel parts, unless a universal checkpoint joins them."""
        self._where = directory
        files = sorted(path for path in directory.iterdir() if path.is_file())
        self._universal = (directory / UNIVERSAL).is_dir()
        models = sorted((_numbers(found), path) for path in files if (found := _MODEL.fullmatch(path.name)))
        self._optims = sorted((_numbers(found), path) for path in files if (found := _OPTIM.fullmatch(path.name)))
        strange = [path.name for path in files if "expert" in path.name or path.name.startswith("layer_")]
        strange += [path.name for (_, part), path in [*models, *self._optims] if part]
        if strange and not self._universal:
            raise FormatError(
                f"{directory}: {', '.join(strange[:3])}: a model in pipeline, tensor or expert parts, and the files "
                f"do not tell how its parameters were cut; {CONVERT}"
            )
        self._parts = len({part for (_, part), _ in models})
        self._states = [_read(path) for _, path in models]
        self.first = self._states[0]
        self._module = dict_of(self.first.get("module"), f"{directory}: module")
        shared = dict_of(self.first.get("shared_params") or {}, f"{directory}: shared_params")
        self.shared = {str(name): str(first) for name, first in shared.items()}
        self._groups = self._shapes()

    @property
    def names(self) -> list[str]:
        """Names of the module's parameters and buffers."""
        return [str(name) for name in self._module]

    def _shapes(self) -> list[dict[str, tuple[int, ...]]]:
        """Returns the shapes of the trained parameters, by group. Each part of a model has different ones."""
        groups: list[dict[str, tuple[int, ...]]] = []
        for state in self._states:
            for i, group in enumerate(state.get("param_shapes") or []):
                groups += [{} for _ in range(i + 1 - len(groups))]
                for name, shape in dict_of(group, f"{self._where}: param_shapes").items():
                    groups[i].setdefault(str(name), sized(shape, f"{self._where}: {str(name)[:200]}"))
        return groups

    def untrained(self) -> dict[str, Any]:
        """Returns everything that no optimizer of ZeRO has: buffers, frozen parameters, and without ZeRO all others."""
        trained = {name for group in self._groups for name in group}
        frozen = self._frozen()
        found = {
            str(name): value
            for name, value in self._module.items()
            if name not in trained
            and name not in self.shared
            and name not in frozen
            # ZeRO 3 leaves tensors without elements where it has cut a parameter
            and not (isinstance(value, torch.Tensor) and tuple(value.shape) == (0,) and self._is_cut)
        } | frozen
        if self._parts > 1 and found:
            raise FormatError(
                f"{self._where}: {', '.join(list(found)[:MAX_SHOWN])}: buffers or frozen parameters of a model in "
                "parallel parts, a part in each file. torch.save a state dict of whole tensors, and import that"
            )
        return found

    @property
    def _is_cut(self) -> bool:
        """Whether ZeRO 3 has cut the parameters."""
        return len(self._states) > self._parts or any(
            path.name.startswith("zero_") for path in self._where.glob("*model*")
        )

    def _frozen(self) -> dict[str, torch.Tensor]:
        """Returns the frozen parameters that ZeRO 3 has cut, joined in memory."""
        made = {}
        for name, shape in dict_of(self.first.get("frozen_param_shapes") or {}, "frozen_param_shapes").items():
            sizes = sized(shape, f"{self._where}: {str(name)[:200]}")
            held = self._module.get(name)
            if isinstance(held, torch.Tensor) and tuple(held.shape) == sizes and not (self._is_cut and sizes == (0,)):
                continue
            held_by = [dict_of(state.get("frozen_param_fragments"), "fragments") for state in self._states]
            parts = [part for of in held_by if isinstance(part := of.get(name), torch.Tensor) and part.dim() == 1]
            if len(parts) != len(self._states):
                raise FormatError(f"{self._where}: {str(name)[:200]}: frozen, and a rank's file has no flat part of it")
            flat = torch.cat(parts)
            ranks = self.first.get("dp_world_size")
            if not 0 <= flat.numel() - numel_of(sizes) < len(parts) or len(parts) != ranks:
                raise FormatError(
                    f"{self._where}: {str(name)[:200]}: frozen, with {flat.numel()} elements in {len(parts)} files, "
                    f"expected {numel_of(sizes)} in those of {str(ranks)[:20]} ranks; was each rank's file copied?"
                )
            made[str(name)] = flat[: numel_of(sizes)].view(sizes)
        return made

    def trained(self) -> Trained | None:
        """Returns the trained parameters, or None without ZeRO."""
        trained = Trained(self._where, self._groups)
        if self._universal:
            trained.add_directories(self._where / UNIVERSAL, _CLASSES)
            return trained
        if not self._optims:
            if any(self._groups):
                raise FormatError(
                    f"{self._where}: has no file *_optim_states.pt, in which ZeRO keeps the weights that are trained; "
                    "was each rank's file copied?"
                )
            return None
        key = "optimizer_state_dict"
        states = [dict_of(_read(path).get(key), f"{path}: {key}") for _, path in self._optims]
        told = states[0].get("partition_count")
        count = max(told) if isinstance(told, list) and told else told
        if count != len(states) or [rank for (rank, _), _ in self._optims] != list(range(len(states))):
            raise FormatError(
                f"{self._where}: has {len(states)} files *_optim_states.pt, expected those of {str(count)[:20]} ranks; "
                "was each rank's file copied?"
            )
        if "fp32_flat_groups" in states[0]:
            trained.add_cut_apart(states)
        else:
            trained.add_cut_together(states)
        return trained

    def rest(self) -> dict[str, Any]:
        """Returns what the engine and its caller saved besides the data that ZeRO cuts."""
        entries = {str(key): value for key, value in self.first.items() if key not in _APART and value is not None}
        if self.first.get("lr_scheduler") is not None:
            entries["scheduler"] = self.first["lr_scheduler"]
        whole = self.first.get("optimizer")
        if isinstance(whole, Mapping):  # without ZeRO; a half-precision one keeps torch's own state within
            inner = whole.get("optimizer_state_dict")
            entries["optimizer"] = whole if inner is None else inner
            if inner is not None:
                entries |= {key: value for key, value in whole.items() if str(key).startswith("fp32_groups")}
        return entries


def _numbers(found: re.Match[str]) -> tuple[int, int]:
    """Returns from the name of a file the rank among those that share a part of the model, and the part."""
    return int(found[1] or 0), int(found[2])


def _read(path: Path) -> Mapping[Any, Any]:
    return dict_of(read_torch_file(Mapped(path), classes=_CLASSES), f"{path}")
