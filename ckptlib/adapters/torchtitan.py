"""Checkpoints of torchtitan by ckptlib: `checkpoint=CkptlibCheckpointManager.Config(enable=True)`. Needs torchtitan.

torchtitan asks its manager to save after each step, and to load once. Here a Checkpointer does both, with the model's
parts, torch's own optimizers, the schedulers, the data loader and the train state.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from itertools import chain
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torchtitan.components.checkpointer import BaseCheckpointManager
from torchtitan.components.checkpointer.base import DATALOADER, LR_SCHEDULER, MODEL, OPTIMIZER
from torchtitan.tools import filesystem
from typing_extensions import override

from ckptlib import api
from ckptlib.adapters.torchtitan_hf import read_hf, state_of, write_hf
from ckptlib.catalog.catalog import Catalog
from ckptlib.checkpointer import Checkpointer
from ckptlib.errors import CheckpointNotFound, Preempted, UnsupportedState
from ckptlib.exporting.asked import Export
from ckptlib.imports.beginning import Init
from ckptlib.policy.keep import Keep
from ckptlib.policy.when import First, Policy, Steps
from ckptlib.ranks.together import by_rank_0
from ckptlib.saving.registry import registry
from ckptlib.state.made_tensors import made_in
from ckptlib.stores import open_store

FINAL = "final-step-{step}"
"""Exports the model of the last step beside the root, for torch.distributed.checkpoint or transformers."""

_EXPORTED_AS = {"float16": "fp16", "bfloat16": "bf16", "float32": "fp32"}
_DTYPES = {name: getattr(torch, name) for name in _EXPORTED_AS}


class CkptlibCheckpointManager(BaseCheckpointManager):
    """torchtitan's CheckpointManager, with its Config, and steps of one root instead of `step-N` directories.

    Loads as torchtitan does: the run's own newest step, or that of `load_step`; if the run has none,
    `initial_load_path`. Saves are asynchronous, whatever `async_mode` was.
    """

    @dataclass(kw_only=True, slots=True)
    class Config(BaseCheckpointManager.Config):
        """torchtitan's Config, and `checkpointer`."""

        checkpointer: dict[str, Any] = field(default_factory=dict)
        """Further arguments of `ckptlib.Checkpointer`, such as peers, codec, must_resume, or another `every`."""

    def __init__(
        self,
        config: Config,
        *,
        dataloader: Any | None,
        model_parts: list[nn.Module],
        optimizers: Any,
        lr_schedulers: Any,
        states: dict[str, Any],
        sd_adapter: Any | None,
        base_folder: str = "",
    ) -> None:
        """Raises ValueError for options that ckptlib does not have."""
        self.enable = config.enable
        self.save_future = None
        if not self.enable:
            return
        if sd_adapter is None and (config.last_save_in_hf or config.initial_load_in_hf):
            raise ValueError("initial_load_in_hf and last_save_in_hf need the model's state dict adapter: sd_adapter=")
        self._config = config
        self._adapter: Any = sd_adapter
        self._parts = model_parts
        self.folder = filesystem.join(base_folder, config.folder)
        self.interval = config.interval
        self._state = {
            MODEL: _model(model_parts),
            OPTIMIZER: _each(optimizers.optimizers),
            LR_SCHEDULER: lr_schedulers,
            **({} if dataloader is None else {DATALOADER: dataloader}),
            **states,
        }
        unknown = [key for key in config.exclude_from_loading if key not in self._state]
        if unknown:
            raise ValueError(f"exclude_from_loading has {unknown}; the state has {[*self._state]}")
        states |= {MODEL: model_parts, OPTIMIZER: optimizers, LR_SCHEDULER: lr_schedulers, DATALOADER: dataloader}
        self._checkpointer: Checkpointer | None = None

    @override
    def _load(self, step: int = -1) -> bool:
        config = self._config
        kept = [key for key in self._state if key not in config.exclude_from_loading]
        if config.load_only:
            return self._load_alone(step, kept)
        every = config.checkpointer.get("every", self._policy())
        options = {
            "keep": Keep(last=config.keep_latest_k) if config.keep_latest_k else None,
            "export": self._export(),
            **self._beginning(),
            **{key: value for key, value in config.checkpointer.items() if key != "every"},
        }
        self._checkpointer = Checkpointer(self.folder, self._state, every=every, **options)
        asked, only = None if step == -1 else step, kept if config.exclude_from_loading else None
        from_seed = self._is_seed(step)
        report = self._checkpointer.restore(step=asked, only=MODEL if from_seed else only)
        if from_seed and report.step:  # a newer step was in memory, or not committed yet
            report = self._checkpointer.restore(step=asked, only=only)
        self._checkpointer.restore_random()
        if report.save is not None or report.initialized_from is not None:
            return True
        return self._read_hf()

    def _is_seed(self, step: int) -> bool:
        """Returns whether the step to load is step 0, which has the model alone. Collective."""
        if step != -1:
            return step == 0

        def newest() -> bytes:
            with open_store(self.folder, self._storage_options) as store, suppress(CheckpointNotFound):
                return str(Catalog(store).resolve("latest").step).encode()
            return b""

        return by_rank_0(registry.group(None), f"looking for the newest step of {self.folder}", newest) == b"0"

    @property
    def _storage_options(self) -> Mapping[str, object] | None:
        return self._config.checkpointer.get("storage_options")

    def _load_alone(self, step: int, kept: Sequence[str]) -> bool:
        """Loads without a job in the root: nothing there changes."""
        begin = self._beginning().get("init_from")
        only = MODEL if self._is_seed(step) else kept
        options = self._storage_options
        try:
            api.load(self.folder, self._state, "latest" if step == -1 else step, only=only, storage_options=options)
        except CheckpointNotFound:
            if step != -1 or self._config.checkpointer.get("must_resume"):
                raise
            if begin is None:
                return self._read_hf()
            api.load(begin.source, self._state, only=self._beginning().get("init_only") or kept)
        return True

    def _read_hf(self) -> bool:
        """Fills the model from Hugging Face's files, if asked, for a run without own step. Returns whether it did."""
        config = self._config
        if not config.initial_load_in_hf:
            return False
        path = config.initial_load_path or self._adapter.hf_assets_path
        if not path:
            raise ValueError("initial_load_in_hf: give initial_load_path, or the model's hf_assets_path")
        group = registry.group(None)
        read_hf(group, self._parts, self._adapter, path, quantized=config.initial_load_in_hf_quantized)
        return True

    @override
    @torch.no_grad()
    def _save(self, curr_step: int, last_step: bool = False) -> bool:
        """Saves. Raises Preempted once the step is saved at which all ranks stop, since one of them was told to."""
        if self._config.load_only:
            return False
        if self._checkpointer is None:  # torchtitan loads first, except for a seed checkpoint
            api.save(self.folder, {MODEL: self._state[MODEL]}, curr_step, storage_options=self._storage_options)
            return True
        before = self._checkpointer.pending
        if last_step:
            self._save_last(self._checkpointer, curr_step)
        else:
            self._checkpointer.after_step(curr_step)
        saved = self._checkpointer.pending is not before
        if self._checkpointer.stopping:  # torchtitan would go on with its next step
            self._close()
            raise Preempted
        return saved

    def _save_last(self, checkpointer: Checkpointer, step: int) -> None:
        """Saves the last step. Writes Hugging Face's files before it is committed: a kill between them repeats both."""
        try:
            if self._config.last_save_in_hf:
                out = Path(self._beside(), FINAL.format(step=step))
                dtype = _DTYPES[self._config.export_dtype]
                write_hf(registry.group(None), self._parts, self._adapter, out, dtype)
        finally:
            checkpointer.save(step)

    @override
    def _maybe_wait_for_staging(self) -> None:
        """Does nothing: the Checkpointer's hook waits as the optimizer steps, as long as needed."""

    @override
    def _wait_for_saving(self) -> None:
        """Does nothing: `close` waits."""

    @override
    def _close(self) -> None:
        checkpointer = getattr(self, "_checkpointer", None)
        if checkpointer is not None:
            self._checkpointer = None
            checkpointer.close()

    def _policy(self) -> Policy:
        steps = Steps(self.interval)
        return First() | steps if self._config.enable_first_step_checkpoint else steps

    def _beginning(self) -> dict[str, Any]:
        path = self._config.initial_load_path
        if not path or self._config.initial_load_in_hf:
            return {}
        return {"init_from": Init(path), "init_only": MODEL if self._config.initial_load_model_only else None}

    def _export(self) -> Export | None:
        """Returns the export of the last step's model; the step itself is saved whole, to extend the run."""
        config = self._config
        if not config.last_save_model_only or config.last_save_in_hf or filesystem.is_remote(self.folder):
            return None
        out = filesystem.join(self._beside(), FINAL)
        dtype = _EXPORTED_AS[config.export_dtype]
        return Export(out, format="dcp", only=MODEL, strip=f"{MODEL}/", dtype=dtype)

    def _beside(self) -> str:
        """Returns where exports of the last step go."""
        return f"{self.folder.rstrip('/')}-export"


def _model(parts: Sequence[nn.Module]) -> nn.Module | Mapping[str, Any]:
    """Returns the model; pipeline stages, which name their layers apart, become one state. Raises UnsupportedState for
    entries that hooks make there: these would be saved as they are now, at every step."""
    if len(parts) == 1:
        return parts[0]
    for name in chain.from_iterable(made_in(part, part.state_dict(keep_vars=True), MODEL) for part in parts):
        raise UnsupportedState(
            f"{MODEL}/{name}: hooks of state_dict() make it, which is supported for one model part, and this rank has "
            f"{len(parts)} pipeline stages; build the model without fused weights"
        )
    return state_of(parts)


def _each(optimizers: Sequence[torch.optim.Optimizer]) -> torch.optim.Optimizer | Mapping[str, torch.optim.Optimizer]:
    """Returns the optimizers: torchtitan has one for each part of the model and kind of optimizer."""
    if len(optimizers) == 1:
        return optimizers[0]
    return {str(i): optimizer for i, optimizer in enumerate(optimizers)}
