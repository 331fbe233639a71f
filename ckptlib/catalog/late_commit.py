"""Handles manifests that came too late: a sweep took the save for remains of a crash, and may have deleted some of it.

A proof is good for EARLY_S, or for as long as a save may take if that is less, and for half of EARLY_S if a newer job
has begun: until then no sweep deletes the save's own objects, or those that it uses. Later, for example if the machine
was suspended, or the store held the request that long, a sweep may have deleted some of them between the proof and the
manifest. Besides, sweeps go by the store's clock, and a store may have several that differ: a save that has just begun
then looks old. So a committer looks again once the manifest is there for every sweep to see, and takes the step back if
something is gone, or may be.

    a sweep sees a trash record, then lists the steps, then deletes: parts, packs, the record last
    a committer puts the manifest, then looks for a trash record, then for a part

So one of the two sees the other, whatever the clocks say.

A committer may die between the two. Nobody knows then how late its manifest came, and it is not taken back: somebody
may have come to rely on it. The next committer that finds it looks for all that it names, and says that the save failed
if some of that is gone. If the first committer had already put the record by which it takes the step back, the next one
takes it back. No torch.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from typing import NoReturn

from ckptlib.catalog.catalog import Catalog
from ckptlib.catalog.reading import each
from ckptlib.catalog.shared_documents import put_new
from ckptlib.catalog.step_objects import check_there
from ckptlib.catalog.unreadable import UNREADABLE
from ckptlib.catalog.uses import TAKEN_BACK, check_kept
from ckptlib.errors import CorruptData, FormatError, ObjectNotFound, SaveFailed
from ckptlib.format.keys import PartName, SaveId
from ckptlib.format.manifest import Manifest, TrashRecord
from ckptlib.policy.keep import EARLY_S

LATE_S = 5.0
"""A commit that took less is never late: this is far below what a save may take."""


def stay_or_take_back(
    catalog: Catalog, manifest: Manifest, seconds: float, live: bool, orphaned: bool, is_own: bool
) -> None:
    """Checks a step whose manifest was put `seconds` after the proof began. Raises SaveFailed if the step has lost
    something, or may have. It is taken back then, unless its manifest is another committer's, which may have reported
    success, or has been there for a while, so that somebody may have come to rely on it.

    `live`: it was saved just now. For a save of a job that is gone, a sweep may put a trash record at this moment, but
    deletes nothing for a grace period. `orphaned`: see `uses.times_of`. `is_own`: this committer has just put the
    manifest.
    """
    save, late = manifest.save, _is_late(catalog, seconds, orphaned)
    try:
        if live or late:
            _check_not_condemned(catalog, manifest)
        if late:
            _check_all(catalog, manifest, orphaned)
    except SaveFailed as error:
        if not is_own:
            _finish_or_stay(catalog, save, error)
        take_back(catalog, save)
        why = (
            "Its manifest came so long after its parts were proved: was the machine suspended, or the store out of "
            "reach?"
            if late
            else "A sweep, such as ckptlib gc, took it for a save that crashed long ago: compare the clocks of the "
            "store, and of the machines that put files there, which differ by more than the grace period."
        )
        raise SaveFailed(f"{error}. {why} The step is taken back") from error


def check_found(catalog: Catalog, manifest: Manifest) -> None:
    """Checks a step whose manifest another committer has put, which may have died before it looked. Raises SaveFailed
    if the step lacks something, or has a trash record."""
    try:
        _check_not_condemned(catalog, manifest)
        check_packs(catalog, manifest.save, manifest.parts)
    except SaveFailed as error:
        _finish_or_stay(catalog, manifest.save, error)


def _finish_or_stay(catalog: Catalog, save: SaveId, error: SaveFailed) -> NoReturn:
    """Leaves a step that lacks something, since somebody may rely on it; but takes it back if its committer had already
    put the record for that when it died, or the store went away. Raises SaveFailed in any case."""
    with suppress(*UNREADABLE):
        if catalog.trash_record(save).reason == TAKEN_BACK:
            take_back(catalog, save)
            raise SaveFailed(f"{error}. The step was about to be taken back, which is done now") from error
    raise SaveFailed(
        f"{error}. Where it is listed, it may not load: its manifest was put by another one, or some time ago, and "
        "stays. `ckptlib verify` tells what is gone"
    ) from error


def check_packs(catalog: Catalog, save: SaveId, names: Sequence[PartName]) -> None:
    """Raises SaveFailed if a pack that these parts name is gone or of another size, or a part cannot be read any
    more."""
    try:
        check_there(catalog, {pack.key: pack.nbytes for part in each(catalog.part, names) for pack in part.packs})
    except (CorruptData, FormatError, ObjectNotFound) as error:
        raise SaveFailed(f"step {save.step}: {error}") from error


def take_back(catalog: Catalog, save: SaveId) -> None:
    """Takes a step off the list. Its trash record keeps neither its packs nor those that it uses; nobody may rely on
    it."""
    put_new(catalog.store, save.trash_key, TrashRecord(save, TAKEN_BACK).encode())
    catalog.store.delete(save.manifest_key)


def _is_late(catalog: Catalog, seconds: float, orphaned: bool) -> bool:
    """Whether a proof that began so long ago may no longer be good. Asks the store only after LATE_S."""
    return seconds > LATE_S and seconds > min(catalog.root().save_deadline_s, EARLY_S / (2 if orphaned else 1))


def _check_not_condemned(catalog: Catalog, manifest: Manifest) -> None:
    """Raises SaveFailed if the save has a trash record, or a sweep has deleted its parts; by two reads of a byte.

    The record is looked for first. A sweep deletes it last, so without it, either all parts are there or none.
    """
    save = manifest.save
    if catalog.is_there(save.trash_key):
        raise SaveFailed(f"step {save.step}: has a trash record, so a sweep may have deleted some of it")
    if not catalog.is_there(manifest.parts[0].key):
        raise SaveFailed(f"step {save.step}: a sweep has deleted its parts")


def _check_all(catalog: Catalog, manifest: Manifest, orphaned: bool) -> None:
    """Checks that all packs of its parts are there, and that packs of other saves were kept until the manifest came.

    From then on the manifest keeps them, so a sweep may rightly have dropped the step that kept them before.
    """
    save = manifest.save
    put = catalog.store.entry(save.manifest_key)
    if put is None:
        raise SaveFailed(f"step {save.step}: its manifest is not there any more")
    check_kept(catalog, manifest, orphaned, put.modified)
    check_packs(catalog, save, manifest.parts)
