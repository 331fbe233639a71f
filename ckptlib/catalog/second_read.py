"""A document that a network may have altered on its way is read once more, as chunks are."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import TypeVar

from ckptlib.errors import CorruptData, FormatError
from ckptlib.stores import Store

log = logging.getLogger(__name__)

T = TypeVar("T")


def decoded(store: Store, read: Callable[[], bytes], decode: Callable[[bytes], T], document: bytes | None = None) -> T:
    """What `decode` makes of what `read` gives, the first time of `document`, where the caller has read it already.
    Raises what both raise; of a store behind a network, `decode` has had a second reading then.
    """
    document = read() if document is None else document
    try:
        return decode(document)
    except (CorruptData, FormatError) as error:
        if store.is_local:
            raise
        log.warning("%s; it is read once more, since the network may have altered it", error)
    return decode(read())
