"""A root without a step to resume from: whether a run has saved there before, and the error if a run must resume.

No torch.
"""

from __future__ import annotations

import logging
from contextlib import suppress

from ckptlib import words
from ckptlib.catalog.catalog import Catalog
from ckptlib.errors import CheckpointNotFound, StoreError
from ckptlib.format import keys
from ckptlib.format.keys import GenerationId

log = logging.getLogger(__name__)


def traces(catalog: Catalog, own: GenerationId | None) -> str | None:
    """Says what other starts than `own` have left in a root without a step; None if nothing. Raises the store's
    errors."""
    if starts := [generation for generation in catalog.generations.ids() if generation != own]:
        return f"a job has begun to save there, as generation {words.last(starts, 2)}"
    if catalog.store.scan(keys.PARTS):
        return f"shares of saves are in its {keys.PARTS}"
    return None


def refuse_new(catalog: Catalog) -> None:
    """Refuses a run that must resume if there is neither a root nor a step, before the run puts anything.

    Raises CheckpointNotFound, and the store's errors. If a root is there, steps may be in memory only: `restore` finds
    that out.
    """
    with suppress(CheckpointNotFound):
        catalog.root()
        return
    if not catalog.saves():
        refuse_fresh(catalog, None)


def refuse_fresh(catalog: Catalog, own: GenerationId | None) -> None:
    """Raises CheckpointNotFound for a run that must resume and has no step; or the store's errors."""
    left = traces(catalog, own)
    raise CheckpointNotFound(
        f"{catalog.store.url} has no step to resume from, and must_resume=True says that there is one: "
        f"{'nobody has saved there before' if left is None else f'{left}, and no step is there'}. Is this the URL of "
        "the run, is its file system mounted, and has a copy of the root ended? To begin a new run, leave out "
        "must_resume="
    )


def warn_of_traces(catalog: Catalog, own: GenerationId) -> None:
    """Warns a fresh run of traces of earlier runs. This is only a hint: if the store fails, the run goes on."""
    try:
        left = traces(catalog, own)
    except StoreError as error:
        log.warning("%s: whether a run has saved there before is not known: %s", catalog.store.url, error)
        return
    if left is not None:
        log.warning(
            "%s has no step, so this is a fresh run; but %s. If a step was ever committed, stop the job and find out "
            "where it is: has a copy of the root not ended, has a rule of the bucket expired objects, or did somebody "
            "remove %s?",
            *(catalog.store.url, left, keys.STEPS),
        )
