"""An orphaned writer persists a snapshot that is in memory only, when no job comes to go on from it.

Each persists its own rank's share; then those of replicas whose ranks have put none, since their host may be lost. The
writer that has put rank 0's share commits. It is a save like any other: it exists when its manifest does.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Iterable, Iterator, Sequence

from ckptlib.catalog.catalog import Catalog
from ckptlib.catalog.commit import Committer
from ckptlib.errors import CkptError, SaveFailed
from ckptlib.format.keys import SaveId
from ckptlib.slots.header import SlotHeader
from ckptlib.slots.slot import Slot
from ckptlib.writer.persist import Persister

log = logging.getLogger(__name__)

SHARES_TIMEOUT_S = 20.0
"""How long the writers of other ranks have to put their own shares, before the replicas of these are used."""

COMMIT_TIMEOUT_S = 300.0

POLL_S = 0.5


def rescue(slots: Sequence[Slot], save: SaveId, own_rank: int, persister: Persister, committer: Committer) -> None:
    """Persists these slots of a snapshot that all ranks held, and commits it if that falls to this writer.

    `save`: the newest that this rank's trainer knew to be held by all; others may have known of a newer one, and what
    they put then is gone along with. Raises Superseded when a newer generation has begun, SaveFailed when shares are
    missing, and what the store and damaged slots raise.
    """
    catalog = committer.catalog
    catalog.check_head(save.generation)
    save = _settle(slots, save, own_rank, persister, catalog)
    shares = _shares(slots, save)
    if not shares or catalog.is_committed(save):
        return
    stand_ins = {rank for rank in shares.keys() - {own_rank} if _is_missing(catalog, save, rank, shares[rank])}
    for rank in sorted(stand_ins):
        _persist(shares[rank], save, persister)
    if 0 in stand_ins or (own_rank == 0 and 0 in shares):
        world_size = shares[0].read_header().world_size
        deadline = time.monotonic() + COMMIT_TIMEOUT_S
        manifest = committer.commit_when_whole(save, world_size, lambda: deadline - time.monotonic())
        log.warning("step %d was in memory only, and is committed now: %d bytes", save.step, manifest.nbytes)


def _settle(slots: Sequence[Slot], save: SaveId, own_rank: int, persister: Persister, catalog: Catalog) -> SaveId:
    """The newest snapshot that any rank has put a share of by now; this rank's own is put, too."""
    newer = sorted({header.save for header, _ in _ready(slots) if header.save > save})
    deadline = time.monotonic() + SHARES_TIMEOUT_S
    while True:
        own = _shares(slots, save).get(own_rank)
        if own is not None and _is_missing(catalog, save, own_rank, own):
            _persist(own, save, persister)
        if time.monotonic() > deadline:
            return save
        time.sleep(POLL_S)
        save = max((other for other in newer if other > save and catalog.parts(other)), default=save)


def _ready(slots: Iterable[Slot]) -> Iterator[tuple[SlotHeader, Slot]]:
    for slot in slots:
        try:
            header = slot.read_header()
        except CkptError:
            continue  # empty, or torn
        if header.ready:
            yield header, slot


def _shares(slots: Iterable[Slot], save: SaveId) -> dict[int, Slot]:
    """By rank: the slot with its share. All of one snapshot, the newest: there may be two of one step."""
    ready = [found for found in _ready(slots) if found[0].save == save]
    newest = max((header.number for header, _ in ready), default=None)
    return {header.rank: slot for header, slot in ready if header.number == newest}


def _is_missing(catalog: Catalog, save: SaveId, rank: int, slot: Slot) -> bool:
    """Whether the rank has put no share of the very snapshot that is in a slot."""
    check = slot.read_header().check
    return not any(name.ok and name.check == check for name in catalog.parts(save).get(rank, []))


def _persist(slot: Slot, save: SaveId, persister: Persister) -> None:
    if not slot.read_lock():
        raise SaveFailed(f"{slot.path}: is being overwritten")
    try:
        persister.persist(slot, save)
    finally:
        slot.unlock()
