"""Slots that are damaged, forged, cut or gone: another copy is used, or the snapshot before, by all ranks."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from workers.peers_bench import MEMORY, PAGE_BYTES, STORE, Cluster, flip

from ckptlib.slots.header import SlotHeader

slow = pytest.mark.slow


def header_of(path: Path) -> SlotHeader:
    with path.open("rb") as file:
        return SlotHeader.decode(file.read(PAGE_BYTES), str(path))


def forge(path: Path, **fields: Any) -> None:
    """A header with other fields, and a digest that fits."""
    with path.open("r+b") as file:
        file.write(replace(header_of(path), **fields).encode())


def flip_document(name: str) -> Callable[[Path], None]:
    return lambda path: flip(path, header_of(path).documents[name][0] + 100)


def forge_document(name: str, offset: int | None = None, nbytes: int | None = None) -> Callable[[Path], None]:
    def damage(path: Path) -> None:
        documents = dict(header_of(path).documents)
        found = documents[name]
        documents[name] = (found[0] if offset is None else offset, found[1] if nbytes is None else nbytes, found[2])
        forge(path, documents=documents)

    return damage


def replace_by_link(path: Path) -> None:
    elsewhere = path.parent / "elsewhere"
    path.rename(elsewhere)
    path.symlink_to(elsewhere)


def vanish(path: Path) -> None:
    path.unlink()


DAMAGES: dict[str, Callable[[Path], None]] = {
    "body": lambda path: flip(path, PAGE_BYTES + 1000),
    "header": lambda path: flip(path, 200),
    "layout": flip_document("layout"),
    "table": flip_document("table"),
    "snapshot": flip_document("snapshot"),
    "cut in the body": lambda path: os.truncate(path, PAGE_BYTES + 1000),
    "cut in the header": lambda path: os.truncate(path, 100),
    "not there": vanish,
    "a link": replace_by_link,
    "of another user": lambda path: os.chown(path, 12345, 12345),
    "absurd body": lambda path: forge(path, body_nbytes=2**62),
    "absurd layout": forge_document("layout", nbytes=2**39),
    "absurd table": forge_document("table", nbytes=2**39),
    "absurd place": forge_document("snapshot", offset=2**62),
    "another rank": lambda path: forge(path, rank=5),
    "another root": lambda path: forge(path, root_id="0" * 32),
    "another snapshot": lambda path: forge(path, number=77),
}

STRANGE = {"cut in the header", "a link", "of another user"}
"""What nobody touches, to the end."""


def clean_up(cluster: Cluster, name: str, path: Path) -> None:
    if name in STRANGE:
        path.unlink()
        (path.parent / "elsewhere").unlink(missing_ok=True)


SOME = ["body", "header", "layout", "cut in the body", "a link"]


@pytest.mark.parametrize("names", [pytest.param(SOME, id="some"), pytest.param([*DAMAGES], id="all", marks=slow)])
def test_damage_to_a_slot_of_its_own(make: Any, names: list[str]) -> None:
    """The replica is sent instead."""
    cluster = make()
    cluster.start("AB", total=2 * len(names) + 2, pauses=[2])
    for step, name in enumerate(names, 1):
        cluster.until_paused(2 * step)
        cluster.lose()
        path = cluster.slots_of(rank=0, step=2 * step)["A"]
        DAMAGES[name](path)
        cluster.start("AB", total=2 * len(names) + 2, pauses=[2 * step + 2])
        assert (cluster.restored(), cluster.received()) == ({(2 * step, MEMORY)}, 1), (name, cluster.story())
        clean_up(cluster, name, path)
    cluster.say(2 * len(names) + 2)
    cluster.finish()


@pytest.mark.parametrize(
    "names",
    [
        pytest.param(["body", "layout", "absurd table"], id="some"),
        pytest.param([*DAMAGES], id="all", marks=slow),
    ],
)
def test_damage_to_the_only_copy(make: Any, names: list[str]) -> None:
    """The snapshot before it is restored, by all ranks."""
    cluster = make()
    step = 3
    cluster.start("AB", total=3 * len(names) + 4, pauses=[step])
    for name in names:
        cluster.until_paused(step)
        cluster.lose("B")
        path = cluster.slots_of(rank=1, step=step)["A"]
        DAMAGES[name](path)
        cluster.start("AB", total=3 * len(names) + 4, pauses=[step + 2])
        assert (cluster.restored(), cluster.received()) == ({(step - 1, MEMORY)}, 1), (name, cluster.story())
        clean_up(cluster, name, path)
        step += 2
    cluster.until_paused(step)
    cluster.say(step)
    cluster.finish()


def test_damage_to_everything_in_memory(make: Any) -> None:
    cluster = make(every=4)
    cluster.start("AB", pauses=[6])
    cluster.until_paused(6)
    cluster.wait_until_committed(4)
    cluster.lose()
    for path in cluster.slots():
        flip(path, PAGE_BYTES + 1000)
    cluster.start("AB")
    assert cluster.restored() == {(4, STORE)}
    assert all(len(line["skipped"]) >= 2 for line in cluster.wait_for("restored"))
    cluster.finish()
