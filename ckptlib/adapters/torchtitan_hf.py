"""Reads and writes torchtitan's model as files of Hugging Face. torchtitan's state dict adapter knows the names and how
tensors differ, torch's DCP reads and writes the files: safetensors, no pickle.
"""

from __future__ import annotations

import logging
import secrets
import shutil
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.hf_storage import HuggingFaceStorageWriter
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import save

from ckptlib.errors import CheckpointNotFound, CorruptData, StateMismatch, StoreError
from ckptlib.exporting.outputs import PARTIAL
from ckptlib.ranks.group import Group
from ckptlib.ranks.together import together, together_at_length
from ckptlib.stores.flushing import flush_path

log = logging.getLogger(__name__)

SHARDED = "sharded"
"""The writer's directory of files that each rank wrote, before they were joined."""


def read_hf(group: Group, parts: Sequence[nn.Module], adapter: Any, path: str, *, quantized: bool) -> None:
    """Fills the model's parts from a directory of safetensors. Collective.

    Raises CheckpointNotFound if there are none, StateMismatch if they lack a parameter, CorruptData for files that DCP
    cannot read; then the model is undefined.
    """

    def look() -> None:
        if not any(Path(path).glob("*.safetensors")):
            raise CheckpointNotFound(f"{path} has no safetensors; give a Hugging Face model as initial_load_path")

    together(group, f"looking for a model in {path}", look)
    theirs = adapter.to_hf(state_of(parts))
    try:
        load(theirs, storage_reader=adapter.get_hf_storage_reader(path, quantized))
    except (Exception, CheckpointException) as error:  # DCP raises it on all ranks, without the path
        raise CorruptData(f"{path} cannot be read as a model of Hugging Face: {error}") from error
    state = adapter.from_hf(theirs)
    together(group, f"loading the model of {path}", lambda: _fill(parts, state, path))


def _fill(parts: Sequence[nn.Module], state: Mapping[str, Any], path: str) -> None:
    for part in parts:
        left = set(part.load_state_dict(state, strict=False).missing_keys)
        missing = sorted(left & {name for name, _ in part.named_parameters()})
        if missing:
            raise StateMismatch(f"{path} has nothing for {len(missing)} parameters, such as {missing[0]}")
        if left:
            log.warning("%s has nothing for the buffers %s, which stay as they are", path, ", ".join(sorted(left)))


def write_hf(group: Group, parts: Sequence[nn.Module], adapter: Any, out: Path, dtype: torch.dtype) -> None:
    """Writes the model as safetensors with an index, durable when this returns. Collective.

    The directory gets its name once it is whole, and replaces one of that name, since a run that was killed behind this
    comes here again. Raises on all ranks if one fails: StoreError from DCP, else OSError on rank 0.
    """
    nonce = group.broadcast(secrets.token_hex(4).encode() if group.rank == 0 else None).decode()
    draft = out.with_name(f".{out.name}.{nonce}{PARTIAL}")
    on_first(group, f"making {draft}", lambda: draft.mkdir(parents=True))
    try:
        state = {name: _cast(value, dtype) for name, value in state_of(parts).items()}
        theirs = adapter.to_hf(state)
        writer = HuggingFaceStorageWriter(
            str(draft),
            fqn_to_index_mapping=adapter.fqn_to_index_mapping,
            save_distributed=True,
            enable_consolidation=True,
        )
        try:
            save(theirs, storage_writer=writer)
        except (Exception, CheckpointException) as error:  # as in `read_hf`
            raise StoreError(f"{out}: the model cannot be written: {error}") from error
        on_first(group, f"writing {out}", lambda: _publish(draft, out))
    finally:
        if group.rank == 0:
            shutil.rmtree(draft, ignore_errors=True)
    if group.rank == 0:
        log.info("the model is in %s, for transformers", out)


def on_first(group: Group, what: str, call: Callable[[], None]) -> None:
    """Makes a call on rank 0 alone; all ranks raise if it fails."""
    together_at_length(group, what, call if group.rank == 0 else lambda: None)


def state_of(parts: Sequence[nn.Module]) -> dict[str, Any]:
    """Returns one state of several pipeline stages, which name their layers apart."""
    merged: dict[str, Any] = {}
    for part in parts:
        merged |= part.state_dict(keep_vars=True)
    return merged


def _cast(value: Any, dtype: torch.dtype) -> Any:
    return value.detach().to(dtype) if isinstance(value, torch.Tensor) and value.is_floating_point() else value


def _publish(draft: Path, out: Path) -> None:
    shutil.rmtree(draft / SHARDED)
    for path in [*draft.iterdir(), draft]:
        flush_path(path)
    old = draft.with_name(draft.name + ".old")
    if out.exists():
        out.rename(old)
    draft.rename(out)
    flush_path(out.parent)
    shutil.rmtree(old, ignore_errors=True)
