"""What a dead generation left whole is committed, and nothing else."""

from __future__ import annotations

import numpy as np
import pytest
from support import (
    layout_of,
    make_generation,
    make_save,
    put_part,
    put_parts,
    read_save,
    replace_object,
    state,
)

from ckptlib.catalog.catalog import Catalog
from ckptlib.catalog.finishing import finish_saves
from ckptlib.format import keys
from ckptlib.format.keys import GenerationId, SaveId
from ckptlib.format.part import FailedPart
from ckptlib.stores import Store


def test_finish_commits_what_a_dead_generation_had_persisted_whole_and_nothing_else(
    store: Store, catalog: Catalog
) -> None:
    dead = make_generation(catalog, 1)
    before = make_save(catalog, dead, 10, state(10), 2)
    whole, _ = put_parts(catalog, dead, 20, state(20), 2)
    _, torn = put_parts(catalog, dead, 30, state(30), 2)
    store.delete(torn[1].key)
    _, headless = put_parts(catalog, dead, 40, state(40), 2)
    store.delete(headless[0].key)
    for damaged_rank in range(2):
        _, damaged = put_parts(catalog, dead, 50 + damaged_rank, state(50 + damaged_rank), 2)
        replace_object(store, damaged[damaged_rank].key, store.get(damaged[damaged_rank].key)[:-1])
    failed, document = FailedPart(SaveId(60, dead), 1, "f" * 8, "no space").encode()
    put_part(catalog, failed.save, 0, layout_of(state(60), 2), state(60))
    store.put(failed.key, document)

    fresh = Catalog(store)
    assert finish_saves(fresh, dead) == [], "one's own saves are not finished"
    assert finish_saves(fresh, fresh.next_generation()) == [whole]
    assert fresh.saves() == [before, whole]
    assert np.array_equal(read_save(store, whole)["w"], state(20)["w"])
    assert finish_saves(fresh, fresh.next_generation()) == []


def test_finish_commits_all_that_a_job_may_go_on_from(store: Store, catalog: Catalog) -> None:
    """The second job could not read step 30, went on from step 10, and died before its first commit."""
    first = make_generation(catalog, 1)
    origin = make_save(catalog, first, 10, state(10))
    make_save(catalog, first, 30, state(30))
    before, _ = put_parts(catalog, first, 5, state(5))
    second = make_generation(catalog, 2, origin)
    whole, _ = put_parts(catalog, second, 15, state(15))
    assert finish_saves(Catalog(store), catalog.next_generation(), to_go_on=True) == [whole]
    assert Catalog(store).resolve("latest") == whole
    third = make_generation(catalog, 3, whole)
    newer, _ = put_parts(catalog, third, 15, state(16))
    assert finish_saves(Catalog(store), catalog.next_generation(), to_go_on=True) == [newer]
    assert before not in Catalog(store).saves(), "a job goes on from the newest step"


def test_finish_leaves_alone_what_was_superseded(catalog: Catalog, caplog: pytest.LogCaptureFixture) -> None:
    """Its step would lie behind the head of history, or before a generation that went another way."""
    put_parts(catalog, make_generation(catalog, 1), 20, state(20))
    make_generation(catalog, 2)
    assert finish_saves(catalog, catalog.next_generation()) == []
    assert not caplog.text, "there is no second job that is to be stopped"


def test_finish_leaves_alone_what_began_in_another_root(store: Store, catalog: Catalog) -> None:
    """A writer that was left alone has put its parts where somebody has made a new root meanwhile."""
    generation = make_generation(catalog, 1)
    put_parts(catalog, generation, 20, state(20))
    store.delete(generation.key, keys.copy_key(generation.key))
    assert finish_saves(catalog, GenerationId(2, "0" * 8)) == []
    assert catalog.saves() == []


def test_what_somebody_gave_up_is_never_finished(store: Store, catalog: Catalog) -> None:
    """Though all parts are there: it was reported as failed."""
    generation = make_generation(catalog)
    save, _ = put_parts(catalog, generation, 10, state(10))
    name, document = FailedPart(save, 0, "f" * 8, "the deadline passed").encode()
    store.put(name.key, document)
    assert finish_saves(catalog, GenerationId(2, "0" * 8)) == []
    assert catalog.saves() == []


@pytest.mark.parametrize("cut", [False, True])
def test_what_lacks_a_pack_is_never_finished(store: Store, catalog: Catalog, cut: bool) -> None:
    """Its machine slept as it put its part, and sweeps had deleted its packs by then: nobody could load the step."""
    save, _ = put_parts(catalog, make_generation(catalog), 10, state(10), 2)
    packs = [entry.key for entry in store.scan(save.packs_prefix)]
    assert len(packs) == 2
    data = store.get(packs[1])
    store.delete(packs[1])
    if cut:
        store.put(packs[1], data[:-1])
    assert finish_saves(catalog, GenerationId(2, "0" * 8)) == []
    assert catalog.saves() == []
