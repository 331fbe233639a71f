"""Finds the packs of other saves that a step needs, and checks that they are kept. No torch.

A save refers to packs of earlier saves for chunks that have not changed since. Such a pack stays while a committed step
names its set and its rank in `uses`, or a trash record younger than the grace period does. So a save may refer to the
packs that a committed step has or uses: if that step is dropped meanwhile, its record protects them for longer than a
save may take, and after that the manifest of the new step does.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from contextlib import suppress

from ckptlib.catalog import clock
from ckptlib.catalog.catalog import Catalog
from ckptlib.catalog.stand import Stand
from ckptlib.catalog.unreadable import UNREADABLE
from ckptlib.errors import (
    CheckpointNotFound,
    CorruptData,
    FormatError,
    ObjectNotFound,
    ObjectUnreadable,
    SaveFailed,
)
from ckptlib.format import keys
from ckptlib.format.keys import PackSet, SaveId
from ckptlib.format.manifest import Manifest, TrashRecord
from ckptlib.policy.keep import EARLY_S

FEW = 4
"""Up to this many steps are looked for one by one. In an object store, ten such requests cost as much as a listing."""

TAKEN_BACK = "committed too late"
"""The reason in the trash record of a step that was taken back: a sweep may have deleted its packs before that."""

DROPPED = "dropped by retention"

Needed = Mapping[PackSet, "frozenset[int] | None"]
"""For each set of packs, the ranks whose packs of it are needed; None: all."""


def needed_by(catalog: Catalog, committed: Iterable[SaveId], trashed: Collection[SaveId]) -> Needed:
    """Returns the packs of other saves that are used by committed steps, or by dropped ones with young trash records.

    `trashed`: the saves with young trash records. Raises what reading a document raises, since it is not known then
    which packs are needed.
    """
    needed: dict[PackSet, frozenset[int] | None] = {}
    catalog.forget_records(trashed)
    committed = [*committed]
    catalog.warm_stands(committed)
    catalog.warm_records(trashed)
    for save in committed:
        try:
            users: Stand | TrashRecord = catalog.stand(save)
        except CheckpointNotFound:  # dropped since it was listed
            users = catalog.trash_record(save)
        add_needed(needed, users)
    for save in trashed:
        add_needed(needed, catalog.trash_record(save))
    return needed


def remedy(error: Exception) -> str:
    """Says what to do about an error that `needed_by` raised."""
    if isinstance(error, ObjectNotFound):  # it was listed
        return "It was there a moment ago: where a job or another sweep deletes what it dropped, ask again"
    return (
        "Make the object readable, or put it back from a copy of the root. To give its step up, delete the object: "
        "then the packs that only this step used go, too"
    )


def add_needed(needed: dict[PackSet, frozenset[int] | None], by: Manifest | Stand | TrashRecord) -> None:
    """Adds the packs that a step uses."""
    for of in by.uses:
        before, ranks = needed.get(of, frozenset()), by.users.get(of)
        needed[of] = None if before is None or ranks is None else before | ranks


def is_needed(needed: Needed, pack: str) -> bool:
    """Whether the pack with this key is needed; False for an object that is no pack."""
    of = keys.pack_set(pack)
    if of is None or of not in needed:
        return False
    ranks = needed[of]
    return ranks is None or keys.pack_rank(pack) in ranks


def times_of(
    catalog: Catalog,
    save: SaveId,
    uses: Mapping[PackSet, frozenset[int]],
    orphaned: bool = False,
    at: float | None = None,
) -> dict[PackSet, float]:
    """Returns, for the manifest of a save, when the saves whose packs it uses were taken.

    `uses`: the ranks that use each set of packs. `orphaned`: a newer job has begun, whose sweeps do not know of this
    save. `at`: see `check_kept`. Raises SaveFailed if nothing keeps one of these packs from being deleted, so that the
    step would be lost later.
    """
    left = dict(uses)
    found: dict[PackSet, float] = {}
    if not left:
        return found
    few = _enough(catalog, save, uses)
    _cover_by_known(catalog, _still_there(catalog, few), left, found)
    if not left:
        return found
    committed = [other for other in catalog.saves() if other != save]
    _cover_by_known(catalog, reversed(committed), left, found)
    if not left:
        return found
    there = {*committed}
    for needed in [of for of in left if of.save in there]:
        found[needed] = _created(catalog, needed.save)
        del left[needed]
    for other in reversed(committed):
        if not left:
            break
        with suppress(*UNREADABLE):
            stand = catalog.stand(other)
            _cover(left, found, stand.uses, stand.users)
    if left:
        _cover_by_trash(catalog, left, found, orphaned, at)
    if left and any(_is_damaged(catalog, other) for other in committed):
        # While that manifest is there, no pack is deleted; if it is deleted, the new manifest names these packs.
        found = {**dict.fromkeys(left, 0.0), **found}
        left.clear()
    if left:
        raise SaveFailed(
            f"step {save.step}: needs packs of {min(left)}, which no committed step uses any more, so they may be "
            "deleted at any time"
        )
    return found


def check_kept(catalog: Catalog, manifest: Manifest, orphaned: bool, at: float | None = None) -> None:
    """Raises SaveFailed, as `times_of` does, if packs that the step uses are not kept any more. `at`: when its manifest
    came, by the store's clock; packs only had to be kept until then, since the manifest keeps them afterwards."""
    every = frozenset(range(manifest.world_size))
    times_of(catalog, manifest.save, {of: manifest.users.get(of, every) for of in manifest.uses}, orphaned, at)


def _enough(catalog: Catalog, save: SaveId, uses: Mapping[PackSet, frozenset[int]]) -> list[SaveId]:
    """Returns a few steps, mostly one, which together name all of these packs, as far as this process knows: only they
    must be looked for. Returns none if all steps must be."""
    left, some = dict(uses), []
    for other, stand in reversed(catalog.known_stands().items()):
        times = {**stand.uses, **_own(other, stand.created)}
        if other == save or left.keys().isdisjoint(times):
            continue
        some.append(other)
        _cover(left, {}, times, stand.users)
        if not left:
            return some
    return []


def _still_there(catalog: Catalog, few: Sequence[SaveId]) -> list[SaveId]:
    """Returns those of these steps that are still committed. Few are looked for one by one: a listing from an early
    step on may have nearly all steps of the root."""
    if len(few) > FEW:
        there = {*catalog.steps(min(few)).saves}
        return [other for other in few if other in there]
    return [other for other in few if catalog.is_committed(other)]


def _cover_by_known(
    catalog: Catalog, committed: Iterable[SaveId], left: dict[PackSet, frozenset[int]], found: dict[PackSet, float]
) -> None:
    """Moves packs that any of these steps has or uses from `left` to `found`; only manifests read before count."""
    for other, stand in catalog.known_stands(committed).items():
        _cover(left, found, {**stand.uses, **_own(other, stand.created)}, stand.users)


def _cover(
    left: dict[PackSet, frozenset[int]],
    found: dict[PackSet, float],
    times: Mapping[PackSet, float],
    users: Mapping[PackSet, frozenset[int]],
) -> None:
    """Moves packs that a step has or uses from `left` to `found`. `times`, `users`: the step's."""
    for needed in [*left]:
        if needed in times:
            found[needed] = times[needed]
            left[needed] = left[needed] - users[needed] if needed in users else frozenset()
            if not left[needed]:
                del left[needed]


def _created(catalog: Catalog, save: SaveId) -> float:
    try:
        return catalog.stand(save).created
    except UNREADABLE:
        return 0.0  # while its manifest cannot be read, no pack is deleted


def _is_damaged(catalog: Catalog, save: SaveId) -> bool:
    """Whether the save's manifest is damaged for good, not only unreadable just now."""
    try:
        catalog.stand(save)
    except (CorruptData, FormatError):
        return True
    except (CheckpointNotFound, ObjectUnreadable):
        pass
    return False


def _cover_by_trash(
    catalog: Catalog,
    left: dict[PackSet, frozenset[int]],
    found: dict[PackSet, float],
    orphaned: bool,
    at: float | None,
) -> None:
    """Moves packs that trash records keep from `left` to `found`.

    Only records count that stay young for as long as a save may take; the grace period is at least twice that.

    If room is made in a full store earlier than that, parts are deleted before packs, so a save whose packs may be gone
    has no part left. The job that makes room spares packs that its own saves in flight may use, but not those of other
    jobs: packs that an orphaned save uses may be deleted EARLY_S after they were dropped. This relies on half of that.
    """
    now, deadline_s = clock.now(catalog.store) if at is None else at, catalog.root().save_deadline_s
    oldest = now - (min(deadline_s, EARLY_S / 2) if orphaned else deadline_s)
    for entry in catalog.store.scan(keys.TRASH):
        save = keys.parse_trash_key(entry.key)
        if save is None or entry.modified < oldest:
            continue
        if entry.modified < now - EARLY_S and not catalog.parts(save):
            continue
        record = _record_there(catalog, save)
        if record is not None and record.reason != TAKEN_BACK:
            _cover(left, found, {**record.uses, **_own(save, record.created)}, record.users)


def _own(save: SaveId, created: float) -> dict[PackSet, float]:
    """Returns the sets of packs that a save itself may have put, of all ranks, with the time of the save."""
    return {PackSet(save): created, PackSet(save, carried=True): created}


def record_of(catalog: Catalog, save: SaveId) -> TrashRecord:
    """Returns the trash record for a committed step that is dropped. If its manifest cannot be read, nobody reads the
    step, and the record keeps no packs."""
    try:
        stand = catalog.stand(save)
    except CheckpointNotFound:  # another sweep has dropped it
        return _record_there(catalog, save) or TrashRecord(save, DROPPED)
    except UNREADABLE:
        return TrashRecord(save, DROPPED)
    return TrashRecord(save, DROPPED, stand.uses, stand.users, stand.created, stand.layouts)


def _record_there(catalog: Catalog, save: SaveId) -> TrashRecord | None:
    try:
        return catalog.trash_record(save)
    except UNREADABLE:
        return None
