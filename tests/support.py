"""Saves made by hand and read back without the reader, for tests that are about neither."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path

import numpy as np
import xxhash
from helpers.objects import objects_of
from helpers.packs import data_of, pack
from safetensors.numpy import load

from ckptlib.catalog.catalog import Catalog
from ckptlib.catalog.commit import Committer
from ckptlib.errors import CorruptData
from ckptlib.format import body_layout, keys, sharding
from ckptlib.format.box import Box
from ckptlib.format.check import Check
from ckptlib.format.digests import XXH3, digester
from ckptlib.format.documents import seal
from ckptlib.format.keys import GenerationId, PartName, SaveId
from ckptlib.format.layout import Layout, Mesh, Placed, TensorEntry
from ckptlib.format.manifest import Generation, Manifest, Root
from ckptlib.format.part import Pack, Part
from ckptlib.format.sharding import Replicate, Shard
from ckptlib.saving.assign import assign, writes
from ckptlib.stores import Store
from ckptlib.stores.local import LocalStore
from ckptlib.stores.memory import MemoryStore

ROOT_ID = "0123456789abcdef" * 2
ATTEMPT = "a77e3b70"


def make_root(store: Store, save_deadline_s: float = 60.0) -> Catalog:
    """A catalog of a store that has a root."""
    catalog = Catalog(store)
    catalog.open_root(Root(ROOT_ID, XXH3, save_deadline_s))
    return catalog


def make_generation(
    catalog: Catalog, number: int = 1, resumed_from: SaveId | None = None, world_size: int = 1
) -> GenerationId:
    """An incarnation whose record is put."""
    generation = GenerationId(number, f"{number:08x}")
    catalog.generations.put(Generation(generation, world_size, resumed_from, 0.0, {}, "here"))
    return generation


def replace_object(store: Store, key: str, data: bytes) -> None:
    """As damage does, and no put."""
    store.delete(key)
    store.put(key, data)


def layout_of(tensors: Mapping[str, np.ndarray], world_size: int = 1) -> Layout:
    """Cut along dim 0 over all ranks; 0-d tensors are replicated."""
    mesh = Mesh((world_size,), tuple(range(world_size)))
    entries = [
        TensorEntry(name, str(a.dtype), a.shape, Placed(mesh, (Shard(0) if a.ndim else Replicate(),), None))
        for name, a in sorted(tensors.items())
    ]
    return Layout(world_size, tuple(assign(entries, {entry.name: entry.holding for entry in entries})))


def shards_of(layout: Layout, rank: int) -> list[tuple[str, Box]]:
    """What a rank writes."""
    found = []
    for entry in layout.tensors:
        assert isinstance(entry.holding, Placed)
        if writes(entry, rank):
            mesh = entry.holding.mesh
            at = mesh.coordinate(rank)
            assert at is not None
            found += [
                (entry.name, piece.box)
                for piece in sharding.pieces(entry.shape, mesh.shape, entry.holding.placements, at)
            ]
    return found


def put_part(
    catalog: Catalog,
    save: SaveId,
    rank: int,
    layout: Layout,
    tensors: Mapping[str, np.ndarray],
    attempt: str = ATTEMPT,
    shards: list[tuple[str, Box]] | None = None,
    chunk_bytes: int = 1 << 20,
    check: Check | None = None,
    told: Mapping[str, object] | None = None,
) -> PartName:
    """Packs and part of one rank, put in the order of a writer. `shards`: what it writes, if not what is its share.

    `told`: further fields of the part.
    """
    table = body_layout.lay_out(layout, shards_of(layout, rank) if shards is None else shards, chunk_bytes)
    body = bytearray(body_layout.body_nbytes(table))
    for tensor, box, begin in zip(table.tensors, table.boxes, table.begins(table.sizes(layout)), strict=True):
        raw = np.ascontiguousarray(tensors[layout.tensors[tensor].name][box.slices()]).tobytes()
        body[begin : begin + len(raw)] = raw
    digests = [digester(XXH3)(bytes(body[o : o + n])) for o, n in zip(table.offsets, table.nbytes, strict=True)]
    packing = pack(table, layout, catalog.store.pack_nbytes)
    packs = []
    for n, shape in enumerate(packing.packs):
        packs.append(Pack(save.pack_key(rank, attempt, n), shape.nbytes, 0.0))
        catalog.store.put(packs[n].key, shape.head(save, rank, layout.digest), [data_of(shape, body)])
    catalog.shared.put_layout(layout.digest, layout.encoded)
    size, shown = layout.world_size, tuple(packs)
    part = Part(save, rank, size, attempt, packing.table, shown, XXH3, tuple(digests), {}, {}, 0.0, check)
    name, document = replace(part, **(told or {})).encode()  # type: ignore[arg-type]
    catalog.store.put(name.key, document)
    return name


def put_parts(
    catalog: Catalog,
    generation: GenerationId,
    step: int,
    tensors: Mapping[str, np.ndarray],
    world_size: int = 1,
    **told: object,
) -> tuple[SaveId, list[PartName]]:
    """A save of all ranks that only lacks its commit. `told`: further fields of the parts, such as metrics."""
    save, layout = SaveId(step, generation), layout_of(tensors, world_size)
    return save, [put_part(catalog, save, rank, layout, tensors, told=told) for rank in range(world_size)]


def make_save(
    catalog: Catalog,
    generation: GenerationId,
    step: int,
    tensors: Mapping[str, np.ndarray],
    world_size: int = 1,
    **told: object,
) -> SaveId:
    """A committed step. `told`: as above."""
    save, names = put_parts(catalog, generation, step, tensors, world_size, **told)
    Committer(catalog).commit(save, names)
    return save


def read_save(store: Store, save: SaveId) -> dict[str, np.ndarray]:
    """Its tensors, every digest checked, read by safetensors alone: an entry says where in its tensor it begins.

    Only for saves of `make_save`, whose chunks are contiguous in the whole tensor.
    """
    catalog = Catalog(store)
    found: dict[str, np.ndarray] = {}
    for name in catalog.manifest(save).parts:
        part = catalog.part(name)
        table = part.table
        for c, expected in enumerate(part.digests):
            data = store.get(part.packs[table.packs[c]].key, table.offsets[c], table.nbytes[c])
            if digester(part.algorithm)(data) != expected:
                raise CorruptData(f"{part.packs[table.packs[c]].key}: chunk {c}")
        shapes = {entry.name: entry.shape for entry in catalog.layout(table.layout).tensors}
        for p in part.packs:
            for entry_name, piece in load(store.get(p.key)).items():
                tensor, _, first = entry_name.rpartition("@")
                if tensor:
                    whole = found.setdefault(tensor, np.zeros(shapes[tensor], piece.dtype))
                    whole.reshape(-1)[int(first) : int(first) + piece.size] = piece.reshape(-1)
    return found


def age(store: Store, seconds: float) -> None:
    """Makes everything that is in the store so much older."""
    if isinstance(store, MemoryStore):
        objects = objects_of(store)
        objects.update({key: (data, modified - seconds) for key, (data, modified) in objects.items()})
        return
    assert isinstance(store, LocalStore)
    root = Path(store.url.removeprefix("file://"))
    for path in root.rglob("*"):
        if path.is_file():
            modified = path.stat().st_mtime - seconds
            os.utime(path, (modified, modified))


def flips(data: bytes) -> Iterator[tuple[int, bytes]]:
    """Every document that differs from this one in a single bit, and which byte of it that is."""
    for position in range(len(data)):
        for bit in range(8):
            flipped = bytearray(data)
            flipped[position] ^= 1 << bit
            yield position, bytes(flipped)


def resealed(document: bytes, **fields: object) -> bytes:
    """The same document with other fields in its body, and a digest that fits: what only malice or a bug writes."""
    envelope = json.loads(document)
    body = {**envelope["body"], **fields}
    return seal(envelope["kind"], json.dumps({name: v for name, v in body.items() if v is not ...}))


def of_version(document: bytes, version: int) -> bytes:
    """The document as a ckptlib of another version would write it: FORMAT.md says what its digest covers."""
    envelope = json.loads(document)
    body = json.dumps(envelope["body"], separators=(",", ":"))
    head = f'{{"ckptlib":{version},"kind":"{envelope["kind"]}"'
    digest = xxhash.xxh3_128_hexdigest(f"{head if version > 1 else ''}{body}".encode())
    return f'{head},"digest":"xxh3:{digest}","body":{body}}}\n'.encode()


def state(step: int) -> dict[str, np.ndarray]:
    """A small state that tells its step."""
    return {
        "w": np.arange(24, dtype=np.float32).reshape(6, 4) + step,
        "b": np.full(5, step, dtype=np.int64),
        "count": np.array(step, dtype=np.float64),
    }


def all_keys(store: Store) -> set[str]:
    return {entry.key for entry in store.scan("")}


def keys_of(store: Store, save: SaveId) -> set[str]:
    """Everything that belongs to one save, but for its layouts."""
    return {
        key
        for key in all_keys(store)
        if save in (keys.pack_save(key), keys.parse_manifest_key(key), keys.parse_trash_key(key))
        or ((part := keys.parse_part_key(key)) is not None and part.save == save)
    }


SAVES_APART = SaveId(1, GenerationId(1, "0" * 8)), SaveId(keys.MAX_STEP, GenerationId(keys.MAX_GENERATION, "f" * 8))
"""Whose numbers are as small and as large as they can be."""


def commit_unproved(store: MemoryStore, save: SaveId, names: list[PartName]) -> None:
    """What a committer with a bug would put."""
    parts = [Part.decode(name, store.get(name.key)) for name in names]
    layouts: dict[str, tuple[int, ...]] = {}
    for part in parts:
        layouts[part.table.layout] = (*layouts.get(part.table.layout, ()), part.rank)
    nbytes = sum(pack.nbytes for part in parts for pack in part.packs)
    state = sum(part.table.nbytes_data for part in parts)
    manifest = Manifest(save, len(parts), tuple(names), layouts, nbytes, 0.0, {}, nbytes_state=state)
    store.put(save.manifest_key, manifest.encode())


def listed_steps_are_whole(store: Store) -> list[int]:
    """Reads every step that is listed, all of it; returns their numbers."""
    found = Catalog(store).saves()
    for save in found:
        content = read_save(store, save)
        assert content.keys() == state(0).keys()
        for name, expected in state(save.step).items():
            assert np.array_equal(content[name], expected), (save, name)
    return [save.step for save in found]
