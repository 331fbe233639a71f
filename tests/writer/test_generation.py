"""The record of a job's generation: put in the root that the job opened, and in no other."""

from __future__ import annotations

from contextlib import nullcontext
from dataclasses import replace
from multiprocessing.connection import Connection
from pathlib import Path
from threading import Barrier

import pytest
from helpers.actors import ActorStore
from helpers.flushed import ForgetfulDisk, Killed
from helpers.forkserver import context, start_server
from helpers.overwriting import OverwritingStore
from helpers.servers import ObjectStorage
from store_conformance import keys
from support import make_generation, make_root, make_save, state

from ckptlib.catalog.catalog import Catalog
from ckptlib.catalog.known_generations import KnownGenerations
from ckptlib.errors import StoreError, Superseded
from ckptlib.format.digests import XXH3
from ckptlib.format.keys import ROOT, GenerationId, SaveId, copy_key
from ckptlib.format.manifest import Generation, Root
from ckptlib.stores import open_store
from ckptlib.stores.local import LocalStore
from ckptlib.stores.memory import MemoryStore
from ckptlib.writer import generation
from ckptlib.writer.generation import GenerationRecord

WAIT_S = 150.0


def record(number: int, root: str, again: bool = False) -> GenerationRecord:
    generation = GenerationId(1, f"{number:08x}")
    return GenerationRecord(Generation(generation, 1, None, 0.0, {}, "here"), root, 1, continues=True, again=again)


def test_a_root_that_another_job_has_replaced_gets_no_record(tmp_path: Path) -> None:
    store = MemoryStore()
    mine = Catalog(store).open_root(Root("a" * 32, XXH3, 60.0))
    store.delete(ROOT)  # as a store does that lets the later of two puts win
    theirs = Catalog(store).open_root(Root("b" * 32, XXH3, 60.0))
    with pytest.raises(Superseded, match="another job made it in the same moment"):
        record(1, mine.id).put(Catalog(store))
    assert keys(store, "generations/") == []
    record(2, theirs.id).put(Catalog(store))
    assert len(keys(store, "generations/")) == 1


@pytest.mark.parametrize("found", [True, False])
def test_a_record_that_a_writer_put_before_it_died_stands(found: bool) -> None:
    """Though the step that the job went on from was removed since. On S3, a second put would replace the record."""
    store = MemoryStore()
    catalog = Catalog(store)
    root = catalog.open_root(Root("a" * 32, XXH3, 60.0))
    own, origin = GenerationId(2, "00000002"), SaveId(5, GenerationId(1, "00000001"))
    told = Generation(own, 1, None, 0.0, {}, "here")
    if found:
        catalog.generations.put(replace(told, resumed_from=origin))
    before = {key: store.get(key) for key in keys(store)}
    record = GenerationRecord(told, root.id, 6, continues=True, again=True)
    assert record.put(catalog) is None
    assert record.is_put
    assert record.record.resumed_from == (origin if found else None)
    assert catalog.shared.own_record == record.record, "it is put again, should it be lost"
    assert {key: store.get(key) for key in keys(store)} == before | (
        {} if found else {key: told.encode() for key in (own.key, copy_key(own.key))}
    )


def test_a_record_that_a_writer_put_as_it_died_survives_a_power_loss(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for moment in (1, 2):  # of the record, and of its copy
        catalog = make_root(LocalStore(str(tmp_path / f"{moment}")))
        with monkeypatch.context() as patched:
            power = ForgetfulDisk(patched)
            power.links_left = moment
            with pytest.raises(Killed):
                record(1, catalog.root().id).put(catalog)
            record(1, catalog.root().id, again=True).put(Catalog(catalog.store))
            power.lose_power()
        assert len(keys(catalog.store, "generations/")) == len(keys(catalog.store, "copies/generations/")) == 1


@pytest.mark.parametrize("lost", ["", "copies/"])
def test_a_record_that_is_there_is_not_put_again_but_for_its_copy(lost: str) -> None:
    """Of who may put and not delete: Google Cloud Storage refuses to replace an object."""
    catalog = make_root(OverwritingStore())
    record(1, catalog.root().id).put(catalog)
    there, put = {key: catalog.store.get(key) for key in keys(catalog.store)}, list[str]()
    if lost:
        catalog.store.delete(*keys(catalog.store, lost))
    actor = ActorStore(catalog.store)  # type: ignore[arg-type]
    actor.before = lambda op, key: put.append(key) if op in ("put", "delete") else None
    record(1, catalog.root().id, again=True).put(Catalog(actor))
    assert put == [key for key in there if lost and key.startswith(lost)]
    assert {key: catalog.store.get(key) for key in keys(catalog.store)} == there


def test_whoever_begins_first_goes_on() -> None:
    """The numbers of two jobs do not tell who is later: each is above what its own hosts have left."""
    catalog = Catalog(MemoryStore())
    root = catalog.open_root(Root("a" * 32, XXH3, 60.0))
    old, orphan, theirs, own = (GenerationId(n, f"{m:08x}") for n, m in ((1, 1), (2, 2), (2, 3), (3, 4)))
    told = {of: Generation(of, 1, None, 0.0, {}, "here") for of in (old, orphan, theirs, own)}

    def begin(of: GenerationId, seen: KnownGenerations) -> None:
        GenerationRecord(told[of], root.id, 1, continues=False, seen=seen).put(catalog)

    begin(old, KnownGenerations(0))
    catalog.generations.put(told[orphan])
    begin(own, KnownGenerations(1, (orphan,)))
    catalog.generations.put(told[theirs])
    begin(own, KnownGenerations(2))  # it knew of both
    with pytest.raises(Superseded, match=f"{own} may no longer save: {theirs} has begun since this job"):
        begin(own, KnownGenerations(1, (orphan,)))


@pytest.mark.parametrize("late", [True, False])
@pytest.mark.parametrize("saves", [True, False])
def test_a_record_that_came_late_hides_no_step_of_a_job_that_began_meanwhile(
    monkeypatch: pytest.MonkeyPatch, late: bool, saves: bool
) -> None:
    """Each has a number above what it knew of, so the later one may have the greater id. Its record stays, but it saves
    nothing, and the steps of the other stay on the history."""
    monkeypatch.setattr(generation, "LATE_S", 0.0 if late else 1e6)
    store, outside = ActorStore(inner := MemoryStore()), Catalog(inner)
    catalog = Catalog(store)
    root = catalog.open_root(Root("a" * 32, XXH3, 60.0))
    first = make_save(catalog, make_generation(catalog, 1), 4, state(4))
    own, theirs = GenerationId(2, "0000000b"), GenerationId(2, "0000000a")
    told, seen = Generation(own, 1, first, 0.0, {}, "here"), KnownGenerations(1, (), first)

    def before(op: str, key: str) -> None:
        if (op, key) == ("put", own.key):
            outside.generations.put(replace(told, id=theirs))
            if saves:
                make_save(outside, theirs, 5, state(5))

    store.before = before
    mine = GenerationRecord(told, root.id, 5, continues=False, seen=seen)
    with pytest.raises(Superseded, match=f"{theirs} has begun since") if late and saves else nullcontext():
        mine.put(catalog)
    assert mine.is_put == (not (late and saves))
    assert own in catalog.generations.ids()
    assert [save.step for save in catalog.visible()] == ([4, 5] if saves else [4])


@pytest.mark.parametrize("fails", [False, True])
def test_a_step_of_another_root_is_no_origin(fails: bool) -> None:
    """`fails`: the store does once, as the record is put."""
    store, tries = ActorStore(MemoryStore()), 1 + fails
    catalog = Catalog(store)
    root = catalog.open_root(Root("a" * 32, XXH3, 60.0))
    there = make_save(catalog, make_generation(catalog, 3), 2, state(2))
    foreign, own = SaveId(5, GenerationId(4, "0000000f")), GenerationId(1, "00000001")
    record = GenerationRecord(Generation(own, 1, foreign, 0.0, {}, "here"), root.id, 6, continues=False)

    def before(op: str, key: str) -> None:
        nonlocal tries
        if op == "put" and key == own.key:
            tries -= 1
            if tries:
                raise StoreError("away")

    store.before = before
    if fails:
        with pytest.raises(StoreError, match="away"):
            record.put(catalog)
    assert f"restored {foreign}, of another root" in (record.put(catalog) or "")
    assert tries == 0
    assert catalog.generations.record(own).resumed_from == there


def test_a_step_that_only_memory_has_is_an_origin_where_its_generation_has_a_record() -> None:
    """No step of that generation is committed. The writers that it left may commit this one while the record names
    it."""
    catalog = Catalog(MemoryStore())
    root = catalog.open_root(Root("a" * 32, XXH3, 60.0))
    make_save(catalog, make_generation(catalog, 3), 2, state(2))
    restored, own = SaveId(5, make_generation(catalog, 4)), GenerationId(5, "00000001")
    record = GenerationRecord(Generation(own, 1, restored, 0.0, {}, "here"), root.id, 6, continues=False)
    assert record.put(catalog) is None
    assert catalog.generations.record(own).resumed_from == restored


def test_a_job_that_did_not_restore_goes_on_from_the_newest_step_before_its_own() -> None:
    catalog = make_root(MemoryStore())
    past = make_generation(catalog, 1)
    for step in (3, 4, 5, 9):
        make_save(catalog, past, step, state(step))
    own = GenerationId(2, "00000002")
    record = GenerationRecord(Generation(own, 1, None, 0.0, {}, "here"), catalog.root().id, 5, continues=True)
    told = record.put(catalog) or ""
    assert "holds steps up to 9, but this job saves step 5 without having restored an earlier one: steps 5 and" in told
    assert catalog.generations.record(own).resumed_from == SaveId(4, past)


@pytest.mark.parametrize(("rewind", "late"), [(False, True), (False, False), (True, True)])
def test_steps_that_an_older_job_commits_after_the_restore_are_told(rewind: bool, late: bool) -> None:
    """It was frozen meanwhile. Going back leaves steps behind on purpose."""
    catalog = Catalog(MemoryStore())
    root = catalog.open_root(Root("a" * 32, XXH3, 60.0))
    frozen, own = GenerationId(1, "00000001"), GenerationId(2, "00000002")
    catalog.generations.put(Generation(frozen, 1, None, 0.0, {}, "here"))
    for step in (5, 6, 7) if late else (5,):
        catalog.store.put(SaveId(step, frozen).manifest_key, b"a step")
    told = Generation(own, 1, SaveId(5, frozen), 0.0, {}, "here", rewind=rewind)
    warning = GenerationRecord(told, root.id, 6, continues=False).put(catalog)
    if rewind or not late:
        assert warning is None
    else:
        assert warning is not None
        assert "holds steps up to 000000000007-000001-00000001, but this job goes on from step 5: " in warning
        assert "steps 6 and later are no longer listed (they stay in the store)" in warning


def make_roots(n: int, url: str, options: dict[str, object], together: Barrier, told: Connection) -> None:
    """In a process of its own: whenever it hears of a race, the id that it goes on with; '' where it is told not to."""
    with open_store(url, options) as store:
        while (race := told.recv()) is not None:
            together.wait(WAIT_S)
            mine = Catalog(store).open_root(Root(f"{race:015x}{n}" * 2, XXH3, 60.0)).id
            together.wait(WAIT_S)
            try:
                record(n, mine).put(Catalog(store))
            except Superseded:
                mine = ""
            told.send(mine)


@pytest.mark.parametrize("server", ["s3", "juicefs"])
@pytest.mark.parametrize("races", [10, pytest.param(200, marks=pytest.mark.slow)])
def test_two_jobs_that_make_a_root_at_once(server: str, races: int, request: pytest.FixtureRequest) -> None:
    """One id is there in the end. Who holds the other is told before it commits anything; one of them goes on."""
    storage: ObjectStorage = request.getfixturevalue(server)
    url, options = storage.url(), storage.options()
    start_server()
    together, pipes = context.Barrier(2), [context.Pipe() for _ in range(2)]
    jobs = [
        context.Process(target=make_roots, args=(n, url, options, together, pipes[n][1]), daemon=True) for n in range(2)
    ]
    for job in jobs:
        job.start()
    with open_store(url, options) as store:
        for race in range(races):
            for ours, _ in pipes:
                ours.send(race)
            assert all(ours.poll(WAIT_S) for ours, _ in pipes), race
            held = [ours.recv() for ours, _ in pipes]
            assert {*held} - {""} == {Catalog(store).root().id}
            assert len(keys(store, "generations/")) == len([*filter(None, held)])
            store.delete(*keys(store))
    for job, (ours, _) in zip(jobs, pipes, strict=True):
        ours.send(None)
        job.join(WAIT_S)
        assert job.exitcode == 0
