"""Commits steps: waits for the parts of a save, chooses one of each rank, and puts the manifest that names them.

This is the only way a step comes to exist: a step is listed once its manifest is put, which happens last and once.
`proving` makes the manifest; `catalog` lists and reads. No torch.
"""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from ckptlib.catalog.catalog import Catalog
from ckptlib.catalog.elapsed import Elapsed
from ckptlib.catalog.failed_parts import raise_if_failed
from ckptlib.catalog.late_commit import check_found, check_packs, stay_or_take_back
from ckptlib.catalog.pauses import Pauses
from ckptlib.catalog.proving import Prover
from ckptlib.catalog.rights import check_may_commit
from ckptlib.catalog.uses import check_kept
from ckptlib.errors import CheckpointNotFound, ObjectExists, SaveFailed, StoreDenied, StoreFull
from ckptlib.format import keys
from ckptlib.format.keys import PartName, SaveId
from ckptlib.format.manifest import Manifest
from ckptlib.words import listed

log = logging.getLogger(__name__)

HEAD_EVERY_S = 10.0
"""How often a committer that waits for parts asks an object store whether its job was superseded."""

TELL_AFTER_S = 300.0
"""How long a committer waits for parts before it says whose: longer than ranks usually differ."""


@dataclass(frozen=True, slots=True)
class _Put:
    """A manifest that is put, or may be, and what its committer knew then."""

    manifest: Manifest
    elapsed: Elapsed
    live: bool
    orphaned: bool


class Committer:
    """Commits the steps of one root, and remembers the last one whose manifest may be there and may lack objects."""

    def __init__(self, catalog: Catalog) -> None:
        self.catalog = catalog
        self.prover = Prover(catalog)
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

        `proving` tells whether the parts are whole, `rights` whether this generation may commit them to this root,
        `uses` whether packs of other saves stay, and `late_commit` whether a sweep was faster than the manifest. Raises
        SaveFailed, ReplicasDiffer, Superseded, StoreError, or what a damaged part raises; the step does not exist then.
        """
        live = elapsed is not None
        elapsed = Elapsed() if elapsed is None else elapsed
        manifest = self.prover.manifest_of(save, names)
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
