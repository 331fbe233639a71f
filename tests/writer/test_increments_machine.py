"""Increments, codecs, commits, retention and crashes in any order, against a dict of what each save was made of.

Whatever happens, each step that is listed loads bit for bit, nothing that must be kept is dropped, a reader has the
grace period, and what nobody needs is gone after two sweeps beyond that.
"""

from __future__ import annotations

from contextlib import ExitStack
from datetime import timedelta

import pytest
from helpers.actors import no_chance
from helpers.small_job import GRACE, HOUR_S, REFRESH_S, ROWS, TENSORS, SmallJob
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule, run_state_machine_as_test
from typing_extensions import override

from ckptlib.policy.codec import Asked
from ckptlib.policy.keep import Keep

ALL_ROWS = range(TENSORS * ROWS)

rows = st.one_of(st.just(ALL_ROWS), st.lists(st.sampled_from(ALL_ROWS), max_size=6, unique=True))
keeps = st.one_of(
    st.none(),
    st.builds(
        Keep,
        last=st.integers(1, 3),
        every=st.one_of(st.none(), st.integers(1, 5)),
        grace=st.sampled_from([GRACE, GRACE, timedelta(hours=30)]),
    ),
)
crash = st.one_of(st.none(), st.none(), st.integers(0, 40))
"""How many operations of the store a process still does; None: all."""
hours = st.sampled_from([0.01, 0.1, 0.4, 0.9, 1.5, 11.0, 25.0, 31.0, REFRESH_S / HOUR_S / 2])
which = st.integers(0, 7)
codecs: st.SearchStrategy[Asked] = st.sampled_from(
    ["raw", "planes", "planes", {"t1": "planes", "t3": "planes", "*": "raw"}]
)
"""Of a job. "planes" is zstd for integers, and patches of the rows of a table."""


class Increments(RuleBasedStateMachine):
    """One root, and the jobs that follow one another in it."""

    @override
    def __init__(self) -> None:
        super().__init__()
        self.held = ExitStack()
        self.held.enter_context(no_chance())
        self.job = SmallJob(codec="planes")

    @override
    def teardown(self) -> None:
        try:
            self.job.settle()
            self.job.settle(Keep(last=1, grace=GRACE))
        finally:
            self.held.close()

    @rule(changed=rows, small=st.booleans(), persisted=st.integers(0, 9), after=crash, hour=hours)
    def save(self, changed: range | list[int], small: bool, persisted: int, after: int | None, hour: float) -> None:
        """Mostly by all ranks; commits may come late."""
        self.job.change(changed)
        if small:
            self.job.change_small()
        save = self.job.begin_save()
        for rank in range(self.job.world_size):
            if persisted != rank:
                self.job.persist(save, rank, after if rank == persisted % 2 else None)

    @rule(changed=rows)
    def save_and_commit(self, changed: range | list[int]) -> None:
        self.job.change(changed)
        self.job.save_and_commit()

    @precondition(lambda self: self.job.saves)
    @rule(nth=which, after=crash)
    def commit(self, nth: int, after: int | None) -> None:
        self.job.commit(self.job.saves[nth % len(self.job.saves)], after)

    @precondition(lambda self: self.job.saves)
    @rule(data=st.data())
    def rescue(self, data: st.DataObject) -> None:
        """The job is gone after that."""
        save = self.job.saves[-1]
        left = data.draw(st.lists(st.sampled_from(range(save.world_size)), min_size=1, unique=True))
        self.job.rescue(save, left)
        self.resume(data.draw(which), 2, None, False, data.draw(codecs), data.draw(st.booleans()))

    @rule(rank=which)
    def restart(self, rank: int) -> None:
        self.job.restart(rank % self.job.world_size)

    @rule(
        nth=which,
        world_size=st.sampled_from([2, 2, 2, 1, 3]),
        after=crash,
        anew=st.sampled_from([False] * 9 + [True]),
        codec=codecs,
        told=st.booleans(),
    )
    def resume(self, nth: int, world_size: int, after: int | None, anew: bool, codec: Asked, told: bool) -> None:
        """From the newest, a rewind to an older one, or from nothing; restored from the store, or from memory."""
        self.job.finish(after)
        self.job.codec = codec
        visible = self.job.visible()
        self.job.begin(visible[-1 - nth % len(visible)] if visible and not anew else None, world_size, told)

    @precondition(lambda self: self.job.saves or self.job.in_memory)
    @rule(nth=which, after=crash, codec=codecs)
    def resume_from_memory(self, nth: int, after: int | None, codec: Asked) -> None:
        """All ranks held one that nobody may have committed. Later ones are damaged, or were not asked for."""
        held = [*self.job.in_memory, *self.job.saves]
        save = held[-1 - nth % len(held)]
        self.job.finish(after)
        self.job.codec = codec
        self.job.begin_from_memory(save)

    @precondition(lambda self: self.job.in_memory)
    @rule(nth=which, data=st.data(), after=crash)
    def rescue_later(self, nth: int, data: st.DataObject, after: int | None) -> None:
        """Nobody has a snapshot of a later step yet; or somebody has, and a writer does not know."""
        save = self.job.in_memory[-1 - nth % len(self.job.in_memory)]
        left = data.draw(st.lists(st.sampled_from(range(save.world_size)), min_size=1, unique=True))
        self.job.rescue_later(save, left, after)

    @rule(keep=keeps, live=st.booleans(), after=crash, abandoned=st.booleans())
    def sweep(self, keep: Keep | None, live: bool, after: int | None, abandoned: bool) -> None:
        self.job.sweep(keep, live, after, abandoned)

    @rule(last=st.integers(1, 3), after=crash)
    def make_room(self, last: int, after: int | None) -> None:
        self.job.make_room(Keep(last=last, grace=GRACE), after)

    @rule(hour=hours)
    def advance(self, hour: float) -> None:
        self.job.advance(hour * HOUR_S)

    @precondition(lambda self: self.job.listed)
    @rule(nth=which)
    def refresh(self, nth: int) -> None:
        self.job.mark(sorted(self.job.listed)[-1 - nth % len(self.job.listed)])

    @invariant()
    def all_is_well(self) -> None:
        self.job.check()


def test_what_the_machine_stores_is_of_every_codec() -> None:
    """Else it would not tell anything of them."""
    with no_chance():
        job = SmallJob(codec="planes")
        for _ in range(3):
            job.change(ALL_ROWS)
            job.save_and_commit()
        frames = [chunk.frame for chunk in job.chunks()]
        assert {None if frame is None else frame.codec for frame in frames} == {None, "planes", "zstd", "patch"}
        assert {None} < {frame.base for frame in frames if frame is not None}
        job.check()


def test_a_job_that_was_left_behind_has_saved_nothing_for_the_newest() -> None:
    """Its later step was damaged, say: the newest job goes on from what is in memory alone, and is gone, too."""
    with no_chance():
        job = SmallJob()
        save = job.begin_save()
        job.begin_from_memory(save)
        job.save_and_commit()
        job.begin_from_memory(save)
        job.rescue_later(save, [0])
        assert save.id in job.listed
        job.check()


def test_any_order() -> None:
    run_state_machine_as_test(Increments, settings=settings(max_examples=60, stateful_step_count=30, deadline=None))


@pytest.mark.slow
@pytest.mark.timeout(3600)
def test_any_order_for_long() -> None:
    run_state_machine_as_test(Increments, settings=settings(max_examples=2500, stateful_step_count=80, deadline=None))
