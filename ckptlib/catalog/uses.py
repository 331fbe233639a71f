"""Which packs of other saves a step needs, and what keeps them from being deleted. No torch.

A save refers to packs of earlier saves for what has not changed since. Such a pack stays as long as a committed step
names its set in `uses`, or a trash record does that is younger than the grace period. So a save may refer to the packs
that a committed step has or uses: if that step is dropped meanwhile, its record protects them for longer than a save
may take, and after that the manifest of the new step does.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable

from ckptlib.catalog import clock
from ckptlib.catalog.catalog import Catalog
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
from ckptlib.format.manifest import TrashRecord

UNREADABLE = (CheckpointNotFound, CorruptData, FormatError, ObjectNotFound, ObjectUnreadable)
"""What may be the matter with one document."""


def needed_by(catalog: Catalog, committed: Iterable[SaveId], trashed: Collection[SaveId]) -> set[PackSet]:
    """The sets of packs of other saves that committed steps use, and those whose trash records are young.

    Raises, for a document that cannot be read, what reading it raises: nobody knows then which packs are needed.
    """
    needed: set[PackSet] = set()
    catalog.forget_records(trashed)
    for save in committed:
        try:
            needed |= catalog.stand(save).uses.keys()
        except CheckpointNotFound:  # dropped since it was listed
            needed |= catalog.trash_record(save).uses.keys()
    for save in trashed:
        needed |= catalog.trash_record(save).uses.keys()
    return needed


def times_of(catalog: Catalog, save: SaveId, uses: Collection[PackSet]) -> dict[PackSet, float]:
    """When the saves were taken whose packs a save uses, as its manifest tells.

    Raises SaveFailed where nothing keeps one of these packs from being deleted, so that the step would be lost later.
    """
    left = {*uses}
    found: dict[PackSet, float] = {}
    if not left:
        return found
    committed = catalog.saves()
    for other in {needed.save for needed in left} & {*committed}:
        created = _created(catalog, other)
        found |= {needed: created for needed in left if needed.save == other}
    left -= found.keys()
    for other in reversed(committed):
        if not left:
            break
        found |= _times_in(catalog, other, left)
        left -= found.keys()
    if left:
        found |= _times_in_trash(catalog, left)
        left -= found.keys()
    if left and any(_is_damaged(catalog, other) for other in committed):
        found |= dict.fromkeys(left, 0.0)  # as above; once the manifest is given up, the one to be put names them
        left.clear()
    if left:
        raise SaveFailed(
            f"step {save.step}: needs packs of {min(left)}, which no committed step uses any more, so they may be "
            "deleted at any time; the step is not committed"
        )
    return found


def _created(catalog: Catalog, save: SaveId) -> float:
    try:
        return catalog.stand(save).created
    except UNREADABLE:
        return 0.0  # while its manifest cannot be read, no pack is deleted


def _is_damaged(catalog: Catalog, save: SaveId) -> bool:
    """For everybody, and for good: not one that could not be read just now."""
    try:
        catalog.stand(save)
    except (CorruptData, FormatError):
        return True
    except (CheckpointNotFound, ObjectUnreadable):
        pass
    return False


def _times_in(catalog: Catalog, save: SaveId, wanted: Collection[PackSet]) -> dict[PackSet, float]:
    try:
        uses = catalog.stand(save).uses
    except UNREADABLE:
        return {}
    return {needed: uses[needed] for needed in wanted if needed in uses}


def _times_in_trash(catalog: Catalog, wanted: Collection[PackSet]) -> dict[PackSet, float]:
    """Only records count that stay young for as long as a save may take: the grace period is twice that at least."""
    deadline_s = catalog.root().save_deadline_s
    oldest = clock.now(catalog.store) - deadline_s
    found: dict[PackSet, float] = {}
    for entry in catalog.store.scan(keys.TRASH):
        save = keys.parse_trash_key(entry.key)
        if save is None or entry.modified < oldest:
            continue
        record = _record_there(catalog, save)
        if record is None:
            continue
        times = {**record.uses, PackSet(save): record.created, PackSet(save, carried=True): record.created}
        found |= {needed: times[needed] for needed in wanted if needed in times}
    return found


def record_of(catalog: Catalog, save: SaveId, reason: str) -> TrashRecord:
    """The trash record of a committed step that is dropped. One whose manifest cannot be read has no readers."""
    try:
        stand = catalog.stand(save)
    except CheckpointNotFound:  # another sweep was faster
        return _record_there(catalog, save) or TrashRecord(save, reason)
    except UNREADABLE:
        return TrashRecord(save, reason)
    return TrashRecord(save, reason, stand.uses, stand.created)


def _record_there(catalog: Catalog, save: SaveId) -> TrashRecord | None:
    try:
        return catalog.trash_record(save)
    except UNREADABLE:
        return None
