"""Retention: how steps leave a store, and when. The only place that deletes from one; `unwanted` says what may go.

It makes two passes, a grace period apart. The first turns unwanted steps into trash: it puts a record, then deletes the
manifest, and the step is gone. The second deletes parts, then packs, then the record, once the record is older than the
grace period and a fresh listing shows no manifest. One request deletes many objects, in no order, and may fail half way
through, so it never has objects of two of these stages. The grace period is the time that a reader which has just found
a step has to read it; and if parts of a dead generation were about to be committed, the fresh listing shows it.

A step that lacks objects is no reason to drop another one: it does not count among those that are kept.

Packs that other steps use stay, and so does the record of their step, which says why they are there. While a manifest
cannot be read, nobody knows which packs its step uses, and no pack is deleted.

What a crashed save left becomes trash too, when all of it is older than the grace period; no save takes that long.
Ages are by the store's own clock. No torch.

    a crash ...                              leaves                            then the next sweep
    after the record, before the manifest    the step, and a stale record      drops the record, and decides anew *
    after the manifest                       trash                             deletes it when its time has come
    between deletions                        trash with fewer objects          deletes the rest, the record last
    while the clock is read                  trash/clock-...                   deletes it when it is old

    * but only if the record is older than a save may take: before, another sweep may be about to delete the manifest.
"""

from __future__ import annotations

import contextlib
import itertools
import logging
import math
import time
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TypeVar

from ckptlib.catalog import clock
from ckptlib.catalog.catalog import Catalog
from ckptlib.catalog.elapsed import Elapsed
from ckptlib.catalog.lacking import lacking
from ckptlib.catalog.late_commit import LATE_S
from ckptlib.catalog.reading import each
from ckptlib.catalog.resolving import TRIES
from ckptlib.catalog.rights import check_may_change
from ckptlib.catalog.shared_documents import put_new
from ckptlib.catalog.stand import Stand
from ckptlib.catalog.stock import Stock, take_stock
from ckptlib.catalog.unnamed_layouts import unnamed_layouts
from ckptlib.catalog.unreadable import UNREADABLE
from ckptlib.catalog.unwanted import crashed, deletable, due_trash, idle_pins, is_refresh_done, unwanted_steps
from ckptlib.catalog.uses import Needed, needed_by, record_of, remedy
from ckptlib.errors import (
    CorruptData,
    NewerFormat,
    ObjectExists,
    ObjectNotFound,
    ObjectUnreadable,
    StoreError,
    StoreTimeout,
)
from ckptlib.format import keys
from ckptlib.format.keys import GenerationId, SaveId
from ckptlib.format.manifest import Generation, TrashRecord
from ckptlib.policy.keep import GRACE, Keep
from ckptlib.stores import Entry, Store, probe

log = logging.getLogger(__name__)

T = TypeVar("T")

BATCH = 1000
"""Objects that one request deletes; the most that S3 takes."""


@dataclass(frozen=True, slots=True)
class Sweep:
    """The result of a sweep, or with dry_run its plan."""

    dropped: tuple[SaveId, ...]
    """Committed steps that became trash: they are gone; their bytes stay for the grace period, and while other steps
    use them."""
    condemned: tuple[SaveId, ...]
    """Saves that were never committed and became trash."""
    deleted: tuple[Entry, ...]
    """Objects of trash past the grace period, layouts, and what killed probes left, in the order of their deletion."""
    waiting: tuple[SaveId, ...]
    """Saves without a manifest that are still there, if only as a trash record."""
    broken: frozenset[SaveId] = frozenset()
    """Committed steps that lack objects."""

    @property
    def nbytes_deleted(self) -> int:
        """Bytes of the deleted objects."""
        return sum(entry.nbytes for entry in self.deleted)


def sweep(
    catalog: Catalog,
    keep: Keep | None,
    generation: keys.GenerationId | None,
    dry_run: bool = False,
    abandoned: bool = False,
    exempt: bool = False,
    early_s: float = math.inf,
    decided: SaveId | None = None,
) -> Sweep:
    """Drops the steps that `keep` (None: all stay) does not keep, and deletes trash older than the grace period.

    `generation`: that of the live job that sweeps; None outside of one. `abandoned`: steps left behind by a rewind are
    dropped as well. `exempt`: so are steps that were saved as exempt, if no other rule keeps them. Pinned steps always
    stay. `dry_run` changes nothing, and measures ages by this machine's clock. `early_s`: trash, and what crashed saves
    left, is deleted at this age if the grace period is longer; see `Sweeper`. `decided`: this save of the live job and
    those before it are committed, or never will be.

    Raises Superseded; ValueError if the grace period is too short; CorruptData for the directory of a local tier, and
    if the record of a generation is lost or a manifest cannot be read (a live job warns instead, goes on with the
    history that is left, and deletes no pack); and what reading the history raises.
    """
    deadline_s = catalog.root().save_deadline_s
    grace_s = _grace_s(keep, deadline_s)
    if not dry_run:
        _check_may_delete(catalog, generation)
    now = time.time() if dry_run else clock.now(catalog.store)
    oldest = now - grace_s
    trash_oldest = now - min(grace_s, early_s)
    stock, needed = _look(catalog, trash_oldest, live=generation is not None)
    stale = stock.records.keys() & stock.committed
    under_way = {save for save in stale if stock.records[save].modified >= now - deadline_s}
    generations = _generations(catalog, stock.committed, live=generation is not None and not abandoned)
    if generation is None and not generations and not stock.committed and stock.objects:
        raise CorruptData(
            f"{catalog.store.url}: has parts and packs, but no step, and no record of a job. If it is the local= of a "
            "job, steps may be on this disk alone, and the job tidies it by itself. If it is a root, steps/ and "
            "generations/ are lost, or were not copied: put them back. Nothing is dropped or deleted"
        )
    known, unknown = _stands(catalog, stock.committed)
    # A step that was committed meanwhile seems to lack objects, too: one more step stays then.
    broken = lacking(stock.objects, {entry.key for entry in stock.layouts}, known)
    unwanted = unwanted_steps(stock.committed, generations, keep, abandoned, known, broken, stock.put)
    stays = unknown | under_way | stock.pins.keys() | {save for save in known if known[save].exempt and not exempt}
    dropped = [save for save in unwanted if save not in stays]
    condemned = crashed(stock, trash_oldest, generation, decided)
    due = [] if needed is None else due_trash(stock, trash_oldest)
    gone, stages = deletable(stock, due, needed or {})
    waiting = sorted(({*stock.objects, *stock.records} - stock.committed | {*dropped}) - gone)
    # Due saves need no layout: all their parts are deleted, even if some of their packs are needed.
    layouts = unnamed_layouts(catalog, stock, {*waiting} - {*due} - stock.committed, oldest)
    probes = probe.left(catalog.store, oldest) if generation is None else []  # a live job skips this listing
    if not dry_run:
        old_clocks = [entry.key for entry in stock.clocks if entry.modified < oldest]
        refreshes = [save.refresh_key for save in stock.refreshes if is_refresh_done(save, stock, needed)]
        _delete(catalog, generation, [*old_clocks, *refreshes, *idle_pins(stock, oldest)])
        for stage in stages:  # before anything is put: the store may be full
            _delete(catalog, generation, [entry.key for entry in stage])
        layouts = _delete_layouts(catalog, generation, stock, layouts)
        _delete(catalog, generation, [entry.key for entry in probes])
        _drop_stale(catalog, generation, [stock.records[save] for save in sorted(stale - under_way)])
        spared = _drop(catalog, generation, dropped, head=max(generations, default=None))
        dropped = [save for save in dropped if save not in spared]
        waiting = [save for save in waiting if save not in spared]
        _put_records(catalog.store, [TrashRecord(save, "never committed") for save in condemned])
        try:
            catalog.store.clean(oldest, keys.is_known)
        except StoreTimeout:
            raise
        except StoreError as error:  # all else is done, and need not be done again for that
            log.warning("what crashed uploads left stays, and is paid for: %s", error)
    deleted = tuple(itertools.chain(*stages, layouts, probes))
    return Sweep(tuple(dropped), tuple(condemned), deleted, tuple(waiting), frozenset(broken))


def drop_unkept(catalog: Catalog, keep: Keep, generation: GenerationId, broken: Collection[SaveId]) -> None:
    """Drops the steps that a live job's `sweep` drops, and does nothing else of a sweep. It lists only steps, so it
    costs the same for any number of ranks, and any amount of trash.

    `broken`: the steps that lacked objects at the last whole sweep. Raises as `sweep` does.
    """
    _check_may_delete(catalog, generation)
    steps = catalog.steps()
    committed = {*steps.saves}
    generations = _generations(catalog, committed, live=True)
    known, unknown = _stands(catalog, committed)
    unwanted = unwanted_steps(committed, generations, keep, False, known, committed.intersection(broken), steps.put)
    stays = unknown | steps.pins.keys() | {save for save in known if known[save].exempt}
    _drop(catalog, generation, [save for save in unwanted if save not in stays])


def _look(catalog: Catalog, oldest: float, live: bool, tries: int = TRIES) -> tuple[Stock, Needed | None]:
    """Returns all that is there; and the sets of packs that are used by other steps, or by steps dropped so lately that
    they may still be read. These are None if they are not known.

    A `live` job goes on if a manifest cannot be read. Other callers, who can repair it, get CorruptData.
    """
    stock = take_stock(catalog, oldest)
    young = [save for save, record in stock.records.items() if record.modified >= oldest]
    try:
        return stock, needed_by(catalog, sorted(stock.committed), young)
    except UNREADABLE as error:
        if isinstance(error, ObjectNotFound) and tries > 1:  # another sweep has deleted it since it was listed
            return _look(catalog, oldest, live, tries - 1)
        what = f"{catalog.store.url}: which packs other steps use cannot be told, so none is deleted: {error}"
        if not live:
            raise CorruptData(f"{what}. {remedy(error)}") from error
        log.warning("%s", what)
        return stock, None


def _grace_s(keep: Keep | None, save_deadline_s: float) -> float:
    if keep is None:
        return max(GRACE.total_seconds(), 2 * save_deadline_s)
    keep.check(save_deadline_s)
    return keep.grace.total_seconds()


def _generations(catalog: Catalog, committed: Collection[SaveId], live: bool) -> Mapping[GenerationId, Generation]:
    """Returns the records of all generations. A `live` job goes on without lost ones, and drops steps of the history
    that is left; for others, raises CorruptData."""
    found, lost = catalog.generations.records(sorted(committed))
    if lost:
        what = "; ".join(str(error) for _, error in sorted(lost.items()))
        if not live:
            raise CorruptData(
                f"{catalog.store.url}: history is incomplete: {what}. Which steps a rewind has left behind, and which "
                "the job goes on from, cannot be told, so nothing is dropped or deleted. Put the record back from a "
                "copy of the root; until then, jobs with keep= drop steps of their own history"
            )
        log.warning("history is incomplete, and only steps on what is left of it are dropped: %s", what)
    return found


def _stands(catalog: Catalog, committed: Collection[SaveId]) -> tuple[dict[SaveId, Stand], set[SaveId]]:
    """Returns the stands of readable manifests, and the saves whose manifests cannot be read now. These saves stay; one
    whose manifest is damaged for good is in neither, and may be dropped."""
    known: dict[SaveId, Stand] = {}
    unknown: set[SaveId] = set()
    catalog.warm_stands(sorted(committed))
    for save in committed:
        try:
            known[save] = catalog.stand(save)
        except (NewerFormat, ObjectUnreadable):
            unknown.add(save)
        except UNREADABLE:
            continue
    return known, unknown


def _delete_layouts(
    catalog: Catalog, generation: GenerationId | None, stock: Stock, layouts: Sequence[Entry]
) -> list[Entry]:
    """Deletes layouts, and returns those that are gone. One that cannot be read stays.

    A job may come to use one meanwhile. A committer looks for its layouts after it has put the manifest, and this lists
    steps again after the deletion: the later of the two puts the layout again.
    """
    documents: dict[str, bytes] = {}
    for entry in layouts:
        with contextlib.suppress(ObjectNotFound, ObjectUnreadable):  # gone already; or it could not be put back
            documents[entry.key] = catalog.store.get(entry.key)
    _delete(catalog, generation, [*documents])
    fresh = {*catalog.saves()} - stock.committed if documents else set()
    named: set[str] = set()
    for save in fresh:
        try:
            named |= {keys.layout_key(digest) for digest in catalog.stand(save).layouts}
        except UNREADABLE:  # it may name any of them
            named |= documents.keys()
    again = documents.keys() & (named | {*map(keys.copy_key, named)})
    for key in again:
        put_new(catalog.store, key, documents[key])
    return [entry for entry in layouts if entry.key in documents and entry.key not in again]


def drop(catalog: Catalog, save: SaveId) -> None:
    """Takes a step off the list, for good; `sweep` deletes its bytes after the grace period. A pinned step stays, and
    so does one that already has a young trash record."""
    _drop(catalog, None, [save])


def _drop(
    catalog: Catalog,
    generation: keys.GenerationId | None,
    saves: Sequence[SaveId],
    head: keys.GenerationId | None = None,
) -> set[SaveId]:
    """Drops steps; returns those that are spared.

    Trash records are put first: without them, the next generation would take the parts for saves to be committed. Pins
    are read after that: a `pin` puts the pin, then looks for a record, so one of the two sees the other. A job or a
    `ckptlib rewind` that goes back to a step does the same with the record of its generation: see `spared`. A live job
    finds itself superseded then; for others, `head` is the newest generation in the history by which these steps were
    chosen.

    `pin` takes a record that is older than a save may take for that of a crashed sweep, so a sweep that took half as
    long drops nothing. Such a record is put anew: by its age the bytes would be deleted at once, though readers could
    find the step until now.

    A step stays while it has a younger record of another sweep, which is dropping it, or died. That record may become
    stale before the manifest goes, and a `pin` meanwhile would report that the pin holds. Besides, by its age, the
    bytes would go too soon if the store is full.

    Records of spared steps stay until they are stale: another sweep that did not see the pin may be about to delete the
    manifest, and the record tells that to `pin`.
    """
    spared: set[SaveId] = set()
    if saves:  # the steps that stay may not be durable: the committer of the newest died first, or its flush failed
        catalog.store.flush(keys.STEPS)
    catalog.warm_stands(saves)
    for some in _batches(saves):
        _check_may_delete(catalog, generation)
        elapsed = Elapsed()
        records = [record_of(catalog, save) for save in some]
        foreign = _put_records(catalog.store, records)
        if foreign:
            _drop_stale(catalog, generation, _stale_records(catalog, foreign))
            foreign = _put_records(catalog.store, [record for record in records if record.save in foreign])
        stay = foreign | {*some} & catalog.steps(since=some[0]).pins.keys()
        if generation is None and head is not None and max(catalog.generations.ids(), default=head) > head:
            log.warning("a job or a rewind began meanwhile: what history keeps is chosen anew by the next sweep")
            stay = {*some}
        _check_may_delete(catalog, generation)
        if _is_late(catalog, elapsed):  # checked last: if suspended after this, it may drop a step that is needed
            log.warning("it took so long to drop steps that they may have been pinned meanwhile: the next sweep does")
            stay = {*some}
        catalog.store.delete(*(save.manifest_key for save in some if save not in stay))
        for save in some:
            if save not in stay:
                log.info("step %d is dropped; its bytes go after the grace period", save.step)
        spared |= stay
    return spared


def _is_late(catalog: Catalog, elapsed: Elapsed) -> bool:
    """Whether so much time has passed, as when the machine was suspended, that records may look stale. Asks the store
    only after LATE_S."""
    seconds = elapsed.at_most()
    return seconds > LATE_S and seconds > catalog.root().save_deadline_s / 2


def _stale_records(catalog: Catalog, of: Collection[SaveId]) -> list[Entry]:
    """Returns the trash records of these saves that are older than a save may take."""
    oldest = clock.now(catalog.store) - catalog.root().save_deadline_s
    listed = catalog.store.scan(keys.TRASH)
    return [entry for entry in listed if keys.parse_trash_key(entry.key) in of and entry.modified < oldest]


def _drop_stale(catalog: Catalog, generation: keys.GenerationId | None, listed: Sequence[Entry]) -> None:
    """Deletes the trash records of steps that are there. If another sweep was faster and has dropped the step, its
    record stays, or is put back. If reading the records took long, none is deleted: another sweep may have put one
    anew, which tells `pin` that the step goes."""
    for some in _batches(listed):
        _check_may_delete(catalog, generation)
        elapsed = Elapsed()
        there = {*catalog.store.scan(keys.TRASH)}
        saves = [save for entry in some if entry in there and (save := keys.parse_trash_key(entry.key)) is not None]
        if saves:
            records = [record_of(catalog, save) for save in saves]
            if _is_late(catalog, elapsed):
                log.warning("it took so long to look at old trash records that they may be new: the next sweep does")
                continue
            catalog.store.delete(*(save.trash_key for save in saves))
            committed = {*catalog.saves()}
            _put_records(catalog.store, [record for record in records if record.save not in committed])


def _put_records(store: Store, records: Sequence[TrashRecord]) -> set[SaveId]:
    """Puts trash records; returns the saves that have one already, by another sweep, now or long ago."""

    def is_there(record: TrashRecord) -> bool:
        try:
            store.put(record.save.trash_key, record.encode())
        except ObjectExists:
            return True
        return False

    return {record.save for record, there in zip(records, each(is_there, records), strict=True) if there}


def _delete(catalog: Catalog, generation: keys.GenerationId | None, objects: Sequence[str]) -> None:
    """Deletes objects of one stage, in any order."""
    for some in _batches(objects):
        _check_may_delete(catalog, generation)
        catalog.store.delete(*some)


def _batches(items: Sequence[T]) -> Iterator[Sequence[T]]:
    for at in range(0, len(items), BATCH):
        yield items[at : at + BATCH]


def _check_may_delete(catalog: Catalog, generation: keys.GenerationId | None) -> None:
    if generation is not None:
        check_may_change(catalog, generation)
