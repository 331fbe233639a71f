"""Checks the safetensors headers of packs against the rows of their parts. Pure; `writer.packs` writes them.

No load reads a header. It is for other programs that open a pack, and a header that differs from what its part says
shows that the object was altered.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import numpy as np

from ckptlib.errors import FormatError
from ckptlib.format import dtypes, keys
from ckptlib.format.box import Box
from ckptlib.format.layout import Layout, TensorEntry
from ckptlib.format.part import Part
from ckptlib.format.tagged_values import brief
from ckptlib.format.values import Json, loads

MAX_HEAD_BYTES = 100_000_000
"""The largest header that safetensors' own reader accepts."""


_TOLD = frozenset(["dtypes", "boxes", "codecs"])
"""Metadata that are JSON objects with a key for each entry that does not tell the fact itself."""

_EARLY = frozenset(["ckptlib", "save", "rank", "layout", "dtypes"])
"""All metadata of packs that were written before `boxes` existed."""


@dataclass(frozen=True, slots=True)
class HeadEntry:
    """One entry of a header."""

    dtype: str
    """The name that safetensors has for it."""
    shape: tuple[int, ...]
    start: int
    """First byte in the object."""
    stop: int
    """Last byte + 1 in the object."""


def expected_head(part: Part, layout: Layout, number: int) -> tuple[dict[str, str], dict[str, HeadEntry]]:
    """Returns the metadata, and the entries by name, that a part's pack should have. `number`: the pack's position."""
    table = part.table
    entries: dict[str, HeadEntry] = {}
    foreign: dict[str, str] = {}
    codecs: dict[str, Json] = {}
    boxes: dict[str, Json] = {}
    sizes = table.sizes(layout)
    for shard, begin in enumerate(table.begins(sizes)):
        entry, box, element = layout.tensors[table.tensors[shard]], table.boxes[shard], 0
        word, chunks = dtypes.safetensors_name(entry.dtype), table.chunks(shard)
        for chunk in chunks:
            start, nbytes = (begin, sizes[shard]) if len(chunks) == 1 else (table.offsets[chunk], table.nbytes[chunk])
            elements = nbytes // dtypes.itemsize(entry.dtype)
            if table.packs[chunk] == number:
                name, coding = _name(entry, box, element), part.codings.get(chunk)
                shape = box.shape if len(chunks) == 1 else (elements,)
                if coding is not None:
                    codecs[name] = coding.codec
                if coding is not None or not dtypes.has_own_word(entry.dtype):
                    foreign[name] = entry.dtype
                    nbytes = nbytes if coding is None else coding.stored
                    shape = (nbytes,)
                if name in foreign or len(shape) != len(entry.shape) or shape[1:] != entry.shape[1:]:
                    boxes[name] = [list(entry.shape), list(box.offset), list(box.shape)]
                entries[name] = HeadEntry("U8" if name in codecs else word, shape, start, start + nbytes)
            element += elements
    metadata = {
        "ckptlib": "2" if codecs else "1",
        "save": str(keys.pack_save(part.packs[number].key)),
        "rank": f"{part.rank:06d}",
        "layout": table.layout,
    }
    if foreign:
        metadata["dtypes"] = json.dumps(foreign)
    if boxes:
        metadata["boxes"] = json.dumps(boxes)
    if codecs:
        metadata["codecs"] = json.dumps(codecs)
    return metadata, entries


def _name(entry: TensorEntry, box: Box, element: int) -> str:
    """Returns <tensor>@<flat index in the whole tensor of the box's element>."""
    if not box.shape:
        return f"{entry.name}@0"
    index = np.unravel_index(element, box.shape)
    at = tuple(int(i) + o for i, o in zip(index, box.offset, strict=True))
    return f"{entry.name}@{int(np.ravel_multi_index(at, entry.shape))}"


def check_head(
    head: bytes, nbytes: int, metadata: Mapping[str, str], entries: Mapping[str, HeadEntry], where: str
) -> None:
    """Raises FormatError unless `head`, the first bytes of an object of `nbytes`, is the safetensors header of exactly
    these entries, with slack in all gaps between them.

    Further metadata is allowed, except dtypes, boxes and codecs. Packs of early versions have no boxes.
    """
    length = int.from_bytes(head[:8], "little")
    if len(head) < 8 or length > len(head) - 8:
        raise FormatError(f"{where}: the header's length is {length}, but data begins at {len(head)}")
    text = head[8 : 8 + length]
    found = _loads(text.rstrip(b" "), f"{where}: the header is")
    if not isinstance(found, dict) or not text.startswith(b"{"):
        raise FormatError(f"{where}: the header is no JSON object")
    _check_metadata(found.pop("__metadata__", None), metadata, where)
    _check_entries(dict(_rows(found, 8 + length, where)), 8 + length, nbytes, entries, where)


def _loads(data: bytes, what: str) -> Json:
    try:
        return loads(data)
    except FormatError as error:
        raise FormatError(f"{what} {error}") from None


def _check_metadata(found: Json, wanted: Mapping[str, str], where: str) -> None:
    if not isinstance(found, dict):
        raise FormatError(f"{where}: the header has no __metadata__")
    early = found.keys() <= _EARLY  # a pack that has metadata of later versions, but no boxes, has lost them
    for name in {*wanted, *(_TOLD & found.keys())} - ({"boxes"} if early else set()):
        got, expected = found.get(name), wanted.get(name)
        if name in _TOLD and isinstance(got, str) and expected is not None:  # order and spaces are free
            what = f"{where}: the header's metadata {name!r} is"
            same = _loads(got.encode(errors="surrogatepass"), what) == loads(expected.encode())
        else:
            same = got == expected
        if not same:
            raise FormatError(f"{where}: the header's metadata {name!r} is {brief(got)}, expected {brief(expected)}")


def _rows(found: Mapping[str, Json], base: int, where: str) -> Iterator[tuple[str, HeadEntry]]:
    for name, entry in found.items():
        match entry:
            case {"dtype": str(dtype), "shape": list(shape), "data_offsets": [int(start), int(stop)], **more} if (
                not more and 0 <= start <= stop and all(type(n) is int for n in shape)
            ):
                yield name, HeadEntry(dtype, tuple(shape), base + start, base + stop)  # type: ignore[arg-type]
            case _:
                raise FormatError(f"{where}: no entry of a safetensors header: {name[:80]!r}: {brief(entry)}")


def _check_entries(
    found: Mapping[str, HeadEntry], start: int, nbytes: int, wanted: Mapping[str, HeadEntry], where: str
) -> None:
    """Checks that the entries are those wanted and slack, and follow one another from `start` to `nbytes`."""
    num_slack = 0
    for name, row in sorted(found.items(), key=lambda item: (item[1].start, item[1].stop)):
        if row.start != start:
            raise FormatError(
                f"{where}: {name!r} begins at {row.start} by the header, but what is before it ends at {start}"
            )
        if name in wanted:
            if row != wanted[name]:
                raise FormatError(
                    f"{where}: {name!r} is {_text(row)} by the header, and {_text(wanted[name])} by the part"
                )
        elif name == f"@slack.{num_slack}" and row == HeadEntry("U8", (row.stop - start,), start, row.stop):
            num_slack += 1
        else:
            raise FormatError(f"{where}: the header tells of {name[:200]!r}, and the part does not")
        start = row.stop
    if start != nbytes:
        raise FormatError(f"{where}: the header's last entry ends at {start}, the object at {nbytes}")
    absent = wanted.keys() - found.keys()
    if absent:
        raise FormatError(f"{where}: the part tells of {min(absent)[:200]!r}, and the header does not")


def _text(entry: HeadEntry) -> str:
    return f"{entry.dtype} {list(entry.shape)} at [{entry.start}:{entry.stop}]"
