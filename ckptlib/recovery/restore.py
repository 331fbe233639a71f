"""Restoring: from the newest step that is whole, in memory or in the store, on all ranks the same one.

Memory first, since it is the newest and the quickest; then local disks, then the store; then the step before. A damaged
copy is named and skipped, and so is one that cannot be read for a reason of its own. An unreachable store is no reason
to go back to an older step: restore raises, and the next start tries again.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import torch

from ckptlib.catalog.no_step import refuse_fresh, warn_of_traces
from ckptlib.catalog.unreadable import UNREADABLE
from ckptlib.checkpoint import LoadOrder
from ckptlib.events import Restored
from ckptlib.format.keys import SaveId, checked_step
from ckptlib.loading.report import LoadReport
from ckptlib.loading.selection import Only, Rename
from ckptlib.ranks.together import together
from ckptlib.recovery.candidates import Candidate
from ckptlib.recovery.filling import Filled, Filling
from ckptlib.recovery.foreign import warn_of_foreign
from ckptlib.recovery.search import Search
from ckptlib.recovery.store_check import check_there
from ckptlib.saving.session import Session


class Result(NamedTuple):
    """The outcome of a restore."""

    filled: Filled
    safer: SaveId | None = None
    """An older snapshot, which stays in memory until all ranks hold one of this job: see `candidates.safer_of`."""


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
    search = Search(session, step)
    filling = Filling(session, search.inventory, order)
    while (candidate := search.take()) is not None:
        try:
            filled = filling.fill(candidate)
        except UNREADABLE as error:
            search.skip(candidate, error)
        else:
            return Result(_go_on_from(session, step, search, candidate, filled), search.safer(candidate))
    if step is not None:
        raise search.skipped.error_of(step, session.store.url)
    if search.skipped.told:
        raise search.skipped.error(session.store.url)
    check_there(session)
    search.tell_left_out(None)
    return Result(Filled(_begin_anew(session, search)))


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


def _go_on_from(
    session: Session, step: int | str | None, search: Search, candidate: Candidate, filled: Filled
) -> Filled:
    """Makes the candidate the one that the job goes on from, and tells of it. Returns it with the whole report."""
    if step is None:
        session.lineage.resumed_from = candidate.save
        search.tell_left_out(candidate)
    else:
        session.lineage.go_back(session.writer, candidate.save, candidate.committed)
    phases = {**search.laps.seconds, **filled.report.phases}
    report = replace(
        filled.report,
        skipped=tuple(search.skipped.told),
        tier=candidate.tier,
        committed=candidate.committed,
        phases=phases,
        seconds=sum(phases.values()),
    )
    session.tier.note_restored(candidate.save.step, search.on_disks)
    session.stopwatch.restored(report.tier)
    num_skipped = len(report.skipped)
    session.listener.tell(Restored(candidate.save.step, report.nbytes, report.seconds, report.tier, num_skipped))
    return filled._replace(report=report)


def _begin_anew(session: Session, search: Search) -> LoadReport:
    """Returns the report of a restore that found no step. Collective. Raises CheckpointNotFound if the run must
    resume."""
    catalog, own, is_first = session.catalog, session.generation, session.group.rank == 0
    if session.settings.must_resume:
        together(session.group, "looking for a step", lambda: refuse_fresh(catalog, own) if is_first else None)
    if is_first:
        warn_of_traces(catalog, own)
        warn_of_foreign(session.store)
    session.tier.note_restored(0, search.on_disks)
    session.stopwatch.restored()
    return LoadReport(0, session.store.url, None, 0, 0.0)
