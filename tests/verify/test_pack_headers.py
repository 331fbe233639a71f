"""What a pack's header may say: exactly what its part's rows do, bit for bit but for the order of entries."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace

import pytest
from helpers.packs import pack
from safetensors import deserialize
from support import ATTEMPT

from ckptlib.errors import FormatError
from ckptlib.format import body_layout
from ckptlib.format.box import Box
from ckptlib.format.digests import XXH3
from ckptlib.format.keys import GenerationId, SaveId
from ckptlib.format.layout import ByHand, Layout, TensorEntry
from ckptlib.format.part import Pack, Part
from ckptlib.verify.pack_headers import check_head, expected_head

SAVE = SaveId(7, GenerationId(1, "0" * 8))
LAYOUT = Layout(
    1,
    tuple(
        TensorEntry(name, dtype, shape, ByHand())
        for name, dtype, shape in [
            ("c", "complex128", (3,)),
            ("deep/name \u00e9\u4e2d", "bfloat16", (3, 5)),
            ("fp8", "float8_e4m3fn", (7,)),
            ("large", "float32", (300, 1000)),
            ("scalar", "int64", ()),
        ]
    ),
)
BOXES = [
    ("c", Box((0,), (3,))),
    ("deep/name \u00e9\u4e2d", Box((1, 2), (2, 3))),
    ("fp8", Box((5,), (2,))),
    ("large", Box((100, 250), (150, 500))),
    ("scalar", Box((), ())),
]


def made(pack_nbytes: int = 1 << 40) -> tuple[Part, list[bytes]]:
    """A part by the writer's own planning, and its packs."""
    packing = pack(body_layout.lay_out(LAYOUT, BOXES, chunk_bytes=1 << 17), LAYOUT, pack_nbytes)
    packs = tuple(Pack(SAVE.pack_key(0, ATTEMPT, n), shape.nbytes, 0.0) for n, shape in enumerate(packing.packs))
    digests = ("0" * 32,) * len(packing.table.nbytes)
    part = Part(SAVE, 0, 1, ATTEMPT, packing.table, packs, XXH3, digests, {}, {}, 0.0)
    return part, [s.head(SAVE, 0, LAYOUT.digest) + bytes(s.nbytes - s.head_nbytes) for s in packing.packs]


def check(part: Part, number: int, data: bytes) -> None:
    first = min(o for o, p in zip(part.table.offsets, part.table.packs, strict=True) if p == number)
    check_head(data[:first], len(data), *expected_head(part, LAYOUT, number), "pack")


@pytest.mark.parametrize("pack_nbytes", [1 << 40, 1 << 17])
def test_takes_what_the_writer_writes(pack_nbytes: int) -> None:
    part, packs = made(pack_nbytes)
    assert (len(packs) > 1) == (pack_nbytes == 1 << 17)
    for number, data in enumerate(packs):
        deserialize(data)
        check(part, number, data)


def test_every_flipped_bit_is_found() -> None:
    part, [data] = made()
    expected = expected_head(part, LAYOUT, 0)
    head = data[: part.table.offsets[0]]
    for position in range(len(head)):
        for bit in range(8):
            flipped = bytearray(head)
            flipped[position] ^= 1 << bit
            if b"\\u00" in head and json_equal(flipped, head):
                continue  # "\u00E9" is "\u00e9"
            with pytest.raises(FormatError, match="pack"):
                check_head(bytes(flipped), len(data), *expected, "pack")


def json_equal(a: bytes | bytearray, b: bytes) -> bool:
    return a[:8] == b[:8] and a[8:].lower() == b[8:].lower() and _loads(a[8:]) == _loads(b[8:])


def _loads(text: bytes | bytearray) -> object:
    """What a header says; what is JSON within it, read as well."""
    try:
        found = json.loads(bytes(text))
        told = [json.loads(found["__metadata__"].pop(name)) for name in ("dtypes", "boxes")]
        return found, told
    except (ValueError, KeyError):
        return None


def rewritten(data: bytes, change: Callable[[dict[str, dict[str, object]]], object]) -> bytes:
    """The same pack with a header that safetensors takes, too."""
    length = int.from_bytes(data[:8], "little")
    header = json.loads(data[8 : 8 + length])
    change(header)
    text = json.dumps(header, separators=(",", ":")).encode()
    assert len(text) <= length
    return data[:8] + text.ljust(length) + data[8 + length :]


def test_order_of_entries_is_free() -> None:
    part, [data] = made()

    def reverse(header: dict[str, dict[str, object]]) -> None:
        for name in reversed(list(header)):
            header[name] = header.pop(name)

    check(part, 0, rewritten(data, reverse))


LIES = {
    "renamed": lambda h: h.update({"fp9@5": h.pop("fp8@5")}),
    "another element": lambda h: h.update({"fp8@4": h.pop("fp8@5")}),
    "reshaped": lambda h: h["deep/name \u00e9\u4e2d@7"].update(shape=[3, 2]),
    "retyped": lambda h: h["deep/name \u00e9\u4e2d@7"].update(dtype="F16"),
    "swapped": lambda h: h.update({"large@100250": h["large@138706"], "large@138706": h["large@100250"]}),
    "forgotten": lambda h: (h["@slack.1"].update(data_offsets=[0, 1]), h.pop("scalar@0")),
    "torch's dtype": lambda h: h["__metadata__"].update(dtypes='{"c@0": "complex64"}'),
    "another box": lambda h: h["__metadata__"].update(boxes=h["__metadata__"]["boxes"].replace("[1,2]", "[1,3]")),
    "boxes of nothing": lambda h: h["__metadata__"].update(boxes="{}"),
    "boxes that are no text": lambda h: h["__metadata__"].update(boxes=1),
    "no dtypes": lambda h: h["__metadata__"].pop("dtypes"),
    "another save": lambda h: h["__metadata__"].update(save=str(replace(SAVE, step=8))),
    "another rank": lambda h: h["__metadata__"].update(rank="000001"),
    "another layout": lambda h: h["__metadata__"].update(layout="f" * 32),
    "no metadata": lambda h: h.pop("__metadata__"),
}


@pytest.mark.parametrize("lie", LIES)
def test_lies_are_found(lie: str) -> None:
    part, [data] = made()
    with pytest.raises(FormatError, match="pack: "):
        check(part, 0, rewritten(data, LIES[lie]))  # type: ignore[no-untyped-call]


@pytest.mark.parametrize(
    "head", [b"", b"\0" * 8, b"\xff" * 8, (2).to_bytes(8, "little") + b"{}", b"\x02" + b"\0" * 7 + b"[]"]
)
def test_no_header_at_all(head: bytes) -> None:
    part, [data] = made()
    with pytest.raises(FormatError, match="pack: "):
        check_head(head, len(data), *expected_head(part, LAYOUT, 0), "pack")


@pytest.mark.parametrize("more", [-1, 1])
def test_an_object_ends_where_its_last_entry_does(more: int) -> None:
    part, [data] = made()
    with pytest.raises(FormatError, match=f"last entry ends at {len(data)}, the object at {len(data) + more}"):
        check(part, 0, data + b"\0" if more > 0 else data[:more])


def test_packs_of_early_versions_have_no_boxes() -> None:
    part, [data] = made()
    check(part, 0, rewritten(data, lambda h: h["__metadata__"].pop("boxes")))


def test_metadata_that_later_versions_add_is_no_damage() -> None:
    part, [data] = made()
    check(part, 0, rewritten(data, lambda h: h["__metadata__"].update(later="1")))
