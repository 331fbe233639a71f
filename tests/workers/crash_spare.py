"""Orders a writer about without torch: what the writer needs must be visible, apart from what a trainer needs."""

from __future__ import annotations

import time
from pathlib import Path

import numpy as np

from ckptlib.catalog.catalog import Catalog
from ckptlib.format import body_layout
from ckptlib.format.digests import XXH3, digester
from ckptlib.format.documents import encode
from ckptlib.format.keys import GenerationId, SaveId
from ckptlib.format.layout import Layout, Mesh, Placed, TensorEntry
from ckptlib.format.manifest import Generation, Root
from ckptlib.format.sharding import Replicate
from ckptlib.slots.header import SlotHeader
from ckptlib.slots.slot import Slot
from ckptlib.stores.local import LocalStore
from ckptlib.writer.channel import PROTOCOL

ROOT_ID = "feedbeef" * 4


def make_root(root: Path) -> GenerationId:
    """A root with one generation."""
    catalog = Catalog(LocalStore(str(root)))
    catalog.open_root(Root(ROOT_ID, XXH3, 60.0))
    generation = GenerationId(1, "00000001")
    catalog.generations.put(Generation(generation, 1, None, 0.0, {}, "here"))
    return generation


def setup(root: Path, rank: int = 0, **more: object) -> dict[str, object]:
    """A writer's first order."""
    order = {
        "op": "setup",
        "protocol": PROTOCOL,
        "url": str(root),
        "options": {},
        "root": ROOT_ID,
        "rank": rank,
        "world_size": 1,
        "deadline_s": 60.0,
        "keep_slots_s": 0.0,
        "refresh_s": 1e9,
        "codec": [["*", "raw"]],
    }
    return {**order, "keep": None, "refresh_s": 1e9, "codec": [["*", "raw"]], **more}


def ready_slot(
    directory: Path, save: SaveId, arrays: dict[str, np.ndarray], rank: int = 0, size: int | None = None
) -> Slot:
    """A snapshot of whole tensors, sealed: of the last rank, which holds all of them; or of one of `size` ranks, each
    of which holds tensors of its own."""
    size = rank + 1 if size is None else size
    holding = Placed(Mesh((1,), (rank,)), (Replicate(),), (0,))
    entries = [TensorEntry(name, str(a.dtype), a.shape, holding) for name, a in sorted(arrays.items())]
    layout = Layout(size, tuple(entries))
    boxes = [(entry.name, body_layout.Box.whole(entry.shape)) for entry in entries]
    table = body_layout.lay_out(layout, boxes)
    nbytes = body_layout.body_nbytes(table)
    slot = Slot.create(directory, f"ckptlib-{ROOT_ID[:16]}-{save.generation}", nbytes + (1 << 20))
    body = slot.body
    for tensor, begin in zip(table.tensors, table.begins(table.sizes(layout)), strict=True):
        raw = arrays[entries[tensor].name].reshape(-1).view(np.uint8)
        body[begin : begin + raw.nbytes] = raw.data
    digest = digester(XXH3)
    digests = [digest(body[o : o + n]) for o, n in zip(table.offsets, table.nbytes, strict=True)]
    snapshot = encode(
        "snapshot",
        {"created": time.time(), "algorithm": XXH3, "digests": "".join(digests), "metrics": {}, "values": {}},
    )
    documents = {"layout": layout.encoded, "table": table.encoded.encode(), "snapshot": snapshot}
    places = slot.write_documents(nbytes, documents)
    slot.write_header(SlotHeader(ROOT_ID, save, rank, size, 1, 2, nbytes, places))
    return slot
