"""From which save a rank takes over what has not changed: only from a committed one, and soon enough."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from dataclasses import replace
from types import SimpleNamespace

import pytest
from helpers.actors import no_chance
from helpers.memory_slots import memory_slot
from helpers.small_job import COLUMNS, ROWS, TENSORS, Save, SmallJob

from ckptlib.errors import StoreError
from ckptlib.format import keys
from ckptlib.format.digests import BLAKE3
from ckptlib.format.keys import SaveId
from ckptlib.slots.snapshot import Snapshot, SnapshotReader
from ckptlib.writer import parents as module
from ckptlib.writer.known_origin import KnownOrigin
from ckptlib.writer.parents import KEPT, Parents
from ckptlib.writer.seen_packs import LOOK_AGAIN_S

ROW_BYTES = 4 * COLUMNS


@pytest.fixture
def job() -> Iterator[SmallJob]:
    with no_chance():
        yield SmallJob(world_size=1)


class Clock:
    """Time that moves when somebody sleeps; `at`: what happens then."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now = 0.0
        self.at: dict[float, Callable[[], object]] = {}
        monkeypatch.setattr(module, "time", SimpleNamespace(monotonic=lambda: self.now, sleep=self.sleep))

    def sleep(self, seconds: float) -> None:
        self.now += seconds
        for when in [when for when in self.at if when <= self.now]:
            self.at.pop(when)()


@pytest.fixture
def clock(job: SmallJob, monkeypatch: pytest.MonkeyPatch) -> Clock:
    return Clock(monkeypatch)


def snapshot(job: SmallJob, save: Save, rank: int = 0) -> Snapshot:
    slot = job.slot(save, rank)
    return SnapshotReader().read(slot, slot.read_header())


def parents_of(job: SmallJob) -> Parents:
    """As a writer has them that lives for long."""
    return job.writers[0].persister._parents


def chosen(job: SmallJob, patience_s: float = 0.0) -> SaveId | None:
    """For the next save."""
    parent, _ = parents_of(job).choose(snapshot(job, job.begin_save()), patience_s)
    return None if parent is None else parent.save


def put_by(job: SmallJob, save: SaveId) -> int:
    return sum(len(job.store.get(key)) for key in job.keys(f"packs/{save}/"))


# -- which


def test_the_first_save_has_no_parent(job: SmallJob) -> None:
    assert chosen(job) is None


def test_the_newest_committed_one(job: SmallJob) -> None:
    saves = [job.save_and_commit() for _ in range(3)]
    assert chosen(job) == saves[-1]


def test_one_that_is_not_committed_is_no_parent(job: SmallJob) -> None:
    """What it names may never be there."""
    committed = job.save_and_commit()
    job.save()
    assert chosen(job) == committed


def test_one_that_was_dropped_is_no_parent(job: SmallJob) -> None:
    job.store.delete(job.save_and_commit().manifest_key)
    assert chosen(job) is None


def test_commits_may_come_several_saves_late(job: SmallJob) -> None:
    late = [job.save() for _ in range(KEPT)]
    job.commit(late[0])
    assert chosen(job) == late[0].id


def test_the_parent_of_before_takes_the_place_of_none_of_them(job: SmallJob) -> None:
    before = job.save_and_commit()
    late = [job.save() for _ in range(KEPT)]
    job.commit(late[0])
    job.store.delete(before.manifest_key)
    assert chosen(job) == late[0].id


def test_the_newest_committed_one_stays_however_many_saves_fail_behind_it(job: SmallJob) -> None:
    """As when another rank does not reach the store for long: all else would be written again at each of them."""
    job.save_and_commit()
    committed = job.save_and_commit()
    for _ in range(2 * KEPT):
        assert put_by(job, job.save().id) == 0
    assert chosen(job) == committed
    assert len(parents_of(job)._parts) == KEPT + 1


def test_three_saves_late_byte_targets_hold_at_every_save() -> None:
    """One row changes at each save; a save has what changed since the newest step that was committed when it began."""
    with no_chance():
        job = SmallJob(world_size=2)
        waiting: list[Save] = []
        for step in range(14):
            job.change([step])
            waiting.append(job.save())
            if len(waiting) > 3:
                job.commit(waiting.pop(0))
        for save in waiting:
            job.commit(save)
        job.check()
        assert all(put_by(job, save) > 16 * ROW_BYTES for save in sorted(job.oracle)[:4]), "nothing is committed yet"
        for save in sorted(job.oracle)[4:]:
            assert put_by(job, save) <= 4 * ROW_BYTES + 4 * 4096 + 256, "four rows; a header and padding on each rank"


# -- patience


def test_the_newest_is_not_waited_for_when_nothing_is_won(job: SmallJob, clock: Clock) -> None:
    """What it has in common with the snapshot, an older one has, too."""
    committed = job.save_and_commit()
    job.change(range(4))
    job.save()
    job.change(range(4))
    assert chosen(job, patience_s=100.0) == committed
    assert clock.now == 0.0


def test_it_is_waited_for_when_something_is_won(job: SmallJob, clock: Clock) -> None:
    job.save_and_commit()
    job.change(range(4))
    late = job.save()
    clock.at[30.0] = lambda: job.commit(late)
    assert chosen(job, patience_s=100.0) == late.id
    assert 30.0 <= clock.now <= 40.0  # a store that is paid for is not asked all the time


def test_the_first_save_is_waited_for(job: SmallJob, clock: Clock) -> None:
    late = job.save()
    clock.at[30.0] = lambda: job.commit(late)
    assert chosen(job, patience_s=100.0) == late.id


def test_no_longer_than_patience_lasts(job: SmallJob, clock: Clock) -> None:
    committed = job.save_and_commit()
    job.change(range(4))
    job.save()
    assert chosen(job, patience_s=100.0) == committed
    assert 100.0 <= clock.now <= 101.0


def test_nobody_waits_for_one_of_which_nothing_is_left(job: SmallJob, clock: Clock) -> None:
    job.save()
    job.change(range(TENSORS * ROWS))
    job.change_small()
    assert chosen(job, patience_s=100.0) is None
    assert clock.now == 0.0


def test_it_waits_as_long_as_the_save_before_took(job: SmallJob) -> None:
    """Not counting what that one waited itself, else patience would grow from save to save."""
    persister = job.writers[0].persister
    with pytest.MonkeyPatch.context() as patch:
        seconds = [0.0]

        def sleep(duration: float) -> None:
            seconds[0] += duration

        clock = SimpleNamespace(monotonic=lambda: seconds[0], sleep=sleep)
        patch.setattr(module, "time", clock)
        patch.setattr("ckptlib.writer.persist.time", clock)

        def slow(op: str, key: str) -> None:
            seconds[0] += 10.0 * key.startswith("packs/") * (op == "commit")

        job.writers[0].store.before = slow
        job.save()
        took = persister._patience_s
        assert took >= 10.0
        for _ in range(3):
            before = seconds[0]
            job.change([0])
            job.save()
            assert seconds[0] - before <= 3 * took
            assert persister._patience_s <= took


# -- after a start


def test_a_writer_that_starts_anew_finds_the_newest_of_its_generation(job: SmallJob) -> None:
    job.save_and_commit()
    newest = job.save_and_commit()
    job.restart(0)
    assert chosen(job) == newest


def test_a_job_that_resumes_goes_on_from_where_it_resumed(job: SmallJob) -> None:
    first, _ = job.save_and_commit(), job.save_and_commit()
    job.begin(first, 1)
    assert chosen(job) == first
    job.change([0])
    job.save_and_commit()
    job.check()


def test_it_searches_once(job: SmallJob) -> None:
    job.save_and_commit()
    job.restart(0)
    chosen(job)
    read = []
    job.writers[0].store.before = lambda op, key: read.append((op, key))
    chosen(job)
    assert read == [("scan", "steps/")]


def test_what_a_job_resumed_from_may_be_gone(job: SmallJob) -> None:
    first = job.save_and_commit()
    job.begin(first, 1)
    job.store.delete(first.manifest_key)
    assert chosen(job) is None


def test_a_lost_record_of_the_generation(job: SmallJob, caplog: pytest.LogCaptureFixture) -> None:
    first = job.save_and_commit()
    job.begin(first, 1)
    job.store.delete(job.generation.key, keys.copy_key(job.generation.key))
    assert chosen(job) is None
    assert "is written whole: what the job resumed from cannot be told" in caplog.text


@pytest.mark.parametrize("late_s", [module.RECORD_WITHIN_S / 2, None])
def test_a_record_that_rank_0_has_yet_to_put(
    late_s: float | None, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """As where a job saves to a root with steps of which it has restored none."""
    with no_chance():
        job = SmallJob(world_size=2)
        clock = Clock(monkeypatch)
        first = job.save_and_commit()
        job.begin(first, 2)
        record = job.store.get(job.generation.key)
        job.store.delete(job.generation.key, keys.copy_key(job.generation.key))
        if late_s is not None:
            clock.at[late_s] = lambda: job.store.put(job.generation.key, record)
        parent, _ = job.writers[1].persister._parents.choose(snapshot(job, job.begin_save(), 1), 0.0)
    if late_s is None:
        assert parent is None
        assert clock.now < 2 * module.RECORD_WITHIN_S
    else:
        assert parent is not None
        assert parent.save == first
        assert not caplog.records


def test_a_record_that_rank_0_puts_as_it_is_looked_for_is_not_called_damaged(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Its copy comes right behind it: whoever missed the record then finds that."""
    with no_chance():
        job = SmallJob(world_size=2)
        first = job.save_and_commit()
        job.begin(first, 2)
        key, read = job.generation.key, job.store.get
        late = {at: read(at) for at in (key, keys.copy_key(key))}
        job.store.delete(*late)

        def get(at: str, offset: int = 0, nbytes: int | None = None) -> bytes:
            try:
                return read(at, offset, nbytes)
            finally:
                while at == key and late:
                    job.store.put(*late.popitem())

        monkeypatch.setattr(job.store, "get", get)
        parent, _ = job.writers[1].persister._parents.choose(snapshot(job, job.begin_save(), 1), 0.0)
    assert parent is not None
    assert parent.save == first
    assert not caplog.records


@pytest.mark.parametrize("world_size", [1, 3])
def test_another_world_size_begins_whole(world_size: int, caplog: pytest.LogCaptureFixture) -> None:
    """Its ranks hold other shards. That is nothing to warn of."""
    with no_chance():
        job = SmallJob(world_size=2)
        job.begin(job.save_and_commit(), world_size)
        save = job.begin_save()
        for rank, writer in enumerate(job.writers):
            assert writer.persister._parents.choose(snapshot(job, save, rank), 0.0)[0] is None
        assert not caplog.records


def test_another_table_begins_whole(job: SmallJob, caplog: pytest.LogCaptureFixture) -> None:
    first = job.save_and_commit()
    job.state["more"] = job.state["t0"]
    assert chosen(job) is None
    job.restart(0)
    assert chosen(job) is None
    assert not caplog.records
    del job.state["more"]
    assert chosen(job) is None, "searched once, for what it was then"
    job.restart(0)
    assert chosen(job) == first


def test_another_algorithm_begins_whole(job: SmallJob) -> None:
    """Digests of two algorithms are never compared."""
    job.save_and_commit()
    save = job.begin_save()
    found = snapshot(job, save)
    assert parents_of(job).choose(found, 0.0)[0] is not None
    assert parents_of(job).choose(replace(found, algorithm=BLAKE3), 0.0)[0] is None


# -- what the trainer has read of the step that it restored


def begin_from(job: SmallJob, known: KnownOrigin) -> list[tuple[str, str]]:
    """Returns what is asked from then on."""
    asked: list[tuple[str, str]] = []
    job.begin(known.save, 1)
    job.writers[0].persister.go_on_from(known.save, known)
    job.writers[0].store.before = lambda op, key: asked.append((op, key))
    return asked


def test_a_part_that_the_trainer_has_read_costs_a_look_whether_its_step_is_committed(job: SmallJob) -> None:
    job.save_and_commit()
    job.change([0])
    newest = job.save_and_commit()
    asked = begin_from(job, job.known(newest, 0))
    assert chosen(job) == newest
    assert asked == [("scan", "steps/")]
    job.change([1])
    job.save_and_commit()
    job.check()


@pytest.mark.parametrize("age_s", [0.0, LOOK_AGAIN_S])
def test_packs_that_the_trainer_has_read_long_ago_are_looked_for(job: SmallJob, age_s: float) -> None:
    """As where it compiles for long before its first save."""
    first = job.save_and_commit()
    known = job.known(first, 0)
    begin_from(job, replace(known, read_at=known.read_at - age_s))
    job.store.delete(*job.keys(first.packs_prefix))
    written = put_by(job, job.save().id)
    assert (written > TENSORS * ROWS * ROW_BYTES) == (age_s > 0)


def test_a_step_that_was_dropped_since_it_was_restored_is_no_parent(job: SmallJob) -> None:
    known = job.known(job.save_and_commit(), 0)
    begin_from(job, known)
    job.store.delete(known.save.manifest_key)
    assert chosen(job) is None


def test_a_part_that_the_trainer_found_no_use_for_is_not_asked_for(job: SmallJob) -> None:
    asked = begin_from(job, replace(job.known(job.save_and_commit(), 0), part=None))
    assert chosen(job) is None
    assert not asked


def test_a_part_that_came_altered_is_no_parent(job: SmallJob, caplog: pytest.LogCaptureFixture) -> None:
    """Its name has the digest, and that is in the manifest."""
    known = job.known(job.save_and_commit(), 0)
    assert known.part is not None
    document = known.part.document.replace(b'"world_size":1', b'"world_size":2')
    assert document != known.part.document
    begin_from(job, replace(known, part=replace(known.part, document=document)))
    assert chosen(job) is None
    assert "does not match the digest in its name" in caplog.text


def test_a_state_of_another_table_than_was_restored_begins_whole(job: SmallJob) -> None:
    begin_from(job, job.known(job.save_and_commit(), 0))
    job.state["more"] = job.state["t0"]
    assert chosen(job) is None


def test_a_writer_that_has_put_something_is_not_led_back(job: SmallJob) -> None:
    """A trainer tells what it restored before the first save, and again where the record could not be put."""
    known = job.known(job.save_and_commit(), 0)
    begin_from(job, known)
    second = job.save_and_commit()
    job.writers[0].persister.go_on_from(known.save, known)
    assert chosen(job) == second


# -- damage


@pytest.mark.parametrize("what", ["manifest", "part"])
@pytest.mark.parametrize("how", ["torn", "gone"])
def test_what_cannot_be_read_is_no_parent(job: SmallJob, what: str, how: str, caplog: pytest.LogCaptureFixture) -> None:
    first = job.save_and_commit()
    prefix = {"manifest": "steps/", "part": "parts/"}[what]
    job.restart(0)
    [key, *_] = job.keys(prefix)
    job.store.delete(key)
    if how == "torn":
        job.store.put(key, b"torn")
    if (what, how) == ("manifest", "gone"):
        assert chosen(job) is None
        return
    with caplog.at_level(logging.WARNING):
        assert chosen(job) is None
    assert f"step 2 is written whole, since step {first.step} cannot be read" in caplog.text


def test_a_part_that_a_network_altered_on_the_way_is_read_again(job: SmallJob, monkeypatch: pytest.MonkeyPatch) -> None:
    first = job.save_and_commit()
    job.restart(0)
    [key] = job.keys("parts/")
    read, reads = job.store.get, [b"altered"]

    def get(at: str, offset: int = 0, nbytes: int | None = None) -> bytes:
        return reads.pop() if at == key and reads else read(at, offset, nbytes)

    monkeypatch.setattr(job.store, "get", get)
    assert chosen(job) == first
    assert not reads


@pytest.mark.parametrize("how", ["torn", "gone"])
def test_a_lost_layout_is_put_again_by_the_save_that_has_the_same(job: SmallJob, how: str) -> None:
    """It is that of the snapshot, so it is not read as a parent is looked for."""
    first = job.save_and_commit()
    job.restart(0)
    [key] = job.keys("layouts/")
    for at in (key, keys.copy_key(key)):
        job.store.delete(at)
        if how == "torn":
            job.store.put(at, b"torn")
    assert chosen(job) == first
    job.save_and_commit()
    job.check()


def test_an_outage_at_the_search_is_a_whole_save(job: SmallJob, caplog: pytest.LogCaptureFixture) -> None:
    job.save_and_commit()
    job.restart(0)

    def fail(op: str, key: str) -> None:
        if key.startswith("parts/"):
            raise StoreError("no answer")

    job.writers[0].store.before = fail
    assert chosen(job) is None
    assert "no answer" in caplog.text


def test_an_outage_of_the_listing_is_an_error(job: SmallJob) -> None:
    """Not an empty root."""
    job.save_and_commit()

    def fail(op: str, key: str) -> None:
        raise StoreError("no answer")

    job.writers[0].store.before = fail
    with pytest.raises(StoreError, match="no answer"):
        chosen(job)


# -- two parts of one save


def test_of_two_parts_of_one_save_neither_is_a_parent(job: SmallJob) -> None:
    """A step that was snapshotted twice: nobody here knows which of the two its manifest names, and what only the other
    one uses, nothing keeps."""
    first = job.save_and_commit()
    job.change([0])
    save = job.begin_save()
    for number in (1, 2):
        slot = memory_slot(save.id, 0, job.oracle[save.id], 1, save.began, number)
        job.writers[0].persister.persist(slot, save.id)  # type: ignore[arg-type]
    save.persisted.add(0)
    job.commit(save)
    assert save.id in job.listed
    assert chosen(job) == first


def test_behind_a_save_that_a_writer_put_again_the_part_that_its_manifest_names_is_the_parent(job: SmallJob) -> None:
    """The one of the writer that died, here; what the other one alone uses, nothing keeps."""
    job.save_and_commit()
    job.change([0])
    save = job.save()
    job.commit(save)
    named = job.catalog().manifest(save.id).parts[0].attempt
    job.restart(0)
    persister = job.writers[0].persister
    again = persister.persist(job.slot(save, 0), save.id)
    assert again.attempt != named
    assert not [pack.key for pack in again.packs if f"-{named}-" in pack.key], "it does not build on the other one"
    persister.search_again()
    job.change([1])
    parent, _ = parents_of(job).choose(snapshot(job, job.begin_save()), 0.0)
    assert parent is not None
    assert (parent.save, parent.attempt) == (save.id, named)


def test_stand_ins_are_no_parents(job: SmallJob) -> None:
    """Of another rank's share only what this writer would do for itself is known."""
    with no_chance():
        job = SmallJob(world_size=2)
        job.save_and_commit()
        save = job.begin_save()
        part = job.writers[0].persister.persist(job.slot(save, 1), save.id)
        assert part.uses == ()
        assert part.nbytes_put >= part.table.nbytes_data
        assert chosen(job) == sorted(job.oracle)[0]
        job.persist(save, 0)
        save.persisted.add(1)
        job.commit(save)
        assert chosen(job) == save.id, "by this rank's own part"
