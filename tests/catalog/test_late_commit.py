"""A committer that is suspended before its manifest is put: what sweeps have taken meanwhile, no step may name."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext

import pytest
from helpers.actors import ActorStore, Crash, no_chance
from helpers.overwriting import OverwritingStore
from helpers.plain_reader import body_of
from helpers.small_job import DEADLINE_S, GRACE, GRACE_S, HOUR_S, Save, SmallJob
from support import make_generation, make_root, put_parts, replace_object, state
from typing_extensions import Buffer, override

from ckptlib.catalog.catalog import Catalog
from ckptlib.catalog.commit import Committer
from ckptlib.catalog.late_commit import stay_or_take_back, take_back
from ckptlib.catalog.retention import sweep
from ckptlib.errors import SaveFailed, StoreDenied, StoreError, StoreFull
from ckptlib.format import manifest
from ckptlib.format.keys import PackSet
from ckptlib.format.manifest import TrashRecord
from ckptlib.policy.keep import EARLY_S, Keep
from ckptlib.stores.memory import MemoryStore
from ckptlib.writer import persist

KEEP = Keep(last=1, grace=GRACE)


@pytest.fixture
def job(request: pytest.FixtureRequest) -> Iterator[SmallJob]:
    """Step 1, and the parts of step 2, which uses packs of it. The parameter: the kind of store, if not the usual."""
    with no_chance():
        job = SmallJob(getattr(request, "param", MemoryStore)())
        job.change(range(16))
        job.save_and_commit()
        job.change([0])
        yield job


def commit_asleep(job: SmallJob, save: Save, monkeypatch: pytest.MonkeyPatch, happens: Callable[[], None]) -> None:
    """The machine wakes when the manifest is put, and its wall clock is set then."""
    wall, slept = time.time, 0.0
    monkeypatch.setattr(time, "time", lambda: wall() + slept)

    def before(op: str, key: str) -> None:
        nonlocal slept
        if op == "put" and key == save.id.manifest_key:
            began = job.now
            happens()
            slept = job.now - began

    job.writers[0].store.before = before
    job.writers[0].committer.commit_when_whole(save.id, save.world_size, lambda: 0.0)


def sweep_after_grace(job: SmallJob, times: int) -> None:
    for _ in range(times):
        job.advance(GRACE_S + HOUR_S)
        job.sweep(KEEP)


def another_commits(job: SmallJob) -> None:
    """A whole step that needs nothing of others, so retention may drop these."""
    job.change(range(16))
    job.change_small()
    job.restart_all()
    other = job.save()
    Committer(job.catalog()).commit_when_whole(other.id, other.world_size, lambda: 0.0)
    job._committed(other.id)


@pytest.mark.parametrize("sweeps", [1, 2, 3])
def test_what_was_swept_meanwhile_is_no_step(job: SmallJob, monkeypatch: pytest.MonkeyPatch, sweeps: int) -> None:
    save = job.save()

    def happens() -> None:
        another_commits(job)
        sweep_after_grace(job, sweeps)

    with pytest.raises(SaveFailed, match=r"step 2: .*suspended.* The step is taken back"):
        commit_asleep(job, save, monkeypatch, happens)
    assert save.id not in job.found_listed()
    assert not job.writers[0].committer.may_have_put(save.id)
    job.check()
    job.settle(KEEP)
    assert {other.step for other in job.listed} == {3}


def test_packs_that_nothing_keeps_any_more_make_no_step(job: SmallJob, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its own objects are young: only what it uses went."""
    job.advance(GRACE_S)
    save = job.save()

    def happens() -> None:
        another_commits(job)
        job.sweep(KEEP)
        job.advance(GRACE_S - HOUR_S / 2)

    with pytest.raises(SaveFailed, match=r"needs packs of .* The step is taken back"):
        commit_asleep(job, save, monkeypatch, happens)
    job.check()
    job.settle(KEEP)
    assert save.id not in job.listed


@pytest.mark.parametrize("job", [MemoryStore, OverwritingStore], indirect=True)
def test_a_step_that_another_one_has_committed_in_time_is_one(job: SmallJob, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its manifest has kept what it uses since then, though a sweep has dropped, by right, what kept that before."""
    save, keep = job.save(), Keep(last=2, grace=GRACE)

    def happens() -> None:
        Committer(job.catalog()).commit_when_whole(save.id, save.world_size, lambda: 0.0)
        job._committed(save.id)
        another_commits(job)
        job.sweep(keep)
        job.advance(2 * DEADLINE_S)

    commit_asleep(job, save, monkeypatch, happens)
    assert save.id in job.found_listed()
    job.check()
    job.settle(keep)
    assert {other.step for other in job.listed} == {2, 3}


@pytest.mark.parametrize("lost", ["nothing", "a pack"])
@pytest.mark.parametrize("in_time", [True, False])
def test_a_step_whose_answer_was_lost_as_the_machine_slept_is_one_where_it_came_in_time(
    job: SmallJob, monkeypatch: pytest.MonkeyPatch, in_time: bool, lost: str
) -> None:
    """What kept its packs before is dropped meanwhile. A sweep that listed the steps before its manifest came may be
    about to delete them; one that did so after that is not."""
    save, writer, keep = job.save(), job.writers[0], Keep(last=1 + in_time, grace=GRACE)
    pack, wall, slept = job.keys("packs/")[0], time.time, 0.0  # of step 1
    monkeypatch.setattr(time, "time", lambda: wall() + slept)

    def sleeps() -> None:
        nonlocal slept
        another_commits(job)
        job.sweep(keep)
        slept = 2 * DEADLINE_S
        job.advance(slept)

    def before(op: str, key: str) -> None:
        if op == "put" and key == save.id.manifest_key:
            writer.store.before = lambda op, key: None
            document = writer.committer.prover.manifest_of(save.id, names).encode()
            if not in_time:
                sleeps()
            job.store.put(key, document)
            job._committed(save.id)
            if in_time:
                sleeps()
            raise StoreError("the answer was lost")

    names = [name for found in job.catalog().parts(save.id).values() for name in found]
    writer.store.before = before
    with pytest.raises(StoreError, match="the answer was lost"):
        writer.committer.commit_when_whole(save.id, save.world_size, lambda: 0.0)
    if lost == "a pack":
        job.store.delete(pack)
    is_whole = in_time and lost == "nothing"
    with nullcontext() if is_whole else pytest.raises(SaveFailed, match=r"step 2: .* and stays"):
        writer.committer.commit_when_whole(save.id, save.world_size, lambda: 0.0)
    assert writer.committer.may_have_put(save.id) is not is_whole
    if lost == "nothing":
        job.check()


class AnsweringStore(ActorStore):
    """Calls `answers` before an operation that was done is answered."""

    answers: Callable[[str, str], None]

    @override
    @contextmanager
    def _around(self, op: str, key: str, data: Buffer = b"") -> Iterator[Buffer]:
        with super()._around(op, key, data) as given:
            yield given
        self.answers(op, key)


def test_a_step_whose_answer_came_late_is_not_taken_back(job: SmallJob, monkeypatch: pytest.MonkeyPatch) -> None:
    """It has been listed since its manifest came, and somebody may have come to rely on it."""
    save, keep, store = job.save(), Keep(last=2, grace=GRACE), AnsweringStore(job.store)
    wall, slept = time.time, 0.0
    monkeypatch.setattr(time, "time", lambda: wall() + slept)

    def answers(op: str, key: str) -> None:
        nonlocal slept
        if op == "put" and key == save.id.manifest_key:
            job._committed(save.id)
            another_commits(job)
            job.sweep(keep)
            slept = 2 * DEADLINE_S
            job.advance(slept)

    store.answers = answers
    committer = Committer(Catalog(store))  # type: ignore[arg-type]
    committer.commit_when_whole(save.id, save.world_size, lambda: 0.0)
    assert slept
    job.check()
    job.settle(keep)
    assert {other.step for other in job.listed} == {2, 3}


@pytest.mark.parametrize("sleeps", [True, False])
def test_a_step_behind_which_the_store_was_away_is_looked_at_by_the_next_try(
    job: SmallJob, monkeypatch: pytest.MonkeyPatch, sleeps: bool
) -> None:
    """As a writer with a local disk tries again. It may have been listed for a while, so it is not taken back."""
    save, wall, slept = job.save(), time.time, 0.0
    monkeypatch.setattr(time, "time", lambda: wall() + slept)

    def before(op: str, key: str) -> None:
        nonlocal slept
        if op == "put" and key == save.id.manifest_key and sleeps:
            began = job.now
            another_commits(job)
            sweep_after_grace(job, 2)
            slept = job.now - began
        if op == "get" and key == save.id.trash_key:
            writer.store.before = lambda op, key: None
            raise StoreError("away")

    writer, left = job.writers[0], lambda: 0.0
    writer.store.before = before
    with pytest.raises(StoreError, match="away"):
        writer.committer.commit_when_whole(save.id, save.world_size, left)
    with pytest.raises(SaveFailed, match=r"and stays") if sleeps else nullcontext():
        writer.committer.commit_when_whole(save.id, save.world_size, left)
    assert save.id in job.found_listed()
    assert writer.committer.may_have_put(save.id) is sleeps, "it has failed, and is there"
    if not sleeps:
        job._committed(save.id)
        job.check()


@pytest.mark.parametrize("error", [StoreError("away"), Crash("killed")])
def test_a_step_that_was_being_taken_back_is_taken_back_by_the_next_try(
    job: SmallJob, monkeypatch: pytest.MonkeyPatch, error: BaseException
) -> None:
    """Its record says so, and only the manifest was left to go."""
    save, writer = job.save(), job.writers[0]

    def happens() -> None:
        another_commits(job)
        sweep_after_grace(job, 2)
        writer.store.before = before

    def before(op: str, key: str) -> None:
        if op == "delete" and key == save.id.manifest_key:
            writer.store.before = lambda op, key: None
            raise error

    with pytest.raises(type(error)):
        commit_asleep(job, save, monkeypatch, happens)
    assert save.id in job.found_listed()
    committer = Committer(job.catalog()) if isinstance(error, Crash) else writer.committer
    with pytest.raises(SaveFailed, match=r"step 2: .* about to be taken back, which is done now"):
        committer.commit_when_whole(save.id, save.world_size, lambda: 0.0)
    assert save.id not in job.found_listed()
    job.check()


@pytest.mark.parametrize(
    ("deadline_s", "orphaned"), [(60.0, False), (60.0, True), (DEADLINE_S, False), (DEADLINE_S, True)]
)
def test_a_proof_is_good_for_as_long_as_no_sweep_may_take_what_it_saw(deadline_s: float, orphaned: bool) -> None:
    """Half of EARLY_S where a newer job sweeps, which knows nothing of the save; and what a save may take, if less."""
    catalog = make_root(MemoryStore(), deadline_s)
    save, _ = put_parts(catalog, make_generation(catalog), 1, state(1))
    manifest = Committer(catalog).commit_when_whole(save, 1, lambda: 0.0)
    catalog.store.delete(*(entry.key for entry in catalog.store.scan("packs/")))
    good_s = min(deadline_s, EARLY_S / 2 if orphaned else EARLY_S)
    stay_or_take_back(catalog, manifest, good_s, live=True, orphaned=orphaned, is_own=True)
    with pytest.raises(SaveFailed, match="The step is taken back"):
        stay_or_take_back(catalog, manifest, good_s + 0.1, live=True, orphaned=orphaned, is_own=True)


def test_a_step_whose_manifest_is_gone_again_as_it_is_looked_at_is_none() -> None:
    catalog = make_root(MemoryStore())
    save, _ = put_parts(catalog, make_generation(catalog), 1, state(1))
    manifest = Committer(catalog).commit_when_whole(save, 1, lambda: 0.0)
    catalog.store.delete(save.manifest_key)
    with pytest.raises(SaveFailed, match="its manifest is not there any more"):
        stay_or_take_back(catalog, manifest, HOUR_S, live=True, orphaned=False, is_own=False)


def test_a_save_of_a_dead_job_that_was_condemned_as_the_machine_slept_is_no_step(
    job: SmallJob, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All of it is there: the sweep that is about to delete it, its record last, has listed the steps before."""
    save, store, wall, slept = job.save(), ActorStore(job.store), time.time, 0.0
    names = [name for found in job.catalog().parts(save.id).values() for name in found]
    monkeypatch.setattr(time, "time", lambda: wall() + slept)

    def before(op: str, key: str) -> None:
        nonlocal slept
        if op == "put" and key == save.id.manifest_key:
            slept = GRACE_S + HOUR_S
            job.advance(slept)
            assert sweep(job.catalog(), None, None).condemned == (save.id,)

    store.before = before
    with pytest.raises(SaveFailed, match=r"step 2: has a trash record, .* The step is taken back"):
        Committer(Catalog(store)).commit(save.id, names, left=True)  # type: ignore[arg-type]
    assert save.id not in job.found_listed()
    job.check()


@pytest.mark.parametrize("lost", ["nothing", "a pack", "a page", "a part", "all", "nothing yet"])
def test_a_step_whose_committer_ended_behind_its_manifest_is_looked_at_by_the_next(
    job: SmallJob, monkeypatch: pytest.MonkeyPatch, lost: str
) -> None:
    """Which cannot know how late it was. Where a step keeps what is gone, no other one is committed that uses it."""
    save = job.save()
    pack, part = job.keys("packs/")[0], job.keys(f"parts/{save.id}/")[-1]  # of step 1; of rank 1

    def before(op: str, key: str) -> None:
        if op == "put" and key == save.id.manifest_key and lost == "all":
            another_commits(job)
            sweep_after_grace(job, 2)
        if op == "get" and key == save.id.trash_key:
            raise Crash("killed")

    store, committer = ActorStore(job.store), job.writers[0].committer
    store.before = before
    with pytest.raises(Crash):
        Committer(Catalog(store)).commit_when_whole(save.id, save.world_size, lambda: 0.0)  # type: ignore[arg-type]
    after = job.save() if lost == "a pack" else None
    job.store.delete(*{"a pack": [pack], "a part": [part]}.get(lost, []))
    if lost == "a page":
        replace_object(job.store, pack, job.store.get(pack)[:-4096])
    if lost == "nothing yet":  # a sweep is about to delete it that has listed the steps before
        job.store.put(save.id.trash_key, TrashRecord(save.id, "never committed").encode())
    with pytest.raises(SaveFailed, match=r"step 2: .* and stays") if lost != "nothing" else nullcontext() as refused:
        committer.commit_when_whole(save.id, save.world_size, lambda: 0.0)
    assert save.id in job.found_listed()
    if refused is None:
        job._committed(save.id)
        job.check()
        return
    assert committer.may_have_put(save.id)
    if after is not None:
        committer.doubt(after.id)  # as where the writer died that had both orders
        parts = [body_of(job.store.get(key), key) for key in job.keys(f"parts/{after.id}/")]
        assert pack in {key for part in parts for key, *_ in part["packs"]}
        with pytest.raises(SaveFailed, match=f"step 3: .*{pack}: no such object"):
            committer.commit_when_whole(after.id, after.world_size, lambda: 0.0)
        assert after.id not in job.found_listed()


def test_a_step_that_another_one_has_committed_and_that_lacks_a_part_is_told_in_doubt(job: SmallJob) -> None:
    """It was put between the look for it and the manifest of this one, and stays."""
    save, writer = job.save(), job.writers[0]

    def before(op: str, key: str) -> None:
        if op == "put" and key == save.id.manifest_key:
            manifest = Committer(job.catalog()).commit_when_whole(save.id, save.world_size, lambda: 0.0)
            job.store.delete(manifest.parts[0].key)

    writer.store.before = before
    with pytest.raises(SaveFailed, match=r"step 2: .* and stays"):
        writer.committer.commit_when_whole(save.id, save.world_size, lambda: 0.0)
    assert save.id in job.found_listed()
    assert writer.committer.may_have_put(save.id)


def test_a_step_that_is_taken_back_as_it_is_found_has_failed(job: SmallJob) -> None:
    save, writer = job.save(), job.writers[0]
    Committer(job.catalog()).commit_when_whole(save.id, save.world_size, lambda: 0.0)
    seen = 0

    def before(op: str, key: str) -> None:
        nonlocal seen
        seen += op == "get" and key == save.id.manifest_key
        if seen == 2:  # the first one was asked whether it is there
            take_back(job.catalog(), save.id)

    writer.store.before = before
    with pytest.raises(SaveFailed, match="step 2: whoever has committed it has taken it back"):
        writer.committer.commit_when_whole(save.id, save.world_size, lambda: 0.0)


def test_a_layout_that_a_sweep_deletes_as_the_manifest_comes_is_put_again(job: SmallJob) -> None:
    save, writer = job.save(), job.writers[0]

    def before(op: str, key: str) -> None:
        if op == "put" and key == save.id.manifest_key:
            job.store.delete(*job.keys("layouts/"), *job.keys("copies/layouts/"))

    writer.store.before = before
    writer.committer.commit_when_whole(save.id, save.world_size, lambda: 0.0)
    assert job.keys("layouts/")
    job._committed(save.id)
    job.check()


def test_only_a_step_behind_which_nobody_may_have_looked_is_looked_at_again(job: SmallJob) -> None:
    save, committer = job.save(), job.writers[0].committer
    Committer(job.catalog()).commit_when_whole(save.id, save.world_size, lambda: 0.0)
    job.store.delete(job.keys("packs/")[0])
    committer.look_again(save.id)
    committer.doubt(save.id)
    with pytest.raises(SaveFailed, match=r"step 2: .* and stays"):
        committer.look_again(save.id)


@pytest.mark.parametrize("error", [StoreDenied, StoreFull])
def test_a_refusal_behind_an_answer_that_was_lost_leaves_a_step(job: SmallJob, error: type[StoreError]) -> None:
    """As a client sends a put again whose answer does not come, and gets the refusal of the second request."""
    save, writer = job.save(), job.writers[0]

    def before(op: str, key: str) -> None:
        if op == "put" and key == save.id.manifest_key:
            writer.store.before = lambda op, key: None
            Committer(job.catalog()).commit_when_whole(save.id, save.world_size, lambda: 0.0)
            raise error("refused")

    writer.store.before = before
    with pytest.raises(error, match="refused"):
        writer.committer.commit_when_whole(save.id, save.world_size, lambda: 0.0)
    assert writer.committer.may_have_put(save.id)
    writer.committer.commit_when_whole(save.id, save.world_size, lambda: 0.0)
    assert not writer.committer.may_have_put(save.id)
    job._committed(save.id)
    job.check()


@pytest.mark.parametrize("ends", ["refused", "taken back"])
def test_a_step_in_doubt_stays_so_behind_one_that_is_none(
    job: SmallJob, monkeypatch: pytest.MonkeyPatch, ends: str
) -> None:
    """Step 2 may be there, and lacks a pack. The commit of step 3 fails, and there is none; step 4 uses that pack."""
    save, writer, store = job.save(), job.writers[0], job.store
    monkeypatch.setattr(writer.store, "is_local", True)
    writer.committer.doubt(save.id)
    after, pack = job.save(), job.keys("packs/")[0]

    def before(op: str, key: str) -> None:
        if op == "put" and key == after.id.manifest_key:
            if ends == "refused":
                raise StoreFull("refused")
            store.put(after.id.trash_key, b"a record")

    writer.store.before = before
    with pytest.raises((StoreFull, SaveFailed)):
        writer.committer.commit_when_whole(after.id, after.world_size, lambda: 0.0)
    assert not writer.committer.may_have_put(after.id)
    assert writer.committer.may_have_put(save.id)
    last = job.save()
    Committer(job.catalog()).commit_when_whole(save.id, save.world_size, lambda: 0.0)
    store.delete(pack)
    with pytest.raises(SaveFailed, match=f"step 4: .*{pack}: no such object"):
        writer.committer.commit_when_whole(last.id, last.world_size, lambda: 0.0)


def test_a_step_that_lost_nothing_stays(job: SmallJob, monkeypatch: pytest.MonkeyPatch) -> None:
    save = job.save()
    commit_asleep(job, save, monkeypatch, lambda: job.advance(10 * GRACE_S))
    job._committed(save.id)
    assert save.id in job.listed
    job.check()
    job.settle(KEEP)
    assert save.id in job.listed


def test_a_rank_that_uses_none_of_a_set_needs_none_of_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """Though the manifest tells that all ranks use it, since it would tell of more ranks than readers take."""
    monkeypatch.setattr(manifest, "MAX_USERS", 3)
    with no_chance():
        job = SmallJob(world_size=4)
        first = job.save_and_commit()
        job.change(range(0, 16, 4))
        job.change_small()
        job.save_and_commit()
        sweep_after_grace(job, 2)
        assert len(job.keys(f"packs/{first}/")) == 3, "rank 0 alone uses none of it"
        job.change([1])
        save = job.save()
        commit_asleep(job, save, monkeypatch, lambda: job.advance(2 * DEADLINE_S))
        job._committed(save.id)
        assert save.id in job.listed
        assert PackSet(first) not in job.catalog().manifest(save.id).users
        job.check()


def test_a_rank_that_slept_between_its_packs_and_its_part_puts_none(
    job: SmallJob, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The monotonic clock stood still. Sweeps know nothing of a part to come, and have deleted the packs."""
    job.change(range(16))
    save, clock, slept = job.begin_save(), time.clock_gettime, 0.0
    monkeypatch.setattr(time, "clock_gettime", lambda which: clock(which) + slept)

    def before(op: str, key: str) -> None:
        nonlocal slept
        if op == "commit" and key.startswith("packs/"):
            slept = 2 * DEADLINE_S

    job.writers[0].store.before = before
    persister, deadline = job.writers[0].persister, persist.time.monotonic() + DEADLINE_S
    with pytest.raises(SaveFailed, match=r"step 2: .* no part is put"):
        persister.persist(job.slot(save, 0), save.id, deadline)
    assert not [key for key in job.keys(f"parts/{save.id}/") if "-ok-" in key]
    slept = 0.0
    job.writers[0].store.before = lambda op, key: None
    persister.persist(job.slot(save, 0), save.id, deadline)
    assert [key for key in job.keys(f"parts/{save.id}/") if "-ok-" in key]


@pytest.mark.parametrize("swept", [True, False])
def test_a_rank_on_a_virtual_machine_that_was_paused_looks_whether_its_packs_are_there(
    job: SmallJob, monkeypatch: pytest.MonkeyPatch, swept: bool
) -> None:
    """Only the wall clock tells, and that may have been set: where nothing was deleted, the part is put."""
    job.change(range(16))
    job.restart(0)  # so that it looks for the layout, behind its packs
    save, wall, paused = job.begin_save(), time.time, 0.0
    monkeypatch.setattr(time, "time", lambda: wall() + paused)

    def before(op: str, key: str) -> None:
        nonlocal paused
        if op == "get" and key.startswith("layouts/"):
            paused = 2 * DEADLINE_S
            if swept:
                job.store.delete(*job.keys(f"packs/{save.id}/"))

    job.writers[0].store.before = before
    persister, deadline = job.writers[0].persister, persist.time.monotonic() + DEADLINE_S
    if swept:
        with pytest.raises(SaveFailed, match=r"step 2: .* no part is put"):
            persister.persist(job.slot(save, 0), save.id, deadline)
    else:
        persister.persist(job.slot(save, 0), save.id, deadline)
    assert any("-ok-" in key for key in job.keys(f"parts/{save.id}/")) == (not swept)


@pytest.mark.parametrize("how", ["suspended", "paused", "clock set"])
def test_a_rank_that_slept_as_it_put_its_part_has_not_saved(
    job: SmallJob, how: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its packs were there as it looked. The part is there, and whoever commits does not ask for packs."""
    job.change(range(16))
    save, clock, wall, slept = job.begin_save(), time.clock_gettime, time.time, 0.0
    monkeypatch.setattr(time, "clock_gettime", lambda which: clock(which) + slept * (how == "suspended"))
    monkeypatch.setattr(time, "time", lambda: wall() + slept)

    def before(op: str, key: str) -> None:
        nonlocal slept
        if key.startswith(f"parts/{save.id}/"):
            slept = 2 * DEADLINE_S
            if how != "clock set":
                job.store.delete(*job.keys(f"packs/{save.id}/"))

    job.writers[0].store.before = before
    persister, deadline = job.writers[0].persister, persist.time.monotonic() + DEADLINE_S
    if how == "clock set":
        persister.persist(job.slot(save, 0), save.id, deadline)
    else:
        with pytest.raises(SaveFailed, match=r"step 2: .* its part counts for nothing"):
            persister.persist(job.slot(save, 0), save.id, deadline)
    assert slept
    assert any("-ok-" in key for key in job.keys(f"parts/{save.id}/"))


def left_save(job: SmallJob, dropped_ago: float) -> Save:
    """Of a job that is dead. The share of rank 0 uses step 1, which the job that goes on from memory has dropped so
    long ago; that of rank 1 came only now."""
    save = job.begin_save()
    job.persist(save, 0)
    job.begin_from_memory(save)
    another_commits(job)
    job.sweep(KEEP)
    job.advance(dropped_ago)
    job.persist(save, 1)
    job.dropped.clear()
    return save


@pytest.mark.parametrize("left", [True, False])
def test_what_a_save_of_a_dead_job_uses_may_go_early(job: SmallJob, left: bool) -> None:
    """A full store is given room by a job that knows of no other saves than its own: what it dropped five minutes ago
    goes, here between the proof and the manifest. `left`: else the writer that commits has outlived its trainer."""
    save, store = left_save(job, EARLY_S + 1), ActorStore(job.store)

    def before(op: str, key: str) -> None:
        if op == "put" and key == save.id.manifest_key:
            sweep(job.catalog(), KEEP, None, early_s=EARLY_S)

    store.before = before
    committer = Committer(Catalog(store))  # type: ignore[arg-type]
    with pytest.raises(SaveFailed, match=r"step 2: needs packs of .*, which no committed step uses any more"):
        committer.commit_when_whole(save.id, save.world_size, lambda: 0.0, left=left)
    job.check()


def test_what_a_save_of_a_dead_job_uses_and_was_dropped_just_now_stays(job: SmallJob) -> None:
    save = left_save(job, EARLY_S / 3)
    Committer(job.catalog()).commit_when_whole(save.id, save.world_size, lambda: 0.0, left=True)
    job._committed(save.id)
    for _ in range(3):
        job.advance(EARLY_S + 1)
        sweep(job.catalog(), None, None, early_s=EARLY_S)
        job.check()
