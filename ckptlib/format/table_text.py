"""Decodes tables from ckptlib's own text. Tables of a thousand ranks mostly differ in one column, the boxes' offsets.

The other columns are decoded once for all tables with the same text, and each different row of the offsets once. This
module accepts what `Table.decode_cuts` accepts of the same text, and returns the same table. For a text that is not
exactly as expected it returns None, and the caller decodes it as any JSON, which also says what is wrong with it. No
I/O.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from functools import lru_cache

import numpy as np

from ckptlib.errors import FormatError
from ckptlib.format.box import Box
from ckptlib.format.documents import Fields
from ckptlib.format.layout import decode_shapes
from ckptlib.format.table import Codes, Table, distinct
from ckptlib.format.values import loads

MAX_BYTES = 2**20
"""The most bytes of the columns other than the offsets: some 50,000 shards. The cache holds that for a few tables."""

_BEFORE = re.compile(rb'\{"layout":"[0-9a-f]{32}","shards":\{"tensor":\[[0-9,]*\],"offset":')
_BEHIND = re.compile(rb',"shape":(\[[0-9,\[\]]*\]),"chunks":\[[0-9,]*\]\},"chunks":\{"nbytes":\[[0-9,]*\]\}\}')
_OFFSET, _SHAPE = b'"offset":', b',"shape":'


def decode_cuts(text: bytes) -> Table | None:
    """Returns the table in this text, with chunks that must be `placed`. None: decode the text as any JSON."""
    begin, end = text.find(_OFFSET) + len(_OFFSET), text.rfind(_SHAPE)
    if not len(_OFFSET) <= begin < end or begin + len(text) - end > MAX_BYTES:
        return None
    try:
        others = _others(text[:begin], text[end:])
        offsets = _rows("offset", text[begin:end])
    except FormatError:
        return None
    if others is None or offsets is None or len(offsets.codes) != len(others.shapes.codes):
        return None
    return _with_offsets(others, offsets)


@dataclass(frozen=True, slots=True)
class _Rows:
    """A column of shapes or offsets."""

    distinct: tuple[tuple[int, ...], ...]
    codes: Codes
    """Position in `distinct`, per row."""


@dataclass(frozen=True, slots=True)
class _Others:
    """All columns but the offsets."""

    table: Table
    """A table with other offsets than those asked for."""
    shapes: _Rows


@lru_cache(maxsize=8)
def _others(before: bytes, behind: bytes) -> _Others | None:
    match = _BEHIND.fullmatch(behind)
    if match is None or _BEFORE.fullmatch(before) is None:
        return None
    shapes = _rows("shape", match[1])
    if shapes is None:
        return None
    # Nothing here depends on where the boxes lie: the shapes stand in for the offsets.
    table = Table.decode_cuts(Fields(loads(before + match[1] + behind), "table"))
    assert len(table.first_chunks) == len(shapes.codes) == len(table.tensor_codes)
    return _Others(table, shapes)


def _rows(name: str, text: bytes) -> _Rows | None:
    """Reads a column. Raises FormatError for an invalid one and for one that only the text around it explains; returns
    None for an unusual one."""
    if text[:2] != b"[[" or text[-2:] != b"]]" or len(text) < 4:
        return None
    inner = text[2:-2]
    rows = inner.split(b"],[")
    if inner.count(b"[") != len(rows) - 1 or inner.count(b"]") != len(rows) - 1:
        return None  # so no row holds a bracket, and each is JSON of its own if all are together
    index = {row: i for i, row in enumerate(dict.fromkeys(rows))}
    found = decode_shapes(name, Fields({name: loads(b"[[" + b"],[".join(index) + b"]]")}, "table"))
    if len(found) != len(index) or len({*map(hash, found)}) != len(found):
        return None
    return _Rows(tuple(found), np.fromiter(map(index.__getitem__, rows), np.int64, len(rows)))


def _with_offsets(others: _Others, offsets: _Rows) -> Table | None:
    shapes, num = others.shapes, len(others.shapes.distinct)
    pairs, _, codes = distinct(offsets.codes * num + shapes.codes, len(offsets.distinct) * num)
    places = [(offsets.distinct[pair // num], shapes.distinct[pair % num]) for pair in pairs.tolist()]
    if len({*map(hash, places)}) != len(places):
        return None
    boxes = [Box(*at) for at in places]
    return others.table.with_boxes(tuple(map(boxes.__getitem__, codes.tolist())), codes)
