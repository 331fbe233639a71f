"""Persists a snapshot that is in memory only. An orphaned writer does so when no job comes to go on from it, or each
that does is gone before it holds a snapshot of its own.

Each writer persists its own rank's share; then those of replicas whose ranks have put none, since their host may be
lost. The writer with rank 0's share commits, whoever put it: a host may be lost between the two. It is a save like any
other: it exists when its manifest does.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Iterable, Iterator, Sequence

from ckptlib.catalog.catalog import Catalog
from ckptlib.catalog.commit import HEAD_EVERY_S, Committer, choose_parts
from ckptlib.catalog.failed_parts import raise_if_failed
from ckptlib.catalog.history import last_step
from ckptlib.errors import CkptError, CorruptData, FormatError, SaveFailed, StoreTimeout, Superseded
from ckptlib.format.keys import SaveId
from ckptlib.slots.header import SlotHeader
from ckptlib.slots.slot import Slot
from ckptlib.writer.persist import Persister, put_failure

log = logging.getLogger(__name__)

SHARES_TIMEOUT_S = 20.0
"""How long the writers of other ranks have to put their own shares, before the replicas of these are used."""

COMMIT_TIMEOUT_S = 300.0

POLL_S = 0.5


def left_of(slots: Sequence[Slot], held: SaveId) -> SaveId:
    """Returns the snapshot that is to be persisted: the one that all ranks held, or a newer one.

    It is the newest one if the one that they held is gone: then a job that restored a newer one, which was whole, has
    removed it, and nothing else of it is left.
    """
    newer = [header.save for header, _ in _ready(slots) if header.save > held]
    return held if _shares(slots, held) else max(newer, default=held)


def rescue(
    slots: Sequence[Slot], save: SaveId, own_rank: int, persister: Persister, committer: Committer, deadline: float
) -> None:
    """Persists these slots of a snapshot that all ranks held, and commits it if that falls to this writer.

    `save`: the newest that this rank's trainer knew to be held by all. Other writers may know of a newer one, and put
    shares of it; then this one does, too. If that proves to be only a save that was under way, it is given up for all.
    A damaged slot counts for nothing: a share may be whole in another writer's. `deadline`: of all that is put, by the
    monotonic clock; what comes later may be swept as soon as it is there. Raises Superseded when a newer generation has
    begun that does not go on from `save`, SaveFailed when the shares make no step, and what the store raises. If the
    time is over, or shares have not come, that is StoreTimeout: the slots are as good as they were.
    """
    slots, catalog = list(slots), committer.catalog
    catalog.generations.check_goes_on(save)
    if _is_saved_again(catalog, save):
        return
    while True:
        catalog.generations.check_goes_on(save)
        chosen = _settle(slots, save, own_rank, persister, deadline, catalog)
        try:
            _complete(slots, chosen, own_rank, persister, deadline, committer, in_doubt=chosen != save)
        except Superseded:
            if chosen == save:
                raise  # else a job may have begun meanwhile that goes on from `save`
        except (SaveFailed, CorruptData) as error:
            if chosen == save:
                raise
            log.warning("step %d is not whole in memory, so step %d is persisted: %s", chosen.step, save.step, error)
            put_failure(catalog.store, chosen, 0, str(error))
        else:
            return


def _is_saved_again(catalog: Catalog, save: SaveId) -> bool:
    """Returns whether a job that went on from this save has saved its step again, or a later one, which the newest job
    goes on from."""
    ids = catalog.generations.ids()
    later = [other for other in catalog.steps(save).saves if other.generation > save.generation]
    return any(other.step <= last_step(other.generation, ids, catalog.generations.record) for other in later)


def _settle(
    slots: list[Slot], save: SaveId, own_rank: int, persister: Persister, put_until: float, catalog: Catalog
) -> SaveId:
    """Returns the newest snapshot that any rank has put a share of by now, that no rank has given up and no job left
    behind; or `save`. Puts this rank's own share, too; a slot that proves damaged leaves `slots`."""
    last = last_step(save.generation, catalog.generations.ids(), catalog.generations.record)
    newer = sorted({header.save for header, _ in _ready(slots) if save < header.save and header.save.step <= last})
    now, chosen = time.monotonic(), save
    deadline = now + min(SHARES_TIMEOUT_S, (put_until - now) / 2)
    while True:
        own = _shares(slots, chosen).get(own_rank)
        if own is not None and _is_missing(catalog, chosen, own_rank, own) and not _is_decided(catalog, chosen):
            _persist(own, chosen, persister, put_until, slots)
        if time.monotonic() > deadline:
            return chosen
        time.sleep(POLL_S)
        chosen = max((other for other in newer if _is_begun(catalog, other)), default=save)


def _is_decided(catalog: Catalog, save: SaveId) -> bool:
    """Returns whether nothing of it is to be put: a snapshot of this step is committed, or was dropped."""
    return catalog.is_committed(save) or catalog.is_there(save.trash_key)


def _is_begun(catalog: Catalog, save: SaveId) -> bool:
    """Returns whether shares of it are there, and more may come: no rank has only a failure, and rank 0 has no
    failure."""
    parts = catalog.parts(save)
    said = [all(n.ok for n in names) if rank == 0 else any(n.ok for n in names) for rank, names in parts.items()]
    return bool(said) and all(said)


def _complete(
    slots: list[Slot],
    save: SaveId,
    own_rank: int,
    persister: Persister,
    put_until: float,
    committer: Committer,
    in_doubt: bool,
) -> None:
    """Persists what other ranks have not, and commits. `in_doubt`: returns when it is committed, whoever does it."""
    catalog, shares = committer.catalog, _shares(slots, save)
    if not shares:
        return
    if catalog.is_committed(save):
        committer.look_again(save)
        return
    if catalog.is_there(save.trash_key):
        raise SaveFailed(
            f"step {save.step}: has a trash record, {save.trash_key}: retention has dropped the step, or a sweep took "
            "what was there of it for the remains of a crash. It is not put again"
        )
    for rank in sorted(shares.keys() - {own_rank}):
        is_missing = _is_missing(catalog, save, rank, shares[rank])
        if is_missing and not _persist(shares[rank], save, persister, put_until, slots):
            del shares[rank]
    now = time.monotonic()
    left = put_until - now  # nobody puts anything later
    if in_doubt:
        left /= 2  # the older one may have to be put yet
    deadline = now + min(COMMIT_TIMEOUT_S, left)
    if 0 in shares:  # if several commit, the first one counts
        world_size = shares[0].read_header().world_size

        def seconds_left() -> float:
            if in_doubt:
                raise_if_failed(catalog, save)
            return deadline - time.monotonic()

        # As the job died, a second snapshot of what all ranks held may have been under way, its failure published.
        try:
            manifest = committer.commit_when_whole(save, world_size, seconds_left, left=True)
        except Superseded:
            raise
        except SaveFailed as error:
            if in_doubt or not choose_parts(catalog.parts(save), world_size)[1]:
                raise
            raise StoreTimeout(str(error)) from error  # the store may be out of reach of the host that has them
        log.warning("step %d was in memory only, and is committed now: %d bytes", save.step, manifest.nbytes)
    elif in_doubt:
        _await_commit(catalog, save, now + min(COMMIT_TIMEOUT_S + SHARES_TIMEOUT_S, left))


def _await_commit(catalog: Catalog, save: SaveId, deadline: float) -> None:
    """Waits until another writer has committed a save. Raises SaveFailed if that writer gives up, or is gone;
    Superseded if a job has begun that does not go on from the save."""
    next_check = began = time.monotonic()
    while not catalog.is_committed(save):
        raise_if_failed(catalog, save)
        now = time.monotonic()
        if now > deadline:
            raise SaveFailed(f"step {save.step} was not committed within {now - began:.0f} s")
        if now >= next_check:
            catalog.generations.check_goes_on(save)
            next_check = now + (0.0 if catalog.store.is_local else HEAD_EVERY_S)
        time.sleep(POLL_S)


def _ready(slots: Iterable[Slot]) -> Iterator[tuple[SlotHeader, Slot]]:
    for slot in slots:
        try:
            header = slot.read_header()
        except CkptError:
            continue  # empty, or torn
        if header.ready:
            yield header, slot


def _shares(slots: Iterable[Slot], save: SaveId) -> dict[int, Slot]:
    """Returns the slot with the share of each rank. All are of the first snapshot: there may be two of one step, and
    what all ranks hold is the first. It stays until they hold a later step, and a step counts for nothing if it failed.
    The second may have been under way as the job died."""
    ready = [found for found in _ready(slots) if found[0].save == save]
    first = min((header.number for header, _ in ready), default=None)
    return {header.rank: slot for header, slot in ready if header.number == first}


def _is_missing(catalog: Catalog, save: SaveId, rank: int, slot: Slot) -> bool:
    """Returns whether the rank has put no share of the very snapshot that is in a slot."""
    check = slot.read_header().check
    return not any(name.ok and name.check == check for name in catalog.parts(save).get(rank, []))


def _persist(slot: Slot, save: SaveId, persister: Persister, put_until: float, slots: list[Slot]) -> bool:
    """Persists a slot. Returns False if it proves damaged, and removes it from `slots`."""
    if not slot.read_lock():
        raise SaveFailed(f"{slot.path}: is being overwritten")
    try:
        persister.persist(slot, save, put_until)
    except SaveFailed as error:
        raise StoreTimeout(str(error)) from error
    except (CorruptData, FormatError) as error:
        log.warning("step %d is persisted without this copy, from another one if there is any: %s", save.step, error)
        slots.remove(slot)
        return False
    finally:
        slot.unlock()
    return True
