"""What the job before has left unfinished: its writers are waited for, and saves that are whole are committed."""

from __future__ import annotations

import logging
import socket
import time

from ckptlib.catalog.finishing import finish_saves
from ckptlib.format.keys import SaveId
from ckptlib.ranks.together import together, together_at_length
from ckptlib.saving.session import Session

log = logging.getLogger(__name__)

ORPHANS_TIMEOUT_S = 60.0
"""How long a restart waits for writers that its predecessor left behind on this host."""


def await_writers(session: Session, newest: SaveId | None) -> None:
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


def finish(session: Session, every: bool) -> None:
    """Commits saves that are whole in the store and were not committed before their job died: every one, or those from
    the newest step on. Collective."""

    def commit() -> None:
        if session.group.rank == 0:
            for save in finish_saves(session.catalog, session.generation, to_go_on=not every):
                log.warning("step %d was complete but not committed; committed it", save.step)

    together(session.group, "finishing saves", commit)
