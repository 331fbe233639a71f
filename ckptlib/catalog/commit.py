"""Commits steps: chooses the parts of a save, proves that they are whole, and names them in a manifest.

This is the only way a step comes to exist: a step is listed once its manifest is put, which happens last and once.
Listing and reading are in `catalog`; the conditions for a whole set of parts, in `completeness`. No torch.
"""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache, partial

from ckptlib.catalog.catalog import Catalog
from ckptlib.catalog.completeness import Doubt, Proof
from ckptlib.catalog.elapsed import Elapsed
from ckptlib.catalog.failed_parts import raise_if_failed
from ckptlib.catalog.history import newest_first, unfinished_from
from ckptlib.catalog.late_commit import check_found, check_packs, stay_or_take_back
from ckptlib.catalog.pauses import Pauses
from ckptlib.catalog.reading import each
from ckptlib.catalog.rights import check_may_commit, is_recorded
from ckptlib.catalog.second_read import decoded
from ckptlib.catalog.shards import PartIndex, ShardComparer
from ckptlib.catalog.uses import check_kept, times_of
from ckptlib.errors import (
    CheckpointNotFound,
    CorruptData,
    FormatError,
    ObjectExists,
    ObjectNotFound,
    ObjectUnreadable,
    ReplicasDiffer,
    SaveFailed,
    StoreDenied,
    StoreFull,
    Superseded,
    UnsupportedState,
)
from ckptlib.format import keys
from ckptlib.format.check import alike
from ckptlib.format.keys import GenerationId, PackSet, PartName, SaveId
from ckptlib.format.manifest import Manifest, ranks_by_layout
from ckptlib.format.part import PartHead, uses_digest
from ckptlib.words import listed

log = logging.getLogger(__name__)

HEAD_EVERY_S = 10.0
"""How often a committer that waits for parts asks an object store whether its job was superseded."""

TELL_AFTER_S = 300.0
"""How long a committer waits for parts before it says whose: longer than ranks usually differ."""

SHARES_KEPT = 4
"""How many parts are kept while replicas are compared, rank by rank."""


@dataclass(frozen=True, slots=True)
class _Proved:
    """The facts of a whole step, from its tables."""

    layouts: Mapping[str, tuple[int, ...]]
    """The ranks of each layout."""
    nbytes: int
    """Bytes of all packs that were put for it."""
    nbytes_state: int
    """Bytes of all chunks, decoded."""


@dataclass(frozen=True, slots=True)
class _Put:
    """A manifest that is put, or may be, and what its committer knew then."""

    manifest: Manifest
    elapsed: Elapsed
    live: bool
    orphaned: bool


class Committer:
    """Commits the steps of one root, and remembers which tables it has proved to be whole."""

    def __init__(self, catalog: Catalog) -> None:
        self.catalog = catalog
        self._proved: dict[tuple[str | None, ...], _Proved] = {}
        self._put: _Put | None = None
        """The last manifest."""
        self._doubted: SaveId | None = None
        """The last step whose manifest may be there, whoever put it, and which may lack objects."""

    def commit(
        self, save: SaveId, names: Sequence[PartName], elapsed: Elapsed | None = None, left: bool = False
    ) -> Manifest:
        """Makes the step exist. `names`: one part per rank. `elapsed`: time since the caller began to look for
        these; None for a save that a dead generation left. `left`: the job that saved it is gone, so nobody knows how
        long its parts took, and sweeps may have deleted its packs before; so this checks that its packs are there.

        For a new set of tables, all parts are read, to prove that together they hold every element of every tensor, and
        one value of each. That proof stands while the tables stay the same, unless two of them hold the same element.
        Every time, the checks in the parts' names tell whether ranks agree on what one of them wrote for several,
        `uses` whether packs of other saves stay, `late_commit` whether a sweep was faster than the manifest, and the
        record of the generation whether this is the root that the job has opened. Raises SaveFailed, ReplicasDiffer,
        Superseded, StoreError, or what a damaged part raises; the step does not exist then.
        """
        live = elapsed is not None
        elapsed = Elapsed() if elapsed is None else elapsed
        manifest = self.manifest_of(save, names)
        catalog = self.catalog
        if left or self._doubted is not None:
            check_packs(catalog, save, names)  # the doubted step would keep what this one uses, but may be gone
        orphaned = check_may_commit(catalog, save)
        if orphaned:
            check_kept(catalog, manifest, orphaned)
        catalog.shared.put_copies(manifest.layouts)
        catalog.store.flush(save.parts_prefix)  # a part is listed a moment before its name survives a power loss
        put, before = _Put(manifest, elapsed, live, orphaned), self._doubted
        self._put, self._doubted = put, save
        is_own = True
        try:
            catalog.store.put(save.manifest_key, manifest.encode(), create=True)
        except ObjectExists:
            is_own = False
        except (StoreDenied, StoreFull):
            # In an object store, an earlier request may have put it, and its answer was lost.
            if catalog.store.is_local and not catalog.is_committed(save):
                self._doubted = before
            raise
        try:
            return self._look(put, is_own)
        except SaveFailed:
            if is_own:  # it is taken back
                self._doubted = before
            raise

    def _look(self, put: _Put, is_own: bool) -> Manifest:
        """Checks the step once its manifest is there. Raises SaveFailed as `late_commit` does."""
        stay_or_take_back(self.catalog, put.manifest, put.elapsed.at_most(), put.live, put.orphaned, is_own)
        return self._stays(put.manifest, is_own)

    def _stays(self, manifest: Manifest, is_own: bool) -> Manifest:
        if not is_own:  # the committer that put it may have died before its name was durable
            self.catalog.store.flush(keys.STEPS)
        self.catalog.shared.put_again(manifest.layouts)  # retention may have deleted a layout that no step named before
        self._doubted = None
        return manifest

    def doubt(self, save: SaveId) -> None:
        """Notes that the manifest may be there: another committer began to commit this save, and is gone."""
        self._doubted = save

    def manifest_of(self, save: SaveId, names: Sequence[PartName]) -> Manifest:
        """Returns the manifest that `commit` puts. Puts nothing; raises as `commit` does."""
        assert [(n.save, n.rank) for n in names] == [(save, rank) for rank in range(len(names))], "one part per rank"
        if not alike(name.check for name in names):
            raise ReplicasDiffer(
                f"step {save.step}: what several ranks hold, and one of them wrote for all, is not the same on all of "
                "them; the step is not committed"
            )
        proved, first = self._prove(save, names)
        catalog, first = self.catalog, first or self._head(names[0])
        users = self._users(names, first)
        uses = times_of(catalog, save, users)
        sizes = [name.nbytes for name in names if name.nbytes is not None]
        return Manifest(
            save=save,
            world_size=len(names),
            parts=tuple(names),
            layouts=proved.layouts,
            nbytes=sum(sizes) if len(sizes) == len(names) else proved.nbytes,
            created=first.created,
            metrics=first.metrics,
            uses=uses,
            users={of: ranks for of, ranks in users.items() if len(ranks) < len(names)},
            nbytes_state=proved.nbytes_state,
            exempt=first.exempt,
            account=first.account,
        )

    def _users(self, names: Sequence[PartName], first: PartHead) -> dict[PackSet, frozenset[int]]:
        """Returns the sets of packs of other saves that parts name, each with the ranks of these parts.

        `first`: the head of rank 0's part. Most ranks use the same sets; the names of their parts tell so, and only one
        of these parts is read.
        """
        known: dict[str | None, tuple[PackSet, ...]] = {None: (), uses_digest(()): (), names[0].uses: first.uses}
        others = {name.uses: name for name in names if name.uses not in known}
        heads = each(self._head, others.values())
        known.update(zip(others, (head.uses for head in heads), strict=True))
        ranks: dict[str | None, list[int]] = {}
        for name in names:
            ranks.setdefault(name.uses, []).append(name.rank)
        found: dict[PackSet, frozenset[int]] = {}
        for digest, some in ranks.items():
            for of in known[digest]:
                found[of] = found.get(of, frozenset()).union(some)
        return found

    def _head(self, name: PartName) -> PartHead:
        store = self.catalog.store
        return decoded(store, partial(store.get, name.key), partial(PartHead.decode, name))

    def commit_when_whole(
        self,
        save: SaveId,
        world_size: int,
        seconds_left: Callable[[], float],
        usual_s: float = 0.0,
        left: bool = False,
        given_up: Callable[[], Mapping[int, str]] = dict,
    ) -> Manifest:
        """Waits for a part of every rank, then commits. `usual_s`: seconds that this rank took for its own share.
        `left`: as for `commit`; failures that ranks have published do not end the wait early, then. `given_up`: returns
        the ranks that have said, past the store, that their share failed, and why; they may have put their parts all
        the same.

        Raises SaveFailed with the ranks that failed, or that did not come while there were seconds left.
        """
        if self.catalog.is_committed(save):  # by a committer that died before it could say so, or before an outage
            return self._look_at_found(save)
        taken_over = self._is_anothers(save)
        # A sweep deletes parts only once its trash record is older than a save may take.
        unswept = taken_over and not self.catalog.is_there(save.trash_key)
        pauses, store, elapsed = Pauses(self.catalog.store, usual_s), self.catalog.store, Elapsed()
        next_check = time.monotonic() + (0.0 if store.is_local else HEAD_EVERY_S)
        tell_at = time.monotonic() + max(usual_s, min(TELL_AFTER_S, seconds_left() / 2))
        while True:
            told = given_up()  # before the parts are listed: one of these ranks may have put its part last
            found = self.catalog.parts(save)
            names, missing = choose_parts(found, world_size)
            if unswept and missing and 0 in found:
                self._doubted = None  # no committer has had all parts so far, so none has put a manifest
            if not left:  # an import that is resumed finds the failure that its first try published
                raise_if_failed(self.catalog, save, found, final=taken_over)
            if not missing:
                return self.commit(save, names, elapsed, left)
            lost = [rank for rank in missing if rank in told]
            who = f"{len(missing)} of {world_size} ranks: {listed(missing, 16)}"
            if seconds_left() <= 0 or lost:
                raise_if_failed(self.catalog, save, found, final=False)
                why = f"; rank {lost[0]} failed: {told[lost[0]]}" if lost else ""
                raise SaveFailed(f"step {save.step}: no part came from {who}{why}")
            if time.monotonic() >= tell_at:
                tell_at = math.inf
                text = "step %d still waits for the parts of %s; it is given up in %.0f s"
                log.warning(text, save.step, who, seconds_left())
            if time.monotonic() >= next_check:
                check_may_commit(self.catalog, save)
                next_check += 0.0 if store.is_local else HEAD_EVERY_S
            time.sleep(min(pauses.next(), max(seconds_left(), 0.0)))

    def _is_anothers(self, save: SaveId) -> bool:
        """Whether the save's manifest may be there, and only another committer can have put it."""
        return self._doubted == save and (self._put is None or self._put.manifest.save != save)

    def _look_at_found(self, save: SaveId) -> Manifest:
        """Checks a step whose manifest was there a moment ago. Raises SaveFailed as `late_commit` does."""
        self._doubted = save  # whatever fails from now on, it may be there
        if self._put is not None and self._put.manifest.save == save:
            return self._look(self._put, is_own=False)
        try:
            manifest = self.catalog.manifest(save)
        except CheckpointNotFound as error:
            raise SaveFailed(f"step {save.step}: whoever has committed it has taken it back") from error
        check_found(self.catalog, manifest)
        return self._stays(manifest, is_own=False)

    def look_again(self, save: SaveId) -> None:
        """Checks that a committed step lacks nothing, if its manifest may be by this committer, or by one before it
        that is gone, and the step has not been checked since. Raises SaveFailed if it lacks something."""
        if self.may_have_put(save):
            self._look_at_found(save)

    def may_have_put(self, save: SaveId) -> bool:
        """Whether the save's manifest may be there, though committing it has failed."""
        return self._doubted == save

    def _prove(self, save: SaveId, names: Sequence[PartName]) -> tuple[_Proved, PartHead | None]:
        """Returns what is proved of the save, and the head of rank 0's part if it had to be read."""
        key = tuple(name.table for name in names)
        if key in self._proved:
            return self._proved[key], None
        proved, doubts, first = _prove(self.catalog, save, names)
        if not doubts:  # the bytes of an overlap may differ the next time
            self._proved = {key: proved}
        return proved, first


def _prove(
    catalog: Catalog, save: SaveId, names: Sequence[PartName]
) -> tuple[_Proved, Sequence[Doubt], PartHead | None]:
    """Reads every part, and proves that the save is whole; raises SaveFailed if not. Returns also the overlaps, for
    which bytes had to be compared, and the head of rank 0's part."""
    found: list[tuple[str, int]] = []
    nbytes, nbytes_state, proof, store = 0, 0, Proof(), catalog.store
    first: PartHead | None = None
    # Decoded in this thread: decoding is work for one core, and garbage collection is paused meanwhile.
    for name, document in zip(names, each(lambda name: store.get(name.key), names), strict=True):
        part = decoded(store, partial(store.get, name.key), partial(catalog.decode_part, name), document)
        first = first or part.head
        if part.world_size != len(names):
            what = f"the part of rank {part.rank} is for {part.world_size} ranks, expected {len(names)}"
            raise SaveFailed(f"step {save.step}: {what}")
        found.append((part.table.layout, part.rank))
        nbytes += part.nbytes_put
        nbytes_state += part.table.nbytes_data
        proof.add(part, catalog.layout(part.table.layout))
    if (clash := proof.clash()) is not None:
        raise SaveFailed(f"step {save.step}: {clash}; the step is not committed")
    try:
        missing = proof.missing()
        doubts = proof.doubts() if missing is None else []
    except (FormatError, UnsupportedState) as error:
        raise SaveFailed(f"step {save.step}: {error}; the step is not committed") from error
    if missing is not None:
        raise SaveFailed(f"step {save.step}: no rank wrote {missing}; the step is not committed")
    _settle(catalog, save, names, doubts)
    return _Proved(ranks_by_layout(found), nbytes, nbytes_state), doubts, first


def _settle(catalog: Catalog, save: SaveId, names: Sequence[PartName], doubts: Sequence[Doubt]) -> None:
    """Compares overlaps. Raises SaveFailed if two ranks wrote different bytes of a tensor."""
    contents = ShardComparer(catalog.store.get_into)

    @lru_cache(maxsize=SHARES_KEPT)
    def share(rank: int) -> PartIndex:
        part = catalog.part(names[rank])
        return PartIndex(part, catalog.layout(part.table.layout))

    for doubt in doubts:
        if not contents.settles(doubt, share):
            where, (first, second) = f"{doubt.name}{doubt.region}", doubt.ranks
            raise SaveFailed(
                f"step {save.step}: {where}: ranks {first} and {second} saved different bytes for it; the step is "
                "not committed. If each rank has its own, say PerRank; if these are pieces of one tensor, DTensor "
                "or Sharded(tensor, offset, shape), with boxes that are equal where they overlap"
            )


def choose_parts(found: Mapping[int, Sequence[PartName]], world_size: int) -> tuple[list[PartName], list[int]]:
    """Returns one good part per rank, and the ranks that have none. Pure.

    All are of one snapshot: there may be parts of two snapshots that were taken at the same step.
    """
    by_number: dict[int, dict[int, PartName]] = {}
    for rank, names in found.items():
        for name in names:
            if name.ok and rank < world_size:
                by_number.setdefault(-1 if name.check is None else name.check.number, {}).setdefault(rank, name)
    good = max(by_number.items(), key=lambda item: (len(item[1]), item[0]), default=(0, {}))[1]
    missing = [rank for rank in range(world_size) if rank not in good]
    return [good[rank] for rank in sorted(good)], missing


def finish_saves(catalog: Catalog, generation: GenerationId, to_go_on: bool = False) -> list[SaveId]:
    """Commits the saves of dead generations, older than `generation`, whose parts are all there; returns these saves.

    So a save that was persisted whole before a crash is not lost with the committer. `to_go_on`: only saves that the
    job may go on from. The parts of others are not even listed: with those of dropped steps, there may be millions.
    """
    committed, since = set(catalog.saves()), 0
    if to_go_on:
        ids = catalog.generations.ids()
        catalog.generations.warm(newest_first(ids, committed))
        since = unfinished_from(committed, ids, catalog.generations.record)
    waiting = {
        name.save
        for entry in catalog.store.scan(keys.PARTS, f"{keys.PARTS}{since:012d}")
        if (name := keys.parse_part_key(entry.key)) is not None and name.save not in committed
    }
    trashed = {keys.parse_trash_key(entry.key) for entry in catalog.store.scan(keys.TRASH)}
    done = []
    for save in sorted(waiting - trashed):
        if save.generation < generation and _finish_one(catalog, save):
            done.append(save)
    return done


def _finish_one(catalog: Catalog, save: SaveId) -> bool:
    found = catalog.parts(save)
    if 0 not in found or not all(name.ok for names in found.values() for name in names):
        return False  # a rank, or the committer, said that it gave up
    if not is_recorded(catalog, save.generation, catalog.generations.ids()):
        log.warning("step %d is not committed: its generation %s began in another root", save.step, save.generation)
        return False
    try:
        names, missing = choose_parts(found, catalog.part(found[0][0]).world_size)
        if missing:
            return False
        # A new committer reads all parts: nobody is left who knows whether they are whole.
        Committer(catalog).commit(save, names, left=True)
    except Superseded:  # there is no second job: this job went back, or went on without the save
        return False
    except (CorruptData, FormatError, ObjectNotFound, ObjectUnreadable, SaveFailed) as error:
        log.warning("step %d is not committed, though all its parts are there: %s", save.step, error)
        return False  # damaged or incomplete: it never existed, and retention will sweep it
    return True
