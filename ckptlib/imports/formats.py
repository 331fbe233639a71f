"""Finds the library that wrote a source, and its reader."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ckptlib.errors import FormatError
from ckptlib.format.keys import ROOT
from ckptlib.imports.dcp import METADATA, read_dcp
from ckptlib.imports.deepspeed import is_deepspeed, read_deepspeed
from ckptlib.imports.entries import add_entries
from ckptlib.imports.foreign import Foreign, is_module
from ckptlib.imports.mapped import Mapped
from ckptlib.imports.megatron import is_megatron, read_megatron
from ckptlib.imports.safetensors_files import read_safetensors
from ckptlib.imports.torch_file import is_torch_file, read_torch_file
from ckptlib.imports.torch_shards import is_torch_shards, read_torch_shards
from ckptlib.imports.torchsnapshot import METADATA as SNAPSHOT_METADATA
from ckptlib.imports.torchsnapshot import read_torchsnapshot


@dataclass(frozen=True, slots=True)
class Format:
    """One format of a source."""

    name: str
    fits: Callable[[Path], bool]
    reader: Callable[[Path, Foreign], None]

    def read(self, source: Path, foreign: Foreign) -> None:
        """Adds everything in the source. Raises FormatError if it is damaged, even if only Python notices: a source may
        hold anything in place of what the library writes."""
        try:
            self.reader(source, foreign)
        except (ArithmeticError, AttributeError, LookupError, RuntimeError, TypeError, ValueError) as error:
            raise FormatError(
                f"{source}: is not as {self.name} writes it ({type(error).__name__}: {str(error)[:200]}); was it "
                "copied whole, or altered since?"
            ) from error


def format_of(source: Path) -> Format:
    """Returns the format of a source. Raises FormatError if no reader fits."""
    if not source.exists():
        raise FormatError(f"{source}: does not exist")
    for known in FORMATS:
        if known.fits(source):
            return known
    if (source / ROOT).is_file():
        raise FormatError(
            f"{source}: is a root of ckptlib already. To begin another run from a step of it: `ckptlib copy`, or "
            "Checkpointer(init_from=); to make files for others of it: `ckptlib export`"
        )
    names = ", ".join(known.name for known in FORMATS)
    if source.is_dir():
        inner = next(filter(_may_be_meant, sorted(source.glob("*"))), None)
        hint = "" if inner is None else f". If one of its files is meant, give that, such as {inner}"
        raise FormatError(f"{source}: this directory is of no format that can be imported ({names}){hint}")
    raise FormatError(
        f"{source}: this file is of no format that can be imported ({names}). If torch.load(..., weights_only=True) "
        "reads it, torch.save what that gives, and import the new file"
    )


def _may_be_meant(path: Path) -> bool:
    """Returns whether it is a file of torch.save. A file that cannot be opened is none, and no reason to fail."""
    try:
        return path.is_file() and is_torch_file(path)
    except OSError:
        return False


def _is_safetensors(source: Path) -> bool:
    if source.is_dir():
        return any(source.glob("*.safetensors"))
    return source.name.endswith((".safetensors", ".safetensors.index.json"))


def _read_safetensors(source: Path, foreign: Foreign) -> None:
    foreign.add_module(read_safetensors(source), "model")


def _read_torch(source: Path, foreign: Foreign) -> None:
    tree = read_torch_file(Mapped(source))
    if isinstance(tree, Mapping) and "pytorch-lightning_version" in tree:
        foreign.kind = "Lightning"
        _add_lightning(tree, foreign)
    elif is_module(tree):
        foreign.add_module(tree, "model")
    elif isinstance(tree, Mapping):
        add_entries(tree, foreign)
    else:
        foreign.add_tree(tree, "value")


def _add_lightning(tree: Mapping[Any, Any], foreign: Foreign) -> None:
    """Adds its module as `model`, its optimizers and schedulers one by one."""
    names = {"state_dict": "model", "optimizer_states": "optimizers", "lr_schedulers": "schedulers"}
    rest: dict[Any, Any] = {key: value for key, value in tree.items() if key not in names}

    def add(name: str, value: object) -> None:
        if name in rest:
            raise FormatError(
                f"Lightning: the checkpoint has an entry {name!r} of its own, as of on_save_checkpoint, where what "
                "Lightning saved would be; give it another name in a copy of the file"
            )
        rest[name] = value

    if "state_dict" in tree:
        add("model", tree["state_dict"])
    for plural, single in (("optimizer_states", "optimizer"), ("lr_schedulers", "scheduler")):
        several = tree.get(plural, [])
        for i, state in enumerate(several if isinstance(several, list) else []):
            add(single if len(several) == 1 else f"{single}.{i}", state)
    step = rest.get("global_step")
    foreign.step = step if type(step) is int and step >= 0 else None
    add_entries(rest, foreign)


FORMATS = [
    Format("Megatron-core", is_megatron, read_megatron),  # before DCP, whose files it has as well
    Format("DCP", lambda source: (source / METADATA).is_file(), read_dcp),
    Format("torchsnapshot", lambda source: (source / SNAPSHOT_METADATA).is_file(), read_torchsnapshot),
    Format("DeepSpeed", is_deepspeed, read_deepspeed),
    Format("torch.save in shards", is_torch_shards, read_torch_shards),
    Format("safetensors", _is_safetensors, _read_safetensors),
    Format("torch.save", lambda source: source.is_file() and is_torch_file(source), _read_torch),
]
