"""The attacks by name: on documents, and on the heads of packs."""

from __future__ import annotations

import base64
from typing import Any

from hostile_parts import (
    MERSENNE,
    Attack,
    by_hand,
    colliding_boxes,
    colliding_shapes,
    deep_key,
    dims_of,
    hard_tensors,
    huge_chunk,
    many_boxes,
    mesh_of,
    nested,
    nested_boxes,
    objects,
    placed,
    rows,
    scalars,
    tensors,
    tree,
    tuples_of_one_hash,
    values_of,
)
from hostile_root import Body

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
    "part: long tuples of one hash": (
        "part",
        values_of({"a": {"$odict": [[{"$tuple": [0] * 720 + one}, 0] for one in tuples_of_one_hash(630)]}}),
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
    "part: long tuples of one hash": ("values", "load"),
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


HEADS: dict[str, bytes] = {
    "deep": b"[" * 4000,
    "many": b"{" + b",".join(b'"%d":{"dtype":"U8","shape":[0],"data_offsets":[0,0]}' % i for i in range(60)) + b"}",
    "twice": b"{" + b",".join(b'"%d":0' % i for i in range(500)) + b',"499":0}',
    "surrogates": b'{"__metadata__":{"dtypes":"\\ud800","save":"\\ud800"}}',
    "huge numbers": b'{"a":{"dtype":"U8","shape":[' + b"9" * 3000 + b'],"data_offsets":[0,' + b"9" * 500 + b"]}}",
}
