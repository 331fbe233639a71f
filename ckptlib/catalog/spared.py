"""Tells whether retention spares a step that was just claimed, by a pin or by going back to it. No torch.

A sweep that drops a step puts its trash record, and only then looks for pins and for newer generations. A process that
claims the step puts a pin or the record of its generation, and only then looks for the trash record. So one of the two
sees the other, however long either takes.

    the sweep saw it, or died before it looked        record and manifest stay; nobody can tell which
    the sweep did not see it                          the manifest goes, and the record says that it will
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable

from ckptlib import words
from ckptlib.catalog import clock
from ckptlib.catalog.catalog import Catalog
from ckptlib.errors import CheckpointNotFound, StoreError
from ckptlib.format.keys import SaveId

PATIENCE_S = 10.0
"""How long to wait for a sweep that is dropping the step; it only has to delete a manifest."""

_POLL_S = 0.05


def is_spared(catalog: Catalog, save: SaveId, patience_s: float = PATIENCE_S) -> bool | None:
    """Whether the step is there to stay, for a caller that has claimed it. False if it is gone; None if that cannot be
    told, since its trash record stays."""
    deadline = time.monotonic() + patience_s
    while _is_condemned(catalog, save):
        if not catalog.is_committed(save):
            return False
        if time.monotonic() > deadline:
            return None
        time.sleep(_POLL_S)
    return catalog.is_committed(save)


def _is_condemned(catalog: Catalog, save: SaveId) -> bool:
    """Whether a sweep may be about to delete the manifest: there is a trash record, and it is not stale."""
    record = catalog.store.entry(save.trash_key)
    return record is not None and record.modified >= clock.now(catalog.store) - catalog.root().save_deadline_s


def enter_to_go_back(catalog: Catalog, save: SaveId, put: Callable[[], object], patience_s: float = PATIENCE_S) -> None:
    """Calls `put` to put the record of a generation that goes back to a committed step. Once this returns, no sweep
    drops the step while that generation has no step of its own.

    Raises CheckpointNotFound if the step is gone, before anything is put. If it was dropped just now, raises
    CheckpointNotFound; if it may be, StoreError: the record is put then.
    """
    url = catalog.store.url
    if not catalog.is_committed(save):
        raise CheckpointNotFound(
            f"{url}: step {save.step} ({save}) is not there any more: retention has dropped it meanwhile. Nothing was "
            "changed. Go back to another step; ckptlib ls lists them"
        )
    put()
    spared = is_spared(catalog, save, patience_s)
    if spared:
        return
    if spared is None:
        minutes = words.count(math.ceil(catalog.root().save_deadline_s / 60), "minute")
        raise StoreError(
            f"{url}: the job goes back to step {save.step}, but that has a trash record, {save.trash_key}: a sweep is "
            f"dropping it, or died while it did. Look again in {minutes}, before a job is started: if "
            f"ckptlib ls lists step {save.step} then, it stays; else go back to another one"
        )
    raise CheckpointNotFound(
        f"{url}: the job goes back to step {save.step}, but retention dropped that ({save}) in the same moment: the "
        "next job would resume at an earlier step, or anew. Go back to another step first: ckptlib ls --all --json "
        "lists them, abandoned ones too"
    )
