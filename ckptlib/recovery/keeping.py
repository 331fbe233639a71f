"""Gives a restored step as many copies as it should have: it may have come from memory or a local disk alone."""

from __future__ import annotations

import logging
import time
from collections.abc import Mapping

from ckptlib.checkpoint import SaveOrder, save_step
from ckptlib.errors import NoRoom
from ckptlib.loading.report import LoadReport
from ckptlib.recovery.filling import Marks
from ckptlib.saving.attempts import Attempts, begun
from ckptlib.saving.pending import Pending
from ckptlib.saving.session import Session
from ckptlib.state.rng import LoadedRng

log = logging.getLogger(__name__)


def keep_restored(
    session: Session,
    state: Mapping[str, object],
    report: LoadReport,
    marks: Marks,
    generators: LoadedRng | None,
    attempts: Attempts,
) -> Pending | None:
    """With peers, keeps the restored state in memory again; saves it again if the store lacks it. Collective.

    Only for a state that was restored whole: else a part of the step would stand for all of it. `marks`: the step's, so
    that retention keeps it as if it had not been saved again. `generators`: the step's; an object's `state_dict()` may
    draw from the process's own, as that of a data loader does which begins to iterate in it.

    Returns the save, if there is one. If the ranks have no room for it, the job goes on without; if the store lacks the
    step, too, `attempts` are told of it, and why.
    """
    with_peers = session.settings.peers is not None
    if report.save is None or (report.committed and not with_peers):
        return None
    began = time.perf_counter()
    try:
        order = SaveOrder(
            state,
            report.step,
            marks.metrics,
            to_store=not report.committed,
            spare=False,
            exempt=marks.exempt,
            created=marks.created,
            generators=generators,
        )
        pending = save_step(session, order)
        pending.staging.go()
    except NoRoom as error:
        what = "is not kept in memory" if report.committed else "is not saved again, and the store does not have it"
        log.error("restored step %d, but it %s: %s", report.step, what, error)
        if not report.committed:
            attempts.miss(report.step, True, error)
        return None
    session.listener.tell(begun(pending, began))
    return pending if pending.persists else None
