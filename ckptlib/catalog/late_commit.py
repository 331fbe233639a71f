"""A manifest that came too late: a sweep took its save for the remains of a crash, and may have deleted some of it.

A proof is good for EARLY_S, or for as long as a save may take where that is less, and for half of EARLY_S where a newer
job has begun: until then what the save uses, and its own objects, stay, whatever sweeps there are. Later, as when the
machine slept, or the store kept the request that long, a sweep may have deleted some of them between the proof and the
manifest. And a sweep goes by the store's clock, which may be several that differ: then a save that has just begun looks
old. So whoever commits looks again, now that the manifest is there for every sweep to see, and takes the step back
where something is gone, or may be.

    a sweep sees a trash record, then lists the steps, then deletes: parts, packs, the record last
    a committer puts the manifest, then looks for a trash record, then for a part

So one of the two sees the other, whatever the clocks say.

A committer may end between the two. Nobody knows then how late its manifest came, and it is not taken back: somebody
may have come to rely on it. Whoever finds it looks for all that it names, and says that the save failed where some of
that is gone. A step whose committer has put the record by which it takes it back is taken back by whoever tries next.
No torch.
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
"""Nobody is late who took less: far below what a save may take."""


def stay_or_take_back(
    catalog: Catalog, manifest: Manifest, seconds: float, live: bool, orphaned: bool, is_own: bool
) -> None:
    """Of a step whose manifest was put so many seconds after the proof began. `live`: it was saved just now, not
    by a job that is gone, of whose saves a sweep may have put trash records in this moment, a grace period before it
    deletes any. `orphaned`: see `uses.times_of`. `is_own`: this committer has put it, and just now. Raises SaveFailed
    when the step has lost something, or may: it is taken back then, unless it is another one's, who may have said that
    it is there to stay, or has been there for a while, in which somebody may have come to rely on it.
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
    """Of a step whose manifest another one has put, who may have ended before it looked. Raises SaveFailed."""
    try:
        _check_not_condemned(catalog, manifest)
        check_packs(catalog, manifest.save, manifest.parts)
    except SaveFailed as error:
        _finish_or_stay(catalog, manifest.save, error)


def _finish_or_stay(catalog: Catalog, save: SaveId, error: SaveFailed) -> NoReturn:
    """Of a step that lacks something, and that somebody may rely on: unless its committer was about to take it back,
    and has put the record for that when it ended, or the store went away. Raises SaveFailed."""
    with suppress(*UNREADABLE):
        if catalog.trash_record(save).reason == TAKEN_BACK:
            take_back(catalog, save)
            raise SaveFailed(f"{error}. The step was about to be taken back, which is done now") from error
    raise SaveFailed(
        f"{error}. Where it is listed, it may not load: its manifest was put by another one, or some time ago, and "
        "stays. `ckptlib verify` tells what is gone"
    ) from error


def check_packs(catalog: Catalog, save: SaveId, names: Sequence[PartName]) -> None:
    """Raises SaveFailed where a pack that these parts name is not as they say, or one of them cannot be read any
    more."""
    try:
        check_there(catalog, {pack.key: pack.nbytes for part in each(catalog.part, names) for pack in part.packs})
    except (CorruptData, FormatError, ObjectNotFound) as error:
        raise SaveFailed(f"step {save.step}: {error}") from error


def take_back(catalog: Catalog, save: SaveId) -> None:
    """Its trash record keeps neither its packs nor those that it uses: nobody may rely on that."""
    put_new(catalog.store, save.trash_key, TrashRecord(save, TAKEN_BACK).encode())
    catalog.store.delete(save.manifest_key)


def _is_late(catalog: Catalog, seconds: float, orphaned: bool) -> bool:
    """Whether a proof that began so long ago may be good no longer. Asks the store only where it may."""
    return seconds > LATE_S and seconds > min(catalog.root().save_deadline_s, EARLY_S / (2 if orphaned else 1))


def _check_not_condemned(catalog: Catalog, manifest: Manifest) -> None:
    """By two reads of a byte. In this order: the record goes last, so without it either all parts are there or none."""
    save = manifest.save
    if catalog.is_there(save.trash_key):
        raise SaveFailed(f"step {save.step}: has a trash record, so a sweep may have deleted some of it")
    if not catalog.is_there(manifest.parts[0].key):
        raise SaveFailed(f"step {save.step}: a sweep has deleted its parts")


def _check_all(catalog: Catalog, manifest: Manifest, orphaned: bool) -> None:
    """All of its parts, and what it uses of other saves. Since the manifest came, that has kept it: a sweep may have
    dropped, by right, the step that kept it before."""
    save = manifest.save
    put = catalog.store.entry(save.manifest_key)
    if put is None:
        raise SaveFailed(f"step {save.step}: its manifest is not there any more")
    check_kept(catalog, manifest, orphaned, put.modified)
    check_packs(catalog, save, manifest.parts)
