"""All codecs, by their names in parts. To add one: write its class, and name it here."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import cache

from ckptlib.codecs.codec import BaseCodec, Codec
from ckptlib.errors import FormatError

RAW = "raw"
"""Name for no codec: the chunk's bytes as they are."""


def _planes() -> Codec:
    from ckptlib.codecs.planes import Planes

    return Planes()


def _zstd() -> Codec:
    from ckptlib.codecs.zstd import Zstd

    return Zstd()


def _patch() -> BaseCodec:
    from ckptlib.codecs.patch import PatchCodec

    return PatchCodec()


def _linear8() -> Codec:
    from ckptlib.codecs.lossy8 import Linear8

    return Linear8()


def _logarithmic8() -> Codec:
    from ckptlib.codecs.lossy8 import Logarithmic8

    return Logarithmic8()


def _bfloat16() -> Codec:
    from ckptlib.codecs.bfloat16 import Bfloat16

    return Bfloat16()


_MAKERS: Mapping[str, Callable[[], Codec | BaseCodec]] = {
    "planes": _planes,
    "zstd": _zstd,
    "patch": _patch,
    "lossy8-linear": _linear8,
    "lossy8-log": _logarithmic8,
    "lossy-bfloat16": _bfloat16,
}
"""Each maker imports what it needs when it is called: a writer that stores raw chunks loads no compressor."""


@cache
def find(name: str) -> Codec | BaseCodec:
    """Returns the codec of this name. Raises FormatError for a name that this ckptlib does not know."""
    make = _MAKERS.get(name)
    if make is None:
        raise FormatError(f"codec {name[:40]!r} is not one of {', '.join([RAW, *_MAKERS])}; update ckptlib")
    return make()


def bound(name: str, frame: memoryview) -> tuple[float, float] | None:
    """Returns the largest errors that a frame claims (see `Loss`), or None if its codec is lossless.

    Raises FormatError as the codecs do.
    """
    codec = find(name)
    if codec.lossless:
        return None
    from ckptlib.codecs.lossy_codec import LossyCodec  # for the few who ask for it

    assert isinstance(codec, LossyCodec)
    absolute, relative = codec.bound(frame)
    return absolute, relative


def decode(name: str, frame: memoryview, out: memoryview, base: memoryview | None = None) -> None:
    """Fills `out` with the bytes that a frame of this codec encodes. `base`: the base it was made against, if any.

    Raises FormatError as the codecs do, and if a base is given to a codec that takes none, or is missing for one that
    takes one.
    """
    codec = find(name)
    if isinstance(codec, Codec) and base is None:
        codec.decode(frame, out)
    elif isinstance(codec, BaseCodec) and base is not None:
        codec.decode(frame, base, out)
    else:
        raise FormatError(f"codec {name!r} {'has no base' if base is None else 'takes no base'}")
