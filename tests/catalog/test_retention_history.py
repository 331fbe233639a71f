"""Retention where the record of a generation is lost: nothing that may be on the history of the job is dropped."""

from __future__ import annotations

import numpy as np
import pytest
from helpers.inside import objects_of
from hypothesis import given, settings
from hypothesis import strategies as st
from support import (
    age,
    all_keys,
    listed_steps_are_whole,
    make_generation,
    make_root,
    make_save,
    resealed,
    state,
)

from ckptlib.catalog.catalog import Catalog
from ckptlib.catalog.retention import sweep
from ckptlib.errors import CorruptData
from ckptlib.format import keys
from ckptlib.format.keys import GenerationId, SaveId
from ckptlib.policy.keep import GRACE, Keep
from ckptlib.stores import Store
from ckptlib.stores.memory import MemoryStore
from ckptlib.verify.root import verify_root

LATER_S = GRACE.total_seconds() + 3600

GENERATIONS = st.lists(st.tuples(st.integers(0, 8), st.integers(1, 3)), min_size=2, max_size=4)
"""Of each: which earlier step it goes on from, counted from the newest, and how many it has saved."""


def make_history(catalog: Catalog, drawn: list[tuple[int, int]]) -> list[GenerationId]:
    saves: list[SaveId] = []
    generations = []
    for number, (back, num_saves) in enumerate(drawn, 1):
        origin = saves[-1 - back] if back < len(saves) else None
        generation = make_generation(catalog, number, resumed_from=origin)
        first = 0 if origin is None else origin.step + 1
        saves += [make_save(catalog, generation, first + i, {"w": np.zeros(1)}) for i in range(num_saves)]
        generations.append(generation)
    return generations


def lose(store: MemoryStore, generation: GenerationId, how: str) -> None:
    """The record, and its copy."""
    objects = objects_of(store)
    del objects[keys.copy_key(generation.key)]
    data, modified = objects.pop(generation.key)
    if how == "altered":
        objects[generation.key] = (data[:-5] + b"!" + data[-4:], modified)
    elif how == "another's":
        objects[generation.key] = (resealed(data, nonce="f" * 8), modified)


@settings(max_examples=60)
@given(GENERATIONS, st.data(), st.integers(1, 3), st.booleans())
def test_a_lost_record_drops_nothing_that_is_on_the_history(
    drawn: list[tuple[int, int]], data: st.DataObject, last: int, abandoned: bool
) -> None:
    store = MemoryStore()
    generations = make_history(make_root(store), drawn)
    whole = sweep(Catalog(store), Keep(last), None, dry_run=True, abandoned=abandoned)
    unwanted = sweep(Catalog(store), Keep(last), None, dry_run=True)
    for generation in data.draw(st.sets(st.sampled_from(generations), min_size=1)):
        lose(store, generation, data.draw(st.sampled_from(["gone", "altered", "another's"])))
    before = dict(objects_of(store))
    for dry_run in (True, False):
        with pytest.raises(CorruptData, match=r"history is incomplete.*so nothing is dropped"):
            sweep(Catalog(store), Keep(last), None, dry_run=dry_run, abandoned=abandoned)
        assert objects_of(store) == before
    assert {*whole.dropped} >= {*unwanted.dropped}
    live = sweep(Catalog(store), Keep(last), generations[-1])
    assert {*live.dropped} <= {*unwanted.dropped}
    assert list(verify_root(Catalog(store))), "and verify knows"


def test_gc_does_not_take_the_past_for_what_a_rewind_left_behind(store: Store, catalog: Catalog) -> None:
    """The head's record is all that says that it goes on from the first generation."""
    first = make_generation(catalog, 1)
    saves = [make_save(catalog, first, step, state(step)) for step in range(3)]
    head = make_generation(catalog, 2, resumed_from=saves[-1])
    saves.append(make_save(catalog, head, 3, state(3)))
    store.delete(head.key, keys.copy_key(head.key))
    before = all_keys(store)
    with pytest.raises(CorruptData, match=rf"{head.key}: no such object.*Put the record back"):
        sweep(Catalog(store), Keep(last=1), None, abandoned=True)
    assert all_keys(store) == before


def test_a_lost_record_in_the_middle_is_noticed_when_its_steps_are_gone(store: Store, catalog: Catalog) -> None:
    first, second, third = (GenerationId(number, f"{number:08x}") for number in (1, 2, 3))
    make_generation(catalog, 1)
    past = [make_save(catalog, first, step, state(step)) for step in range(2)]
    make_generation(catalog, 2, resumed_from=past[-1])
    middle = make_save(catalog, second, 2, state(2))
    make_generation(catalog, 3, resumed_from=middle)
    newest = [make_save(catalog, third, step, state(step)) for step in (3, 4)]
    store.delete(middle.manifest_key)
    store.delete(second.key, keys.copy_key(second.key))
    with pytest.raises(CorruptData, match="history is incomplete"):
        sweep(Catalog(store), Keep(last=5), None, abandoned=True)
    (found,) = verify_root(Catalog(store))
    assert (found.damage, found.key) == ("missing", second.key)
    assert sweep(Catalog(store), Keep(last=1), third).dropped == (newest[0],)
    assert listed_steps_are_whole(store) == [0, 1, 4]


def test_a_live_job_goes_on_along_what_is_left_of_history(
    store: Store, catalog: Catalog, caplog: pytest.LogCaptureFixture
) -> None:
    first = make_generation(catalog, 1)
    saves = [make_save(catalog, first, step, state(step)) for step in range(3)]
    head = make_generation(catalog, 2, resumed_from=saves[-1])
    newer = [make_save(catalog, head, step, state(step)) for step in (3, 4, 5)]
    store.delete(first.key, keys.copy_key(first.key))
    age(store, LATER_S)
    store.delete(head.key, keys.copy_key(head.key))
    assert sweep(Catalog(store), Keep(last=2), head).dropped == (newer[0],)
    assert "history is incomplete, and only steps on what is left of it are dropped" in caplog.text
    assert listed_steps_are_whole(store) == [0, 1, 2, 4, 5]
    age(store, LATER_S)
    assert sweep(Catalog(store), Keep(last=2), head).deleted, "what was dropped goes all the same"
