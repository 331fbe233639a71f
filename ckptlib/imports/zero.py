"""Parameters in DeepSpeed's optimizer states: ZeRO 1 and 2, ZeRO 3, and universal checkpoints.

A rank's file has flat tensors with runs of parameters: of their fp32 weights, and of the optimizer's state. ZeRO 1 and
2 cut all parameters of a group together, ZeRO 3 each one. A universal checkpoint has a directory per parameter.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from ckptlib.errors import FormatError
from ckptlib.format.box import Box, boxes_of_range
from ckptlib.imports.foreign import Foreign
from ckptlib.imports.mapped import Mapped, numel_of
from ckptlib.imports.torch_file import read_torch_file

WEIGHTS = "fp32"
OPTIMIZER_STATE = "optimizer_state.pt"

CONVERT = (
    "convert it with DeepSpeed's own `python -m deepspeed.checkpoint.ds_to_universal --input_folder TAG "
    "--output_folder OUT`, and import OUT"
)

Shapes = Mapping[str, tuple[int, ...]]
"""Shape of each parameter, by name."""


def dict_of(node: Any, what: str) -> Mapping[Any, Any]:
    """Returns the node. Raises FormatError if it is no dict."""
    if not isinstance(node, Mapping):
        raise FormatError(f"{what} is a {type(node).__name__}, expected a dict as DeepSpeed saves")
    return node


class Trained:
    """The parameters that an optimizer trains, from all ranks' files."""

    def __init__(self, where: Path, groups: Sequence[Shapes]) -> None:
        """`groups`: the parameters that are cut together, in the order in which ranks cut them."""
        self._where, self._groups = where, groups
        self.shapes = {name: shape for group in groups for name, shape in group.items()}
        self._runs: dict[str, dict[str, list[tuple[int, torch.Tensor]]]] = {}
        self._plain: dict[str, dict[str, Any]] = {}
        self._options: Sequence[Mapping[str, Any]] = ()

    def weights(self, foreign: Foreign) -> dict[str, torch.Tensor]:
        """Returns the fp32 weights, by name. Raises FormatError if the ranks' files lack any."""
        return {name: self._tensor(foreign, name, WEIGHTS) for name in self.shapes}

    def state(self, foreign: Foreign) -> dict[str, Any]:
        """Returns an optimizer's state_dict() with names instead of numbers. Raises FormatError as `weights` does."""
        entries: dict[str, dict[str, Any]] = {}
        for name in self.shapes:
            kinds = [kind for kind in self._runs.get(name, {}) if kind != WEIGHTS]
            entry = self._plain.get(name, {}) | {kind: self._tensor(foreign, name, kind) for kind in kinds}
            if entry:
                entries[name] = entry
        return {"state": entries, "param_groups": list(self._described())}

    def _described(self) -> Iterator[dict[str, Any]]:
        """Yields groups of parameters with their options. One group may have been cut in several steps."""
        steps = iter(self._groups)
        for options in self._options or [{"params": [0]} for _ in self._groups]:
            taken = [next(steps, {}) for _ in options.get("params", ())]
            plain = {key: value for key, value in options.items() if key != "params"}
            yield {**plain, "params": [name for group in taken for name in group]}
        if next(steps, None) is not None:
            raise FormatError(f"{self._where}: has more groups of parameters than of options")

    def _tensor(self, foreign: Foreign, name: str, kind: str) -> torch.Tensor:
        """Returns a tensor that stands for one in boxes."""
        what, shape = f"{self._where}: {name[:200]}: {kind}", self.shapes[name]
        runs = sorted(self._runs.get(name, {}).get(kind, []), key=lambda run: run[0])
        at = 0
        pieces: list[tuple[Box, torch.Tensor]] = []
        for begin, run in runs:
            if begin != at:
                raise FormatError(f"{what}: elements {at} to {begin} of {list(shape)} are in no rank's file, or in two")
            at += run.numel()
        if at != numel_of(shape):
            raise FormatError(f"{what}: the ranks' files have {at} elements, {list(shape)} has {numel_of(shape)}")
        for begin, run in runs:
            pieces += (
                (box, run[flat - begin :][: box.numel].view(box.shape))
                for flat, box in boxes_of_range(shape, begin, begin + run.numel())
            )
        return foreign.in_boxes(runs[0][1].dtype if runs else torch.float32, shape, pieces)

    # What the ranks' files have

    def add_cut_together(self, states: Sequence[Mapping[str, Any]]) -> None:
        """Adds states of ZeRO 1 and 2: a rank has a part of all parameters of a group, joined one behind the other."""
        ends: dict[str, int] = {}
        for state in states:
            base = state.get("base_optimizer_state")
            weights, slices = state.get("single_partition_of_fp32_groups"), state.get("param_slice_mappings")
            if not isinstance(weights, list) or not isinstance(slices, list):
                raise FormatError(
                    f"{self._where}: has no param_slice_mappings, so an old DeepSpeed wrote it, or its states are on "
                    f"other storage; {CONVERT}"
                )
            if isinstance(base, Mapping):
                entries = self._entries(base)
            else:
                entries = base if isinstance(base, list) else []  # an elastic checkpoint; it has no options
            if not len(entries) == len(weights) == len(slices):
                raise FormatError(
                    f"{self._where}: has {len(entries)} groups of optimizer state, {len(weights)} of weights"
                )
            for part, entry, flat in zip(slices, entries, weights, strict=True):
                for name, piece in dict_of(part, f"{self._where}: param_slice_mappings").items():
                    numel, start = (dict_of(piece, "a fragment_address").get(key) for key in ("numel", "start"))
                    if type(numel) is not int or type(start) is not int or numel < 0 or start < 0:
                        raise FormatError(f"{self._where}: {str(name)[:200]}: a fragment that is none")
                    begin = ends.get(name, 0)
                    ends[name] = begin + numel
                    self._take(name, {**entry, WEIGHTS: flat}, begin, start, numel)

    def add_cut_apart(self, states: Sequence[Mapping[str, Any]]) -> None:
        """Adds states of ZeRO 3: a rank has a part of each parameter, several of them one behind the other."""
        for rank, state in enumerate(states):
            flats = state.get("fp32_flat_groups")
            entries = self._entries(dict_of(state.get("optimizer_state_dict"), f"{self._where}: optimizer_state_dict"))
            if not isinstance(flats, list) or len(entries) != len(flats):
                raise FormatError(f"{self._where}: has {len(entries)} flat parameters, but not as many of weights")
            places = self._places([self._flat(flat, WEIGHTS).numel() for flat in flats], len(states))
            for name, segment, start, share in places:
                begin = rank * share
                numel = max(0, min(share, numel_of(self.shapes[name]) - begin))
                self._take(name, {**entries[segment], WEIGHTS: flats[segment]}, begin, start, numel)

    def _places(self, lengths: Sequence[int], ranks: int) -> Iterator[tuple[str, int, int, int]]:
        """Yields for each parameter its flat tensor, where it begins in that, and how much of it each rank has."""
        segment, start = 0, 0
        for name, shape in self.shapes.items():
            share = -(-numel_of(shape) // ranks)
            while share and segment < len(lengths) and start == lengths[segment]:
                segment, start = segment + 1, 0
            if not share:
                continue
            if segment == len(lengths) or start + share > lengths[segment]:
                raise FormatError(
                    f"{self._where}: {name[:200]} of {list(shape)}, cut for {ranks} ranks, is not within flat tensors "
                    f"of {list(lengths)[:8]} elements"
                )
            yield name, segment, start, share
            start += share

    def add_directories(self, home: Path, classes: Mapping[str, Any]) -> None:
        """Adds a universal checkpoint: files with whole tensors, by parameter and kind. Parallel parts are joined, so
        the shapes differ from those of the parts.
        """
        state = dict_of(read_torch_file(Mapped(home / OPTIMIZER_STATE), classes=classes), f"{home / OPTIMIZER_STATE}")
        steps = [entry["step"] for entry in self._numbered(state.get("optimizer_state_dict")) if "step" in entry]
        self._options = self._groups_of(state)
        for name in self.shapes:
            if not name or name in (".", "..") or set(name) & set("/\\\0"):
                raise FormatError(f"{home}: {name[:200]!r} is no name of a parameter's directory")
            found = {}
            for path in sorted((home / name).glob("*.pt")):
                value = read_torch_file(Mapped(path), classes=classes)
                found[path.stem] = value.get("param") if isinstance(value, Mapping) else value
            weights = found.get(WEIGHTS)
            if not isinstance(weights, torch.Tensor):
                raise FormatError(f"{home / name}: has no {WEIGHTS}.pt with a tensor; was the directory copied whole?")
            shape = self.shapes[name] = self._joined(self.shapes[name], tuple(weights.shape), home / name)
            if steps:  # ZeRO 3 has one for all parameters
                self._plain.setdefault(name, {})["step"] = _own(steps[0])
            for kind, value in found.items():
                if isinstance(value, torch.Tensor) and (value.dim() or not shape) and kind != "step":
                    if value.shape != weights.shape:
                        raise FormatError(
                            f"{home / name}: {kind} is {list(value.shape)}, but {WEIGHTS} is {list(weights.shape)}"
                        )
                    found[kind] = value.reshape(-1)
            self._take(name, found, 0, 0, numel_of(shape))

    @staticmethod
    def _joined(part: tuple[int, ...], stored: tuple[int, ...], where: Path) -> tuple[int, ...]:
        """Returns the shape of a whole parameter: ZeRO 3's are stored flat; parallel parts were joined along a dim."""
        if numel_of(stored) == numel_of(part):
            return part
        if len(stored) != len(part) or any(whole % size for whole, size in zip(stored, part, strict=True) if size):
            raise FormatError(f"{where}: {WEIGHTS} is {list(stored)}, which is no multiple of the model's {list(part)}")
        return stored

    def _take(self, name: Any, kinds: Mapping[Any, Any], begin: int, start: int, numel: int) -> None:
        """Records a run of a flat tensor for each kind, or a value that all parameters in the flat tensor share."""
        if name not in self.shapes:
            raise FormatError(
                f"{self._where}: {str(name)[:200]} has optimizer state, but the model has no such parameter"
            )
        for kind, value in kinds.items():
            if not isinstance(value, torch.Tensor) or not value.dim():
                self._plain.setdefault(name, {}).setdefault(str(kind), _own(value))
                continue
            flat = self._flat(value, f"{name}: {kind}")
            if start + numel > flat.numel():
                raise FormatError(
                    f"{self._where}: {name[:200]}: {str(kind)[:80]} is said to be at [{start}:+{numel}] of "
                    f"{flat.numel()} elements"
                )
            runs = self._runs.setdefault(name, {}).setdefault(str(kind), [])
            if numel:
                runs.append((begin, flat[start : start + numel]))

    def _flat(self, value: Any, what: str) -> torch.Tensor:
        if not isinstance(value, torch.Tensor) or value.dim() != 1 or not value.is_contiguous():
            raise FormatError(
                f"{self._where}: {what[:200]} is no flat tensor. Optimizers that keep other than one element for each "
                f"of a parameter, and states on NVMe, are not read; {CONVERT}"
            )
        return value

    def _entries(self, base: Mapping[str, Any]) -> list[Mapping[Any, Any]]:
        """Returns the state of each flat parameter of an optimizer, in order; records the first rank's options."""
        groups = self._groups_of(base)
        self._options = self._options or groups
        entries = dict_of(base.get("state"), f"{self._where}: an optimizer's state")
        numbers = [number for group in groups for number in group.get("params", ())]
        return [dict_of(entries.get(number, {}), f"{self._where}: state of parameter {number}") for number in numbers]

    def _numbered(self, base: Any) -> list[Mapping[Any, Any]]:
        return self._entries(base) if isinstance(base, Mapping) else []

    def _groups_of(self, base: Mapping[str, Any]) -> list[Mapping[str, Any]]:
        groups = base.get("param_groups")
        if not isinstance(groups, list):
            raise FormatError(f"{self._where}: has an optimizer without param_groups")
        return [dict_of(group, f"{self._where}: a group of parameters") for group in groups]


def _own(value: Any) -> Any:
    """Returns a tensor of its own for each parameter: one tensor in several places would be tied."""
    return value.clone() if isinstance(value, torch.Tensor) else value
