"""Generations that a disk alone knows of: which ones the next job may enter into history."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

import pytest
from support import make_generation, make_root, make_save, state

from ckptlib.catalog.begun import Begun, note, noted, noted_ids, unrecorded
from ckptlib.catalog.catalog import Catalog
from ckptlib.catalog.known_generations import KnownGenerations
from ckptlib.errors import CorruptData, FormatError
from ckptlib.format import keys
from ckptlib.format.keys import GenerationId, SaveId
from ckptlib.format.manifest import Generation
from ckptlib.stores.local import LocalStore
from ckptlib.stores.memory import MemoryStore
from ckptlib.stores.testing import flip_bit
from ckptlib.writer.generation import GenerationRecord


def begun(number: int, nonce: str = "a" * 8, origin: SaveId | None = None) -> Begun:
    return Begun(Generation(GenerationId(number, nonce), 3, origin, 1.5, {"ckptlib": "1"}, "host"), 7, origin is None)


def test_what_is_noted_is_read_again_and_stands_when_noted_twice(tmp_path: Path) -> None:
    disk = LocalStore(str(tmp_path))
    assert (noted(disk), noted_ids(disk)) == ([], set())
    seen = KnownGenerations(1, (begun(2).record.id,), SaveId(5, GenerationId(1, "b" * 8)))
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
    catalog.generations.put(replace(earlier.record, id=killed))
    assert unrecorded([own], catalog) == [own], "its record came late"
    assert unrecorded([replace(begun(2, "d" * 8), seen=KnownGenerations(1))], catalog) == [], "it has its record"
    make_generation(catalog, 2)
    assert unrecorded([own], catalog) == [], "a job on other hosts went on"
    catalog.generations.put(own.record)
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


class Hiding(NamedTuple):
    """What older jobs commit before and after a job began that saved to a local disk only, and died."""

    why: str
    before: Sequence[tuple[int, int | None, Sequence[int]]]
    """A generation, the step that it goes on from, and the steps that it commits. REWIND is a rewind."""
    restored: int | None
    first: int
    after: Sequence[tuple[int, int | None, Sequence[int]]]
    enters: bool


REWIND = 12

HIDING = [
    Hiding("nothing was committed since", [(1, None, (1, 2, 3))], 3, 4, [], True),
    Hiding("an older job went on beside it", [(1, None, (1, 2, 3))], 3, 4, [(1, None, (4,))], False),
    Hiding("though not as far", [(1, None, (1, 2, 3))], 3, 6, [(1, None, (4, 5))], False),
    Hiding("it goes on from a step that was committed late", [(1, None, (1, 2, 3))], 5, 6, [(1, None, (4, 5))], True),
    Hiding("and from no later one", [(1, None, (1, 2, 3))], 5, 6, [(1, None, (4, 5, 6))], False),
    Hiding("it left out steps that it knew", [(1, None, (1, 2, 3))], 1, 2, [], True),
    Hiding("and those that came since", [(1, None, (1, 2, 3))], 1, 2, [(1, None, (4,))], False),
    Hiding("it did not restore", [(1, None, (1, 2, 3))], None, 1, [], True),
    Hiding("nor did it know what came since", [(1, None, (1, 2, 3))], None, 1, [(1, None, (4,))], False),
    Hiding("its first step comes behind", [(1, None, (1, 2, 3))], None, 6, [(1, None, (4, 5))], True),
    Hiding("or among them", [(1, None, (1, 2, 3))], None, 5, [(1, None, (4, 5))], False),
    Hiding("the older job had no step yet", [(1, None, ())], None, 1, [(1, None, (1,))], False),
    Hiding("there was nothing", [], None, 1, [], True),
    Hiding("a rewind left later steps", [(1, None, range(1, 9)), (REWIND, 3, ())], 3, 4, [], True),
    Hiding(
        "behind a rewind it went on",
        [(1, None, range(1, 9)), (REWIND, 3, ()), (13, 3, (4,))],
        *(4, 5, [(13, None, (5, 6))], False),
    ),
    Hiding("or left that out", [(1, None, range(1, 9)), (REWIND, 3, ()), (13, 3, (4, 5))], 3, 4, [], True),
    Hiding("one that hosts had left came late", [(1, None, range(1, 6))], 5, 6, [(20, 3, (4,))], False),
    Hiding("and had no step", [(1, None, range(1, 6))], 5, 6, [(20, 5, ())], True),
    Hiding("it goes on from that one", [(1, None, range(1, 6)), (2, 3, (4, 5))], 5, 6, [], True),
    Hiding("which went on", [(1, None, range(1, 6)), (2, 3, (4, 5))], 5, 6, [(2, None, (6,))], False),
]


def commit(catalog: Catalog, rows: Sequence[tuple[int, int | None, Sequence[int]]]) -> None:
    for number, resumed, steps in rows:
        of = GenerationId(number, f"{number:08x}")
        if of not in catalog.generations.ids():
            origin = None if resumed is None else catalog.resolve(resumed)
            catalog.generations.put(Generation(of, 1, origin, 0.0, {}, "here", rewind=number == REWIND))
        for step in steps:
            make_save(catalog, of, step, state(step))


@pytest.mark.parametrize("case", HIDING, ids=[case.why.replace(" ", "-") for case in HIDING])
def test_a_late_record_hides_no_step_that_an_older_job_has_committed_since(
    case: Hiding, caplog: pytest.LogCaptureFixture
) -> None:
    """The oracle commits a step of the job in a copy of the root, and looks what is not listed any more."""
    store = MemoryStore()
    catalog = make_root(store)
    commit(catalog, case.before)
    known, visible = {*catalog.saves()}, catalog.visible()
    newest = max((generation.number for generation in catalog.generations.ids()), default=0)
    own, left = GenerationId(newest + 20, "e" * 8), GenerationId(20, f"{20:08x}")
    seen = KnownGenerations(newest, (left,), max(visible, default=None))
    origin = None
    if case.restored is not None:  # committed by then, or in memory
        committed = [save for save in visible if save.step == case.restored]
        origin = committed[0] if committed else SaveId(case.restored, visible[-1].generation)
    told = Begun(Generation(own, 1, origin, 0.0, {}, "host"), case.first, origin is None, seen)
    commit(catalog, case.after)
    assert unrecorded([told], catalog) == ([told] if case.enters else [])
    assert ("are not used" in caplog.text) == (not case.enters)
    unread = replace(told, seen=KnownGenerations.from_json({"newest": newest, "left": [str(left)]}, "an old note"))

    copy = MemoryStore()
    for entry in store.scan(""):
        copy.put(entry.key, store.get(entry.key))
    there = Catalog(copy)
    before = {*there.visible()}
    GenerationRecord(told.record, there.root().id, case.first, told.continues).put(there)
    make_save(there, own, case.first, state(case.first))
    hidden = before - {*there.visible()}
    assert (hidden <= known) == case.enters
    for old in (unread, replace(told, seen=None)):
        assert unrecorded([old], catalog) == ([] if hidden else [old]), "what it knew is not known"


@pytest.mark.parametrize("lost", ["damaged", "gone"])
def test_a_late_record_hides_no_step_where_that_of_its_origin_is_lost(lost: str) -> None:
    """It goes on from there all the same, and from no step that is listed instead."""
    store = MemoryStore()
    catalog = make_root(store)
    commit(catalog, [(1, None, (1, 2, 3)), (2, 3, (4, 5))])
    third, *_, origin = catalog.visible()[2:]
    late, own = GenerationId(20, f"{20:08x}"), GenerationId(22, "e" * 8)
    told = Begun(Generation(own, 1, origin, 0.0, {}, "host"), 6, False, KnownGenerations(2, (late,), origin))
    for key in (origin.generation.key, keys.copy_key(origin.generation.key)):
        store.delete(key)
        if lost == "damaged":
            store.put(key, b"{}")
    assert unrecorded([told], Catalog(store)) == [told]
    make_save(catalog, make_generation(catalog, 20, third), 4, state(4))
    assert unrecorded([told], Catalog(store)) == [], "step 4 would not be listed any more"
    before = {*Catalog(store).visible()}
    GenerationRecord(told.record, catalog.root().id, 6, continues=False).put(Catalog(store))
    make_save(catalog, own, 6, state(6))
    assert {save.step for save in before - {*Catalog(store).visible()}} >= {4}


def test_a_job_that_restored_from_another_root_goes_on_from_what_is_listed() -> None:
    catalog = make_root(MemoryStore())
    commit(catalog, [(1, None, (1, 2, 3))])
    seen, foreign = KnownGenerations(1, (), catalog.resolve("latest")), SaveId(5, GenerationId(7, "f" * 8))
    told = Begun(Generation(GenerationId(21, "e" * 8), 1, foreign, 0.0, {}, "host"), 6, False, seen)
    commit(catalog, [(1, None, (4,))])
    assert unrecorded([told], catalog) == [told], "it hides nothing"
    commit(catalog, [(1, None, (6,))])
    assert unrecorded([told], catalog) == []


def test_one_that_goes_on_from_another_that_began_on_a_disk_hides_what_that_one_hides() -> None:
    """Step 5 was in memory as the first one went on from it, and has been committed since."""
    catalog = make_root(MemoryStore())
    commit(catalog, [(1, None, (1, 2, 3))])
    third = catalog.resolve("latest")
    ids = [GenerationId(number, "e" * 8) for number in (21, 22)]
    origins = [SaveId(5, third.generation), SaveId(6, ids[0])]
    left = KnownGenerations(1, tuple(ids), third)
    first, second = [
        Begun(Generation(own, 1, origin, 0.0, {}, "host"), origin.step + 1, False, left)
        for own, origin in zip(ids, origins, strict=True)
    ]
    commit(catalog, [(1, None, (4, 5))])
    assert unrecorded([first, second], catalog) == [first, second]
    commit(catalog, [(1, None, (6,))])
    assert unrecorded([first, second], catalog) == [second], "it goes on from what is listed then"
