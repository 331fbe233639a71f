"""Checks whether a generation may change its root: no newer one has begun, and this one began there. No torch.

If a newer one has begun, a step that it goes on from may be committed all the same. That step may have been restored
from memory alone, which is lost with its hosts; and if the newer one dies before it has saved it again, nobody else
would commit it. The step is on the history of the newer one, whoever commits it, and when.

A root may be moved away or removed while a job, or the writer that a killed job left behind, still saves to it; and a
new one may be made in its place. Each job puts the record of its generation before its first step, so a root without
that record is another one, unless the record was lost.
"""

from __future__ import annotations

import logging
from collections.abc import Collection

from ckptlib.catalog.catalog import Catalog
from ckptlib.catalog.history import check_goes_on, check_head
from ckptlib.errors import Superseded
from ckptlib.format import keys
from ckptlib.format.keys import GenerationId, SaveId

log = logging.getLogger(__name__)


def check_may_change(catalog: Catalog, generation: GenerationId) -> None:
    """Raises Superseded if there is a newer generation, or another root in the place of this one; StoreError if no
    generation has begun in that place. Puts the generation's own record again if only that is lost."""
    ids = catalog.generations.ids()
    check_head(generation, ids, catalog.store.url)
    _check_began(catalog, generation, ids)


def check_may_commit(catalog: Catalog, save: SaveId) -> bool:
    """Checks as `check_may_change` does, but accepts a newer generation if this save is on its history.

    Returns whether there is one, other than this process's own: its job sweeps, and knows nothing of the save.
    """
    ids = catalog.generations.ids()
    check_goes_on(save, ids, catalog.generations.record, catalog.store.url)
    _check_began(catalog, save.generation, ids)
    newest, own = max(ids, default=save.generation), catalog.shared.own_record
    return newest > save.generation and (own is None or own.id != newest)


def _check_began(catalog: Catalog, generation: GenerationId, ids: Collection[GenerationId]) -> None:
    url = catalog.store.url
    if is_recorded(catalog, generation, ids):
        return
    if catalog.shared.is_same_root():
        own = catalog.shared.own_record
        if own is not None and own.id == generation:
            log.warning(
                "%s: the record of generation %s, without which nobody knows what came before it, is not there any "
                "more. Did somebody delete it, or a rule of the bucket that expires objects? It is put again",
                *(url, generation),
            )
            catalog.generations.put(own)
        return
    if ids:
        raise Superseded(
            f"{url}: another root is there now, without a record of generation {generation}: the root that this job "
            "saved to was moved or removed, and another job has begun there. This one may not save there; stop one of "
            "the two, or give each a root of its own"
        )
    raise catalog.shared.gone(f"record of generation {generation}")


def is_recorded(catalog: Catalog, generation: GenerationId, ids: Collection[GenerationId]) -> bool:
    """Whether the generation began in this root, not in another that was in its place. `ids`: those with a record."""
    return generation in ids or bool(catalog.store.scan(keys.copy_key(generation.key)))
