"""A manifest that was put long after its parts were proved: the machine slept, or the store kept the request that long.

A proof is good for as long as a save may take: until then what the save uses, and its own objects, stay, whatever
sweeps there are. Later, a sweep may have deleted some of them between the proof and the manifest. So whoever comes late
looks again, now that the manifest is there for every sweep to see, and takes the step back where something is gone. No
torch.
"""

from __future__ import annotations

from ckptlib.catalog.catalog import Catalog
from ckptlib.catalog.elapsed import Elapsed
from ckptlib.catalog.shared_documents import put_new
from ckptlib.catalog.uses import times_of
from ckptlib.errors import SaveFailed
from ckptlib.format.manifest import Manifest, TrashRecord

LATE_S = 5.0
"""Nobody is late who took less: far below what a save may take."""


def is_late(catalog: Catalog, elapsed: Elapsed) -> bool:
    """Whether a proof that began then may be good no longer. Asks the store only where it may."""
    seconds = elapsed.at_most()
    return seconds > LATE_S and seconds > catalog.root().save_deadline_s


def stay_or_take_back(catalog: Catalog, manifest: Manifest) -> None:
    """Of a step whose manifest came late. Raises SaveFailed when it has lost something, or may: it is taken back then.

    Its trash record says nothing of what it uses: nobody may rely on that.
    """
    save, store = manifest.save, catalog.store
    every = frozenset(range(manifest.world_size))
    try:
        if any(entry.key == save.trash_key for entry in store.scan(save.trash_key)):
            raise SaveFailed(f"step {save.step}: has a trash record, so a sweep may have deleted some of it")
        there = {name for names in catalog.parts(save).values() for name in names}
        if not there.issuperset(manifest.parts):
            raise SaveFailed(f"step {save.step}: a sweep has deleted parts of it")
        times_of(catalog, save, {of: manifest.users.get(of, every) for of in manifest.uses})
    except SaveFailed as error:
        put_new(store, save.trash_key, TrashRecord(save, "committed too late").encode())
        store.delete(save.manifest_key)
        raise SaveFailed(
            f"{error}. Its manifest came so long after its parts were proved: was the machine suspended, or the store "
            "out of reach? The step is taken back"
        ) from error
