"""Restoring: from the newest step that is whole, in memory or in the store, on all ranks the same one.

Memory first, since it is the newest and the quickest; then local disks, then the store; then the step before. A damaged
copy is named and skipped, and so is one that cannot be read for a reason of its own. An unreachable store is no reason
to go back to an older step: restore raises, and the next start tries again.
"""

from __future__ import annotations

import logging
import os
import socket
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from typing import NamedTuple

import torch

from ckptlib.catalog.catalog import Catalog
from ckptlib.catalog.commit import finish_saves
from ckptlib.catalog.no_step import refuse_fresh, warn_of_traces
from ckptlib.catalog.unreadable import UNREADABLE, UNUSABLE
from ckptlib.checkpoint import LoadOrder, load_step
from ckptlib.errors import AgreementFailed, CheckpointNotFound, CkptError, ObjectUnreadable
from ckptlib.events import Restored
from ckptlib.format import keys, values
from ckptlib.format.keys import SaveId, checked_step
from ckptlib.format.part import Part
from ckptlib.loading.committed import read_manifest
from ckptlib.loading.progress import Laps
from ckptlib.loading.report import LoadReport
from ckptlib.loading.selection import Only, Rename
from ckptlib.ranks.together import by_rank_0, together, together_at_length
from ckptlib.reading.source import StepSource, own_rank
from ckptlib.recovery import local_step
from ckptlib.recovery.begun import enter_begun
from ckptlib.recovery.candidates import Candidate, Untried, newest_in_memory
from ckptlib.recovery.foreign import warn_of_foreign
from ckptlib.recovery.inventory import Inventory, describe, look
from ckptlib.recovery.left_out import tell_left_out
from ckptlib.recovery.local_step import LocalStep, OnDisks, OnHosts, on_hosts
from ckptlib.recovery.memory_source import InMemory
from ckptlib.recovery.not_closed import await_others
from ckptlib.recovery.skipped import Skipped, problem
from ckptlib.recovery.stored_step import StoredStep
from ckptlib.saving.session import Session
from ckptlib.slots.host import boot_id, memory_of
from ckptlib.state.rng import RNG, LoadedRng
from ckptlib.stores.local import LocalStore

log = logging.getLogger(__name__)

ORPHANS_TIMEOUT_S = 60.0
"""How long a restart waits for writers that its predecessor left behind on this host."""


class Marks(NamedTuple):
    """What retention goes by, as saved with a step. Rank 0's marks count."""

    metrics: Mapping[str, object]
    exempt: bool
    """Whether the step is to stay for good."""
    created: float | None = None
    """When its snapshot was taken; seconds since the epoch."""


class Result(NamedTuple):
    """The outcome of a restore."""

    report: LoadReport
    generators: LoadedRng | None = None
    """The saved state of the random generators, unless only a part was restored."""
    marks: Marks = Marks({}, False)
    """Empty if only a part was restored."""
    safer: SaveId | None = None
    """An older snapshot, which stays in memory until all ranks hold one of this job: see `Untried.safer`."""


Load = Callable[[StepSource], Result]


@dataclass(frozen=True, slots=True)
class Scope:
    """Which part of the state is restored, and from which names; see `ckptlib.load`."""

    only: Only
    map: Rename
    optional: str | Sequence[str]


def restore(
    session: Session,
    state: Mapping[str, object],
    strict: bool,
    device: str | torch.device | None,
    step: int | str | None,
    scope: Scope,
) -> Result:
    """Fills `state`; collective.

    With `step`, a number or a full name, only that step will do, and the job goes back to it: see `Lineage.go_back`.
    Raises CheckpointNotFound if it does not exist.

    Raises CorruptData when there are steps and all of them are damaged, ObjectUnreadable when some cannot be read,
    CheckpointNotFound when all of them lack objects and none is damaged, NewerFormat when some are newer. If a newer
    ckptlib wrote the root or the record of a generation, nothing is restored at all: it is not known then which step is
    the right one. Raises CheckpointNotFound, too, if there is no step and the run must resume.
    """
    _check_asked(session, step, scope)
    order = LoadOrder(state, strict=strict, device=device, only=scope.only, rename=scope.map, optional=scope.optional)
    load = partial(_load, session, order)
    laps = Laps()
    await_others(session)
    inventory = _look_around(session)
    laps.end("look")
    _await_orphans(session, newest_in_memory(session, inventory) if step is None else None)
    laps.end("wait")
    finished_all = step is not None
    _finish(session, finished_all)
    on_disks, in_part_on_disks = _look_at_disks(session, step)
    skipped = Skipped()
    untried, in_part = Untried(session, inventory, on_disks, step), inventory.in_part()
    laps.end("list")
    while (candidate := untried.take()) is not None:
        try:
            result = _restore_from(session, inventory, candidate, load)
        except UNREADABLE as error:
            if isinstance(error, ObjectUnreadable):
                _check_store(session)
            skipped.add(candidate, error)
            if candidate.snapshot is not None:  # nobody waited for its writers, some of which may yet have it to commit
                _await_orphans(session, untried.next)
                _finish(session, finished_all)
                on_disks = _look_at_disks(session, step).whole
            elif candidate.local is None and not finished_all:  # the step before it may be one that nobody committed
                finished_all = True
                _finish(session, finished_all)
            untried.look_again(on_disks)
            if session.group.rank == 0:
                log.error(
                    "step %s in %s %s and is skipped%s: %s",
                    candidate.save,
                    candidate.where,
                    problem(error),
                    ", the next is tried" if untried else "",
                    error,
                )
            continue
        if step is None:
            session.lineage.resumed_from = candidate.save
            tell_left_out(session, inventory, in_part, in_part_on_disks, candidate)
        else:
            session.lineage.go_back(session.writer, candidate.save, candidate.committed)
        phases = {**laps.seconds, **result.report.phases}
        report = replace(
            result.report,
            skipped=tuple(skipped.told),
            tier=candidate.tier,
            committed=candidate.committed,
            phases=phases,
            seconds=sum(phases.values()),
        )
        session.tier.note_restored(candidate.save.step, on_disks)
        session.stopwatch.restored(report.tier)
        num_skipped = len(report.skipped)
        session.listener.tell(Restored(candidate.save.step, report.nbytes, report.seconds, report.tier, num_skipped))
        return result._replace(report=report, safer=untried.safer(candidate))
    if step is not None:
        raise skipped.error_of(step, session.store.url)
    if skipped.told:
        raise skipped.error(session.store.url)
    _check_there(session)
    tell_left_out(session, inventory, in_part, in_part_on_disks, None)
    return _begin_anew(session, on_disks)


def _begin_anew(session: Session, on_disks: Mapping[SaveId, LocalStep]) -> Result:
    """Returns an empty result, as there is no step. Collective. Raises CheckpointNotFound if the run must resume."""
    catalog, own, is_first = session.catalog, session.generation, session.group.rank == 0
    if session.settings.must_resume:
        together(session.group, "looking for a step", lambda: refuse_fresh(catalog, own) if is_first else None)
    if is_first:
        warn_of_traces(catalog, own)
        warn_of_foreign(session.store)
    session.tier.note_restored(0, on_disks)
    session.stopwatch.restored()
    return Result(LoadReport(0, session.store.url, None, 0, 0.0))


def _check_asked(session: Session, step: int | str | None, scope: Scope) -> None:
    """Raises, on all ranks, if any names a step that others do not, or that cannot be gone back to. Collective."""
    if step is not None and not isinstance(step, str):
        checked_step(step)
    if not session.group.same(repr(step).encode()):
        raise ValueError(f"restore(step={step!r}): not all ranks named this step")
    if not session.group.same(b"" if scope.only is None else b"only"):  # those that restore all save it again together
        raise ValueError("restore(only=) was given on some ranks only; every rank must give it, or none")
    if step is not None and session.lineage.began:
        raise ValueError(
            "restore(step=): this Checkpointer has saved already, so its place in history is fixed; to go back, "
            "close it and create another one"
        )


def _look_around(session: Session) -> Inventory:
    """Returns the snapshots in the memory of all hosts; collective. Empty if the job keeps none."""
    if session.settings.peers is None:
        return Inventory([])

    def own() -> bytes:
        with session.snapshots.arena.others.opened() as slots:
            found = look(slots, session.root.id)
        memories = map(memory_of, filter(os.path.isdir, session.snapshots.arena.others.directories))
        return describe(found, memories, boot_id(), os.sched_getaffinity(0))

    return Inventory(session.group.gather(together(session.group, "looking for snapshots in memory", own)))


def _look_at_disks(session: Session, step: int | str | None) -> OnHosts:
    """Returns the steps that the local disks of all hosts hold, and that may be wanted; collective. None without a
    local tier.

    Abandoned steps are left out: there may be more of them than are looked at, and they may be later ones.
    """
    local, group = session.settings.local, session.group
    if local is None:
        return OnHosts({}, {})
    what = f"looking at {local.path}"
    with LocalStore(str(local.path)) as store:
        disk = Catalog(store, session.catalog)
        enter_begun(session, store)
        saves = local_step.parse_saves(group.gather(together(group, what, lambda: local_step.saves_on(disk))))

        def choose() -> bytes:
            return "\n".join(map(str, local_step.newest(session.catalog.visible(saves), saves, step))).encode()

        chosen = local_step.parse_saves([by_rank_0(group, "listing steps", choose)])
        return on_hosts(group.gather(together(group, what, lambda: local_step.look(disk, chosen))))


def _restore_from(
    session: Session,
    inventory: Inventory,
    candidate: Candidate,
    load: Load,
) -> Result:
    if candidate.snapshot is None:
        load_from = _load_from_store if candidate.local is None else _load_from_disks
        try:
            return load_from(session, candidate, load)
        except ObjectUnreadable as error:  # also of a file system that had lost its server for a moment
            if session.group.rank == 0:
                log.warning("retrying step %s once: %s", candidate.save, error)
            if candidate.local is None:
                _check_store(session)
            return load_from(session, candidate, load)
    if session.group.rank == 0:
        log.info("restoring step %d from memory: %s", candidate.save.step, _describe(session, inventory, candidate))
    source = InMemory(session.group, session.over, inventory, candidate.snapshot, session.settings.timeout)
    again = True
    with _closed_together(source):
        while True:
            try:
                return load(source)
            except UNUSABLE as error:
                if source.drop_damaged():
                    continue
                if not again:
                    raise
                again = False  # what was altered on its way is read once more
                if session.group.rank == 0:
                    log.warning("retrying step %s in memory once, where no slot is damaged: %s", candidate.save, error)


@contextmanager
def _closed_together(source: InMemory | OnDisks) -> Iterator[None]:
    """Closes the source in the end, together with the other ranks if all come there. AgreementFailed, and an error that
    is not ckptlib's, may be this rank's alone."""
    together = False
    try:
        yield
        together = True
    except CkptError as error:
        together = not isinstance(error, AgreementFailed)
        raise
    finally:
        source.close(together)


def _load_from_store(session: Session, candidate: Candidate, load: Load) -> Result:
    manifest = read_manifest(session.group, session.catalog, candidate.save)
    stored = StoredStep(session.catalog, manifest, session.group)
    found = load(stored)
    session.lineage.known = stored.known()
    return found


def _load_from_disks(session: Session, candidate: Candidate, load: Load) -> Result:
    assert session.settings.local is not None
    assert candidate.local is not None
    group, over, timeout = session.group, session.over, session.settings.timeout
    with LocalStore(str(session.settings.local.path)) as store:
        disk = Catalog(store, session.catalog)
        source = OnDisks(group, over, disk, candidate.local, timeout)
        with _closed_together(source):
            return load(source)


def _check_store(session: Session) -> None:
    """Raises if any rank cannot read from the store as a whole. Collective."""
    together(session.group, "reading from the store", session.catalog.root)


def _check_there(session: Session) -> None:
    """Checks that the root is there, after rank 0 has listed nothing: a file system that is not mounted any more lists
    nothing either. Collective.

    Raises CheckpointNotFound.
    """
    try:
        together(session.group, "reading from the store", lambda: session.group.rank == 0 and session.catalog.root())
    except CheckpointNotFound as error:
        raise CheckpointNotFound(
            f"{session.catalog.store.url} has no {keys.ROOT}, and it was there when the Checkpointer was made. Was it "
            "moved or removed, or is its file system not mounted any more? Nothing was restored. Put it back, and "
            "start the job again. To begin anew, start it again as it is"
        ) from error


def _load(session: Session, order: LoadOrder, source: StepSource) -> Result:
    if order.only is not None:
        return Result(load_step(session.group, source, order).report)
    generators = LoadedRng(session.group.rank, source.world_size)
    optional = [order.optional] if isinstance(order.optional, str) else order.optional
    order = replace(order, optional=[*optional, RNG])  # other libraries' checkpoints that were imported have none
    loaded = load_step(session.group, source, order, generators)
    step = loaded.report.step
    marks = together(session.group, f"reading the metrics of step {step}", lambda: _marks_in(loaded.part))
    together(session.group, f"putting back the random generators of step {step}", generators.restore)
    return Result(loaded.report, generators, marks)


def _marks_in(part: Part) -> Marks:
    metrics = {name: values.decode(value, f"metrics[{name}]") for name, value in part.metrics.items()}
    return Marks(metrics, part.exempt, part.created)


def _describe(session: Session, inventory: Inventory, candidate: Candidate) -> str:
    """Describes the plan, for people."""
    assert candidate.snapshot is not None
    size, saved_size = session.group.size, candidate.snapshot.world_size
    needs = [{own_rank(rank, saved_size)} for rank in range(size)]
    moves = inventory.moves(candidate.snapshot, needs)
    text = f"{size - len(moves)} of {size} ranks have their snapshot on their host"
    return text + "".join(f", rank {m.receiver} gets that of rank {m.found.rank} from rank {m.sender}" for m in moves)


def _finish(session: Session, every: bool) -> None:
    """Commits saves that are whole in the store and were not committed before their job died: every one, or those from
    the newest step on. Collective."""

    def finish() -> None:
        if session.group.rank == 0:
            for save in finish_saves(session.catalog, session.generation, to_go_on=not every):
                log.warning("step %d was complete but not committed; committed it", save.step)

    together(session.group, "finishing saves", finish)


def _await_orphans(session: Session, newest: SaveId | None) -> None:
    """Waits, on every host, for writers of this root that are not this job's. Collective.

    `newest`: the step that can be restored without them; only what is newer is waited for.
    """

    def wait() -> None:
        deadline = time.monotonic() + ORPHANS_TIMEOUT_S
        told = False
        while left := session.snapshots.arena.others.under_way(newest):
            if time.monotonic() > deadline:
                log.warning(
                    "writers of an earlier job on %s have not finished within %.0f s what they write to %s, and may "
                    "commit it yet; resuming without it. If the step that is restored is too old, end those writers "
                    "and start the job again. They hold: %s",
                    socket.gethostname(),
                    ORPHANS_TIMEOUT_S,
                    session.store.url,
                    ", ".join(map(str, left[:4])),
                )
                return
            if not told:
                log.info("waiting for the writers of the previous job to finish")
                told = True
            time.sleep(0.05)

    together_at_length(session.group, "waiting for the writers of the job before", wait)
