"""Checkpoints of transformers' Trainer by ckptlib: `class MyTrainer(CkptlibTrainerMixin, Trainer)`.

A directory `checkpoint-N` has trainer_state.json, as usual, and a line of JSON that names a step of the root beside it.
The root has the tensors of all such directories. Needs the packages transformers and accelerate.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Mapping
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from transformers import TrainerCallback
from typing_extensions import override

from ckptlib import api
from ckptlib.adapters.quantized_base import weights_of
from ckptlib.adapters.step_folders import ROOT, step_of
from ckptlib.adapters.trainer_callback import CkptlibCallback as CkptlibCallback
from ckptlib.adapters.trainer_callback import outlast
from ckptlib.adapters.trainer_run import TrainerRun, checkpoints_in, state_of
from ckptlib.catalog.unreadable import UNREADABLE
from ckptlib.format.keys import SaveId, parse_save
from ckptlib.ranks.together import by_rank_0
from ckptlib.saving.registry import registry

if TYPE_CHECKING:
    from transformers import Trainer as _Trainer
else:
    _Trainer = object

log = logging.getLogger(__name__)


class CkptlibTrainerMixin(_Trainer):  # type: ignore[misc]
    """Saves and resumes a Trainer by ckptlib. Put it before Trainer, or a class derived from it, among the bases.

    Saves model, optimizer, scheduler, scaler and the random state of every rank as one step of a root, when Trainer
    says so; another process writes it while training goes on. `checkpoint-N` appears when its step is committed. All
    ranks must see `output_dir`, as resuming requires anyway.

    `train` waits for the last checkpoint. It raises Preempted if SIGTERM told the job to stop; the step is saved then.
    With `resume_from_checkpoint=True` it skips a damaged checkpoint and tries the one before. Checkpoints that Trainer
    wrote itself load as before.
    """

    ckptlib_root: str | None = None
    """The URL of the root, such as "s3://bucket/run7". Default: the directory `ckptlib` of `output_dir`."""

    ckptlib_options: Mapping[str, Any] = {}
    """Further arguments of `Checkpointer`, such as {"codec": "planes"}; `every` adds saves to those of Trainer.
    `keep`, `peers`, `local`, `drain`, `process_group` and `must_resume` have no place here."""

    _run: TrainerRun | None = None
    _resuming: bool = False
    """Whether Trainer is about to load a checkpoint to resume from."""
    _random_from: tuple[str, SaveId] | None = None
    """Root and step of another run whose random state is still to be put back."""

    @override
    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.add_callback(_Events(self))

    @override
    def train(self, resume_from_checkpoint: str | bool | None = None, *args: Any, **kwargs: Any) -> Any:
        tried = self._to_try() if resume_from_checkpoint is True else []
        for path, older in pairwise(tried):
            try:
                return self._train(path, *args, **kwargs)
            except UNREADABLE as error:
                if not self._resuming:
                    raise
                log.error("%s cannot be resumed from and is skipped, %s is tried: %s", path, older, error)
        return self._train(tried[-1] if tried else resume_from_checkpoint, *args, **kwargs)

    def _train(self, resume_from_checkpoint: str | bool | None, *args: Any, **kwargs: Any) -> Any:
        self._resuming = resume_from_checkpoint not in (None, False)
        self._random_from = None
        try:
            return super().train(resume_from_checkpoint, *args, **kwargs)
        finally:
            self._let_go()

    def _inner_training_loop(self, *args: Any, **kwargs: Any) -> Any:
        """Called again if memory ran out, with `auto_find_batch_size`: with another scheduler, from the first step."""
        self._let_go()
        return super()._inner_training_loop(*args, **kwargs)

    def _let_go(self) -> None:
        """Lets go of a run that has not come to its end, without waiting for anything."""
        if self._run is not None:
            self._run.let_go()
            self._run = None

    def last_checkpoint(self) -> str | None:
        """Returns the newest checkpoint of `output_dir`, or None. Collective.

        First finishes the saves that a kill has left, so it may see one more than transformers' `get_last_checkpoint`.
        """
        return next(iter(self._to_try()), None)

    def _get_dataloader(self, *args: Any, **kwargs: Any) -> Any:
        """Makes the workers outlast signals, for evaluations, too."""
        loader = super()._get_dataloader(*args, **kwargs)
        outlast(loader)
        return loader

    # Saving: Trainer calls these

    def _save_checkpoint(self, model: Any, trial: Any) -> None:
        assert self._run is not None
        self._run.save(trial)

    def _finalize_training(self, *args: Any, **kwargs: Any) -> Any:
        """Waits for saves: Trainer now loads the best model and, with `save_total_limit=1`, removes all others."""
        assert self._run is not None
        self._run.step_done()  # before other weights are loaded
        self._run.wait()
        return super()._finalize_training(*args, **kwargs)

    # Loading

    def _load_from_checkpoint(self, resume_from_checkpoint: str, model: Any = None) -> None:
        save = self._named_by(resume_from_checkpoint)
        if save is None:
            super()._load_from_checkpoint(resume_from_checkpoint, model)
        elif not self._resuming:  # else all of the state is loaded at once, as soon as there is an optimizer
            self._load_model(resume_from_checkpoint, save, self.model if model is None else model)

    def _load_optimizer_and_scheduler(self, checkpoint: str | None) -> None:
        save = None if checkpoint is None else self._named_by(checkpoint)
        if checkpoint is None or save is None:
            super()._load_optimizer_and_scheduler(checkpoint)
            return
        self._open()
        assert self._run is not None
        root = self._root_of(checkpoint)
        if not self._run.resume(root, save):
            self._random_from = root, save

    def _load_scaler(self, checkpoint: str | None) -> None:
        if checkpoint is None or self._named_by(checkpoint) is None:
            super()._load_scaler(checkpoint)

    def _load_rng_state(self, checkpoint: str | None) -> None:
        if checkpoint is None or self._named_by(checkpoint) is None:
            super()._load_rng_state(checkpoint)
        elif self._random_from is not None:
            root, save = self._random_from
            api.load(root, {}, str(save), strict=False, random=True, storage_options=self._storage_options)
        else:
            assert self._run is not None
            self._run.checkpointer.restore_random()

    def _load_best_model(self) -> None:
        best = self.state.best_model_checkpoint
        save = self._named_by(best)
        if save is None:
            super()._load_best_model()
        else:
            self._load_model(best, save, self.model)

    def _load_model(self, checkpoint: str, save: SaveId, model: torch.nn.Module) -> None:
        root = self._root_of(checkpoint)
        api.load(root, {"model": weights_of(model)}, str(save), only="model", storage_options=self._storage_options)

    # Where things are

    def _open(self) -> None:
        """Opens a run. Collective."""
        self._let_go()
        self._run = TrainerRun(self, state_of(self), self.ckptlib_root, self.ckptlib_options)

    @property
    def _storage_options(self) -> Mapping[str, object] | None:
        return self.ckptlib_options.get("storage_options")

    def _root_of(self, checkpoint: str) -> str:
        return self.ckptlib_root or str(Path(checkpoint).absolute().parent / ROOT)

    def _named_by(self, checkpoint: str) -> SaveId | None:
        """Returns the step that a checkpoint names, as rank 0 reads it. Collective."""
        told = by_rank_0(
            registry.group(None), f"reading {checkpoint}", lambda: str(step_of(Path(checkpoint)) or "").encode()
        )
        name = told.decode()
        return parse_save(name) if name else None

    def _to_try(self) -> list[str]:
        """Returns the checkpoints of the output directory, newest first; as rank 0 sees them. Collective."""
        directory = Path(self._get_output_dir(None))

        def look() -> bytes:
            found = checkpoints_in(directory, self.ckptlib_root, self.ckptlib_options)
            return json.dumps([*map(str, found)]).encode()

        told = by_rank_0(registry.group(None), f"looking for checkpoints in {directory}", look)
        return [str(path) for path in json.loads(told)]


class _Events(TrainerCallback):  # type: ignore[misc]
    """Tells the run of a trainer how far it is."""

    def __init__(self, trainer: CkptlibTrainerMixin) -> None:
        self._trainer = trainer

    def on_train_begin(self, *args: Any, **kwargs: Any) -> None:
        outlast(kwargs["train_dataloader"])  # the loader may come from the user's `get_train_dataloader`
        if self._trainer._run is None:
            self._trainer._open()
        self._trainer._resuming = False

    def on_epoch_begin(self, *args: Any, **kwargs: Any) -> None:
        self._step_done()

    def on_step_begin(self, *args: Any, **kwargs: Any) -> None:
        self._step_done()

    def on_train_end(self, *args: Any, **kwargs: Any) -> None:
        self._step_done()
        run, self._trainer._run = self._trainer._run, None
        if run is not None:
            run.close()

    def _step_done(self) -> None:
        if self._trainer._run is not None:
            self._trainer._run.step_done()
