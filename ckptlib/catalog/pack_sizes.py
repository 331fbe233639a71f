"""Checks that a pack is there with the size that a part tells. The content of the pack is not read. No torch."""

from __future__ import annotations

from ckptlib.errors import FormatError
from ckptlib.format.part import Pack
from ckptlib.stores import Store


def check_pack(store: Store, pack: Pack) -> None:
    """Raises FormatError if the pack is not there, or has another size; or the store's errors."""
    found = store.entry(pack.key)
    if found is None or found.nbytes != pack.nbytes:
        what = "none" if found is None else found.nbytes
        raise FormatError(f"{pack.key}: expected an object of {pack.nbytes} bytes, found {what}")
