"""Small documents that try to take much time or memory, each read by all that read one, in a process of its own.

    hostile.py DIRECTORY [quick | SEED COUNT]

Prints a JSON line for each: what it was, who read it, how that ended, processor seconds, and megabytes above what the
process had. Without a seed: the attacks by name, or a few of them. With one: so many random ones.
"""

from __future__ import annotations

import base64
import json
import os
import random
import resource
import shutil
import sys
import time
from collections.abc import Callable, Collection, Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
import xxhash
from support import make_generation, make_root, make_save

import ckptlib
from ckptlib.catalog.catalog import Catalog
from ckptlib.catalog.commit import finish_saves, raise_if_failed
from ckptlib.cli.app import run
from ckptlib.errors import CkptError, UnsupportedState
from ckptlib.format import keys, values
from ckptlib.format.documents import seal
from ckptlib.format.keys import GenerationId, SaveId
from ckptlib.format.manifest import TrashRecord
from ckptlib.slots.header import SlotHeader
from ckptlib.slots.snapshot import SnapshotReader
from ckptlib.stores.local import LocalStore

Body = dict[str, Any]
Attack = Callable[[Body], None]

LIMIT_S = 20
"""Processor time after which a reader is killed."""

LIMIT_BYTES = 2**31
"""Address space above what the process had, after which memory runs out."""

MERSENNE = 2**61 - 1
"""Python's hash of an int is its remainder by this."""


# Roots


class Root:
    """A root of one save by two ranks, to be spoiled. Every digest fits, whatever is in the documents."""

    def __init__(self, path: Path) -> None:
        self.path = path
        store = LocalStore(str(path))
        catalog = make_root(store)
        weights = np.zeros(2**12, dtype=np.float32)
        self.save = make_save(catalog, make_generation(catalog, world_size=2), 1, {"w": weights}, 2)
        manifest = catalog.manifest(self.save)
        (layout,) = manifest.layouts
        self.bodies: dict[str, Body] = {
            kind: body(store.get(key))
            for kind, key in {
                "root": keys.ROOT,
                "generation": self.save.generation.key,
                "manifest": self.save.manifest_key,
                "layout": keys.layout_key(layout),
                "part": manifest.parts[0].key,
            }.items()
        }
        self.bodies["trash"] = body(TrashRecord(self.other, "kept enough").encode())
        self.bodies["failure"] = {"save": str(self.other), "rank": 0, "error": "no room"}
        self.parts = [body(store.get(part.key)) for part in manifest.parts]
        self.target: list[int] = [2**12]
        """Shape of what is loaded."""

    @property
    def other(self) -> SaveId:
        """One that was not committed."""
        return SaveId(2, self.save.generation)

    def put(self, kind: str, text: str) -> None:
        """A document of this kind, and those that have to follow from it."""
        if kind in ("layout", "part"):
            self._put_parts(kind, text)
        elif kind in ("trash", "failure"):
            document = seal(kind, text)
            digest = xxhash.xxh3_128_hexdigest(document)
            failed = keys.PartName(self.other, 0, "0" * 8, None, digest).key
            path = self.path / (failed if kind == "failure" else self.other.trash_key)
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(document)
        else:
            key = {"root": keys.ROOT, "generation": self.save.generation.key, "manifest": self.save.manifest_key}[kind]
            (self.path / key).write_bytes(seal(kind, text))

    def _put_parts(self, kind: str, text: str) -> None:
        layout = text if kind == "layout" else dumps(self.bodies["layout"])
        document = seal("layout", layout)
        digest = xxhash.xxh3_128_hexdigest(document)
        (self.path / keys.layout_key(digest)).write_bytes(document)
        names = []
        for rank, one in enumerate(self.parts):
            written = text if kind == "part" and rank == 0 else dumps(one)
            written = written.replace(one["table"]["layout"], digest)
            table = written[written.rindex('"table":') + 8 : -1]
            sealed = seal("part", written)
            name = keys.PartName(
                self.save,
                rank,
                one["attempt"],
                xxhash.xxh3_128_hexdigest(table.encode()),
                xxhash.xxh3_128_hexdigest(sealed),
            )
            (self.path / name.key).write_bytes(sealed)
            names.append(name.key)
        manifest = {**self.bodies["manifest"], "parts": names, "layouts": {digest: [[0, 1]]}}
        self.put("manifest", dumps(manifest))


def dumps(value: Any) -> str:
    return json.dumps(value, separators=(",", ":"))


def body(document: bytes) -> Body:
    found: Body = json.loads(document)["body"]
    return found


# What is put in


def nested(depth: int) -> Any:
    value: Any = 0
    for _ in range(depth):
        value = [value]
    return value


def colliding_shapes(count: int, within: int) -> list[list[int]]:
    """Pairs of sizes whose tuples have one hash: its second step undoes the first (xxHash without a seed)."""
    mask, p1, p2, p5 = 2**64 - 1, 11400714785074694791, 14029467366897019727, 2870177450012600261
    inverse = pow(p2, -1, 2**64)

    def lane(acc: int, value: int) -> int:
        acc = (acc + value * p2) & mask
        acc = ((acc << 31) | (acc >> 33)) & mask
        return acc * p1 & mask

    first = lane(p5, 1)
    found, a = [[1, 5]], 1
    while len(found) < count:
        a += 1
        b = (5 + (first - lane(p5, a)) * inverse) & mask
        if b < within:
            found.append([a, b])
    return found


def dims_of(shape: list[int]) -> list[int]:
    return [0, *shape]


def values_of(changes: dict[str, Any]) -> Attack:
    return lambda part: part["values"].update(changes)


def tensors(rows: list[list[Any]], **more: Any) -> Attack:
    def change(layout: Body) -> None:
        layout.update({"tensors": rows, **more})

    return change


def mesh_of(num: int) -> Body:
    return {"world_size": num, "meshes": [{"shape": [num], "ranks": list(range(num))}]}


def placed(*placements: str, mesh: int = 0) -> Body:
    return {"how": "placed", "mesh": mesh, "placements": list(placements), "writer": None}


def many_boxes(part: Body) -> None:
    """Of `w`, in rows that fit in a document; the layout says (8, 8, 8, 8) by hand."""
    rng = random.Random(0)
    table = part["table"]
    boxes = []
    for _ in range(6000):
        offset = [rng.randrange(8) for _ in range(4)]
        boxes.append((offset, [rng.randrange(1, 9 - a) for a in offset]))
    sizes = [4 * int(np.prod(shape)) for _, shape in boxes]
    table["shards"] = {
        "tensor": [0] * len(boxes),
        "offset": [a for a, _ in boxes],
        "shape": [b for _, b in boxes],
        "chunks": [1] * len(boxes),
    }
    rows(part, sizes)


def rows(part: Body, sizes: list[int]) -> None:
    """One chunk for each size, in a pack that is said to be large enough."""
    part["table"]["chunks"] = {"pack": [0] * len(sizes), "offset": [4096] * len(sizes), "nbytes": sizes}
    part["digests"] = "0" * 32 * len(sizes)
    part["packs"] = [[part["packs"][0][0], 2**40]]


def scalars(part: Body) -> None:
    """Ten thousand shards with a chunk each, all of them damaged."""
    count = 9000
    part["table"]["shards"] = {
        "tensor": [0] * count,
        "offset": [[0]] * count,
        "shape": [[1]] * count,
        "chunks": [1] * count,
    }
    rows(part, [4] * count)
    part["table"]["chunks"]["offset"] = [4096 + 4 * (i % 1024) for i in range(count)]
    part["packs"] = [[part["packs"][0][0], 12288]]


def hard_tensors(num: int, boxes: int, within: int) -> Attack:
    """So many tensors of so many boxes in 4 dims, none of them the whole."""

    def change(part: Body) -> None:
        rng = random.Random(1)
        table, found = part["table"], []
        for _ in range(num * boxes):
            offset = [rng.randrange(within) for _ in range(4)]
            found.append((offset, [rng.randrange(1, within + 1 - a) for a in offset]))
        table["shards"] = {
            "tensor": [i // boxes for i in range(num * boxes)],
            "offset": [a for a, _ in found],
            "shape": [b for _, b in found],
            "chunks": [1] * len(found),
        }
        rows(part, [4 * int(np.prod(shape)) for _, shape in found])

    return change


def nested_boxes(num: int, boxes: int, equal: bool = False) -> Attack:
    """So many tensors of so many boxes, any two of which overlap in a region of their own."""

    def change(part: Body) -> None:
        part["table"]["shards"] = {
            "tensor": [i // boxes for i in range(num * boxes)],
            "offset": [[i % boxes] for i in range(num * boxes)],
            "shape": [[boxes] for i in range(num * boxes)],
            "chunks": [1] * (num * boxes),
        }
        rows(part, [4 * boxes] * (num * boxes))
        if equal:
            part["digests"] = ZEROS[4 * boxes] * (num * boxes)

    return change


ZEROS = {nbytes: xxhash.xxh3_128_hexdigest(bytes(nbytes)) for nbytes in range(4, 2000, 4)}


def by_hand(num: int, shape: list[int]) -> Body:
    return {
        "holdings": [{"how": "by-hand"}],
        "tensors": [[f"w{i or ''}", "float32", shape, 0] for i in range(num)],
    }


def tree(depth: int, leaf: Any = "tensor") -> Any:
    """Of an object, as a layout tells of one."""
    return {"list": [tree(depth - 1, leaf)]} if depth else leaf


def objects(found: Any, name: str = "a", shape: tuple[int, ...] = (2**12,)) -> Attack:
    """An object, and the one tensor in it."""

    def change(layout: Body) -> None:
        layout.update({"objects": {"a": found}, "tensors": [[name, "float32", list(shape), 0]]})

    return change


def colliding_boxes(part: Body) -> None:
    found = colliding_shapes(9000, 2**59)
    count = len(found)
    part["table"]["shards"] = {
        "tensor": [0] * count,
        "offset": [dims_of(a) for a in found],
        "shape": [[0, 1, 1]] * count,
        "chunks": [1, *[0] * (count - 1)],
    }
    rows(part, [4])


def huge_chunk(part: Body) -> None:
    part["table"]["shards"] = {"tensor": [0], "offset": [[0]], "shape": [[2**38 - 1024]], "chunks": [1]}
    rows(part, [2**40 - 4096])


def deep_key(depth: int) -> Any:
    value: Any = 0
    for _ in range(depth):
        value = {"$tuple": [value]}
    return value


ATTACKS: dict[str, tuple[str, Attack | str]] = {
    "root: a huge number": ("root", lambda b: b.update(save_deadline_s=10**4000)),
    "root: deep": ("root", lambda b: b.update(id=nested(900))),
    "generation: deep": ("generation", lambda b: b.update(tags={"a": nested(950)}, versions={"b": nested(950)})),
    "generation: many tags": ("generation", lambda b: b.update(tags={f"{i:x}": "" for i in range(80_000)})),
    "generation: many domains": (
        "generation",
        lambda b: b.update(peers={"copies": 10**9, "domains": [""] * 10**5, "kinds": [0] * 10**5}),
    ),
    "manifest: 150 layouts of a million ranks": (
        "manifest",
        lambda b: b.update(layouts={f"{i:032x}": [[0, 999_999]] for i in range(150)}),
    ),
    "manifest: runs": ("manifest", lambda b: b.update(layouts={"0" * 32: [[2 * i, 2 * i] for i in range(60_000)]})),
    "manifest: a world of millions": ("manifest", lambda b: b.update(world_size=10**6)),
    "manifest: one key twice among 80,000": (
        "manifest",
        '{"metrics":{' + ",".join(f'"{i}":0' for i in range(80_000)) + ',"79999":0}}',
    ),
    "manifest: deep metrics": ("manifest", lambda b: b.update(metrics={"a": nested(950)})),
    "manifest: long metrics": ("manifest", lambda b: b.update(metrics={"a" * 500_000: "b" * 400_000})),
    "manifest: many metrics": ("manifest", lambda b: b.update(metrics={f"{i:x}": 0.5 for i in range(60_000)})),
    "manifest: many lists": ("manifest", lambda b: b.update(metrics={"a": [[] for _ in range(300_000)]})),
    "manifest: colliding keys in metrics": (
        "manifest",
        lambda b: b.update(metrics={"a": {"$set": [{"$int": hex(MERSENNE * i)} for i in range(1, 25_000)]}}),
    ),
    "layout: SS0x999999999": ("layout", lambda b: b.update(holdings=[placed("SS0x999999999")])),
    "layout: SS0x999999999 of a huge tensor": (
        "layout",
        tensors([["w", "float32", [2**58], 0]], holdings=[placed("SS0x999999999")]),
    ),
    "layout: many uneven strided sizes": (
        "layout",
        tensors(
            [[f"t{i:05d}", "float32", [2**20 + 2 * i + 1], 0] for i in range(20_000)],
            world_size=4096,
            meshes=[{"shape": [64, 64], "ranks": list(range(4096))}],
            holdings=[placed("SS0x64", "S0")],
        ),
    ),
    "layout: a large mesh and many sizes": (
        "layout",
        tensors(
            [[f"t{i}", "float32", [2**20 + i], 0] for i in range(10_000, 30_000)],
            **mesh_of(16384),
            holdings=[placed("S0")],
        ),
    ),
    "layout: a mesh of 100,000 axes": (
        "layout",
        lambda b: b.update(
            meshes=[{"shape": [1] * 100_000, "ranks": [0]}],
            holdings=[placed(*["R"] * 100_000)],
            tensors=[[f"{i:02d}", "float32", [1] * i, 0] for i in range(60)],
        ),
    ),
    "layout: many holdings": ("layout", lambda b: b.update(holdings=[placed(f"SS0x{i + 1}") for i in range(12_000)])),
    "layout: shapes of one hash": (
        "layout",
        lambda b: b.update(
            holdings=[{"how": "by-hand"}],
            tensors=[[f"t{i:06d}", "float32", dims_of(s), 0] for i, s in enumerate(colliding_shapes(18_000, 2**59))],
        ),
    ),
    "layout: sizes of one hash": (
        "layout",
        tensors([[f"t{i:06d}", "float32", [MERSENNE * i], 0] for i in range(20_000)], holdings=[{"how": "by-hand"}]),
    ),
    "layout: sizes of 4,000 digits": (
        "layout",
        tensors([[f"t{i:06d}", "float32", [10**4000 + i], 0] for i in range(200)], holdings=[{"how": "by-hand"}]),
    ),
    "layout: many names": (
        "layout",
        lambda b: b.update(tensors=[[f"t{i:06d}", "float32", [1], 0] for i in range(30_000)]),
    ),
    "layout: many aliases": ("layout", lambda b: b.update(aliases={f"a{i}": "w" for i in range(60_000)})),
    "layout: deep objects": ("layout", lambda b: b.update(objects={"a": nested(950)})),
    "layout: an object of 130 levels": ("layout", objects(tree(130), "/".join(["a", *["0"] * 130]))),
    "layout: an object of 190 levels": ("layout", objects(tree(190), "/".join(["a", *["0"] * 190]))),
    "layout: an object of deep keys": (
        "layout",
        objects({"dict": [[deep_key(95), {"dict": [[deep_key(95), "tensor"]]}]]}),
    ),
    "layout: an object of keys of one hash": (
        "layout",
        objects({"dict": [[{"$int": hex(MERSENNE * i)}, {"list": []}] for i in range(1, 15_000)]}),
    ),
    "layout: an object of one key": ("layout", objects({"dict": [["b", {"list": []}]] * 50_000})),
    "layout: an object of a huge key": (
        "layout",
        objects({"dict": [[{"$int": "0x" + "f" * 9000}, {"list": []}]]}),
    ),
    "layout: an object of a long name": (
        "layout",
        objects({"dict": [["b" * 400_000, {"list": [{"list": []}] * 40_000}]]}),
    ),
    "layout: an object of a huge tensor": ("layout", objects("tensor", shape=(2**58,))),
    "layout: an object of a tensor of none of huge": ("layout", objects("tensor", shape=(0, 2**59, 2**59))),
    "layout: many objects and names": (
        "layout",
        lambda b: b.update(
            objects={f"o{i}": {} for i in range(30_000)},
            tensors=[["a", "float32", [2**12], 0], *([f"t{i:06d}", "float32", [0], 0] for i in range(17_000))],
        ),
    ),
    "layout: three axes that cut in turn": (
        "layout",
        tensors(
            [[f"t{i:05d}", "float32", [2**20 + 2 * i + 1], 0] for i in range(20_000)],
            world_size=4096,
            meshes=[{"shape": [16, 16, 16], "ranks": list(range(4096))}],
            holdings=[placed("SS0x16", "SS0x16", "S0")],
        ),
    ),
    "layout: what torch reads in two ways": (
        "layout",
        tensors(
            [["w", "float32", [4096], 0]],
            holdings=[{**placed("SS0x3", "S0"), "writer": [0, 0]}],
            meshes=[{"shape": [2, 2], "ranks": [0, 1, 2, 3]}],
            world_size=4,
        ),
    ),
    "layout: 64 dims": (
        "layout",
        tensors([[f"t{i:06d}", "float32", [1] * 64, 0] for i in range(5000)], holdings=[{"how": "by-hand"}]),
    ),
    "part: a huge int": ("part", values_of({"a": {"$int": "0x" + "f" * 900_000}})),
    "part: a dict of huge ints": ("part", values_of({"a": {"$dict": [[{"$int": "0x" + "f" * 450_000}, 0]] * 2}})),
    "part: ints of one hash": (
        "part",
        values_of({"a": {"$dict": [[{"$int": hex(MERSENNE * i)}, 0] for i in range(1, 22_000)]}}),
    ),
    "part: complex of one hash": (
        "part",
        values_of({"a": {"$set": [{"$complex": [3e10 - 1000003.0 * i, float(i)]} for i in range(20_000)]}}),
    ),
    "part: an array of a huge shape": (
        "part",
        values_of(
            {
                "a": {
                    "$ndarray": {
                        "dtype": "<f4",
                        "shape": [{"$int": hex(2**200 + i)} for i in range(12_000)],
                        "data": "",
                    }
                }
            }
        ),
    ),
    "part: an array of 0 and huge": (
        "part",
        values_of({"a": {"$ndarray": {"dtype": "<f4", "shape": [0, 2**52, 2**52], "data": ""}}}),
    ),
    "part: bytes": ("part", values_of({"a": {"$bytes": base64.b64encode(bytes(700_000)).decode()}})),
    "part: deep": ("part", values_of({"a": nested(950)})),
    "part: deep sets": ("part", lambda b: b["values"].update(a=sets(90))),
    "part: many values": ("part", values_of({f"{i}": 0 for i in range(80_000)})),
    "part: boxes in 4 dims": ("part", many_boxes),
    "part: chunks that are damaged": ("part", scalars),
    "part: boxes of one hash": ("part", colliding_boxes),
    "part: chunks of one place": (
        "part",
        lambda b: (b["table"]["shards"].update(chunks=[20_000]), rows(b, [2**39] * 20_000)),
    ),
    "part: counts of chunks": ("part", lambda b: b["table"]["shards"].update(chunks=[2**62])),
    "part: a shard of a huge chunk": ("part", lambda b: rows(b, [2**40 - 4096])),
    "part: a tensor of a huge chunk": ("part", huge_chunk),
    "part: tensors in 4 dims": ("part", hard_tensors(60, 100, 8)),
    "part: many tensors in 4 dims": ("part", hard_tensors(300, 20, 8)),
    "part: large tensors in 4 dims": ("part", hard_tensors(40, 100, 1000)),
    "part: boxes that all overlap": ("part", nested_boxes(1, 300)),
    "part: tensors whose boxes all overlap": ("part", nested_boxes(40, 200)),
    "part: equal boxes that all overlap": ("part", nested_boxes(1, 180, equal=True)),
    "failure: long": ("failure", lambda b: b.update(error="x" * 1_000_000)),
    "failure: deep": ("failure", lambda b: b.update(error=nested(950))),
    "failure: of another kind": ("failure", lambda b: b.update(rank=10**4000)),
    "trash: deep": ("trash", lambda b: b.update(reason=nested(950))),
    "trash: many words": ("trash", lambda b: b.update({f"{i:x}": "" for i in range(80_000)})),
}


LAYOUTS: dict[str, Body] = {
    "part: boxes in 4 dims": by_hand(1, [8, 8, 8, 8]),
    "part: boxes of one hash": by_hand(1, [0, 2**59, 2**59]),
    "part: a tensor of a huge chunk": by_hand(1, [2**38 - 1024]),
    "part: tensors in 4 dims": by_hand(60, [8] * 4),
    "part: many tensors in 4 dims": by_hand(300, [8] * 4),
    "part: large tensors in 4 dims": by_hand(40, [1000] * 4),
    "part: boxes that all overlap": by_hand(1, [600]),
    "part: tensors whose boxes all overlap": by_hand(40, [400]),
    "part: equal boxes that all overlap": by_hand(1, [360]),
}
"""What the layout says, where a part alone is not enough."""


QUICK: dict[str, tuple[str, ...]] = {
    "manifest: 150 layouts of a million ranks": ("ls", "verify", "checkpoints", "load"),
    "manifest: one key twice among 80,000": ("ls", "verify", "restore"),
    "layout: SS0x999999999 of a huge tensor": ("verify", "load", "load all"),
    "layout: a mesh of 100,000 axes": ("show", "verify", "load"),
    "layout: a large mesh and many sizes": ("show", "verify"),
    "layout: shapes of one hash": ("show", "verify", "load"),
    "layout: an object of 190 levels": ("load object", "restore"),
    "layout: an object of keys of one hash": ("load object",),
    "layout: an object of a huge key": ("load object",),
    "layout: an object of a huge tensor": ("load object",),
    "layout: many objects and names": ("load all",),
    "layout: what torch reads in two ways": ("verify", "load", "restore", "finish"),
    "part: ints of one hash": ("values", "verify", "load", "restore"),
    "part: an array of a huge shape": ("values", "verify", "load"),
    "part: deep": ("values", "show", "show --json", "verify"),
    "part: boxes in 4 dims": ("verify", "load"),
    "part: tensors in 4 dims": ("verify", "finish"),
    "part: equal boxes that all overlap": ("verify",),
    "part: tensors whose boxes all overlap": ("verify", "finish"),
    "part: chunks of one place": ("verify", "load", "restore"),
    "part: a tensor of a huge chunk": ("verify", "load", "restore"),
    "failure: long": ("failed", "finish"),
}
"""Each of them took gigabytes or minutes once, or ended in a traceback; and those that read what did."""


def sets(depth: int) -> Any:
    value: Any = 1
    for _ in range(depth):
        value = {"$frozenset": [{"$tuple": [value, value]}]} if depth % 7 == 0 else {"$tuple": [value]}
    return value


NOTHING: Body = {
    "shards": {"tensor": [], "offset": [], "shape": [], "chunks": []},
    "chunks": {"pack": [], "offset": [], "nbytes": []},
}
"""Of a table."""


HEADS: dict[str, bytes] = {
    "deep": b"[" * 4000,
    "many": b"{" + b",".join(b'"%d":{"dtype":"U8","shape":[0],"data_offsets":[0,0]}' % i for i in range(60)) + b"}",
    "twice": b"{" + b",".join(b'"%d":0' % i for i in range(500)) + b',"499":0}',
    "surrogates": b'{"__metadata__":{"dtypes":"\\ud800","save":"\\ud800"}}',
    "huge numbers": b'{"a":{"dtype":"U8","shape":[' + b"9" * 3000 + b'],"data_offsets":[0,' + b"9" * 500 + b"]}}",
}

# Who reads


def consumers(root: Root) -> dict[str, Callable[[], object]]:
    url = str(root.path)
    catalog = Catalog(LocalStore(url))
    target = lambda: {"w": target_of(root.target)}  # noqa: E731
    return {
        "ls": lambda: run(["ls", url, "--all"]),
        "show": lambda: run(["show", url, "--tensors", "*", "--values"]),
        "show --json": lambda: run(["show", url, "--tensors", "*", "--values", "--json"]),
        "verify": lambda: run(["verify", url, "--all"]),
        "gc": lambda: run(["gc", url, "--keep-last", "1", "--dry-run"]),
        "checkpoints": lambda: list(ckptlib.checkpoints(url)),
        "load": lambda: ckptlib.load(url, target(), strict=False),
        "load all": lambda: ckptlib.load(url, {}, strict=False),
        "load object": lambda: from_deep(300, lambda: ckptlib.load(url, {"a": Thing()}, strict=False)),
        "values": lambda: read_values(root, url),
        "failed": lambda: raise_if_failed(catalog, root.other),
        "restore": lambda: restore(root, target()),
        "finish": lambda: finish(root, url),
    }


class Thing:
    """An object with a state."""

    def state_dict(self) -> object:
        return {}

    def load_state_dict(self, state: object) -> None:
        pass


def from_deep(depth: int, call: Callable[[], object]) -> object:
    """As programs do, with frames of their own below."""
    return from_deep(depth - 1, call) if depth else call()


def target_of(shape: list[int]) -> object:
    if np.prod([float(max(n, 1)) for n in shape]) < 2**20:
        return torch.zeros(shape)
    if not 0 < np.prod([float(n) for n in shape]) <= 2**60:
        return torch.zeros(1)
    return ckptlib.Sharded(torch.zeros([1] * len(shape)), [0] * len(shape), shape)


def restore(root: Root, state: Body) -> None:
    arena = root.path.parent / "arena"
    arena.mkdir(exist_ok=True)
    with ckptlib.Checkpointer(root.path, state, every=10**6, arena=arena) as checkpointer:
        try:
            checkpointer.restore(strict=False)
        except UnsupportedState as error:
            raise AssertionError("the step before is not tried") from error


def finish(root: Root, url: str) -> None:
    """The next job commits what is whole."""
    (root.path / root.save.manifest_key).unlink(missing_ok=True)
    finish_saves(Catalog(LocalStore(url)), GenerationId(9, "0" * 8))


def read_values(root: Root, url: str) -> None:
    catalog = Catalog(LocalStore(url))
    for name in catalog.manifest(root.save).parts:
        for value in catalog.part(name).values.values():
            values.decode(value)


def in_child(what: str, readers: dict[str, Callable[[], object]]) -> Iterator[dict[str, object]]:
    """How each of them ends, one after the other, in a process that is forked for them. Nothing here has threads."""
    out, into = os.pipe()
    sys.stdout.flush()
    pid = os.fork()
    if pid == 0:
        os.close(out)
        null = os.open(os.devnull, os.O_WRONLY)
        os.dup2(null, 1)
        os.dup2(null, 2)
        address_space = int(Path("/proc/self/statm").read_text().split()[0]) * 4096
        resource.setrlimit(resource.RLIMIT_AS, (address_space + LIMIT_BYTES,) * 2)
        for reader, call in readers.items():
            used = time.process_time()
            resource.setrlimit(resource.RLIMIT_CPU, (int(used) + LIMIT_S, resource.RLIM_INFINITY))
            before = resident("VmRSS")
            Path("/proc/self/clear_refs").write_text("5")  # the peak begins anew
            ended = outcome(call)
            told = {"what": what, "reader": reader, "ended": ended, "seconds": round(time.process_time() - used, 3)}
            os.write(into, dumps({**told, "mb": resident("VmHWM") - before}).encode() + b"\n")
        os._exit(0)
    os.close(into)
    with os.fdopen(out) as lines:
        found = [json.loads(line) for line in lines]
    _, status = os.waitpid(pid, 0)
    yield from found
    if len(found) < len(readers):
        reader = [*readers][len(found)]
        ended = f"! killed by signal {os.WTERMSIG(status)}"
        yield {"what": what, "reader": reader, "ended": ended, "seconds": float(LIMIT_S), "mb": 0}


def outcome(call: Callable[[], object]) -> str:
    try:
        call()
    except (CkptError, SystemExit) as error:
        return type(error).__name__
    except BaseException as error:  # a traceback, in whatever form, is what is looked for
        return f"! {type(error).__name__}: {str(error)[:200]}"
    return "good"


def resident(name: str) -> int:
    """Megabytes of this process."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith(name)) // 1024


def spoiled(path: Path, kind: str, attack: Attack | str) -> Root:
    shutil.rmtree(path, ignore_errors=True)
    root = Root(path)
    what = next((name for name, (_, one) in ATTACKS.items() if one is attack), "")
    root.bodies["layout"].update(LAYOUTS.get(what, {}))
    if what in LAYOUTS:
        root.bodies["layout"]["tensors"].sort()
        for one in root.parts[1:]:
            one["table"] = {"layout": one["table"]["layout"], **NOTHING}
            one.update(digests="", packs=[])
    if isinstance(attack, str):
        text = attack
    else:
        attack(root.bodies[kind])
        text = dumps(root.bodies[kind])
    assert len(text) < 2**20, (kind, len(text))
    root.target = root.bodies["layout"]["tensors"][0][2] if kind != "layout" else [2**12]
    root.put(kind, text)
    return root


def in_documents(directory: Path, chosen: Mapping[str, Collection[str]]) -> Iterator[dict[str, object]]:
    """`chosen`: names of attacks, and who reads; all where none is named."""
    for what, names in chosen.items():
        kind, attack = ATTACKS[what]
        root = spoiled(directory / "root", kind, attack)
        readers = consumers(root)
        yield from in_child(what, {name: readers[name] for name in names or readers})


def in_heads(directory: Path) -> Iterator[dict[str, object]]:
    for what, text in HEADS.items():
        shutil.rmtree(directory / "root", ignore_errors=True)
        root = Root(directory / "root")
        pack = root.path / root.parts[0]["packs"][0][0]
        data = pack.read_bytes()
        head = len(text[: 4096 - 8]).to_bytes(8, "little") + text[: 4096 - 8]
        pack.write_bytes(head.ljust(4096) + data[4096:])
        yield from in_child(f"pack: {what}", {"verify": consumers(root)["verify"]})


SNAPSHOT = ("algorithm", "digests", "values", "metrics", "created")
"""What of a part is in the snapshot of a slot."""


class Page:
    """As much of a slot as is read of one: its documents."""

    where = "a slot"

    def __init__(self, documents: dict[str, bytes]) -> None:
        self._documents = documents

    def read_document(self, header: SlotHeader, name: str) -> bytes:
        return self._documents[name]


def in_slots(directory: Path) -> Iterator[dict[str, object]]:
    for what, (kind, attack) in ATTACKS.items():
        if kind in ("part", "layout"):
            root = spoiled(directory / "root", kind, attack)
            yield from in_slot(f"slot: {what}", root)


def in_slot(what: str, root: Root) -> Iterator[dict[str, object]]:
    """The documents of a slot that say what a root's do."""
    part, layout = root.bodies["part"], seal("layout", dumps(root.bodies["layout"]))
    part["table"]["layout"] = xxhash.xxh3_128_hexdigest(layout)
    documents = {
        "layout": layout,
        "table": dumps(part["table"]).encode(),
        "snapshot": seal(
            "snapshot",
            dumps({name: part[name] for name in ("algorithm", "digests", "values", "metrics", "created")}),
        ),
    }
    header = SlotHeader("0" * 32, root.save, 0, 2, 0, 0, 2**20, {"table": (4096, 1, "")})
    read = partial(SnapshotReader().read, Page(documents), header)  # type: ignore[arg-type]
    yield from in_child(what, {"snapshot": read})


def random_value(rng: random.Random, size: int) -> Any:
    """Something that may become larger than its text."""
    n = rng.choice([1, 10, 1000, size // 20])
    return rng.choice(
        [
            lambda: 10 ** rng.choice([3, 9, 18, 30, 4000]),
            lambda: -1,
            lambda: "x" * (n * 10),
            lambda: [[0, rng.choice([0, 10**6 - 1, 2**62])] for _ in range(n)],
            lambda: [rng.randrange(2**60) for _ in range(n)],
            lambda: [
                [rng.randrange(2 ** rng.choice([3, 20, 59])) for _ in range(rng.choice([1, 2, 4, 64]))]
                for _ in range(n // 8)
            ],
            lambda: {f"{i:x}": rng.randrange(9) for i in range(n)},
            lambda: nested(rng.choice([5, 100, 330, 401, 990])),
            lambda: {"$int": "0x1" + "0" * (n * 10)},
            lambda: {"$dict": [[{"$tuple": [i, i * MERSENNE % 2**52]}, i] for i in range(n)]},
            lambda: {"$frozenset": [{"$float": "nan"}, *range(n)]},
            lambda: {"$ndarray": {"dtype": "<f8", "shape": [2**40, 0, n], "data": ""}},
            lambda: 1e308,
            lambda: None,
            list,
            dict,
        ]
    )()


def places(value: Any, way: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """Ways to everything inside."""
    inner = value.items() if isinstance(value, dict) else enumerate(value[:20]) if isinstance(value, list) else ()
    for key, item in inner:
        yield (*way, key)
        yield from places(item, (*way, key))


def at_random(directory: Path, seed: int, count: int) -> Iterator[dict[str, object]]:
    """Up to three places of a document are replaced by what may expand."""
    for n in range(count):
        rng = random.Random(f"{seed} {n}")
        kind = rng.choice([*["layout"] * 3, *["part"] * 4, "root", "generation", "manifest", "trash", "failure"])

        def attack(found: Body, rng: random.Random = rng) -> None:
            for _ in range(rng.randrange(1, 4)):
                *way, last = rng.choice([*places(found)])
                if "layout" in (last, *way[-1:]) and "table" in way:
                    continue
                into: Any = found
                for key in way:
                    into = into[key]
                into[last] = random_value(rng, 300_000)

        try:
            root = spoiled(directory / "root", kind, attack)
        except (KeyError, IndexError, TypeError, AssertionError, ValueError):
            continue  # the second place went with the first, or the document is too large
        yield from in_child(f"random {seed} {n}: {kind}", consumers(root))
        part = root.bodies["part"]
        if kind in ("layout", "part") and isinstance(part.get("table"), dict) and {*SNAPSHOT} <= {*part}:
            yield from in_slot(f"random {seed} {n}: {kind} of a slot", root)


def main(directory: Path, *arguments: str) -> None:
    from ckptlib.cli import doctor, gc, ls, show, verify  # noqa: F401

    outcome(lambda: ckptlib.load(directory / "nothing", {}))
    if arguments == ("quick",):
        found = in_documents(directory, QUICK)
    else:
        found = at_random(directory, *map(int, arguments)) if arguments else attacks(directory)
    for line in found:
        print(json.dumps(line), flush=True)


def attacks(directory: Path) -> Iterator[dict[str, object]]:
    yield from in_heads(directory)
    yield from in_slots(directory)
    yield from in_documents(directory, dict.fromkeys(ATTACKS, ()))


if __name__ == "__main__":
    main(Path(sys.argv[1]), *sys.argv[2:])
