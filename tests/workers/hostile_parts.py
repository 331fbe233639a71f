"""What attacks are made of: values, shapes and boxes that take much more time or memory than their text."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import numpy as np
import xxhash
from hostile_root import Body

Attack = Callable[[Body], None]

MERSENNE = 2**61 - 1
"""Python's hash of an int is its remainder by this."""


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


def tuples_of_one_hash(count: int) -> list[list[int]]:
    """In Python -1 and -2 have one."""
    return [[-1 - (i >> bit & 1) for bit in range(14)] for i in range(count)]


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
    part["table"]["chunks"] = {"nbytes": sizes}
    part["places"] = {"runs": [[0, 4096, len(sizes)]]}
    part["digests"] = "0" * 32 * len(sizes)
    part["packs"] = [[part["packs"][0][0], 2**40, 0.0]]


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
    part["places"] = {"runs": [[0, 4096 + 4 * (i % 1024), 1] for i in range(count)]}
    part["packs"] = [[part["packs"][0][0], 12288, 0.0]]


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


NOTHING: Body = {
    "shards": {"tensor": [], "offset": [], "shape": [], "chunks": []},
    "chunks": {"nbytes": []},
}
"""Of a table."""
