"""Retention under random histories of saves, crashes, rewinds and pins: exactly the promised steps remain, and load.

The model (`helpers.kept_steps`) shares no code with what it judges. Whole saves; those that use packs of others are in
`tests/writer/test_increments_machine.py`.
"""

from __future__ import annotations

import math
import tempfile
from contextlib import suppress
from datetime import timedelta

import numpy as np
import pytest
from helpers.crashing_store import Crash, CrashingStore
from helpers.kept_steps import KeptSteps, Promise, Saved, Step
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule, run_state_machine_as_test
from support import age, make_generation, make_root, make_save, put_parts, read_save
from typing_extensions import override

from ckptlib.catalog.catalog import Catalog
from ckptlib.catalog.finishing import finish_saves
from ckptlib.catalog.pins import pin, unpin
from ckptlib.catalog.retention import sweep
from ckptlib.errors import CheckpointNotFound
from ckptlib.format.keys import GenerationId, SaveId
from ckptlib.format.values import Json, encode
from ckptlib.policy.best import Best
from ckptlib.policy.keep import GRACE, Keep
from ckptlib.stores import Store
from ckptlib.stores.local import LocalStore
from ckptlib.stores.memory import MemoryStore

LATER_S = GRACE.total_seconds() + 3600
STALE_S = 120.0
"""Longer than the save deadline of these roots: what another sweep has begun counts as given up."""

losses = st.none() | st.just(math.nan) | st.sampled_from([-math.inf, 0.0, 1.0, 2.5, 3.0, math.inf])
promises = st.builds(
    Promise,
    last=st.integers(1, 3),
    every=st.none() | st.integers(1, 5),
    within_s=st.none() | st.sampled_from([0.5, 10.0, 100.0]),
    best=st.none() | st.sampled_from(["min", "max"]),
    num_best=st.integers(1, 3),
    abandoned=st.booleans(),
    drops_exempt=st.booleans(),
)
which = st.integers(0, 7)
crash = st.none() | st.integers(0, 30)


def tensors(at: Step) -> dict[str, np.ndarray]:
    generation, step = at
    return {"w": np.arange(16, dtype=np.float32) * (step + 1) + generation, "n": np.array(step * 100 + generation)}


def named(at: Step) -> SaveId:
    return SaveId(at[1], GenerationId(at[0], f"{at[0]:08x}"))


def keep_of(promise: Promise) -> Keep:
    return Keep(
        last=promise.last,
        every=promise.every,
        within=None if promise.within_s is None else timedelta(seconds=promise.within_s),
        best=None if promise.best is None else "loss",
        mode=promise.best,
        num_best=1 if promise.best is None else promise.num_best,
    )


class Retention(RuleBasedStateMachine):
    """One root, and the jobs that follow one another in it."""

    def __init__(self) -> None:
        super().__init__()
        self.store = self.open()
        self.catalog = make_root(self.store)
        self.model = KeptSteps()
        self.seconds = 0.0
        self.begin(None)

    def open(self) -> Store:
        return MemoryStore()

    def begin(self, origin: Step | None) -> None:
        number = len(self.model.origins) + 1
        self.generation = make_generation(self.catalog, number, None if origin is None else named(origin))
        self.model.origins[number] = origin
        self.step = -1 if origin is None else origin[1]
        self.is_fresh = True

    def next(self, ahead: int, loss: float | None, exempt: bool) -> tuple[Step, Saved, dict[str, object]]:
        self.step += ahead
        self.is_fresh = False
        self.seconds += 7.0
        metrics: dict[str, Json] = {"epoch": 1} if loss is None else {"loss": encode(loss, "loss")}
        told = {"metrics": metrics, "created": self.seconds, "exempt": exempt}
        return (self.generation.number, self.step), Saved(self.seconds, loss, exempt), told

    def put(self, ahead: int, loss: float | None, exempt: bool) -> None:
        at, saved, told = self.next(ahead, loss, exempt)
        make_save(self.catalog, self.generation, at[1], tensors(at), **told)
        self.note(at, saved)

    def note(self, at: Step, saved: Saved) -> None:
        """It is committed."""
        saved.put = next(entry.modified for entry in self.store.scan("steps/") if str(named(at)) in entry.key)
        self.model.steps[at] = saved

    def age(self, seconds: float) -> None:
        age(self.store, seconds)
        self.model.age(seconds)

    @rule(ahead=st.integers(1, 3), loss=losses, exempt=st.integers(0, 5).map(lambda n: n == 0))
    def save(self, ahead: int, loss: float | None, exempt: bool) -> None:
        self.put(ahead, loss, exempt)

    @precondition(lambda self: self.is_fresh and self.step >= 0)
    @rule(loss=losses, exempt=st.integers(0, 5).map(lambda n: n == 0))
    def save_again(self, loss: float | None, exempt: bool) -> None:
        """The step that the job goes on from."""
        self.put(0, loss, exempt)

    @rule(loss=losses, exempt=st.booleans(), to_go_on=st.booleans())
    def crash_before_the_commit(self, loss: float | None, exempt: bool, to_go_on: bool) -> None:
        """The next job finishes it."""
        at, saved, told = self.next(1, loss, exempt)
        put_parts(self.catalog, self.generation, at[1], tensors(at), **told)
        next_one = GenerationId(len(self.model.origins) + 1, "0" * 8)
        assert finish_saves(Catalog(self.store), next_one, to_go_on) == [named(at)]
        self.note(at, saved)
        self.begin(self.model.visible()[-1])

    @rule(nth=which)
    def rewind(self, nth: int) -> None:
        """To any visible step; later ones are abandoned with the first save."""
        visible = self.model.visible()
        self.begin(visible[-1 - nth % len(visible)] if visible else None)

    @precondition(lambda self: self.model.steps)
    @rule(nth=which)
    def pin(self, nth: int) -> None:
        at = sorted(self.model.steps)[nth % len(self.model.steps)]
        assert pin(Catalog(self.store), named(at)) is not self.model.steps[at].pinned
        self.model.steps[at].pinned = True

    @precondition(lambda self: any(saved.pinned for saved in self.model.steps.values()))
    @rule(nth=which)
    def unpin(self, nth: int) -> None:
        pinned = sorted(at for at, saved in self.model.steps.items() if saved.pinned)
        assert unpin(Catalog(self.store), named(pinned[nth % len(pinned)]))
        self.model.steps[pinned[nth % len(pinned)]].pinned = False

    @rule(promise=promises, live=st.booleans(), after=crash)
    def sweep(self, promise: Promise, live: bool, after: int | None) -> None:
        """By one that dies after so many operations, and then by another one."""
        generation = self.generation if live else None
        before = {*self.model.steps}
        self.model.sweep(promise)
        if after is not None:
            with suppress(Crash):
                sweep(
                    Catalog(CrashingStore(self.store, after)),
                    keep_of(promise),
                    generation,
                    abandoned=promise.abandoned,
                    exempt=promise.drops_exempt,
                )
            assert {*map(named, self.model.steps)} <= {*self.catalog.saves()} <= {*map(named, before)}
            self.age(STALE_S)
        sweep(self.catalog, keep_of(promise), generation, abandoned=promise.abandoned, exempt=promise.drops_exempt)

    @rule(seconds=st.sampled_from([STALE_S, LATER_S]))
    def advance(self, seconds: float) -> None:
        self.age(seconds)

    @invariant()
    def exactly_the_promised_steps_are_there(self) -> None:
        catalog = Catalog(self.store)
        assert catalog.visible() == [*map(named, self.model.visible())]
        assert {*catalog.saves()} == {*map(named, self.model.steps)}
        for at in self.model.steps:
            content = read_save(self.store, named(at))
            for name, expected in tensors(at).items():
                assert content[name].tobytes() == expected.tobytes(), (at, name)
        pinned = {named(at) for at, saved in self.model.steps.items() if saved.pinned}
        assert {*catalog.steps().pins} & {*catalog.saves()} == pinned
        known = [(at, self.model.steps[at].loss) for at in self.model.visible()]
        ranked = sorted((loss, -at[1], -at[0], at) for at, loss in known if loss is not None and loss == loss)
        if ranked:
            assert catalog.resolve("best", Best("loss", "min")) == named(ranked[0][3])
            return
        with pytest.raises(CheckpointNotFound):
            catalog.resolve("best", Best("loss", "min"))

    @override
    def teardown(self) -> None:
        """What nobody needs is gone in the end."""
        for _ in range(3):
            self.age(LATER_S)
            sweep(Catalog(self.store), None, None)
        self.exactly_the_promised_steps_are_there()
        left = {entry.key.split("/")[1] for entry in self.store.scan("packs/")}
        assert left == {str(named(at)) for at in self.model.steps}
        assert not self.store.scan("trash/")


class OnDisk(Retention):
    """The same on a local directory."""

    @override
    def open(self) -> Store:
        self.directory = tempfile.TemporaryDirectory()
        return LocalStore(self.directory.name)

    @override
    def teardown(self) -> None:
        super().teardown()
        self.directory.cleanup()


def test_exactly_the_promised_steps_remain() -> None:
    run_state_machine_as_test(Retention, settings=settings(max_examples=40, stateful_step_count=25, deadline=None))


def test_exactly_the_promised_steps_remain_on_disk() -> None:
    run_state_machine_as_test(OnDisk, settings=settings(max_examples=4, stateful_step_count=20, deadline=None))


@pytest.mark.slow
def test_exactly_the_promised_steps_remain_for_long() -> None:
    run_state_machine_as_test(Retention, settings=settings(max_examples=200, stateful_step_count=50, deadline=None))
