"""A crash at every operation of every process that touches a root with increments; and what a root grows to."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest
from helpers.actors import no_chance
from helpers.small_job import GRACE, GRACE_S, HOUR_S, REFRESH_S, ROWS, TENSORS, SmallJob, copied

from ckptlib.policy.keep import Keep

KEEP = Keep(last=2, grace=GRACE)

ALL_ROWS = range(TENSORS * ROWS)


@pytest.fixture(autouse=True)
def by_count() -> Iterator[None]:
    with no_chance():
        yield


def ready_job() -> SmallJob:
    """With steps to drop, packs of dropped steps that are used and others that are not, some that are mostly dead, a
    marker, a crashed save, one of an older generation that can be finished, and one that waits for its commit."""
    job = SmallJob()
    job.change(ALL_ROWS)
    job.save_and_commit()
    for rows in (range(3), range(6), [0, 9], [0]):
        job.change(rows)
        job.save_and_commit()
        job.sweep(KEEP)
        job.advance(GRACE_S / 2 + HOUR_S)
    job.change(range(8, 16))
    job.persist(job.begin_save(), 1)
    job.advance(GRACE_S + HOUR_S)
    job.change([5])
    job.save()
    job.begin(max(job.listed), 2)
    job.change([6])
    job.save_and_commit()
    job.mark(max(job.listed))
    job.change([7])
    job.save()
    return job


CRASHES: dict[str, Callable[[SmallJob, int], object]] = {
    "persist": lambda job, nth: (job.change([0]), job.persist(job.begin_save(), 1, nth)),
    "persist after a restart": lambda job, nth: (job.restart(0), job.persist(job.begin_save(), 0, nth)),
    "commit": lambda job, nth: job.commit(job.saves[-1], nth),
    "sweep": lambda job, nth: job.sweep(KEEP, killed_after=nth),
    "sweep of a job": lambda job, nth: job.sweep(KEEP, live=True, killed_after=nth),
    "finish": lambda job, nth: job.finish(nth),
}


@pytest.mark.parametrize("what", CRASHES)
def test_a_crash_anywhere(what: str) -> None:
    """Whatever the crash leaves, the job goes on, and a later sweep makes it good."""
    ready, nth, crashed = ready_job(), 0, True
    while crashed:
        job = copied(ready)
        CRASHES[what](job, nth)
        job.check()
        crashed = job.crashed
        job.change([1, 12])
        job.save_and_commit()
        job.check()
        job.finish()
        job.check()
        job.begin(job.visible()[-1], 2)
        job.change([2])
        job.save_and_commit()
        job.settle(KEEP)
        nth += 1
    assert nth > 3


# -- what a root grows to


def grown(job: SmallJob, hot: list[int], settling: list[int], num: int) -> float:
    """Bytes stored over bytes needed, after saves in each of which the hot rows change, and one of the others, that
    never changes again before all others have."""
    for step in range(num):
        job.change([*hot, settling[step % len(settling)]])
        job.save_and_commit()
        job.advance(GRACE_S / 2 + HOUR_S)
        job.sweep(KEEP, live=True)
    job.settle(KEEP)
    return job.nbytes_stored() / job.nbytes_needed()


def test_of_one_rank_a_root_holds_at_most_twice_what_its_steps_need(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("helpers.small_job.COLUMNS", 8192)  # so that headers are small
    monkeypatch.setattr("helpers.small_job.TENSORS", 12)
    rows = range(12 * ROWS)
    job = SmallJob(world_size=1)
    assert grown(job, [row for row in rows if row % 4 > 1], [row for row in rows if row % 4 <= 1], 16) <= 2


def test_of_several_ranks_too(monkeypatch: pytest.MonkeyPatch) -> None:
    """What rank 0 has settles, and what the others have is always new."""
    monkeypatch.setattr("helpers.small_job.COLUMNS", 8192)
    monkeypatch.setattr("helpers.small_job.TENSORS", 12)
    rows = range(12 * ROWS)
    job = SmallJob(world_size=4)
    assert grown(job, [row for row in rows if row % 4], [row for row in rows if row % 4 == 0], 16) <= 2


def test_a_frozen_state_is_written_again_once_in_the_time_to_a_refresh() -> None:
    job, written = SmallJob(), []
    for _ in range(40):
        before = job.nbytes_stored()
        job.save_and_commit()
        written.append(job.nbytes_stored() - before)
        job.advance(REFRESH_S / 20)
    assert written[0] >= 64 * 1024
    assert sum(written[1:15]) == 0, "nothing in the first three quarters of the time"
    assert 64 * 1024 <= sum(written[15:22]) <= 1.7 * written[0]
    assert max(written[15:22]) <= 0.7 * written[0], "not all at once"
    job.check()
    job.settle(KEEP)


def test_a_marker_has_everything_before_it_written_again() -> None:
    job = SmallJob()
    first = job.save_and_commit()
    job.change([0])
    second = job.save_and_commit()
    job.change([1])
    job.mark(second)
    third = job.save_and_commit()
    job.change([2])
    fourth = job.save_and_commit()
    used = {save: {needed.save for needed in job.catalog().manifest(save).uses} for save in (second, third, fourth)}
    assert used == {second: {first}, third: set(), fourth: {third}}
    job.settle(Keep(last=1, grace=GRACE))
    assert not [key for key in job.keys("steps/") if key.endswith(".refresh")], "nothing is left to ask for"


def test_a_marker_that_a_rewind_left_behind_asks_for_nothing_more_than_once() -> None:
    job = SmallJob()
    first, *_, marked = [job.save_and_commit() for _ in range(4)]
    job.mark(marked)
    job.begin(first, 2)
    second, third = job.save_and_commit(), job.save_and_commit()
    used = {save: {needed.save for needed in job.catalog().manifest(save).uses} for save in (second, third)}
    assert used == {second: set(), third: {second}}
    assert not job.keys(f"packs/{third}/"), "nothing has changed"
    job.mark(third)
    fourth, fifth = job.save_and_commit(), job.save_and_commit()
    used = {save: {needed.save for needed in job.catalog().manifest(save).uses} for save in (fourth, fifth)}
    assert used == {fourth: set(), fifth: {fourth}}, "a mark on its own branch is heeded"
    job.sweep(Keep(last=1, grace=GRACE), abandoned=True)
    job.settle(Keep(last=1, grace=GRACE))
    assert not [key for key in job.keys("steps/") if key.endswith(".refresh")], "nothing is left to ask for"


def test_a_marker_outlives_its_step_while_it_still_asks_for_something() -> None:
    """Two saves were under way when it was put, and so did not see it; then its step is dropped."""
    job, keep = SmallJob(), Keep(last=1, grace=GRACE)
    job.save_and_commit()
    job.change([0])
    marked = job.save_and_commit()
    job.change([1])
    under_way = [job.save(), job.save()]
    job.mark(marked)
    for save in under_way:
        job.commit(save)
        job.sweep(keep, live=True)
    assert marked not in job.listed
    job.change([2])
    taken = job.save_and_commit()
    assert all(of.save > marked for of in job.catalog().manifest(taken).uses)
    job.settle(keep)
    assert not [key for key in job.keys("steps/") if key.endswith(".refresh")]
