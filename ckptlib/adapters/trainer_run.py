"""One call of `train` of a Trainer whose checkpoints are ckptlib's: its Checkpointer, and its directories."""

from __future__ import annotations

import json
import logging
import re
import sys
from collections.abc import Mapping
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

from ckptlib import api
from ckptlib.adapters.quantized_base import weights_of
from ckptlib.adapters.step_folders import ROOT, StepFolders, step_of
from ckptlib.catalog.catalog import Catalog
from ckptlib.checkpointer import Checkpointer
from ckptlib.errors import (
    CheckpointNotFound,
    FormatError,
    Preempted,
    ReplicasDiffer,
    SaveFailed,
    StateMismatch,
    Superseded,
)
from ckptlib.format.keys import SaveId
from ckptlib.policy.when import policy_of
from ckptlib.ranks.together import by_rank_0, together, together_at_length
from ckptlib.saving.pending import Pending
from ckptlib.saving.registry import registry
from ckptlib.stores import absolute, open_store

log = logging.getLogger(__name__)

STATE = "trainer_state.json"
PREFIX = "checkpoint-"
NUMBERED = re.compile(rf"{PREFIX}([0-9]+)")

SAME_TIME_S = 1.0
"""If the times of directories differ by less, they do not tell which one is older."""

OURS = ("keep", "peers", "local", "drain", "process_group", "must_resume")
"""Arguments of Checkpointer that contradict Trainer's."""


class TrainerRun:
    """The run of one call of `train`, from the time that its optimizer exists. Main thread."""

    def __init__(self, trainer: Any, state: dict[str, object], root: str | None, options: Mapping[str, Any]) -> None:
        """`trainer`: a Trainer, or what a callback sees of one. Collective. Raises ValueError for options that
        contradict Trainer, UnsupportedState for objects in the state."""
        wrong = [name for name in OURS if name in options]
        if wrong:
            raise ValueError(
                f"{', '.join(wrong)} cannot be given to Checkpointer here: Trainer says what is saved and kept, and "
                "train(resume_from_checkpoint=True) that there is a checkpoint to resume from"
            )
        self._trainer = trainer
        self._directory = Path(trainer._get_output_dir(getattr(trainer, "_trial", None))).absolute()
        self._root = absolute(root or str(self._directory / ROOT))
        self._options, self._arena = options.get("storage_options"), options.get("arena")
        self._state = state
        self._group = registry.group(None)
        self._folders = self._folders_of_rank_0()
        given = {"config": trainer.args.to_sanitized_dict(), **options}
        more = given.pop("every", None)
        every = policy_of(self._is_due)
        self.checkpointer = Checkpointer(
            self._root, self._state, every=every if more is None else every | more, **given
        )
        self._told = int(trainer.state.global_step)
        """The last step that the Checkpointer knows of."""
        self._noted: Pending | None = None
        """The last save that has a directory, or a draft."""
        self._under_way: list[tuple[str, Pending]] = []
        """Drafts, and the saves that they wait for."""
        self._failed: SaveFailed | None = None
        """Why the last save that Trainer asked for was not even begun."""
        best = trainer.state.best_model_checkpoint
        self._bests: list[str] = [] if best is None else [best]
        """Directories of the best steps, the newest last; earlier ones are kept until the newest is there."""

    def _folders_of_rank_0(self) -> StepFolders | None:
        def settled() -> StepFolders | None:
            if self._group.rank != 0:
                return None
            folders = StepFolders(self._directory, self._root, self._options, self._beyond, self._arena)
            folders.settle()
            return folders

        return together(self._group, f"looking at {self._directory}", settled)

    # Loading

    def resume(self, root: str, save: SaveId) -> bool:
        """Fills the state from a step. Returns whether the own Checkpointer did; if not, the root is another one.

        Collective. Raises StateMismatch, CorruptData and so on as `Checkpointer.restore` does.
        """
        expected = int(self._trainer.state.global_step)
        if save.step != expected:
            raise StateMismatch(
                f"{STATE} says global_step {expected}, but the file beside it names step {save.step} of {root}: they "
                "are not of one checkpoint; resume from another one"
            )
        if absolute(root) == self._root:
            self.checkpointer.restore(step=str(save))
            return True
        api.load(root, self._state, str(save), storage_options=self._options)
        return False

    # Training

    def step_done(self) -> None:
        """Tells the Checkpointer of a step, once. Collective.

        Called as late as possible, when what Trainer does behind a step, such as evaluating, is done. Raises Preempted
        if all ranks have agreed to stop.
        """
        step = int(self._trainer.state.global_step)
        if step == self._told:
            return
        self._told = step
        self.checkpointer.after_step(step)
        self._note(self.checkpointer.pending)
        self._publish_done()
        if self.checkpointer.stopping:
            self.close()
            raise Preempted

    def save(self, trial: Any) -> None:
        """Replaces Trainer's `_save_checkpoint`. Collective."""
        trainer = self._trainer
        if trainer.hp_search_backend is None and trial is None:
            trainer.store_flos()
        self._drop_failed_bests()
        best = trainer.state.best_global_step
        if self._is_there(best):
            self._name_best(str(Path(trainer._get_output_dir(trial)) / f"{PREFIX}{best}"))
        self.step_done()
        step = int(trainer.state.global_step)
        self._failed = None
        if self._noted is not None and self._noted.step == step:
            return
        try:
            self._note(self.checkpointer.save(step))
        except (Superseded, ReplicasDiffer):
            raise
        except SaveFailed as error:  # on all ranks; `after_step` ends a training whose saves fail for too long
            log.error("%s: %s", self._directory / f"{PREFIX}{step}", error)
            self._failed = error

    def _name_best(self, folder: str) -> None:
        """Names the best checkpoint, which Trainer keeps, and loads at the end; it may not be there yet."""
        if folder not in self._bests[-1:]:
            self._bests.append(folder)
        self._trainer.state.best_model_checkpoint = folder

    def _drop_failed_bests(self) -> None:
        """Drops best checkpoints that could not be saved: the one before them is the best that there is. Collective."""
        while len(self._bests) > 1 and not self._is_there(_number(Path(self._bests[-1]))):
            self._bests.pop()
            self._trainer.state.best_model_checkpoint = self._bests[-1]

    def _is_there(self, step: int | None) -> bool:
        """Returns whether a step has its directory, or will have one, as rank 0 sees it. Collective."""
        folder = self._directory / f"{PREFIX}{step}"

        def look() -> bytes:
            begun = step == self._trainer.state.global_step or any(name == folder.name for name, _ in self._under_way)
            return b"there" if step and (begun or folder.is_dir()) else b""

        return bool(by_rank_0(self._group, f"looking for {folder}", look))

    def _is_due(self, step: int) -> bool:
        """Returns whether Trainer will ask for a save, as far as known: such a save is copied beside the training."""
        args, state = self._trainer.args, self._trainer.state
        if str(getattr(args.save_strategy, "value", args.save_strategy)) != "steps":
            return False
        return bool((state.save_steps > 0 and step % state.save_steps == 0) or step == state.max_steps)

    def _note(self, pending: Pending | None) -> None:
        """Makes a draft of a new save."""
        if pending is None or pending is self._noted:
            return
        self._noted = pending
        name = f"{PREFIX}{pending.step}"
        self._under_way.append((name, pending))
        if self._folders is not None:
            try:
                self._folders.draft(name, pending.save, partial(write_files, self._trainer))
            except OSError as error:  # the step is saved anyway; raising would stop this rank alone
                log.error("%s: its files cannot be written: %s", self._directory / name, error)

    def _publish_done(self) -> None:
        """Publishes drafts whose saves are done, on rank 0; other ranks only forget the saves."""
        for name, pending in [*self._under_way]:
            if not pending.done():
                continue
            self._under_way.remove((name, pending))
            if self._folders is None:
                continue
            if pending.committed:
                self._folders.publish(name, pending.save)
            else:
                log.error("%s: step %d is not saved: %s", self._directory / name, pending.step, pending.error)
                self._folders.discard(name, pending.save)

    def _beyond(self, newest: Path) -> list[Path]:
        """Returns the directories beyond `save_total_limit`, oldest first."""
        limit = self._trainer.args.save_total_limit
        if limit is None or limit <= 0:
            return []
        bests = [path for path in map(Path, self._bests) if path.is_dir()]
        stays = {newest, *(path.absolute() for path in bests[-1:])}
        others = _by_age([path for path in _numbered(self._directory) if path not in stays])
        stays = {path for path in stays if path.is_dir()}
        return others[: max(0, len(others) - max(0, limit - len(stays)))]

    # Ending

    def wait(self) -> None:
        """Waits until each save has its directory, or has failed. Collective."""

        def finish() -> None:
            for _, pending in self._under_way:
                try:
                    pending.wait_committed()
                except SaveFailed:
                    continue  # the error is reported below
            self._publish_done()
            if self._folders is not None:
                self._folders.wait()

        together_at_length(self._group, f"waiting for the checkpoints of {self._directory}", finish)
        self._drop_lost_bests()

    def _drop_lost_bests(self) -> None:
        """Drops best checkpoints that are not there, now that no save is under way. Trainer would load even the only
        one, or compare it with others. Collective."""

        def look() -> bytes:
            return b"lost" if self._bests and not Path(self._bests[-1]).is_dir() else b""

        while by_rank_0(self._group, "looking for the best checkpoint", look):
            log.warning("%s has the best model, but is not there", self._trainer.state.best_model_checkpoint)
            del self._bests[-1:]
            self._trainer.state.best_model_checkpoint = self._bests[-1] if self._bests else None

    def finish(self) -> None:
        """Saves the last step, unless it is saved, and closes. Collective."""
        self.step_done()
        if self._noted is None or self._noted.step != self._told:
            self._note(self.checkpointer.save(self._told))
        self.close()

    def close(self) -> None:
        """Waits for all saves. Collective. Raises SaveFailed if the last one failed."""
        try:
            self.wait()
            if self._folders is not None:
                self._folders.close()
        except BaseException:
            self.let_go()
            raise
        self._folders = None
        self.checkpointer.close()
        if self._failed is not None:
            raise self._failed

    def let_go(self) -> None:
        """Waits for nothing: the writers finish alone, and the next run gives their steps directories."""
        if self._folders is not None:
            self._folders.let_go()
        error = sys.exc_info()[1] or SaveFailed("the training was begun anew")
        self.checkpointer.__exit__(type(error), error, error.__traceback__)


def checkpoints_in(directory: Path, root: str | None, options: Mapping[str, Any]) -> list[Path]:
    """Returns the checkpoints, newest first, after finishing those left by an earlier process. Call it in one process.

    Omits checkpoints whose step was abandoned; raises CheckpointNotFound if all were. Omits those whose
    trainer_state.json is damaged, unless all are: they are checkpoints all the same, and nobody may begin anew in their
    place without a word.
    """
    directory = directory.absolute()
    where = root or str(directory / ROOT)
    folders = StepFolders(directory, where, options.get("storage_options"), lambda _: [], options.get("arena"))
    try:
        folders.settle()
    finally:
        folders.let_go()
    found = sorted(_numbered(directory), key=_number, reverse=True)
    left = _abandoned(found, where, options.get("storage_options"))
    if left and len(left) == len(found):
        raise CheckpointNotFound(
            f"{directory}: its checkpoints, the newest of which is {found[0].name}, were all abandoned as the run went "
            f"back to an earlier step, and the steps of {where} that were not have no directory; pass the path of one "
            "to go on from it all the same"
        )
    found = [folder for folder in found if folder not in left]
    return [*filter(_has_state, found)] or found


def _abandoned(folders: list[Path], root: str, options: Mapping[str, object] | None) -> set[Path]:
    """Returns the folders whose step exists, but was abandoned when the run went back to an earlier one."""
    named: dict[Path, SaveId] = {}
    for folder in folders:
        with suppress(FormatError, OSError):  # reported when it is read to be loaded
            save = step_of(folder)
            if save is not None:
                named[folder] = save
    if not named:
        return set()
    with open_store(root, options) as store:
        catalog = Catalog(store)
        behind = {*catalog.saves()} - {*catalog.visible()}
    left = {folder for folder, save in named.items() if save in behind}
    for folder in sorted(left, key=_number):
        log.warning("%s is left out: the run went back to an earlier step, and that abandoned this one", folder)
    return left


def _has_state(folder: Path) -> bool:
    """Returns whether Trainer can read its state file, which it does before it asks for anything of ours."""
    try:
        _ = json.loads((folder / STATE).read_bytes())["global_step"]
    except (OSError, ValueError, TypeError, KeyError, RecursionError) as error:
        log.error("%s cannot be resumed from and is skipped: %s: %r", folder, STATE, error)
        return False
    return True


def state_of(trainer: Any) -> dict[str, object]:
    """Returns what is saved of a Trainer. Raises ValueError for trainings whose state is not in torch's own objects."""
    plugin = getattr(trainer.accelerator.state, "fsdp_plugin", None)
    if trainer.is_deepspeed_enabled or getattr(trainer, "is_fsdp_xla_enabled", False):
        raise ValueError("CkptlibTrainerMixin saves no DeepSpeed and no XLA; use FSDP2, DDP or one process")
    if trainer.is_fsdp_enabled and getattr(plugin, "fsdp_version", 1) != 2:
        raise ValueError("CkptlibTrainerMixin saves no FSDP1; use fsdp_config={'fsdp_version': 2}")
    if trainer.args.push_to_hub and trainer.args.hub_strategy != "end":
        raise ValueError(
            f"hub_strategy={str(trainer.args.hub_strategy)!r}: checkpoint-N has no weights to be pushed at each save; "
            "use hub_strategy='end'"
        )
    state: dict[str, object] = {"model": weights_of(trainer.model)}
    if trainer.args.save_only_model:
        return state
    state["optim"] = getattr(trainer.optimizer, "optimizer", trainer.optimizer)
    state["sched"] = trainer.lr_scheduler
    scaler = getattr(trainer.accelerator, "scaler", None)
    return state if scaler is None else {**state, "scaler": scaler}


def write_files(trainer: Any, folder: Path) -> None:
    """Writes everything of a checkpoint but its tensors: the state of Trainer, the model's config and the tokenizer."""
    from transformers.trainer_callback import ExportableState

    exported: dict[str, list[Any]] = {}
    for callback in [*trainer.callback_handler.callbacks, trainer.control]:
        if isinstance(callback, ExportableState):
            exported.setdefault(type(callback).__name__, []).append(callback.state())
    trainer.state.stateful_callbacks.update({k: v[0] if len(v) == 1 else v for k, v in exported.items()})
    trainer.state.save_to_json(str(folder / STATE))
    for part in (getattr(trainer.model, "config", None), trainer.processing_class):
        if part is not None and hasattr(part, "save_pretrained"):
            part.save_pretrained(str(folder))


def _numbered(directory: Path) -> list[Path]:
    if not directory.is_dir():
        return []
    return [path for path in directory.iterdir() if NUMBERED.fullmatch(path.name) and path.is_dir()]


def _by_age(folders: list[Path]) -> list[Path]:
    """Returns the oldest first; by their numbers, as Trainer does, if the file system has no times, or a copy has given
    all the same one."""
    times = {folder: folder.stat().st_mtime for folder in folders}
    if times and max(times.values()) - min(times.values()) < SAME_TIME_S:
        return sorted(folders, key=_number)
    return sorted(folders, key=lambda folder: (times[folder], _number(folder)))


def _number(path: Path) -> int:
    return int(path.name[len(PREFIX) :])
