"""One document of each kind, which fit each other."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace

import pytest
import xxhash
from support import of_version, resealed

from ckptlib.format.box import Box
from ckptlib.format.keys import GenerationId, PackSet, PartName, SaveId
from ckptlib.format.layout import ByHand, Layout, TensorEntry
from ckptlib.format.manifest import Generation, Manifest, Root, TrashRecord
from ckptlib.format.part import FailedPart, Pack, Part
from ckptlib.format.places import Base, Coding, Loss
from ckptlib.format.table import Table

GENERATION = GenerationId(7, "0123abcd")
SAVE = SaveId(500, GENERATION)
LAYOUT = Layout(
    2,
    (
        TensorEntry("a", "float32", (8, 4), ByHand()),
        TensorEntry("b", "bfloat16", (10,), ByHand()),
        TensorEntry("c", "float64", (), ByHand()),
    ),
)
TABLE = Table(
    layout=LAYOUT.digest,
    tensors=(0, 1, 2),
    boxes=(Box((2, 0), (4, 4)), Box((5,), (5,)), Box((), ())),
    num_chunks=(2, 1, 1),
    packs=(0, 0, 1, 1),
    offsets=(4096, 4144, 4096, 4112),
    nbytes=(48, 16, 10, 8),
)
PACKS = (Pack(SAVE.pack_key(1, "a77e3b70", 0), 8192, 1.5), Pack(SAVE.pack_key(1, "a77e3b70", 1), 8192, 1.5))
PART = Part(
    save=SAVE,
    rank=1,
    world_size=2,
    attempt="a77e3b70",
    table=TABLE,
    packs=PACKS,
    algorithm="xxh3",
    digests=tuple(digit * 32 for digit in "0123"),
    values={"sched": {"lr": 0.1, "$tuple": [1]}},
    metrics={"loss": 2.5},
    created=1.5,
)
NAME, PART_DOCUMENT = PART.encode()
OLD = SaveId(400, GENERATION)
REUSING = replace(
    PART,
    table=TABLE.placed((2, 0, 2, 3), (4096, 4096, 4144, 4096)),
    packs=(
        PACKS[0],
        PACKS[1],
        Pack(OLD.pack_key(1, "0ddba110", 0), 8192, 0.5),
        Pack(OLD.pack_key(1, "0ddba110", 7, carried=True), 8192, 0.25),
    ),
    codings={
        1: Coding("patch", 9, Base(3, 4104, 12, "planes", "a" * 32)),
        2: Coding("bits8", 5, None, Loss("b" * 32, 0.0, 0.125)),
        3: Coding("patch", 8, Base(1, 8184, 8, None, "c" * 32)),
    },
)
"""Chunks of every sort: in packs of other saves, as frames, with bases, and with a loss."""
REUSING_NAME, REUSING_DOCUMENT = REUSING.encode()
FIRST_DOCUMENT = of_version(
    resealed(
        PART_DOCUMENT,
        uses=...,
        places=...,
        packs=[[pack.key, pack.nbytes] for pack in PACKS],
        table=json.loads(TABLE.encoded),
    ),
    1,
)
"""As version 1 wrote it."""
FIRST_NAME = PartName(SAVE, 1, "a77e3b70", TABLE.digest, xxhash.xxh3_128_hexdigest(FIRST_DOCUMENT))
FAILED_NAME, FAILED_DOCUMENT = FailedPart(SAVE, 1, "a77e3b70", "no space on /scratch").encode()
MANIFEST = Manifest(
    save=SAVE,
    world_size=3,
    parts=tuple(PartName(SAVE, rank, "a77e3b70", "1" * 32, "2" * 32) for rank in range(3)),
    layouts={"3" * 32: (0, 2), "4" * 32: (1,)},
    nbytes=12345,
    created=1.5,
    metrics={"loss": 2.5, "note": "fine"},
    uses={PackSet(OLD): 0.5, PackSet(OLD, carried=True): 0.25},
    users={PackSet(OLD): frozenset({0, 2})},
    nbytes_state=98765,
)
TRASH = TrashRecord(SAVE, "dropped by retention", MANIFEST.uses, MANIFEST.users, 1.5, ("3" * 32, "4" * 32))
ROOT = Root("5" * 32, "xxh3", 1800.0)
INCARNATION = Generation(GENERATION, 3, SAVE, 1.5, {"python": "3.11"}, "node-1", {"run": "x"})
WITH_PEERS = replace(INCARNATION, domains=("a", "b", "c"), copies=1, kinds=(0, 1, 0))


def decode_renamed(data: bytes, name: PartName = NAME) -> Part:
    """A part whose name fits its bytes, whatever these say."""
    return Part.decode(replace(name, digest=xxhash.xxh3_128_hexdigest(data)), data)


DOCUMENTS: dict[str, tuple[object, bytes, Callable[[bytes], object]]] = {
    "root": (ROOT, ROOT.encode(), lambda data: Root.decode(data, "here")),
    "generation": (INCARNATION, INCARNATION.encode(), lambda data: Generation.decode(data, "here")),
    "part": (PART, PART_DOCUMENT, lambda data: Part.decode(NAME, data)),
    "part, renamed": (PART, PART_DOCUMENT, decode_renamed),
    "part that reuses": (REUSING, REUSING_DOCUMENT, lambda data: decode_renamed(data, REUSING_NAME)),
    "part of version 1": (PART, FIRST_DOCUMENT, lambda data: decode_renamed(data, FIRST_NAME)),
    "failed part": (
        FailedPart(SAVE, 1, "a77e3b70", "no space on /scratch"),
        FAILED_DOCUMENT,
        lambda data: FailedPart.decode(FAILED_NAME, data),
    ),
    "manifest": (MANIFEST, MANIFEST.encode(), lambda data: Manifest.decode(SAVE, data)),
    "trash": (TRASH, TRASH.encode(), lambda data: TrashRecord.decode(SAVE, data, "here")),
}

kinds = pytest.mark.parametrize("kind", DOCUMENTS)
