"""Cuts a chunk of a table into rows, which are compared and stored one by one.

A chunk is any piece of a tensor, so it may begin and end inside a row:

    [lead: the end of a row] [row] [row] ... [row] [rest: the beginning of a row]

Lead and rest are its edges. Knows nothing of what becomes of rows.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from ckptlib.codecs.codec import Content

MIN_ROW_BYTES = 64
"""Shorter rows are joined: the number of a row takes a byte or two, and its hash takes twelve."""

MAX_ROW_BYTES = 16 * 1024
"""Longer rows are cut into pieces of `PIECE_BYTES`: nothing is gained unless a chunk holds many rows."""

PIECE_BYTES = 1024

_ITEM_BYTES = {
    **dict.fromkeys(("bool", "uint8", "int8", "float4_e2m1fn_x2", "float8_e4m3fn", "float8_e5m2"), 1),
    **dict.fromkeys(("float8_e4m3fnuz", "float8_e5m2fnuz", "float8_e8m0fnu"), 1),
    **dict.fromkeys(("uint16", "int16", "float16", "bfloat16"), 2),
    **dict.fromkeys(("uint32", "int32", "float32", "complex32"), 4),
    **dict.fromkeys(("uint64", "int64", "float64", "complex64"), 8),
    "complex128": 16,
}


@dataclass(frozen=True, slots=True)
class Rows:
    """The rows of one chunk."""

    nbytes: int
    """Bytes of each row."""
    lead: int
    """Bytes before the first row, fewer than `nbytes`."""
    chunk_nbytes: int

    @property
    def num(self) -> int:
        return max(0, self.chunk_nbytes - self.lead) // self.nbytes

    @property
    def edges_nbytes(self) -> int:
        """Number of bytes that lie in no row."""
        return self.chunk_nbytes - self.num * self.nbytes

    def table(self, chunk: memoryview) -> NDArray[np.uint8]:
        """Returns the rows, [num, nbytes]: a view, writable if the chunk is."""
        data = np.frombuffer(chunk, np.uint8)
        return data[self.lead : self.lead + self.num * self.nbytes].reshape(self.num, self.nbytes)

    def edges(self, chunk: memoryview) -> tuple[NDArray[np.uint8], NDArray[np.uint8]]:
        """Returns lead and rest: views, writable if the chunk is."""
        data = np.frombuffer(chunk, np.uint8)
        return data[: self.lead], data[self.lead + self.num * self.nbytes :]


def cut(content: Content, chunk_nbytes: int) -> Rows | None:
    """Returns the rows of a chunk, or None if it holds several dtypes, an unknown one, or no whole row."""
    itemsize = _ITEM_BYTES.get(content.dtype)
    if itemsize is None:
        return None
    nbytes = max(1, content.row) * itemsize
    if nbytes > MAX_ROW_BYTES:
        nbytes = PIECE_BYTES
    elif nbytes < MIN_ROW_BYTES:
        nbytes *= -(-MIN_ROW_BYTES // nbytes)
    rows = Rows(nbytes, content.lead * itemsize % nbytes, chunk_nbytes)
    return rows if rows.num else None
