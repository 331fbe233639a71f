"""What keeps packs that other steps use, and what a commit says of a step whose packs nothing keeps."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator

import pytest
from helpers.actors import ActorStore, no_chance
from helpers.small_job import DEADLINE_S, GRACE, GRACE_S, HOUR_S, SmallJob
from support import replace_object
from typing_extensions import override

from ckptlib.catalog import retention
from ckptlib.catalog.catalog import Catalog
from ckptlib.catalog.commit import Committer
from ckptlib.catalog.finishing import finish_saves
from ckptlib.catalog.late_commit import take_back
from ckptlib.catalog.retention import sweep
from ckptlib.catalog.stand import Stand
from ckptlib.catalog.stock import Stock, take_stock
from ckptlib.catalog.uses import DROPPED, add_needed, is_needed, needed_by, record_of, times_of
from ckptlib.errors import CorruptData, FormatError, SaveFailed
from ckptlib.format import keys, manifest
from ckptlib.format.keys import GenerationId, PackSet, SaveId
from ckptlib.format.manifest import TrashRecord
from ckptlib.policy.keep import EARLY_S, Keep
from ckptlib.stores.base import Entry
from ckptlib.verify.root import verify_save

KEEP = Keep(last=1, grace=GRACE)


@pytest.fixture
def job() -> Iterator[SmallJob]:
    """Step 2 uses packs of step 1, and each of them took an hour."""
    with no_chance():
        job = SmallJob()
        for rows in (range(16), [0]):
            job.change(rows)
            job.save_and_commit()
            job.advance(HOUR_S)
        yield job


@pytest.mark.parametrize("order", [(0, 1, 2), (1, 0, 2), (1, 2, 0)])
def test_a_step_that_does_not_say_which_ranks_use_packs_keeps_those_of_all(order: tuple[int, ...]) -> None:
    """In whichever order steps are read: the next one, which says, takes nothing back."""
    first = SaveId(1, GenerationId(1, "00000001"))
    of = PackSet(first)
    records = [TrashRecord(first, "", {of: 1.0}, users) for users in ({}, {of: frozenset({0})}, {of: frozenset({1})})]
    needed: dict[PackSet, frozenset[int] | None] = {}
    for number in order:
        add_needed(needed, records[number])
    assert [is_needed(needed, first.pack_key(rank, "0" * 8, 0)) for rank in range(4)] == [True] * 4
    needed = {}
    for record in records[1:]:
        add_needed(needed, record)
    assert [is_needed(needed, first.pack_key(rank, "0" * 8, 0)) for rank in range(4)] == [True, True, False, False]


def saves(job: SmallJob) -> list[SaveId]:
    return sorted(job.oracle)


def catalog_of(job: SmallJob) -> Catalog:
    return Catalog(job.store)


NEW = SaveId(9, GenerationId(1, "00000001"))


# -- what may be used


def by_all(sets: list[PackSet]) -> dict[PackSet, frozenset[int]]:
    return dict.fromkeys(sets, frozenset({0}))


def test_nothing_is_asked_where_nothing_is_used(job: SmallJob) -> None:
    store = ActorStore(job.store, left=0)
    assert times_of(Catalog(store), NEW, {}) == {}


@pytest.mark.parametrize("carried", [False, True])
def test_packs_of_a_committed_step_may_be_used(job: SmallJob, carried: bool) -> None:
    first = PackSet(saves(job)[0], carried)
    assert times_of(catalog_of(job), NEW, by_all([first])) == {first: 1e9}


def test_packs_that_a_committed_step_uses_may_be_used(job: SmallJob) -> None:
    job.advance(GRACE_S)
    job.sweep(KEEP)
    job.advance(GRACE_S + HOUR_S)
    job.sweep(KEEP)
    first, second = saves(job)
    assert job.found_listed() == {second}
    assert times_of(catalog_of(job), NEW, by_all([PackSet(first)])) == {PackSet(first): 1e9}
    with pytest.raises(SaveFailed, match=f"packs of {first}-carried, which no committed step uses"):
        times_of(catalog_of(job), NEW, by_all([PackSet(first), PackSet(first, carried=True)]))


def knowing(job: SmallJob, save: SaveId, left: int) -> Catalog:
    """That has read the manifest of a step, and may ask so many times more."""
    catalog = Catalog(ActorStore(job.store, left))
    catalog.keep_stand(job.catalog().manifest(save))
    return catalog


def test_a_step_whose_manifest_is_known_answers_for_all_that_it_uses(job: SmallJob) -> None:
    """Such as the one that the job restored: nothing is asked but whether it is still listed."""
    first, second = saves(job)
    sets = by_all([PackSet(first), PackSet(second)])
    assert times_of(knowing(job, second, 1), NEW, sets) == times_of(catalog_of(job), NEW, sets) != {}


class _Listed(ActorStore):
    """Remembers how many objects were listed."""

    listed = 0

    @override
    def scan(self, prefix: str, after: str = "") -> list[Entry]:
        found = super().scan(prefix, after)
        self.listed += len(found)
        return found


def test_no_steps_are_listed_before_those_that_answer(job: SmallJob) -> None:
    """Each commit asks: a job that keeps ten thousand steps in a bucket would list ten pages of names each time."""
    for row in range(6):
        job.change([row])
        job.save_and_commit()
    first, *_, parent = saves(job)
    store = _Listed(job.store)
    catalog = Catalog(store)
    for save in saves(job):
        catalog.keep_stand(job.catalog().manifest(save))
    sets = by_all([PackSet(first), PackSet(parent)])
    assert times_of(catalog, NEW, sets) == times_of(catalog_of(job), NEW, sets)
    assert store.listed == 0, "a byte of the manifest tells"
    sets = by_all([PackSet(save, carried=True) for save in saves(job)[-6:-1]])  # each is known of its own save alone
    assert times_of(catalog, NEW, sets) == times_of(catalog_of(job), NEW, sets)
    assert store.listed == 6, "from the first of them on"
    job.store.delete(parent.manifest_key)
    sets = by_all([PackSet(first)])
    assert times_of(catalog, NEW, sets) == {PackSet(first): 1e9}
    assert store.listed == 6 + 7


def test_a_known_manifest_of_a_step_that_is_gone_answers_for_nothing(job: SmallJob) -> None:
    first, second = saves(job)
    catalog = knowing(job, second, 99)
    job.store.delete(first.manifest_key, second.manifest_key)
    with pytest.raises(SaveFailed, match="which no committed step uses"):
        times_of(catalog, NEW, by_all([PackSet(first)]))


def test_a_step_answers_for_nothing_that_it_uses_itself(job: SmallJob) -> None:
    """Its manifest may be there, and known, as it is proved that something else has kept what it uses."""
    first, second = saves(job)
    catalog = catalog_of(job)
    catalog.keep_stand(catalog.manifest(second))
    job.store.delete(first.manifest_key)
    with pytest.raises(SaveFailed, match=f"step {second.step}: needs packs of {first}, which no committed step uses"):
        times_of(catalog, second, by_all([PackSet(first)]))


@pytest.mark.parametrize(
    ("age_s", "orphaned", "kept"),
    [
        (0.9 * DEADLINE_S, False, True),
        (1.1 * DEADLINE_S, False, False),
        (0.45 * EARLY_S, True, True),
        (0.55 * EARLY_S, True, False),
    ],
)
def test_a_trash_record_keeps_packs_for_as_long_as_a_save_may_take(
    job: SmallJob, age_s: float, orphaned: bool, kept: bool
) -> None:
    """And no longer: the time till the grace period is over is the committer's, from its look to its manifest. Of an
    orphaned save that time ends EARLY_S after the drop, and half of it is the committer's."""
    first, second = saves(job)
    job.change(range(16))
    job.change_small()
    third = job.save_and_commit()
    job.sweep(KEEP)
    job.advance(age_s)
    assert job.found_listed() == {third}
    wanted = [PackSet(first), PackSet(second), PackSet(second, carried=True)]
    if kept:
        assert times_of(catalog_of(job), NEW, by_all(wanted), orphaned) == dict(
            zip(wanted, [1e9, 1e9 + HOUR_S, 1e9 + HOUR_S], strict=True)
        )
        return
    for needed in wanted:
        with pytest.raises(SaveFailed, match=f"packs of {needed}, which no committed step uses any more"):
            times_of(catalog_of(job), NEW, by_all([needed]), orphaned)


def test_a_damaged_trash_record_keeps_nothing(job: SmallJob) -> None:
    first, _ = saves(job)
    job.sweep(KEEP)
    assert times_of(catalog_of(job), NEW, by_all([PackSet(first, carried=True)]))
    replace_object(job.store, first.trash_key, b"torn")
    with pytest.raises(SaveFailed, match="which no committed step uses any more"):
        times_of(catalog_of(job), NEW, by_all([PackSet(first, carried=True)]))
    assert times_of(catalog_of(job), NEW, by_all([PackSet(first)])), "which step 2 uses"


def test_a_step_whose_own_manifest_is_damaged_keeps_its_packs(job: SmallJob) -> None:
    """Its name is listed, and while it cannot be read no pack is deleted."""
    first, _ = saves(job)
    replace_object(job.store, first.manifest_key, b"torn")
    assert times_of(catalog_of(job), NEW, by_all([PackSet(first)])) == {PackSet(first): 0.0}


def test_the_record_of_a_step_that_was_taken_back_keeps_nothing(job: SmallJob) -> None:
    """A sweep may have deleted its packs before: that of a dropped step is put before any of them goes."""
    _, second = saves(job)
    dropped, taken_back = record_of(catalog_of(job), second).encode(), [PackSet(second)]
    take_back(catalog_of(job), second)
    with pytest.raises(SaveFailed, match=f"packs of {second}, which no committed step uses any more"):
        times_of(catalog_of(job), NEW, by_all(taken_back))
    replace_object(job.store, second.trash_key, dropped)
    assert times_of(catalog_of(job), NEW, by_all(taken_back))


def test_a_damaged_manifest_keeps_whatever_it_used(job: SmallJob) -> None:
    """Else a job whose newest step is damaged could commit none after it: each takes over what that one used."""
    job.sweep(KEEP)
    job.advance(GRACE_S + HOUR_S)
    job.sweep(KEEP)
    first, second = saves(job)
    replace_object(job.store, second.manifest_key, b"torn")
    assert times_of(catalog_of(job), NEW, by_all([PackSet(first)])) == {PackSet(first): 0.0}
    job.writers[0].committer = Committer(catalog_of(job))
    job.change([1])
    third = job.save()
    job.commit(third)
    assert third.id in job.found_listed()
    with pytest.raises(CorruptData, match="none is deleted"):
        sweep(catalog_of(job), KEEP, None)
    job.store.delete(second.manifest_key)
    for _ in range(2):
        job.advance(GRACE_S + HOUR_S)
        sweep(catalog_of(job), KEEP, None)
    job.check_loads(third.id, job.store.get(third.id.manifest_key))


# -- what is needed


def test_needed_is_what_manifests_and_young_records_say(job: SmallJob) -> None:
    first, second = saves(job)
    assert {*needed_by(catalog_of(job), [first], [])} == set()
    assert {*needed_by(catalog_of(job), [first, second], [])} == {PackSet(first)}
    job.store.put(
        SaveId(7, job.generation).trash_key, TrashRecord(SaveId(7, job.generation), "", {PackSet(second): 1.0}).encode()
    )
    assert {*needed_by(catalog_of(job), [], [SaveId(7, job.generation)])} == {PackSet(second)}


def test_what_a_step_uses_that_was_dropped_lately_stays_for_its_readers(job: SmallJob) -> None:
    """Though no step needs it any more, and the time of its own step has come: the grace period is of the one that used
    it, too."""
    first, second = saves(job)
    job.sweep(KEEP)
    job.advance(GRACE_S + HOUR_S)
    job.change(range(16))
    job.change_small()
    third, manifest = job.save_and_commit(), job.store.get(second.manifest_key)
    assert catalog_of(job).manifest(third).uses == {}
    for _ in range(2):
        job.sweep(KEEP)
        assert job.found_listed() == {third}
        assert job.keys(first.packs_prefix)
        job.check_loads(second, manifest)
        job.advance(HOUR_S)
    job.advance(GRACE_S)
    for _ in range(2):  # the record that kept them goes in the first
        job.sweep(KEEP)
    assert not job.keys(first.packs_prefix)


def test_the_record_of_a_dropped_step_stays_as_long_as_any_of_its_packs(job: SmallJob) -> None:
    """It tells whoever looks why they are there; without it they would look like the remains of a crash."""
    first, second = saves(job)
    job.sweep(KEEP)
    job.advance(GRACE_S + HOUR_S)
    for _ in range(2):
        assert sweep(catalog_of(job), KEEP, None).condemned == ()
        assert job.keys(first.packs_prefix)
        assert catalog_of(job).trash_record(first).reason == DROPPED
    assert job.found_listed() == {second}


def test_a_step_dropped_since_it_was_listed_is_known_by_its_record(job: SmallJob) -> None:
    first, second = saves(job)
    listed = catalog_of(job).saves()
    job.store.put(second.trash_key, record_of(catalog_of(job), second).encode())
    job.store.delete(second.manifest_key)
    assert {*needed_by(catalog_of(job), listed, [])} == {PackSet(first)}


@pytest.mark.parametrize("live", [True, False])
@pytest.mark.parametrize("whole", [True, False])
def test_what_another_sweep_deletes_meanwhile_is_no_damage(
    job: SmallJob, live: bool, whole: bool, caplog: pytest.LogCaptureFixture
) -> None:
    """The job keeps the bytes of dropped steps for a shorter time than whoever sweeps thinks. `whole`: its sweep has
    dropped the step since it was listed, too."""
    first, second = saves(job)
    record = record_of(catalog_of(job), second)
    if not whole:
        job.store.put(second.trash_key, record.encode())
        job.store.delete(second.manifest_key)

    def other_sweep(op: str, key: str) -> None:
        if op == "get" and key == (second.manifest_key if whole else second.trash_key):
            job.store.delete(second.manifest_key, *job.keys(second.parts_prefix), *job.keys(second.packs_prefix))
            job.store.delete(second.trash_key)

    overtaken = ActorStore(job.store)
    overtaken.before = other_sweep
    found = sweep(Catalog(overtaken), KEEP, job.generation if live else None)
    assert (found.dropped, found.waiting) == ((), ())
    assert "cannot be told" not in caplog.text
    assert job.found_listed() == {first}


def test_a_store_that_lists_what_it_has_not_is_told(job: SmallJob, monkeypatch: pytest.MonkeyPatch) -> None:
    first, _ = saves(job)

    def listed_before(catalog: Catalog, oldest: float) -> Stock:
        stock = take_stock(catalog, oldest)
        stock.committed.add(first)
        for key in (first.manifest_key, first.trash_key):
            job.store.delete(key)
        return stock

    monkeypatch.setattr(retention, "take_stock", listed_before)
    with pytest.raises(CorruptData, match=r"It was there a moment ago: where a job or another sweep .*, ask again"):
        sweep(catalog_of(job), KEEP, None, dry_run=True)


def test_only_the_packs_of_ranks_that_are_named_are_needed() -> None:
    """What one rank still uses keeps nothing of the others."""
    one, two, both = (PackSet(SaveId(step, NEW.generation)) for step in (1, 2, 3))
    needed: dict[PackSet, frozenset[int] | None] = {}
    add_needed(needed, TrashRecord(NEW, "", {one: 1.0, two: 2.0}, {one: frozenset({1}), two: frozenset({2, 3})}))
    add_needed(needed, TrashRecord(NEW, "", {one: 1.0, both: 3.0}, {one: frozenset({4})}))
    assert needed == {one: frozenset({1, 4}), two: frozenset({2, 3}), both: None}
    for of, ranks in ((one, {1, 4}), (two, {2, 3}), (both, {*range(6)})):
        for rank in range(6):
            assert is_needed(needed, of.save.pack_key(rank, "0" * 8, 0)) == (rank in ranks)
            assert not is_needed(needed, of.save.pack_key(rank, "0" * 8, 0, carried=True))
    assert not is_needed(needed, "steps/1.json")


def test_what_other_ranks_use_does_not_protect_a_rank(job: SmallJob) -> None:
    used = PackSet(SaveId(0, job.generation))
    record = TrashRecord(SaveId(7, job.generation), "", {used: 5.0}, {used: frozenset({1, 2})}, 1.0)
    job.store.put(record.save.trash_key, record.encode())
    assert times_of(catalog_of(job), NEW, {used: frozenset({1})}) == {used: 5.0}
    with pytest.raises(SaveFailed, match=f"packs of {used}, which no committed step uses"):
        times_of(catalog_of(job), NEW, {used: frozenset({1, 3})})


def test_nor_does_a_step_whose_manifest_is_known() -> None:
    with no_chance():
        job = SmallJob(world_size=4)
        first = job.save_and_commit()
        job.change(range(0, 16, 4))
        job.change_small()
        second = job.save_and_commit()
        for _ in range(2):
            job.advance(GRACE_S + HOUR_S)
            job.sweep(KEEP)
    catalog, used = knowing(job, second, 99), PackSet(first)
    assert times_of(catalog, NEW, {used: frozenset({1, 2, 3})}) == {used: 1e9}
    with pytest.raises(SaveFailed, match=f"packs of {used}, which no committed step uses"):
        times_of(catalog, NEW, {used: frozenset({0, 1})})


@pytest.mark.parametrize("damaged", ["manifest", "record"])
def test_what_cannot_be_read_raises(job: SmallJob, damaged: str) -> None:
    """An empty answer would be taken for leave to delete."""
    first, second = saves(job)
    if damaged == "manifest":
        replace_object(job.store, second.manifest_key, b"torn")
    else:
        job.store.put(first.trash_key, b"torn")
    with pytest.raises(FormatError, match="is not a document"):
        needed_by(catalog_of(job), [second], [first] if damaged == "record" else [])


def test_records_that_are_gone_are_not_kept_in_memory(job: SmallJob) -> None:
    """A job that saves every minute drops a million steps in two years."""
    catalog = catalog_of(job)
    for _ in range(6):
        job.change([0])
        job.save_and_commit()
        sweep(catalog, KEEP, None)
        job.note_dropped({})
        job.listed = job.found_listed()
        job.advance(GRACE_S / 2 + HOUR_S)
    assert len(catalog._trash) <= 2


def test_a_save_that_is_committed_and_dropped_after_it_was_condemned(job: SmallJob) -> None:
    """By a committer that was paused for days: what was read of the first record does not stand for the second."""
    first, second = saves(job)
    catalog = catalog_of(job)
    job.store.put(second.trash_key, TrashRecord(second, "never committed").encode())
    assert {*needed_by(catalog, [], [second])} == set()
    replace_object(job.store, second.trash_key, record_of(catalog, second).encode())
    assert {*needed_by(catalog, [], [second])} == {PackSet(first)}


# -- the record


def test_the_record_of_a_dropped_step_says_what_it_used(job: SmallJob) -> None:
    first, second = saves(job)
    layouts = tuple(job.catalog().manifest(second).layouts)
    assert record_of(catalog_of(job), second) == TrashRecord(
        second, DROPPED, {PackSet(first): 1e9}, {}, 1e9 + HOUR_S, layouts
    )
    replace_object(job.store, second.manifest_key, b"torn")
    assert record_of(catalog_of(job), second) == TrashRecord(second, DROPPED)


def test_the_record_of_a_step_that_another_sweep_has_dropped_is_what_that_said(job: SmallJob) -> None:
    first, second = saves(job)
    record = record_of(catalog_of(job), second)
    job.store.put(second.trash_key, record.encode())
    job.store.delete(second.manifest_key)
    assert record_of(catalog_of(job), second) == record
    assert record_of(catalog_of(job), first).uses == {}


# -- the commit


def test_a_commit_is_refused_when_nothing_keeps_what_it_uses(job: SmallJob) -> None:
    """A save was persisted, its committer died, and only after the grace period somebody finishes it."""
    first, _ = saves(job)
    job.change([1])
    third = job.save()
    job.change(range(16))
    job.change_small()
    job.save_and_commit()
    job.sweep(KEEP)
    job.advance(GRACE_S / 2)
    with pytest.raises(SaveFailed, match=f"step 3: needs packs of {first}, .* may be deleted at any time"):
        Committer(catalog_of(job)).commit_when_whole(third.id, 2, lambda: 0.0)
    assert finish_saves(catalog_of(job), GenerationId(99, "0" * 8)) == []
    assert third.id not in job.found_listed()
    job.check()


def test_a_parent_that_is_dropped_before_the_commit_is_no_matter(job: SmallJob) -> None:
    job.change([1])
    third = job.save()
    job.change(range(16))
    job.change_small()
    fourth = job.save()
    job.commit(fourth)
    job.sweep(KEEP)
    job.commit(third)
    assert {third.id, fourth.id} == job.found_listed()
    job.settle(Keep(last=2, grace=GRACE))
    assert {third.id, fourth.id} == job.found_listed()


def test_one_part_is_read_of_all_that_use_the_same() -> None:
    with no_chance():
        job = SmallJob(world_size=4)
        job.save_and_commit()
        for rank in (1, 2, 2):
            job.change([rank])
            job.save_and_commit()
        save = job.save()
        read: Counter[str] = Counter()

        def before(op: str, key: str) -> None:
            if op == "get" and key.startswith("parts/"):
                read[key] += 1

        job.writers[0].store.before = before
        job.commit(save)
        assert len(read) == 3, "of ranks 0 and 3, of rank 1, of rank 2"
        assert sorted(read.values()) == [1, 1, 2], "of rank 0 a byte, too, once the manifest is there"
        manifest = catalog_of(job).manifest(save.id)
        first, second, _, fourth = sorted(job.oracle)[:4]
        assert manifest.uses.keys() == {PackSet(first), PackSet(second), PackSet(fourth)}
        job.check()


def test_a_set_that_is_told_without_ranks_is_kept_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    """As where thousands of ranks use hundreds of sets. That some of its packs are gone already is no damage."""
    monkeypatch.setattr(manifest, "MAX_USERS", 3)
    with no_chance():
        job = SmallJob(world_size=4)
        first = job.save_and_commit()
        for rows in (range(0, 16, 4), [1]):
            job.change(rows)
            job.change_small()
            save = job.save_and_commit()
            made = Committer(catalog_of(job)).prover.manifest_of(save, catalog_of(job).manifest(save).parts)
            assert Stand.of(made) == catalog_of(job).stand(save), "the job that commits keeps what others keep"
            job.advance(GRACE_S)
            job.sweep(KEEP)
            job.advance(GRACE_S + HOUR_S)
            swept = job.sweep(KEEP)
            assert swept is not None
            assert not swept.broken
            job.check()
    packs = [keys.pack_rank(key) for key in job.keys(f"packs/{first}/")]
    assert packs == [1, 2, 3], "rank 0 used none of it when the ranks were told"
    found = catalog_of(job).manifest(save)
    assert [of.save for of in found.uses] == [first, SaveId(2, job.generation)]
    assert found.users == {PackSet(SaveId(2, job.generation)): frozenset({0})}
    assert [*verify_save(catalog_of(job), save)] == []
