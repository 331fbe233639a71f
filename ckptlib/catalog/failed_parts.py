"""What ranks have published of a save whose parts will not come. A name tells that a rank failed; its document, why.
No torch."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial

from ckptlib.catalog.catalog import Catalog
from ckptlib.catalog.second_read import decoded
from ckptlib.errors import CorruptData, FormatError, ObjectUnreadable, SaveFailed
from ckptlib.format.keys import PartName, SaveId
from ckptlib.format.part import FailedPart


def failure(catalog: Catalog, name: PartName) -> FailedPart:
    """Returns what a rank has published. Raises CorruptData, FormatError, ObjectNotFound, ObjectUnreadable."""
    store = catalog.store
    return decoded(store, partial(store.get, name.key), partial(FailedPart.decode, name))


def raise_if_failed(
    catalog: Catalog, save: SaveId, found: Mapping[int, Sequence[PartName]] | None = None, final: bool = True
) -> None:
    """Raises SaveFailed if a rank has published that its part will not come, and has put no good one.

    `found`: the parts that are there, if they are known. `final`: the word of rank 0 counts beside a good part, too: it
    has given up the commit, and others act upon that.
    """
    found = catalog.parts(save) if found is None else found
    for names in found.values():
        if names and not any(name.ok for name in names):
            _fail(catalog, names[0])
    given_up = [name for name in found.get(0, ()) if not name.ok]
    if final and given_up:
        _fail(catalog, given_up[0])


def _fail(catalog: Catalog, name: PartName) -> None:
    """Raises SaveFailed, also if the document cannot be read: then only the reason is not known."""
    try:
        why = failure(catalog, name).error
    except (CorruptData, FormatError, ObjectUnreadable) as error:
        why = f"why cannot be read: {error}"
    raise SaveFailed(f"step {name.save.step}: rank {name.rank} failed: {why}")
