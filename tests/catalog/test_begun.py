"""Generations that a disk alone knows of: which ones the next job may enter into history."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
from support import make_generation, make_root, make_save, state

from ckptlib.catalog.begun import Begun, note, noted, noted_ids, unrecorded
from ckptlib.catalog.known_generations import KnownGenerations
from ckptlib.errors import CorruptData, FormatError
from ckptlib.format import keys
from ckptlib.format.keys import GenerationId, SaveId
from ckptlib.format.manifest import Generation
from ckptlib.stores.local import LocalStore
from ckptlib.stores.memory import MemoryStore
from ckptlib.stores.testing import flip_bit


def begun(number: int, nonce: str = "a" * 8, origin: SaveId | None = None) -> Begun:
    return Begun(Generation(GenerationId(number, nonce), 3, origin, 1.5, {"ckptlib": "1"}, "host"), 7, origin is None)


def test_what_is_noted_is_read_again_and_stands_when_noted_twice(tmp_path: Path) -> None:
    disk = LocalStore(str(tmp_path))
    assert (noted(disk), noted_ids(disk)) == ([], set())
    seen = KnownGenerations(1, (begun(2).record.id,))
    told = [begun(2), replace(begun(3, origin=SaveId(5, GenerationId(1, "b" * 8))), seen=seen)]
    for one in (*told, told[0]):
        note(disk, one)
    assert noted(disk) == told
    assert noted_ids(disk) == {one.record.id for one in told}


def test_one_that_is_damaged_is_told_of_and_left_out(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    disk = LocalStore(str(tmp_path))
    note(disk, begun(2))
    note(disk, begun(3))
    path = tmp_path / begun(2).record.id.begun_key
    flip_bit(path, path.stat().st_size // 2)
    (tmp_path / "begun" / "foreign").write_text("x")
    disk.put(GenerationId(9, "c" * 8).begun_key, begun(4).encode())  # under another's name
    assert noted(disk) == [begun(3)]
    assert "steps of generation 000002-aaaaaaaa on the local disk may not be found" in caplog.text
    with pytest.raises((CorruptData, FormatError)):
        Begun.decode(path.read_bytes(), "here")


def test_a_job_that_others_knew_nothing_of_may_have_any_number() -> None:
    """It is above those that its hosts have left: a start that was killed early, of which the store never knew."""
    catalog = make_root(MemoryStore())
    make_generation(catalog, 1)
    killed, own = GenerationId(2, "d" * 8), replace(begun(3), seen=KnownGenerations(1, (GenerationId(2, "d" * 8),)))
    earlier = replace(begun(2), seen=KnownGenerations(1))
    assert unrecorded([own], catalog) == [own]
    assert unrecorded([earlier, own], catalog) == [earlier, own]
    catalog.put_generation(replace(earlier.record, id=killed))
    assert unrecorded([own], catalog) == [own], "its record came late"
    make_generation(catalog, 2)
    assert unrecorded([own], catalog) == [], "a job on other hosts went on"
    catalog.put_generation(own.record)
    assert unrecorded([own], catalog) == []


def test_a_record_is_put_only_where_no_other_job_has_put_one_since() -> None:
    catalog = make_root(MemoryStore())
    told = [begun(3), begun(2), begun(3)]
    assert unrecorded([], catalog) == []
    assert unrecorded(told, catalog) == [begun(2), begun(3)], "each once, in their order"
    make_generation(catalog, 1)
    assert unrecorded(told, catalog) == [begun(2), begun(3)]
    other = make_generation(catalog, 2)
    assert other.nonce != begun(2).record.id.nonce
    assert unrecorded(told, catalog) == [begun(3)], "the other one knew nothing of it, and went on"
    lost = make_generation(catalog, 4)
    make_save(catalog, lost, 1, state(1))
    catalog.store.delete(lost.key, keys.copy_key(lost.key))
    assert unrecorded(told, catalog) == []
