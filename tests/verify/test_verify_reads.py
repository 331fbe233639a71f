"""How `verify` reads a store: what that does not give, and how much at a time."""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from helpers.findings import findings, only, parts_of, tensors
from helpers.objects import objects_of
from helpers.writers import until
from support import (
    make_generation,
    make_root,
    make_save,
)
from typing_extensions import Buffer, override

from ckptlib.catalog.catalog import Catalog
from ckptlib.errors import ObjectNotFound, StoreError
from ckptlib.format.box import Box
from ckptlib.format.keys import SaveId
from ckptlib.stores import Store
from ckptlib.stores.io_limits import THREADS
from ckptlib.stores.local import LocalStore
from ckptlib.stores.memory import MemoryStore
from ckptlib.stores.testing import FaultStore, _HookedStore, write_plan
from ckptlib.verify import packs
from ckptlib.verify.findings import Finding
from ckptlib.verify.root import verify_save


def test_what_the_store_does_not_give_is_unreadable(store: MemoryStore, save: SaveId, tmp_path: Path) -> None:
    """A bad sector: the rest of the pack is judged all the same."""
    part = parts_of(store, save)[1]
    plan = tmp_path / "plan.json"
    write_plan(plan, [{"op": "get_into", "key": part.packs[0].key, "action": "error"}])
    found = findings(FaultStore(store, str(plan)), save)
    assert {one.damage for one in found} == {"unreadable"}
    assert {name for one in found for name, _ in one.shards} == {"w", "b", "large"}
    assert {one.rank for one in found} == {1}


def test_a_manifest_that_the_store_does_not_give(store: MemoryStore, save: SaveId, tmp_path: Path) -> None:
    plan = tmp_path / "plan.json"
    write_plan(plan, [{"op": "get", "key": "^steps/", "action": "unreadable"}])
    found = only(findings(FaultStore(store, str(plan)), save))
    assert (found.damage, found.key) == ("unreadable", save.manifest_key)


@pytest.mark.timeout(20)
@pytest.mark.parametrize("kind", ["packs", "parts", "layouts"])
def test_what_is_no_file_is_missing(tmp_path: Path, kind: str) -> None:
    """As a load finds it; neither waits for somebody to write into a FIFO, or takes what a link leads to."""
    store = LocalStore(str(tmp_path))
    catalog = make_root(store)
    save = make_save(catalog, make_generation(catalog), 5, tensors())
    path = next(p for p in (tmp_path / kind).rglob("*") if p.is_file())
    moved = path.rename(tmp_path / "moved")
    for put_there in (os.mkfifo, lambda path: path.symlink_to(moved), os.mkdir):
        put_there(path)
        found = findings(store, save)
        assert {one.damage for one in found} == {"missing"}
        assert {one.key for one in found} == {str(path.relative_to(tmp_path))}
        with pytest.raises(ObjectNotFound):
            store.get(str(path.relative_to(tmp_path)))
        path.rmdir() if path.is_dir() and not path.is_symlink() else path.unlink()


def test_bad_sector_hurts_only_its_chunk(store: MemoryStore, save: SaveId) -> None:
    part = parts_of(store, save)[0]
    table = part.table
    bad = table.offsets[table.first_chunks[table.boxes.index(Box((0, 0), (3, 4)))]]
    found = only(findings(BadSector(store, part.packs[0].key, bad), save))
    assert (found.damage, found.offset) == ("unreadable", bad)
    assert ("w", Box((0, 0), (3, 4))) in found.shards
    assert "large" not in {name for name, _ in found.shards}


@pytest.mark.parametrize("times", [1, 2])
def test_what_a_network_alters_once_is_no_damage(store: MemoryStore, save: SaveId, times: int) -> None:
    """A chunk that is read as it should not be is read once more by itself."""
    part = parts_of(store, save)[0]
    at = part.table.offsets[part.table.first_chunks[part.table.boxes.index(Box((0, 0), (3, 4)))]]
    found = findings(Altering(store, part.packs[0].key, at, times), save)
    assert [(one.damage, one.offset) for one in found] == [("altered", at)] * (times - 1)


class Altering(_HookedStore):
    """Gives a byte of a pack otherwise than it is, so often."""

    def __init__(self, inner: Store, key: str, at: int, times: int) -> None:
        super().__init__(inner, "altering")
        self._key, self._at, self._left = key, at, times

    @override
    @contextmanager
    def _around(self, op: str, key: str, data: Buffer = b"") -> Iterator[Buffer]:
        yield data

    @override
    def get_into(self, key: str, offset: int, buffer: memoryview, *, deadline: float | None = None) -> None:
        super().get_into(key, offset, buffer, deadline=deadline)
        if key == self._key and offset <= self._at < offset + buffer.nbytes and self._left:
            self._left -= 1
            buffer[self._at - offset] ^= 1


def test_outage_is_no_damage(store: MemoryStore, save: SaveId, tmp_path: Path) -> None:
    plan = tmp_path / "plan.json"
    write_plan(plan, [{"op": "scan", "action": "error"}])
    with pytest.raises(StoreError):
        findings(FaultStore(store, str(plan)), save)


class BadSector(_HookedStore):
    """A byte of an object cannot be read."""

    def __init__(self, inner: Store, key: str, at: int) -> None:
        super().__init__(inner, "bad")
        self._key, self._at = key, at

    @override
    @contextmanager
    def _around(self, op: str, key: str, data: Buffer = b"") -> Iterator[Buffer]:
        yield data

    @override
    def get_into(self, key: str, offset: int, buffer: memoryview, *, deadline: float | None = None) -> None:
        if key == self._key and offset <= self._at < offset + buffer.nbytes:
            raise StoreError(f"{key}: cannot read: Input/output error (errno 5)")
        self._inner.get_into(key, offset, buffer)


class Meter(_HookedStore):
    """How much is asked for at once."""

    def __init__(self, inner: Store) -> None:
        super().__init__(inner, "meter")
        self._lock = threading.Lock()
        self.largest = self.busy = self.most_busy = 0

    @override
    @contextmanager
    def _around(self, op: str, key: str, data: Buffer = b"") -> Iterator[Buffer]:
        with self._lock:
            self.busy += 1
            self.most_busy = max(self.busy, self.most_busy)
        try:
            yield data
        finally:
            with self._lock:
                self.busy -= 1

    @override
    def get_into(self, key: str, offset: int, buffer: memoryview, *, deadline: float | None = None) -> None:
        self.largest = max(self.largest, buffer.nbytes)
        super().get_into(key, offset, buffer)


def test_memory_is_bounded(store: MemoryStore, save: SaveId, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(packs, "RUN_BYTES", 1 << 20)
    meter = Meter(store)
    assert findings(meter, save) == []
    assert 0 < meter.largest <= 1 << 20
    assert meter.most_busy <= THREADS


def test_giving_up_half_way_leaves_no_thread(store: MemoryStore, save: SaveId) -> None:
    del objects_of(store)[parts_of(store, save)[0].packs[0].key]
    found: Iterator[Finding] = verify_save(Catalog(store), save)
    next(found)
    found.close()  # type: ignore[attr-defined]
    until(lambda: not [thread for thread in threading.enumerate() if thread.name.startswith("ckptlib-verify")])
