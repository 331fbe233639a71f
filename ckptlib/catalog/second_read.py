"""Reads a document once more if a network may have altered it on its way, as is done for chunks."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import TypeVar

from ckptlib.errors import CorruptData, FormatError, NewerFormat
from ckptlib.stores import Store

log = logging.getLogger(__name__)

T = TypeVar("T")


def decoded(store: Store, read: Callable[[], bytes], decode: Callable[[bytes], T], document: bytes | None = None) -> T:
    """Returns `decode(read())`, or `decode(document)` if the caller has read it already.

    If `decode` fails and the store is behind a network, the document is read and decoded once more. Raises what `read`
    and `decode` raise.
    """
    document = read() if document is None else document
    try:
        return decode(document)
    except (CorruptData, FormatError) as error:
        if store.is_local or isinstance(error, NewerFormat):  # that one is whole
            raise
        log.warning("%s; it is read once more, since the network may have altered it", error)
    return decode(read())
