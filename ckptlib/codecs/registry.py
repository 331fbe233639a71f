"""Every codec by the name that parts know it by. To add one: write its class, and name it here."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import cache

from ckptlib.codecs.codec import BaseCodec, Codec
from ckptlib.errors import FormatError

RAW = "raw"
"""No codec: the chunk's bytes as they are."""


def _patch() -> BaseCodec:
    from ckptlib.codecs.patch import PatchCodec

    return PatchCodec()


_MAKERS: Mapping[str, Callable[[], Codec | BaseCodec]] = {"patch": _patch}
"""Each imports what it needs when it is called: a writer that stores raw chunks loads no compressor."""


@cache
def find(name: str) -> Codec | BaseCodec:
    """The codec of this name. Raises FormatError for one that this ckptlib does not know."""
    make = _MAKERS.get(name)
    if make is None:
        raise FormatError(f"codec {name[:40]!r} is not one of {', '.join([RAW, *_MAKERS])}; update ckptlib")
    return make()
