"""Checkpoints of Accelerate by ckptlib: `CkptlibAccelerator` in place of Accelerator. Needs the package accelerate.

The directory that `save_state` was given holds a line of JSON that names a step of the root beside it. The root has the
tensors of all such directories.
"""

from __future__ import annotations

import json
import logging
import os
import re
import threading
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, ClassVar

from accelerate import Accelerator
from accelerate.utils import DistributedType, ProjectConfiguration, extract_model_from_parallel
from typing_extensions import override

from ckptlib import api
from ckptlib.adapters.accelerate_epochs import Resumed, gave_last
from ckptlib.adapters.quantized_base import weights_of
from ckptlib.adapters.step_folders import ROOT, StepFolders, step_of
from ckptlib.catalog.catalog import Catalog
from ckptlib.errors import CkptError, SaveFailed
from ckptlib.format.keys import SaveId, parse_save
from ckptlib.jobs import at_exit
from ckptlib.policy.codec import AUTO, Asked
from ckptlib.ranks.together import by_rank_0, together_at_length
from ckptlib.saving.pending import Pending
from ckptlib.saving.registry import registry
from ckptlib.state.frameworks import SEEDABLE, read_anew, warn_of_order
from ckptlib.state.leaf import PerRank
from ckptlib.state.rng import capture
from ckptlib.stores import open_store

log = logging.getLogger(__name__)

NUMBERED = re.compile("checkpoint_([0-9]+)")
NOWHERE = "no directory"
"""Stands for the name of a step if there is no directory."""

UNSUPPORTED = (DistributedType.DEEPSPEED, DistributedType.MEGATRON_LM, DistributedType.XLA)


@dataclass(frozen=True, slots=True, eq=False)
class _Saving:
    directory: Path
    token: object
    """Token of the Accelerator that saves."""
    pending: Pending
    known: threading.Event
    """Set once the save is known to be committed or to have failed, for threads that wait for it."""


class CkptlibAccelerator(Accelerator):  # type: ignore[misc]
    """An Accelerator whose `save_state` and `load_state` go through ckptlib; all else is as it was.

    Saves all that was prepared or registered, and the random state of every rank. `save_state` returns as soon as the
    state is copied; another process writes it, and the directory appears when the step is committed: `wait_for_saves`
    and `end_training` wait for that. All ranks must see the directory.

    After a state was loaded, the first `skip_first_batches` puts the random state back once its batches are skipped:
    a data loader draws from it as it begins. A state that was saved at the last batch of an epoch goes on with the next
    epoch, unless that call skips the batches of the one before.
    """

    # Shared by the process: another Accelerator may load what the last one has just saved

    _folders: ClassVar[dict[Path, StepFolders]] = {}
    """Folders by directory; on rank 0."""
    _whose: ClassVar[dict[Path, object]] = {}
    """Token of the Accelerator that opened each directory last."""
    _under_way: ClassVar[list[_Saving]] = []
    _newest: ClassVar[dict[str, int]] = {}
    """The last step that this process saved or found, by root."""

    def __init__(
        self,
        *args: Any,
        ckptlib_codec: Asked = AUTO,
        ckptlib_storage_options: Mapping[str, object] | None = None,
        **kwargs: Any,
    ) -> None:
        """`ckptlib_codec`: as for `ckptlib.save`. All other arguments are Accelerator's."""
        super().__init__(*args, **kwargs)
        self._codec: Asked = ckptlib_codec
        self._storage_options = ckptlib_storage_options
        self._token = object()
        self._random: Mapping[str, Any] | None = None
        """The loaded random state, until batches are skipped."""
        self._ended: list[tuple[Any, int]] = []
        """Data loaders loaded at the last batch of an epoch, and that epoch; until batches are skipped."""
        self._resumed: Resumed | None = None

    @override
    def prepare_data_loader(self, data_loader: Any, *args: Any, **kwargs: Any) -> Any:
        """As Accelerate's. It asks a loader for its state before it sets the seeded sampler, so workers have begun the
        first epoch in another order by then: they begin it anew."""
        loader = super().prepare_data_loader(data_loader, *args, **kwargs)
        if self.use_seedable_sampler and loader is not data_loader:  # else it was prepared before, and may have a place
            read_anew(loader)
        return loader

    @override
    def save_state(
        self, output_dir: str | os.PathLike[str] | None = None, safe_serialization: bool = True, **kwargs: Any
    ) -> str:
        """Saves like Accelerate's method; collective. Returns where the directory will be.

        `safe_serialization` makes no difference: nothing is ever pickled. Raises UnsupportedState for registered
        objects whose state is not made of plain values and tensors; SaveFailed, maybe for an earlier save.
        """
        self._settle_done()
        folder = self._folder_to_save(output_dir)
        root = str(folder.parent / ROOT)
        step = self._next_step(folder.parent, root)
        pending = api.save_async(root, self._state(), step, storage_options=self._storage_options, codec=self._codec)
        self._newest[root] = step
        known = threading.Event()
        self._under_way.append(_Saving(folder.parent, self._token, pending, known))
        at_exit(_finish)
        self._on_rank_0(f"making {folder}", lambda: str(self._folders[folder.parent].draft(folder.name, pending.save)))
        if folder.parent in self._folders:
            self._folders[folder.parent].publish_when_committed(folder.name, pending.save, known)
        self.project_configuration.iteration += 1
        return str(folder)

    @override
    def load_state(
        self, input_dir: str | os.PathLike[str] | None = None, load_kwargs: dict[str, Any] | None = None, **kwargs: Any
    ) -> None:
        """Loads like Accelerate's method; collective. Directories that Accelerate wrote itself load as before.

        Raises CheckpointNotFound, StateMismatch, and CorruptData, on all ranks.
        """
        self.wait_for_saves()
        folder = self._folder_to_load(input_dir)
        save = self._named_by(folder)
        if save is None:
            super().load_state(str(folder), load_kwargs, **kwargs)
            return
        root, state = str(folder.parent / ROOT), {**self._state(), "ended": [False] * len(self._dataloaders)}
        api.load(root, state, str(save), random=True, storage_options=self._storage_options)
        self.step = state["step"]
        saved, prepared = len(state["iterations"]), len(self._dataloaders)
        if saved != prepared and self.is_main_process:
            log.warning(
                "%s was saved with %d prepared data loaders, and there are %d now: in the order in which they were "
                "prepared, those that both have go on at their epochs",
                *(folder, saved, prepared),
            )
        self._ended = []
        for loader, iteration, ended in zip(self._dataloaders, state["iterations"], state["ended"], strict=False):
            loader.iteration = iteration + ended
            if ended:
                self._ended.append((loader, iteration))
        self._random = capture()

    @override
    def skip_first_batches(self, dataloader: Any, num_batches: int = 0) -> Any:
        for loader, epoch in self._ended:
            if num_batches and loader is dataloader and loader.iteration == epoch + 1:  # else it was told of an epoch
                loader.iteration = epoch
        if self._random is not None and hasattr(dataloader, "iteration"):
            dataloader.set_epoch(dataloader.iteration)  # that of a dispatcher with skipped batches finds no sampler
        skipped, random = super().skip_first_batches(dataloader, num_batches), self._random
        if random is None:
            return skipped
        if num_batches and not any(loader is dataloader for loader, _ in self._ended):
            warn_of_order(dataloader, "skip_first_batches", SEEDABLE)
        self._random, self._ended = None, []
        self._resumed = Resumed(skipped, dataloader, num_batches, random)
        return self._resumed

    def wait_for_saves(self) -> None:
        """Waits until the directory of each earlier `save_state` is there. Collective. Raises SaveFailed."""
        opened = {directory for directory, token in self._whose.items() if token is self._token}
        self._wait([each for each in self._under_way if each.token is self._token], opened)

    def _wait(self, saving: list[_Saving], opened: Iterable[Path]) -> None:
        def finish() -> None:
            failed: SaveFailed | None = None
            for each in saving:
                self._under_way.remove(each)
                try:
                    each.pending.wait_committed()
                except SaveFailed as error:
                    failed = error
                each.known.set()
            for directory in opened:
                if directory in self._folders:
                    self._folders[directory].wait()
            if failed is not None:
                raise failed

        together_at_length(registry.group(None), "waiting for checkpoints", finish)

    @override
    def end_training(self) -> None:
        """Waits for the last checkpoints first."""
        self.wait_for_saves()
        for directory in [path for path, token in self._whose.items() if token is self._token]:
            del self._whose[directory]
            if directory in self._folders:
                self._folders.pop(directory).close()
        super().end_training()

    # The state

    def _state(self) -> dict[str, Any]:
        """Returns the state by the names of Accelerate's files: model, model_1, ..."""
        is_fsdp1 = self.distributed_type == DistributedType.FSDP and not self.is_fsdp2
        if self.distributed_type in UNSUPPORTED or is_fsdp1:
            raise ValueError(f"CkptlibAccelerator saves no {self.distributed_type}; use FSDP2, DDP or one process")
        if self._save_model_state_pre_hook or self._load_model_state_pre_hook:
            raise ValueError(
                "CkptlibAccelerator calls no hooks of register_save_state_pre_hook and register_load_state_pre_hook, "
                "which write and read files of models; leave them out, or use Accelerator"
            )
        stateful = [each for each in self._dataloaders if getattr(each, "use_stateful_dataloader", False)]
        groups: dict[str, list[Any]] = {
            "model": [_weights_of(model) for model in self._models],
            "optimizer": [optimizer.optimizer for optimizer in self._optimizers],
            "scheduler": [scheduler.scheduler for scheduler in self._schedulers],
            "custom_checkpoint": self._custom_objects,
            "dataloader": [PerRank(each) for each in stateful],
            "scaler": [] if self.scaler is None else [self.scaler],
        }
        state: dict[str, Any] = {
            name if i == 0 else f"{name}_{i}": each for name, group in groups.items() for i, each in enumerate(group)
        }
        iterations = [getattr(loader, "iteration", 0) for loader in self._dataloaders]
        resumed = self._resumed
        ended = [gave_last(x) or (resumed is not None and resumed.gave_last_of(x)) for x in self._dataloaders]
        return {**state, "step": self.step, "iterations": iterations, "ended": ended}

    # Where it goes

    def _folder_to_save(self, output_dir: str | os.PathLike[str] | None) -> Path:
        if not self.project_configuration.automatic_checkpoint_naming:
            if output_dir is None:
                raise ValueError("save_state needs output_dir, such as 'checkpoints/step_100'")
            return Path(output_dir).expanduser().absolute()
        folder = self._automatic / f"checkpoint_{self.save_iteration}"
        if self._on_rank_0(f"looking for {folder}", lambda: "there" if folder.exists() else ""):
            raise ValueError(
                f"{folder} exists already; to go on behind a checkpoint that was loaded, set "
                "accelerator.project_configuration.iteration to the number of the next one"
            )
        return folder

    def _folder_to_load(self, input_dir: str | os.PathLike[str] | None) -> Path:
        if input_dir is not None:
            folder = Path(input_dir).expanduser().absolute()
            self._open(folder.parent)
            return folder
        if not self.project_configuration.automatic_checkpoint_naming:
            raise ValueError("load_state needs input_dir, as automatic_checkpoint_naming is off")
        self._open(self._automatic)
        numbered = partial(_numbered, self._automatic)
        newest = self._on_rank_0(f"looking into {self._automatic}", lambda: str(max(numbered(), default=-1)))
        if newest == "-1":
            raise ValueError(f"{self._automatic}: no directory is called checkpoint_N")
        return self._automatic / f"checkpoint_{newest}"

    @property
    def _automatic(self) -> Path:
        return Path(self.project_dir).expanduser().absolute() / "checkpoints"

    def _open(self, directory: Path) -> None:
        """Finishes saves that an earlier process, or another Accelerator here, left in a directory. Collective."""
        if self._whose.get(directory) is self._token:
            return
        self._wait([each for each in self._under_way if each.directory == directory], [directory])

        def settle() -> str:
            if directory in self._folders:
                self._folders.pop(directory).close()
            beyond = partial(_beyond, self.project_configuration)
            folders = StepFolders(directory, str(directory / ROOT), self._storage_options, beyond)
            self._folders[directory] = folders
            folders.settle()
            return ""

        self._on_rank_0(f"looking at {directory}", settle)
        self._whose[directory] = self._token

    def _next_step(self, directory: Path, root: str) -> int:
        self._open(directory)

        def newest() -> str:
            with open_store(root, self._storage_options) as store:
                return str(max((save.step for save in Catalog(store).saves()), default=-1))

        if root not in self._newest:
            self._newest[root] = int(self._on_rank_0(f"looking for the steps of {root}", newest))
        return self._newest[root] + 1

    def _named_by(self, folder: Path) -> SaveId | None:
        name = self._on_rank_0(f"reading {folder}", lambda: str(step_of(folder) or "") if folder.is_dir() else NOWHERE)
        if name == NOWHERE:
            raise ValueError(f"{folder} is no directory")
        return parse_save(name) if name else None

    def _on_rank_0(self, what: str, call: Callable[[], str]) -> str:
        """Returns what `call` returns on rank 0. Collective."""
        return by_rank_0(registry.group(None), what, lambda: call().encode()).decode()

    def _settle_done(self) -> None:
        """Forgets saves that are done, as rank 0 sees it: otherwise ranks, which learn of a failure at different times,
        would raise it twice. Raises SaveFailed, on all ranks, if one failed."""
        mine = [each for each in self._under_way if each.token is self._token]

        def errors() -> str:
            done = [each.pending for each in mine if each.pending.done()]
            return json.dumps({str(x.save): None if x.error is None else str(x.error) for x in done})

        told = json.loads(self._on_rank_0("saving", errors))
        failed: list[str] = []
        for each in mine:
            if str(each.pending.save) not in told:
                continue
            self._under_way.remove(each)
            each.known.set()
            error = told[str(each.pending.save)]
            if error is not None:
                failed.append(f"step {each.pending.step} is not saved: {error}")
        if failed:
            raise SaveFailed("; ".join(failed))


def _finish() -> None:
    """Waits for saves as a program ends without `end_training`; sessions, which began before, close after it."""
    for each in CkptlibAccelerator._under_way:
        try:
            each.pending.wait_committed()
        except CkptError as error:
            log.error("%s", error)
        each.known.set()
    for folders in CkptlibAccelerator._folders.values():
        try:
            folders.end()
        except (CkptError, OSError) as error:
            log.error("%s", error)


def _weights_of(model: Any) -> object:
    """Returns what to save of a model. A wrapper such as DDP's does not tell whether its model is quantized."""
    inner = extract_model_from_parallel(model)
    found = weights_of(inner)
    return model if found is inner else found


def _numbered(directory: Path) -> list[int]:
    """Returns the numbers of the directories that are named automatically."""
    if not directory.is_dir():
        return []
    return [int(m[1]) for path in directory.iterdir() if (m := NUMBERED.fullmatch(path.name))]


def _beyond(project: ProjectConfiguration, newest: Path) -> list[Path]:
    """Returns the directories beyond `total_limit`, oldest first."""
    limit, directory = project.total_limit, newest.parent
    if limit is None or not project.automatic_checkpoint_naming:
        return []
    numbers = sorted(n for n in _numbered(directory) if directory / f"checkpoint_{n}" != newest)
    return [directory / f"checkpoint_{n}" for n in numbers[: max(0, len(numbers) + 1 - max(1, limit))]]
