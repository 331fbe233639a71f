"""The bytes of one chunk of a part, wherever they lie in packs, and whatever they are stored as. No torch.

The part's table, not the frame itself, says how much memory is taken.
"""

from __future__ import annotations

from collections.abc import Callable

from ckptlib.codecs import registry
from ckptlib.errors import CorruptData
from ckptlib.format.digests import digester
from ckptlib.format.part import Part

ReadInto = Callable[[str, int, memoryview], None]
"""Fills a buffer with bytes of a pack, from an offset on."""

UNSEEN_BYTES = 64 * 1024 * 1024
"""The most memory that is allocated on the word of a document; ckptlib writes chunks of a sixteenth of it."""


def read_chunk(read: ReadInto, part: Part, chunk: int) -> memoryview:
    """Returns a chunk of a part, decoded, but not compared with its digest.

    Raises as `read` does, FormatError, CorruptData.
    """
    table = part.table
    pack, offset, stored = part.packs[table.packs[chunk]].key, table.offsets[chunk], part.stored[chunk]
    check_there(read, pack, offset, stored)
    data = memoryview(bytearray(stored))
    read(pack, offset, data)
    if chunk not in part.codings:
        return data
    out = memoryview(bytearray(table.nbytes[chunk]))
    decode_chunk(read, part, chunk, data, out)
    return out


def decode_chunk(read: ReadInto, part: Part, chunk: int, frame: memoryview, out: memoryview) -> None:
    """Decodes a frame into `out`, of the chunk's size; reads its base if it has one.

    Raises as `read` does, FormatError for a malformed frame, CorruptData for a base that does not match its digest.
    """
    coding = part.codings[chunk]
    if coding.base is None:
        registry.decode(coding.codec, frame, out)
        return
    base, pack = coding.base, part.packs[coding.base.pack].key
    data = memoryview(bytearray(base.stored))
    read(pack, base.offset, data)
    if base.codec is not None:
        whole = memoryview(bytearray(len(out)))
        registry.decode(base.codec, data, whole)
        data = whole
    found = digester(part.algorithm)(data)
    if found != base.digest:
        raise CorruptData(
            f"{pack} [{base.offset}:+{base.stored}], which later chunks are stored as changes of, does not match "
            f"{base.digest} (got {found}); the object was altered after it was written"
        )
    registry.decode(coding.codec, frame, out, data)


def check_there(read: ReadInto, pack: str, offset: int, nbytes: int) -> None:
    """Raises as `read` does if a pack ends before a range that is too large to allocate memory for unseen."""
    if nbytes > UNSEEN_BYTES:
        read(pack, offset + nbytes - 1, memoryview(bytearray(1)))
