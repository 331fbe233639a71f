"""The newest step of a root of two ranks, and what is done to its objects."""

from __future__ import annotations

import json
import os
import socket
from collections.abc import Callable
from pathlib import Path
from typing import Any

from workers.crash_jobs import run, try_roots
from workers.crash_oracle import read_document

from ckptlib.stores.testing import flip_bit, truncate

NEWEST = 3


def newest(root: Path, what: str) -> Path:
    """An object of the newest step."""
    if what == "root":
        return root / "ckptlib.json"
    if what == "generation":
        return next(root.glob("generations/*.json"))
    if what == "manifest":
        return next(root.glob(f"steps/{NEWEST:012d}-*"))
    if what == "layout":
        return root / "layouts" / f"{next(iter(read_document(newest(root, 'manifest'))['layouts']))}.json"
    if what.startswith("copy of "):
        return root / "copies" / newest(root, what.removeprefix("copy of ")).relative_to(root)
    kind, rank = what.split()
    return next(root.glob(f"{kind}s/{NEWEST:012d}-*/00000{rank}-*"))


def middle(path: Path) -> int:
    return path.stat().st_size // 2


def data_of(path: Path, entry: str | None = None) -> int:
    """The first byte behind the header of a pack, or the first one of an entry."""
    pack = path.read_bytes()
    start = 8 + int.from_bytes(pack[:8], "little")
    return start if entry is None else start + int(json.loads(pack[8:start])[entry]["data_offsets"][0])


Damage = Callable[[Path], None]


def replace(path: Path, make: Callable[[Path], None]) -> None:
    path.unlink()
    make(path)


def bind(path: Path) -> None:
    """A socket: its address is short, whatever the path."""
    directory = os.open(path.parent, os.O_PATH)
    with socket.socket(socket.AF_UNIX) as bound:
        bound.bind(f"/proc/self/fd/{directory}/{path.name}")
    os.close(directory)


def twice(damage: Damage) -> Damage:
    """A layout, and its copy."""

    def both(path: Path) -> None:
        damage(path)
        damage(path.parents[1] / "copies" / "layouts" / path.name)

    return both


DAMAGES: dict[str, tuple[str, Damage, str]] = {
    f"{what.replace(' ', '')}-{how}": (what, damage, kinds)
    for what, hows in {
        "pack 0": {
            "first": (lambda p: flip_bit(p, data_of(p)), "CorruptData"),
            "cut": (lambda p: truncate(p, middle(p)), "FormatError"),
            "empty": (lambda p: truncate(p, 0), "FormatError"),
            "gone": (Path.unlink, "ObjectNotFound"),
            "fifo": (lambda p: replace(p, os.mkfifo), "ObjectNotFound"),
            "socket": (lambda p: replace(p, bind), "ObjectNotFound"),
            "directory": (lambda p: replace(p, os.mkdir), "ObjectNotFound"),
            "loop": (lambda p: replace(p, lambda path: os.symlink(path.name, path)), "ObjectNotFound"),
            "link": (lambda p: os.symlink(p.rename(f"{p}.moved").name, p), "ObjectNotFound"),
        },
        "pack 1": {
            "first": (lambda p: flip_bit(p, data_of(p)), "CorruptData"),
            "gone": (Path.unlink, "ObjectNotFound"),
        },
        "part 0": {
            "first": (lambda p: flip_bit(p, 0), "CorruptData"),
            "middle": (lambda p: flip_bit(p, middle(p)), "CorruptData"),
            "last": (lambda p: flip_bit(p, -1), "CorruptData"),
            "gone": (Path.unlink, "ObjectNotFound"),
        },
        "part 1": {
            "middle": (lambda p: flip_bit(p, middle(p)), "CorruptData"),
            "cut": (lambda p: truncate(p, middle(p)), "CorruptData"),
            "empty": (lambda p: truncate(p, 0), "CorruptData"),
            "gone": (Path.unlink, "ObjectNotFound"),
            "fifo": (lambda p: replace(p, os.mkfifo), "ObjectNotFound"),
        },
        "manifest": {
            "first": (lambda p: flip_bit(p, 0), "FormatError"),
            "middle": (lambda p: flip_bit(p, middle(p)), "CorruptData"),
            "last": (lambda p: flip_bit(p, -1), "CorruptData"),
            "cut": (lambda p: truncate(p, middle(p)), "CorruptData"),
            "empty": (lambda p: truncate(p, 0), "FormatError"),
        },
        "layout": {
            "first": (twice(lambda p: flip_bit(p, 0)), "CorruptData"),
            "middle": (twice(lambda p: flip_bit(p, middle(p))), "CorruptData"),
            "cut": (twice(lambda p: truncate(p, middle(p))), "CorruptData"),
            "gone": (twice(Path.unlink), "ObjectNotFound"),
        },
    }.items()
    for how, (damage, kinds) in hows.items()
}


BY_BOTH = ("part1-middle", "pack1-first", "pack0-fifo", "manifest-middle", "layout-gone")


def try_all(directory: Path, roots: list[Path], size: int = 2) -> dict[str, dict[str, list[dict[str, Any]]]]:
    """What ranks told of each root: "load" of the newest step, and "restore"; by root."""
    ranks = run(try_roots, directory, size, roots=[str(root) for root in roots], step=NEWEST)
    found: dict[str, dict[str, list[dict[str, Any]]]] = {}
    for told in ranks:
        for line in told:
            found.setdefault(line["root"], {}).setdefault(line["what"], []).append(line)
    return found
