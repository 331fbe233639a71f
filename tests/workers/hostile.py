"""Small documents that try to take much time or memory, each read by all that read one, in a process of its own.

    hostile.py DIRECTORY [quick | SEED COUNT]

Prints a JSON line for each: what it was, who read it, how that ended, processor seconds, and megabytes above what the
process had. Without a seed: the attacks by name, or a few of them. With one: so many random ones.
"""

from __future__ import annotations

import json
import random
import shutil
import sys
from collections.abc import Collection, Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import xxhash
from hostile_attacks import ATTACKS, HEADS, LAYOUTS, QUICK
from hostile_parts import MERSENNE, NOTHING, Attack, nested
from hostile_readers import consumers, in_child, outcome
from hostile_root import Body, Root, dumps

import ckptlib
from ckptlib.format.documents import seal
from ckptlib.slots.header import SlotHeader
from ckptlib.slots.snapshot import SnapshotReader


def spoiled(path: Path, kind: str, attack: Attack | str) -> Root:
    shutil.rmtree(path, ignore_errors=True)
    root = Root(path)
    what = next((name for name, (_, one) in ATTACKS.items() if one is attack), "")
    root.bodies["layout"].update(LAYOUTS.get(what, {}))
    if what in LAYOUTS:
        root.bodies["layout"]["tensors"].sort()
        for one in root.parts[1:]:
            one["table"] = {"layout": one["table"]["layout"], **NOTHING}
            one.update(digests="", packs=[], places={"runs": []})
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
        except (KeyError, IndexError, TypeError, AssertionError, ValueError, RecursionError):
            continue  # the second place went with the first, or the document is too large or too deep to be written
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
