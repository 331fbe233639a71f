"""torch.distributed.checkpoint's functions, by ckptlib: `import ckptlib.dcp as dcp`.

A state dict is what DCP takes: it may hold modules and optimizers as they are, any other object with state_dict() and
load_state_dict() is asked for its state, and tensors and plain values may be nested in dicts, lists and tuples.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Iterable, Mapping, MutableMapping
from concurrent.futures import Future
from dataclasses import replace
from datetime import timedelta
from typing import Any

import torch.distributed as dist
from torch.optim import Optimizer
from typing_extensions import override

from ckptlib import api
from ckptlib.adapters.checkpoint_id import place_of
from ckptlib.adapters.dcp_optimizers import fill_named, fill_optimizers
from ckptlib.adapters.dcp_overlap import Overlapping
from ckptlib.adapters.optimizer_names import GROUPS, named_optimizers
from ckptlib.adapters.state_dicts import asked, gives_state, unwrap, wrapped
from ckptlib.catalog.catalog import Catalog
from ckptlib.catalog.unreadable import UNREADABLE
from ckptlib.checkpoint import SaveOrder
from ckptlib.errors import NewerFormat, StateError, StateMismatch, WaitTimeout
from ckptlib.format.keys import SaveId
from ckptlib.loading.report import LoadReport
from ckptlib.policy.codec import AUTO, Asked
from ckptlib.policy.keep import Keep
from ckptlib.ranks.meeting import meet
from ckptlib.ranks.together import by_rank_0
from ckptlib.reading.opened import CheckpointReader
from ckptlib.reading.opened import open as ckptlib_open
from ckptlib.saving.pending import Pending
from ckptlib.saving.registry import registry
from ckptlib.stores import absolute, open_store

log = logging.getLogger(__name__)

CheckpointId = str | os.PathLike[str] | None

REPLACED = Keep(last=1, grace=timedelta(hours=2))
"""Retention for a checkpoint_id without a step: the checkpoint before stays until the new one is committed, and its
bytes for a while, as somebody may be loading them."""

REPLACES = {"replaces": "the step before"}
"""Tags of runs that save without a step: only their steps are dropped unasked."""


def save(
    state_dict: Mapping[str, object],
    *,
    checkpoint_id: CheckpointId = None,
    storage_writer: object = None,
    planner: object = None,
    process_group: dist.ProcessGroup | None = None,
    no_dist: bool = False,
    use_collectives: bool = True,
    storage_options: Mapping[str, object] | None = None,
    codec: Asked = AUTO,
    keep: Keep | None = None,
) -> None:
    """Saves a state dict; when it returns, the checkpoint is committed and durable, on every rank. Collective.

    checkpoint_id: a path or URL, such as "runs/7/step-12": step 12 of the root "runs/7/step". One without a step, such
                   as "runs/last", has one checkpoint, which each save replaces once the new one is committed.
    storage_options, codec, keep: see `ckptlib.save`.

    Steps of a root ascend. A save of a step that this process has passed already begins a new generation, which
    abandons the later steps: see docs/history.md.

    Raises as `ckptlib.save`; ValueError for `storage_writer`, a planner other than DCP's default one, `no_dist=True`
    with several ranks, and `use_collectives=False`, which ckptlib has no use for. DCP's Metadata has no counterpart:
    returns None.
    """
    _refuse_planning(process_group, no_dist, use_collectives, storage_writer=storage_writer, planner=planner)
    url, step, kept = _next_save(checkpoint_id, process_group, storage_options, keep)
    order = SaveOrder(wrapped(asked(state_dict)), step)
    pending = api.begin_save(url, order, storage_options, process_group, codec, kept, tags=_tags(kept))
    pending.staging.go()
    api.await_committed(pending)


def async_save(
    state_dict: Mapping[str, object],
    *,
    checkpoint_id: CheckpointId = None,
    storage_writer: object = None,
    planner: object = None,
    process_group: dist.ProcessGroup | None = None,
    async_checkpointer_type: object = None,
    async_stager: object = None,
    no_dist: bool = False,
    use_collectives: bool = True,
    storage_options: Mapping[str, object] | None = None,
    codec: Asked = AUTO,
    keep: Keep | None = None,
    overlap: Optimizer | Iterable[Optimizer] | None = None,
) -> SaveFuture:
    """Copies a state dict and returns a Future of its step; another process writes it. Collective.

    The state may change as soon as this returns. The checkpoint exists when the Future is done. As for `save`;
    `async_checkpointer_type` makes no difference, and `async_stager` is refused.

    overlap: optimizers whose parameters and state nothing but their own `step` writes to, such as `[optim]`. What the
             state dict has of these is copied beside the training, from the second save on, and their next step waits
             for the copy. Whatever else writes to them must call the Future's `wait_copied` before. A write that came
             too early is found out by a sample of each tensor; that save fails then, and later ones copy at once.
    """
    given = {"storage_writer": storage_writer, "planner": planner, "async_stager": async_stager}
    _refuse_planning(process_group, no_dist, use_collectives, **given)
    overlapping = Overlapping(overlap)
    url, step, kept = _next_save(checkpoint_id, process_group, storage_options, keep)
    state = wrapped(asked(state_dict))
    order = SaveOrder(state, step, overlap=overlapping, owners=overlapping.owners(state))
    pending = api.begin_save(url, order, storage_options, process_group, codec, kept, tags=_tags(kept))
    overlapping.begin(pending)
    return SaveFuture(pending)


def load(
    state_dict: MutableMapping[str, Any],
    *,
    checkpoint_id: CheckpointId = None,
    storage_reader: object = None,
    planner: object = None,
    process_group: dist.ProcessGroup | None = None,
    no_dist: bool = False,
    storage_options: Mapping[str, object] | None = None,
    cast: bool = False,
) -> None:
    """Fills a state dict in place, whatever layout and world size it was saved with. Collective.

    Objects with load_state_dict() get theirs; plain values are replaced, and so are tensors on the meta device. Names
    that only the checkpoint has are not loaded. A name that only `state_dict` has raises StateMismatch, unless
    `planner` is a DefaultLoadPlanner with allow_partial_load=True. Raises as `ckptlib.load`; ValueError for a
    `storage_reader`, and for another planner.

    cast: allow a tensor's dtype to differ from the saved one. DCP always converts, and says nothing.
    """
    partial = bool(getattr(planner, "allow_partial_load", False))
    _refuse_planning(process_group, no_dist, True, storage_reader=storage_reader, planner=None if partial else planner)
    url, step = place_of(checkpoint_id)
    states = asked(state_dict)
    target = wrapped(states, allocate=True)

    def fill(some: dict[str, Any], step: int | str, names: dict[str, str] | None = None) -> LoadReport:
        options: dict[str, Any] = {"storage_options": storage_options, "process_group": process_group}
        return api.load(url, some, step, strict=False, cast=cast, map=names, **options)

    named = {path: (node, node.get(GROUPS)) for path, node in named_optimizers(states)}
    report = fill(target, "latest" if step is None else step)
    unwrap(states, target, {*report.missing})
    group, save = registry.group(process_group), str(report.save)
    missing = fill_optimizers(group, states, {*report.missing}, lambda some: fill(some, save))

    def opened() -> CheckpointReader:
        return ckptlib_open(url, save, storage_options=storage_options)

    missing = fill_named(group, named, missing, opened, lambda some, names: fill(some, save, names))
    if missing and not partial:
        names = sorted(missing)
        raise StateMismatch(
            f"{checkpoint_id}: step {report.step} of {url} lacks {', '.join(names[:20])}"
            f"{' and more' if len(names) > 20 else ''}, which the state dict has; what the checkpoint has was "
            "loaded. Take these out of the state dict, or pass planner=DefaultLoadPlanner(allow_partial_load=True)"
        )
    for key in sorted(states, key=str):  # a load_state_dict() may be a collective
        given = state_dict[key]
        if gives_state(given):
            given.load_state_dict(states[key])
        else:
            state_dict[key] = states[key]


class SaveFuture(Future[int]):
    """The step of a save in flight, once it is committed and durable."""

    def __init__(self, pending: Pending) -> None:
        super().__init__()
        self.pending = pending

    @override
    def result(self, timeout: float | None = None) -> int:
        """Waits for the commit. Raises SaveFailed if there will be none, TimeoutError after `timeout` seconds."""
        try:
            return self.pending.result(timeout)
        except WaitTimeout as error:
            raise TimeoutError(str(error)) from error

    def wait_copied(self) -> None:
        """Waits until anything may write to the state: returns at once unless `overlap` was given."""
        self.pending.staging.wait_copied()

    @override
    def exception(self, timeout: float | None = None) -> BaseException | None:
        try:
            self.result(timeout)
        except TimeoutError:
            raise
        except Exception as error:  # whatever `result` raises is returned
            return error
        return None

    @override
    def done(self) -> bool:
        return self.pending.done()

    @override
    def running(self) -> bool:
        return not self.done()

    @override
    def cancel(self) -> bool:
        """Returns False: no save can be cancelled."""
        return False

    # Attributes that `concurrent.futures.wait` and `as_completed` look at, which would sleep for ever: see the message.

    @property  # type: ignore[explicit-override]
    def _state(self) -> str:
        return "FINISHED" if self.done() else "RUNNING"

    @_state.setter
    def _state(self, value: str) -> None:
        """Ignores the state that Future's constructor sets."""

    @property  # type: ignore[explicit-override]
    def _waiters(self) -> list[Any]:
        if not self.done():
            raise StateError(
                f"concurrent.futures cannot wait for the save of step {self.pending.save.step}: the thread that trains "
                "hears of its end. Call the future's result(timeout), or done() now and then"
            )
        return self._told

    @_waiters.setter
    def _waiters(self, value: list[Any]) -> None:
        self._told = value

    @override
    def add_done_callback(self, fn: Callable[[Future[int]], object]) -> None:
        """Adds a callback as `Pending.add_done_callback` does; the thread that trains calls it."""
        self.pending.add_done_callback(lambda _: fn(self))


def _next_save(
    checkpoint_id: CheckpointId,
    process_group: dist.ProcessGroup | None,
    storage_options: Mapping[str, object] | None,
    keep: Keep | None,
) -> tuple[str, int, Keep | None]:
    """Returns root, step and retention of a save. Collective if there may be a checkpoint to replace."""
    url, step = place_of(checkpoint_id)
    newest = registry.newest_step(absolute(url), process_group)
    if step is None:
        if newest is None:
            newest = _newest_committed(url, process_group, storage_options, keep)
        return url, newest + 1, keep or REPLACED
    if newest is not None and step <= newest:
        if step < newest and registry.group(process_group).rank == 0:
            log.warning("%s: step %d is saved after step %d; the steps behind it are abandoned", url, step, newest)
        registry.begin_again(absolute(url), process_group)
    return url, step, keep


def _tags(keep: Keep | None) -> Mapping[str, str] | None:
    return REPLACES if isinstance(keep, Keep) and replace(keep, grace=REPLACED.grace) == REPLACED else None


def _is_replaced(catalog: Catalog, save: SaveId) -> bool:
    """Returns whether the next save may drop it; False if the record that would say so cannot be read."""
    try:
        return catalog.generations.record(save.generation).tags == REPLACES
    except NewerFormat:
        raise
    except UNREADABLE:
        return False


def _newest_committed(
    url: str,
    process_group: dist.ProcessGroup | None,
    storage_options: Mapping[str, object] | None,
    keep: Keep | None,
) -> int:
    """Returns the newest committed step, or -1. Collective; rank 0 looks. Raises StateError for the steps of a run."""
    meet(process_group, url, "save", api.CALL_TIMEOUT)

    def newest() -> bytes:
        with open_store(url, storage_options) as store:
            catalog = Catalog(store)
            saves = catalog.visible()
            kept = [] if keep is not None else [save for save in saves if not _is_replaced(catalog, save)]
        if kept:
            raise StateError(
                f"{url} has {len(saves)} steps, of which {len(kept)} are of a run that keeps them, step "
                f"{kept[-1].step} the last one: a save without a step would drop them. Name a step, such as "
                f"{url}/step-{saves[-1].step + 1}, or say with keep= which ones stay, such as ckptlib.Keep(last=1)"
            )
        return str(max((save.step for save in saves), default=-1)).encode()

    return int(by_rank_0(registry.group(process_group), f"looking for the checkpoint of {url}", newest))


def _refuse_planning(
    process_group: dist.ProcessGroup | None, no_dist: bool, use_collectives: bool, **given: object
) -> None:
    """Raises ValueError for arguments of DCP that would change what is written or read."""
    for name, value in given.items():
        if value is not None and type(value).__name__ not in ("DefaultSavePlanner", "DefaultLoadPlanner"):
            raise ValueError(
                f"{name}={type(value).__name__}: ckptlib plans, stages and stores by itself; leave {name} out and give "
                "checkpoint_id, or call torch.distributed.checkpoint's function with ckptlib.dcp's StorageWriter or "
                "StorageReader"
            )
    if not use_collectives:
        raise ValueError("use_collectives=False: the ranks must agree on a checkpoint; leave it out")
    if no_dist and dist.is_initialized() and dist.get_world_size(process_group) > 1:
        raise ValueError(
            f"no_dist=True in a job of {dist.get_world_size(process_group)} ranks: give process_group=, a group of the "
            "ranks that hold this state"
        )
