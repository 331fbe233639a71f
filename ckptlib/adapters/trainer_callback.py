"""A callback that saves a Trainer whose class cannot be changed, by a policy of its own."""

from __future__ import annotations

import logging
from pathlib import Path
from types import SimpleNamespace
from typing import Any, ClassVar
from weakref import WeakValueDictionary

from torch.utils.data import DataLoader
from transformers import TrainerCallback, TrainingArguments

from ckptlib.adapters.quantized_base import weights_of
from ckptlib.adapters.step_folders import ROOT, step_of
from ckptlib.adapters.trainer_run import PREFIX, TrainerRun, checkpoints_in
from ckptlib.catalog.unreadable import UNREADABLE
from ckptlib.data.worker_signals import outlasting
from ckptlib.errors import CkptError
from ckptlib.exporting.export import HF, export
from ckptlib.policy.when import When
from ckptlib.ranks.together import together_at_length
from ckptlib.recovery.not_closed import await_all
from ckptlib.saving.registry import registry
from ckptlib.stores import absolute

log = logging.getLogger(__name__)

WEIGHTS = ("model.safetensors", "model.safetensors.index.json")
"""Trainer takes a directory without any of these files for no checkpoint."""

IN_ONE_FILE = 2**62
"""Shard size in bytes. For a model of peft, Trainer takes an index for no weights, and asks for an adapter's files."""


def outlast(loader: Any) -> None:
    """Lets the workers that a loader of Trainer's starts outlast the signals that tell a job to stop: otherwise there
    would be no step to save."""
    own = getattr(loader, "base_dataloader", loader)
    if isinstance(own, DataLoader):
        outlasting(own)


class CkptlibCallback(TrainerCallback):  # type: ignore[misc]
    """Saves model, optimizer, scheduler and the random state of every rank, beside the training, as `every` says.

        saves = CkptlibCallback(every=Overhead(at_most=0.035))
        trainer = SFTTrainer(..., callbacks=[saves])  # with save_strategy="no"
        trainer.train(resume_from_checkpoint=saves.last_checkpoint(args))

    The last step is always saved; `save_total_limit` says how many checkpoints stay. Use `CkptlibTrainerMixin` if you
    can change the class: it resumes without writing the weights once more, and knows the best model, the scaler of fp16
    and the states of other callbacks.
    """

    _running: ClassVar[WeakValueDictionary[Path, TrainerRun]] = WeakValueDictionary()
    """Runs by output directory. Nobody tells a callback that a training raised, or was interrupted in a notebook."""

    def __init__(self, every: When, *, root: str | None = None, **options: Any) -> None:
        """`root`: its URL; default: the directory `ckptlib` of `output_dir`. `options`: arguments of `Checkpointer`."""
        self._root = root
        self._options = {**options, "every": every}
        self._run: TrainerRun | None = None
        self._resumed: Path | None = None
        self._owes_random = False

    def last_checkpoint(self, args: TrainingArguments) -> str | None:
        """Returns a directory for `train(resume_from_checkpoint=)`, or None. Collective.

        Writes the weights of the newest checkpoint into it, which Trainer asks for. Skips a damaged checkpoint with an
        error in the log. Raises CorruptData, CheckpointNotFound and so on if all are damaged. Waits for saves of this
        process there that are under way: one of its trainings may have been interrupted.
        """
        assert args.device is not None  # asking for it makes Accelerate make the process group
        directory, group = Path(args.output_dir).absolute(), registry.group(None)
        await_all(group, absolute(self._root or str(directory / ROOT)))

        def look() -> str:
            return "" if group.rank else str(self._prepared(directory) or "")

        found = together_at_length(group, f"looking for checkpoints in {args.output_dir}", look)
        path = group.broadcast(found.encode()).decode()
        self._resumed = Path(path) if path else None
        return path or None

    def _prepared(self, directory: Path) -> Path | None:
        """Returns the newest checkpoint that can be resumed from, with its weights; None if there is none."""
        failed: CkptError | None = None
        for folder in checkpoints_in(directory, self._root, self._options):
            try:
                save = step_of(folder)
                if save is not None and not any((folder / name).exists() for name in WEIGHTS):
                    root, options = self._root or folder.parent / ROOT, self._options.get("storage_options")
                    export(
                        *(root, folder, str(save)),
                        format=HF,
                        only="model",
                        strip="model/",
                        max_shard_size=IN_ONE_FILE,
                        storage_options=options,
                    )
            except UNREADABLE as error:
                log.error("%s cannot be resumed from and is skipped: %s", folder, error)
                failed = failed or error
            else:
                return folder
        if failed is not None:
            raise failed
        return None

    def on_train_begin(self, args: Any, state: Any, control: Any, **seen: Any) -> None:
        self._run, directory = None, Path(args.output_dir).absolute()
        before = self._running.pop(directory, None)
        if before is not None:
            before.let_go()
        if str(getattr(args.save_strategy, "value", args.save_strategy)) != "no":
            raise ValueError("CkptlibCallback saves by itself; use TrainingArguments(save_strategy='no')")
        if args.fp16 or args.deepspeed or args.fsdp:
            raise ValueError(
                "CkptlibCallback sees no gradient scaler and no wrapped model: it saves no fp16, FSDP and DeepSpeed; "
                "use CkptlibTrainerMixin, or bf16 and DDP"
            )
        trainer = SimpleNamespace(
            args=args,
            state=state,
            control=control,
            model=seen["model"],
            processing_class=seen.get("processing_class"),
            callback_handler=SimpleNamespace(callbacks=[]),
            _get_output_dir=lambda trial: args.output_dir,
        )
        optim = getattr(seen["optimizer"], "optimizer", seen["optimizer"])
        saved = {"model": weights_of(seen["model"]), "optim": optim, "sched": seen["lr_scheduler"]}
        self._run = self._running[directory] = TrainerRun(trainer, saved, self._root, self._options)
        outlast(seen["train_dataloader"])
        self._owes_random = state.global_step > 0 and self._resume(self._run, args, int(state.global_step))

    def _resume(self, run: TrainerRun, args: Any, step: int) -> bool:
        """Resumes if this run goes on from one of our checkpoints, of which Trainer has loaded the weights only.
        Returns whether the random state is still to be put back."""
        folder = self._resumed or Path(args.output_dir).absolute() / f"{PREFIX}{step}"
        save = step_of(folder)
        return save is not None and run.resume(self._root or str(folder.parent / ROOT), save)

    def on_epoch_begin(self, args: Any, state: Any, control: Any, **seen: Any) -> None:
        self._step_done()
        if args.ignore_data_skip or float(state.epoch).is_integer():
            self._put_random_back()  # before the data loader draws from it; else behind the batches that are skipped

    def on_step_begin(self, args: Any, state: Any, control: Any, **seen: Any) -> None:
        self._step_done()
        self._put_random_back()

    def on_train_end(self, args: Any, state: Any, control: Any, **seen: Any) -> None:
        run, self._run = self._run, None
        if run is not None:
            run.finish()
            self._running.pop(Path(args.output_dir).absolute(), None)

    def _step_done(self) -> None:
        if self._run is not None:
            self._run.step_done()

    def _put_random_back(self) -> None:
        owes, self._owes_random = self._owes_random, False
        if owes and self._run is not None:
            self._run.checkpointer.restore_random()
