"""Rewinds: what is listed after any story of jobs, crashes and rewinds, beside a list that is cut and grows."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
from helpers.actors import no_chance
from helpers.interleaved import Actor
from helpers.objects import objects_of
from hypothesis import given, settings
from hypothesis import strategies as st
from support import age, listed_steps_are_whole, make_generation, make_root, make_save, resealed, state

from ckptlib.catalog.catalog import Catalog
from ckptlib.catalog.retention import sweep
from ckptlib.catalog.spared import enter_to_go_back
from ckptlib.errors import CheckpointNotFound, CorruptData, FormatError, StoreError, Superseded
from ckptlib.format import keys
from ckptlib.format.keys import GenerationId, SaveId
from ckptlib.format.manifest import Generation, TrashRecord
from ckptlib.policy.keep import Keep
from ckptlib.stores import Store
from ckptlib.stores.memory import MemoryStore

ACTIONS = st.lists(
    st.one_of(
        st.tuples(st.just("resume"), st.just(0), st.integers(0, 3)),
        st.tuples(st.just("rewind"), st.integers(0, 9), st.integers(0, 2)),
        st.tuples(st.just("undo"), st.integers(0, 9), st.integers(0, 1)),
        st.tuples(st.just("anew"), st.just(0), st.integers(1, 2)),
    ),
    max_size=9,
)
"""What a job does first, with which step, and how many steps it saves before it dies."""


def put_rewind(catalog: Catalog, number: int, to: SaveId | None) -> GenerationId:
    generation = GenerationId(number, f"{number:08x}")
    catalog.generations.put(Generation(generation, 1, to, 0.0, {}, "here", rewind=True))
    return generation


class Story:
    """A root, and the plain list of what must be visible in it."""

    def __init__(self) -> None:
        self.store = MemoryStore()
        self.catalog = make_root(self.store)
        self.line: list[SaveId] = []
        self.lines: dict[SaveId, list[SaveId]] = {}
        """Of every save: what was visible when it had just been committed."""
        self.number = 0

    def act(self, what: str, which: int, num_saves: int) -> None:
        self.number += 1
        origin = self.line[-1] if self.line else None
        if what == "rewind" and self.line:
            self.line = self.line[: which % len(self.line) + 1]
            origin = self.line[-1]
        elif what == "undo" and self.lines:
            origin = sorted(self.lines)[which % len(self.lines)]
            self.line = [*self.lines[origin]]
        elif what == "anew":
            origin = None
        if what in ("rewind", "undo") and origin is not None:
            generation = put_rewind(self.catalog, self.number, origin)
        else:
            generation = make_generation(self.catalog, self.number, resumed_from=origin)
        if what == "anew":
            self.line = []
        first = 1 if origin is None else origin.step + 1
        for step in range(first, first + num_saves):
            save = make_save(self.catalog, generation, step, {"w": np.full(1, step)})
            self.line = [*self.line, save]
            self.lines[save] = [*self.line]

    def check(self) -> None:
        catalog = Catalog(self.store)
        assert catalog.visible() == self.line
        assert catalog.saves() == sorted(self.lines)
        if self.line:
            assert catalog.resolve("latest") == self.line[-1]


@settings(max_examples=150)
@given(ACTIONS, st.booleans())
def test_any_story_lists_what_a_plain_list_says(actions: list[tuple[str, int, int]], abandoned: bool) -> None:
    story = Story()
    for action in actions:
        story.act(*action)
        story.check()
    if not story.line:
        return
    result = sweep(Catalog(story.store), Keep(last=100), None, abandoned=abandoned)
    assert {*result.dropped} == ({*story.lines} - {*story.line} if abandoned else set())
    assert Catalog(story.store).visible() == story.line


def test_a_rewind_without_steps_ends_history_at_once(catalog: Catalog) -> None:
    first = make_generation(catalog, 1)
    saves = [make_save(catalog, first, step, state(step)) for step in (1, 2, 3)]
    assert catalog.visible() == saves
    put_rewind(catalog, 2, saves[0])
    assert catalog.visible() == saves[:1]
    with pytest.raises(CheckpointNotFound, match="holds no step 3; the last ones are: 1"):
        catalog.resolve(3)
    assert catalog.resolve(str(saves[2])) == saves[2], "by its full name it is found"
    with pytest.raises(Superseded):
        catalog.generations.check_head(first)


def test_a_snapshot_of_an_abandoned_generation_is_none(catalog: Catalog) -> None:
    first = make_generation(catalog, 1)
    saves = [make_save(catalog, first, step, state(step)) for step in (1, 2)]
    snapshots = {SaveId(step, first) for step in (1, 3, 4)}
    assert catalog.visible(snapshots)[-1].step == 4
    second = put_rewind(catalog, 2, saves[0])
    assert catalog.visible(snapshots) == saves[:1]
    assert catalog.visible({*snapshots, SaveId(2, second)}) == [saves[0], SaveId(2, second)]


def test_a_snapshot_of_a_job_in_a_copy_of_the_root_is_none(catalog: Catalog) -> None:
    """Both roots have one id. The other job may have begun later, and its record is in the copy alone."""
    save = make_save(catalog, make_generation(catalog, 1), 1, state(1))
    assert catalog.visible({SaveId(9, GenerationId(2, "0" * 8))}) == [save]


@pytest.mark.parametrize("how", ["altered", "cut", "another's"])
def test_an_unreadable_record_that_may_be_a_rewind_stops_whoever_would_go_on(how: str) -> None:
    store = MemoryStore()
    catalog = make_root(store)
    first = make_generation(catalog, 1)
    saves = [make_save(catalog, first, step, state(step)) for step in (1, 2)]
    key = put_rewind(catalog, 2, saves[0]).key
    data, modified = objects_of(store)[key]
    altered = {"altered": data[:-5] + b"!" + data[-4:], "cut": data[:50], "another's": resealed(data, nonce="f" * 8)}
    objects_of(store)[key] = (altered[how], modified)
    assert Catalog(store).visible() == saves[:1], "its copy tells"
    store.delete(keys.copy_key(key))
    for ask in (Catalog(store).visible, lambda: Catalog(store).resolve("latest")):
        with pytest.raises(CorruptData, match=rf"cannot be told whether the job went back.*delete {key}"):
            ask()
    assert Catalog(store).visible(newer=True) == saves, "who only looks is shown what is there"
    store.delete(key)
    assert Catalog(store).visible() == saves


def test_an_older_unreadable_record_hides_no_step(store: Store, catalog: Catalog) -> None:
    first = make_generation(catalog, 1)
    save = make_save(catalog, first, 1, state(1))
    put_rewind(catalog, 2, save)
    third = make_generation(catalog, 3, resumed_from=save)
    newest = make_save(catalog, third, 2, state(2))
    key = GenerationId(2, f"{2:08x}").key
    store.delete(key, keys.copy_key(key))
    store.put(key, b"{}")
    assert Catalog(store).visible() == [save, newest]


def test_a_rewind_to_nowhere_is_refused() -> None:
    record = Generation(GenerationId(1, "0" * 8), 1, None, 0.0, {}, "here", rewind=True)
    with pytest.raises(FormatError, match="goes back, but 'resumed_from' names no step"):
        Generation.decode(record.encode(), "here")
    anew = Generation(GenerationId(1, "0" * 8), 1, None, 0.0, {}, "here")
    assert Generation.decode(anew.encode(), "here") == anew
    for hostile in (1, "true", [], {}):
        with pytest.raises(FormatError, match="'rewind' is not true or false"):
            Generation.decode(resealed(anew.encode(), rewind=hostile), "here")


# -- a step that is dropped as somebody goes back to it


def going_back(target: SaveId) -> Callable[[Store], object]:
    """Has looked at the step some time ago, as a person who is asked, or a job that has loaded it."""

    def go_back(store: Store) -> None:
        catalog = Catalog(store)
        enter_to_go_back(catalog, target, lambda: put_rewind(catalog, 2, target), patience_s=0.0)

    return go_back


@pytest.mark.parametrize("live", [True, False], ids=["the job sweeps", "gc sweeps"])
@pytest.mark.parametrize("sweep_begins", [True, False])
def test_a_step_that_is_dropped_meanwhile_is_no_place_to_go_back_to(live: bool, sweep_begins: bool) -> None:
    """One does some operations, then the other one some, then the first goes on to its end, and then the other."""
    made = MemoryStore()
    generation = make_generation(catalog := make_root(made))
    target = [make_save(catalog, generation, step, state(step)) for step in range(3)][1]
    outcomes = set()
    for num_swept in range(10, 30):  # what it lists before changes nothing
        for num_gone in range(8):
            num_first, num_second = (num_swept, num_gone) if sweep_begins else (num_gone, num_swept)
            store = MemoryStore()
            objects_of(store).update(objects_of(made))
            with no_chance(), Actor(store, going_back(target)) as goer:
                sweeper = Actor(store, lambda s: sweep(Catalog(s), Keep(last=1), generation if live else None))
                with sweeper:
                    first, second = (sweeper, goer) if sweep_begins else (goer, sweeper)
                    first.go_on(num_first)
                    second.go_on(num_second)
                    first.go()
                    second.go()
            assert goer.error is None or isinstance(goer.error, (CheckpointNotFound, StoreError)), goer.error
            outcomes.add(type(goer.error))
            if goer.error is not None:
                continue
            for seconds in (0.0, 120.0, 90000.0, 90000.0):
                age(store, seconds)
                sweep(Catalog(store), Keep(last=1), None)
            assert Catalog(store).visible() == [target], (num_first, num_second)
            assert 1 in listed_steps_are_whole(store)
    assert type(None) in outcomes
    assert len(outcomes) > 1


def test_going_back_to_a_step_that_is_gone_changes_nothing(store: Store, catalog: Catalog) -> None:
    generation = make_generation(catalog)
    saves = [make_save(catalog, generation, step, state(step)) for step in range(3)]
    sweep(catalog, Keep(last=1), generation)
    with pytest.raises(CheckpointNotFound, match=r"step 1 .* retention has dropped it meanwhile. Nothing was changed"):
        going_back(saves[1])(store)
    assert Catalog(store).visible() == saves[2:]


def test_a_step_that_went_while_the_machine_slept_is_no_place_to_go_back_to(store: Store, catalog: Catalog) -> None:
    """Its trash record is gone as well when the record of the generation comes."""
    generation = make_generation(catalog)
    saves = [make_save(catalog, generation, step, state(step)) for step in range(3)]

    def asleep() -> None:
        for _ in range(2):
            sweep(Catalog(store), Keep(last=1), generation)
            age(store, 90000.0)
        put_rewind(catalog, 2, saves[1])

    with pytest.raises(CheckpointNotFound, match="goes back to step 1, but retention dropped that"):
        enter_to_go_back(catalog, saves[1], asleep)


def test_going_back_to_a_step_whose_sweep_died_leaves_it_in_doubt(store: Store, catalog: Catalog) -> None:
    generation = make_generation(catalog)
    saves = [make_save(catalog, generation, step, state(step)) for step in range(3)]
    store.put(saves[1].trash_key, TrashRecord(saves[1], "dropped").encode())
    with pytest.raises(StoreError, match=r"goes back to step 1, but that has a trash record.*Look again in 1 minute"):
        going_back(saves[1])(store)
