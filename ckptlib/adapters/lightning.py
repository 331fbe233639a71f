"""Checkpoints of Lightning by ckptlib: `Trainer(plugins=[CkptlibCheckpointIO()])`. Needs the package lightning.

Lightning asks the plugin for files: a path holds a checkpoint, can be listed, and can be removed. Here the file at the
path is a line of JSON that names a step of the root beside it; the root has the data of all of them. So data that did
not change is written once, however many files (`last.ckpt`, the best ones) have it.
"""

from __future__ import annotations

import copy
import logging
import re
import threading
import time
from collections.abc import Iterable, Mapping
from concurrent.futures import Future, wait
from datetime import timedelta
from pathlib import PurePosixPath
from typing import Any, ClassVar, NamedTuple

import torch
import torch.distributed as dist
from lightning.fabric.plugins.io.checkpoint_io import CheckpointIO
from lightning.fabric.utilities.cloud_io import get_filesystem
from typing_extensions import override

from ckptlib import api
from ckptlib.adapters import step_files
from ckptlib.adapters.lightning_callback import CkptlibCallback as CkptlibCallback
from ckptlib.adapters.plain_tree import PlainTree
from ckptlib.adapters.step_files import named_beside, root_of, save_at
from ckptlib.catalog.catalog import Catalog
from ckptlib.catalog.retention import drop, sweep
from ckptlib.errors import CkptError, SaveFailed
from ckptlib.format.keys import SaveId
from ckptlib.jobs import JobFutures, at_exit
from ckptlib.policy.codec import AUTO, Asked
from ckptlib.policy.keep import Keep
from ckptlib.ranks.together import together_at_length
from ckptlib.reading.nested import read
from ckptlib.saving.pending import Pending
from ckptlib.saving.registry import registry
from ckptlib.saving.settings import SAVE_DEADLINE
from ckptlib.stores import open_store

log = logging.getLogger(__name__)

KEPT = Keep(last=10**9, grace=2 * SAVE_DEADLINE)
"""Retention that keeps every step: Lightning says which steps to remove."""

POLL_S = 0.1


class _Saving(NamedTuple):
    publisher: JobFutures
    pending: Pending
    published: Future[SaveId | None]
    """The step that the file named before."""
    known: threading.Event
    """Set once the outcome of the save is known."""


class _Removal(NamedTuple):
    behind: list[str]
    """Paths that were being saved to when the removal was asked for."""
    done: Future[None]


class CkptlibCheckpointIO(CheckpointIO):
    """Saves each checkpoint of Lightning as a step of a root, and writes a file that names it once it is committed.

    For strategies that gather the state on rank 0, such as DDP, and for one process. FSDP and ModelParallel save shards
    by themselves, and do not ask a CheckpointIO.

    asynchronous:    `save_checkpoint` returns as soon as the state is copied; another process writes it. `teardown`
                     and the next call for the same path wait.
    codec:           as for `ckptlib.save`.
    storage_options: for the root, if it is no local directory.
    """

    _steps: ClassVar[dict[str, int]] = {}
    """The last step that this process saved, whichever Trainer asked for it, by root."""
    _saving: ClassVar[dict[str, _Saving]] = {}
    """Saves by path. Another Trainer may load what the last one has just saved."""
    _removing: ClassVar[dict[str, _Removal]] = {}
    """Removals by path."""
    _ending: ClassVar[bool] = False
    """Whether the program ends: then Python begins no more threads, which a removal needs."""

    def __init__(
        self,
        *,
        asynchronous: bool = True,
        codec: Asked = AUTO,
        storage_options: Mapping[str, object] | None = None,
    ) -> None:
        self._asynchronous = asynchronous
        self._codec: Asked = codec
        self._options = storage_options
        self._group: dist.ProcessGroup | None = None
        self._publisher: JobFutures | None = None

    @override
    def save_checkpoint(self, checkpoint: dict[str, Any], path: Any, storage_options: Any | None = None) -> None:
        """Raises UnsupportedState for objects that are no plain values; SaveFailed, maybe for an earlier save;
        TypeError for `storage_options`, which are the plugin's, as Lightning's own plugin does."""
        if storage_options is not None:
            raise TypeError(
                "CkptlibCheckpointIO takes no storage_options for one checkpoint: all of a directory are in one root; "
                "pass them as CkptlibCheckpointIO(storage_options=...)"
            )
        where = str(path)
        unseen = self._unseen(where)
        self._settle()
        self._finish(where)
        root = root_of(where)
        step = self._next_step(root)
        state = {"checkpoint": PlainTree(checkpoint)}
        pending = api.save_async(
            *(root, state, step), storage_options=self._options, process_group=self._alone(), codec=self._codec
        )
        self._steps[root] = step
        publisher, known = self._thread(), threading.Event()
        published = publisher.submit(self._publish, where, root, pending.save, known)
        self._saving[where] = _Saving(publisher, pending, published, known)
        if unseen is not None and unseen.published.result() is None and _may_rank(checkpoint, where):
            log.warning(
                "%s is saved to again, and its file was not there yet when ModelCheckpoint looked for a free name: it "
                "may have forgotten the first one. Its step %d stays in %s; have the names differ, as by {step}, or "
                "use CkptlibCheckpointIO(asynchronous=False)",
                *(where, unseen.pending.step, root),
            )
        else:
            publisher.submit(self._drop_replaced, where, published)
        if not self._asynchronous:
            self._finish(where)

    @override
    def load_checkpoint(
        self, path: Any, map_location: Any | None = None, weights_only: bool | None = None
    ) -> dict[str, Any]:
        """Loads the checkpoint. `weights_only` makes no difference: nothing is ever unpickled.

        Collective if there are several ranks, as Lightning and Fabric call it: only rank 0 knows of a save under way.
        All load the step that its file names.

        Raises FileNotFoundError, CheckpointNotFound if the named step is gone, FormatError for a file of another kind,
        CorruptData, SaveFailed; on all ranks.
        """
        where = str(path)
        group = registry.group(None)
        what = f"loading {where}"
        told = group.broadcast(together_at_length(group, what, lambda: b"" if group.rank else self._at(where))).decode()
        if not told:
            raise FileNotFoundError(f"Checkpoint file not found: {where}")  # as Lightning's own plugin does
        step, _, place = told.partition(" ")

        def load() -> dict[str, Any]:
            if place != where:
                raise ValueError(f"{where}: rank 0 loads {place}; all ranks have to load the same checkpoint")
            found: dict[str, Any] = read(root_of(where), step=step, storage_options=self._options)["checkpoint"]
            return found

        checkpoint = together_at_length(group, what, load)
        return checkpoint if map_location is None else _moved(checkpoint, map_location)

    def _at(self, where: str) -> bytes:
        """Returns the step at a path, once it is saved, and the path; empty if there is no file."""
        self._finish(where)
        try:
            return f"{save_at(where)} {where}".encode()
        except FileNotFoundError:
            return b""

    @override
    def remove_checkpoint(self, path: Any) -> None:
        """Removes the file at once, or after saves to other paths that are under way: one of them may be to take its
        place. If one of these fails, the file stays, with a warning. The data goes with the first removal two hours or
        more after this one, except for chunks that other steps use; all of it stays if another file beside names the
        same step, as a copy."""
        where = str(path)
        behind = [*self._saving]
        if behind in ([], [where]):
            self._finish(where)
            self._remove(where)
        else:
            published = [saving.published for saving in self._saving.values()]
            done = self._thread().submit(self._remove_behind, where, published)
            self._removing[where] = _Removal(behind, done)

    def _remove_behind(self, where: str, published: list[Future[SaveId | None]]) -> None:
        """Removes a file after other saves, on the thread that publishes them; those of other Trainers end by
        their own deadlines."""
        wait(published)
        if any(saved.cancelled() or saved.exception() is not None for saved in published):
            log.warning("%s stays: a save failed that may have been to take its place", where)
        else:
            self._remove(where)

    def _remove(self, where: str) -> None:
        fs = get_filesystem(where)
        if not fs.exists(where):
            return
        save = save_at(where)
        fs.rm(where)
        self._drop(where, save)

    def _drop_replaced(self, where: str, published: Future[SaveId | None]) -> None:
        """Drops the step that the file named before. Runs on the thread that has published it."""
        if self._ending or published.cancelled() or published.exception() is not None:
            return
        replaced = published.result()
        if replaced is None:
            return
        try:
            self._drop(where, replaced)
        except (CkptError, OSError, ValueError) as error:  # the step only takes room
            log.warning("%s: step %d, which it named before, is left: %s", where, replaced.step, error)

    def _drop(self, where: str, save: SaveId) -> None:
        """Drops a step that the file at a path no longer names, unless another file beside names it."""
        if save in named_beside(where):
            return
        with open_store(root_of(where), self._options) as store:
            catalog = Catalog(store)
            drop(catalog, save)
            sweep(catalog, KEPT, None)

    @override
    def teardown(self) -> None:
        """Waits for all saves and removals, then raises SaveFailed, the first one, if any failed.

        Lightning calls it as each `fit` ends, and may save again later: `trainer.save_checkpoint`, another `fit`.
        """
        publisher, self._publisher = self._publisher, None
        try:
            errors = [self._outcome(where) for where in [*self._saving, *self._removing]]
        finally:
            for saving in self._saving.values():
                if saving.publisher is publisher:
                    saving.known.set()
            if publisher is not None:
                publisher.finish()
        _raise_first(errors)

    @override
    def __getstate__(self) -> dict[str, Any]:
        """Leaves out what is under way, for users who copy a module with its Trainer, or pickle it."""
        return {**self.__dict__, "_publisher": None, "_group": None}

    def _thread(self) -> JobFutures:
        if self._publisher is None:
            self._publisher = JobFutures("lightning")
            at_exit(_finish_all)
        return self._publisher

    def _unseen(self, where: str) -> _Saving | None:
        """Returns the save to a path whose file Lightning, which has just chosen the path, may not have found there."""
        saving = self._saving.get(where)
        return None if saving is None or saving.published.done() or where in self._removing else saving

    def _settle(self) -> None:
        """Raises the error of a save or removal that failed; forgets those that are done."""
        for where, saving in [*self._saving.items()]:
            if saving.published.done():
                self._finish(where)
        for where, removal in [*self._removing.items()]:
            if removal.done.done():
                self._finish(where)

    @classmethod
    def _finish(cls, where: str) -> None:
        """Waits for a save to this path, if there is one, and for its removal."""
        _raise_first([cls._outcome(where)])

    @classmethod
    def _outcome(cls, where: str) -> BaseException | None:
        """Waits as `_finish` does; returns why it failed, or None."""
        errors: list[BaseException | None] = []
        if where in cls._saving:
            saving = cls._saving.pop(where)
            try:
                saving.pending.wait_committed()
            except CkptError as error:
                saving.published.cancel()
                return error
            finally:
                saving.known.set()
            errors.append(saving.published.exception())
        if where in cls._removing:
            removal = cls._removing.pop(where)
            errors += [cls._outcome(other) for other in removal.behind]  # else it would wait long for one that failed
            errors.append(removal.done.exception())
        return next(filter(None, errors), None)

    def _publish(self, where: str, root: str, save: SaveId, known: threading.Event) -> SaveId | None:
        """Writes the file as soon as the step is in the store. On a thread: training goes on, and asks nobody.

        Returns the step that the file named before.
        """
        deadline, over = time.monotonic() + SAVE_DEADLINE / timedelta(seconds=1), False
        with open_store(root, self._options) as store:
            catalog = Catalog(store)
            while not catalog.is_committed(save):
                if over:
                    raise SaveFailed(f"{where}: step {save.step} of {root} was not committed, or is gone again")
                over = known.wait(POLL_S) or time.monotonic() > deadline
        return step_files.write(where, save)

    def _next_step(self, root: str) -> int:
        if root not in self._steps:
            with open_store(root, self._options) as store:
                self._steps[root] = max((save.step for save in Catalog(store).saves()), default=-1)
        return self._steps[root] + 1

    def _alone(self) -> dist.ProcessGroup | None:
        """Returns a group of this rank alone, or None in a job of one rank: Lightning calls on rank 0 only."""
        if dist.is_initialized() and dist.get_world_size() > 1 and self._group is None:
            self._group = dist.new_group([dist.get_rank()], backend="gloo", use_local_synchronization=True)
        return self._group


def _finish_all() -> None:
    """Waits for saves as a program ends that saves after `fit`, which ends with `teardown`; sessions close after it."""
    CkptlibCheckpointIO._ending = True
    for where, removal in CkptlibCheckpointIO._removing.items():
        if removal.done.cancel():
            log.warning("%s stays: the program ended before it was removed; call teardown", where)
    for where in [*CkptlibCheckpointIO._saving]:
        error = CkptlibCheckpointIO._outcome(where)
        if error is not None:
            log.error("%s", error)


def _raise_first(errors: Iterable[BaseException | None]) -> None:
    for error in errors:
        if error is not None:
            raise error


_LAST = re.compile(r"last(-v[0-9]+)?\.ckpt")
"""ModelCheckpoint's name for its newest file, which it keeps beside the others, and whose place it remembers."""


def _may_rank(checkpoint: dict[str, Any], where: str) -> bool:
    """Returns whether a ModelCheckpoint keeps this file by its score, beside another one of this name. A file of
    weights only is judged by its name; Fabric has no ModelCheckpoint. One that keeps a single file has replaced the one
    before."""
    if "callbacks" not in checkpoint:
        return "pytorch-lightning_version" in checkpoint and _LAST.fullmatch(PurePosixPath(where).name) is None
    states = [state for state in checkpoint["callbacks"].values() if isinstance(state, dict)]
    ranked = [state for state in states if where in state.get("best_k_models", ())]
    return any(state.get("kth_best_model_path") != where or len(state["best_k_models"]) > 1 for state in ranked)


def _moved(node: Any, location: Any) -> Any:
    """Moves tensors as torch.load's `map_location` does."""
    if isinstance(node, torch.Tensor):
        if callable(location):
            moved = location(node.untyped_storage(), "cpu")
            return node if moved is None else torch.empty_like(node, device=moved.device).copy_(node)
        return node.to(location.get("cpu", "cpu") if isinstance(location, dict) else location)
    if isinstance(node, dict):
        moved = copy.copy(node)  # a Counter would count the pairs, and a defaultdict does not take them
        for key, value in node.items():
            moved[key] = _moved(value, location)
        return moved
    return type(node)(_moved(value, location) for value in node) if type(node) in (list, tuple) else node
