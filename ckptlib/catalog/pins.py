"""Pins: objects that keep a step, whatever retention rules say. No torch.

A pin is put beside the manifest, under a name that is never used again. `spared` says why it holds once it is put.

    `pin` died after its put                      the pin holds if the step is there; else a sweep removes it in time
"""

from __future__ import annotations

import math
import time
from contextlib import suppress

from ckptlib import words
from ckptlib.catalog.catalog import Catalog
from ckptlib.catalog.spared import PATIENCE_S, is_spared
from ckptlib.catalog.unreadable import UNUSABLE
from ckptlib.errors import CheckpointNotFound, FormatError, StoreError
from ckptlib.format.documents import encode
from ckptlib.format.keys import STEPS, SaveId, new_nonce


def pin(catalog: Catalog, save: SaveId, patience_s: float = PATIENCE_S) -> bool:
    """Pins a committed step; returns whether it was not pinned before. Once this returns, no sweep drops the step.

    Raises CheckpointNotFound if the step is not there, FormatError if this root may be swept by a ckptlib that knows no
    pins, and StoreError if the step has a trash record and it cannot be told whether the step will be dropped.
    """
    _refuse_old_writers(catalog)
    _check_there(catalog, save)
    is_new = save not in catalog.steps(since=save).pins
    if not is_new:
        catalog.store.flush(STEPS)  # the process that pinned it may have died before the name was durable
    else:
        catalog.store.put(save.pin_key(new_nonce()), encode("pin", {"save": str(save), "created": time.time()}))
    if is_spared(catalog, save, patience_s) is None:
        minutes = words.count(math.ceil(catalog.root().save_deadline_s / 60), "minute")
        raise StoreError(
            f"{catalog.store.url}: step {save.step} has a trash record, {save.trash_key}: a sweep is dropping it, "
            "or died while it did. The pin is put, but may have come too late. Pin the step again in "
            f"{minutes}: then it is gone, or the pin holds"
        )
    _check_there(catalog, save)
    return is_new


def unpin(catalog: Catalog, save: SaveId) -> bool:
    """Removes the pins of a step; returns whether there were any."""
    entries = catalog.steps(since=save).pins.get(save, ())
    if entries:
        catalog.store.delete(*(entry.key for entry in entries))
    return bool(entries)


def _check_there(catalog: Catalog, save: SaveId) -> None:
    if not catalog.is_committed(save):
        raise CheckpointNotFound(
            f"{catalog.store.url}: step {save.step} ({save}) is not there any more: retention has dropped it, so it "
            "cannot be pinned. Pin another one; ckptlib ls lists them"
        )


def _refuse_old_writers(catalog: Catalog) -> None:
    """Raises FormatError if the newest job is of version 1, whose writers drop pinned steps. The record of a job of
    version 2 keeps them out."""
    document = b""
    if (newest := max(catalog.generations.ids(), default=None)) is not None:
        with suppress(*UNUSABLE):  # reported when history is walked
            document = catalog.shared.document(newest.key)
    if document.startswith(b'{"ckptlib":1,'):
        raise FormatError(
            f"{catalog.store.url}: the newest job here, generation {newest}, is of a ckptlib that knows no pins and "
            "would drop the step all the same. Resume the job with this version first, or copy the step elsewhere"
        )
