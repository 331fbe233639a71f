"""Stalls, intervals and persist times of saves, from accounts that were made by hand."""

from __future__ import annotations

import pytest
from support import make_generation, make_root, make_save, state

from ckptlib.format.account import Account, Mark
from ckptlib.format.keys import GenerationId, SaveId
from ckptlib.format.manifest import Manifest
from ckptlib.reporting.records import Times
from ckptlib.reporting.times import Marks, times_of
from ckptlib.stores.memory import MemoryStore

GENERATION = GenerationId(1, "00000001")


def manifests(*steps: int) -> list[Manifest]:
    catalog = make_root(MemoryStore("memory://times"))
    generation = make_generation(catalog)
    return [catalog.manifest(make_save(catalog, generation, step, state(step))) for step in steps]


def account(*marks: tuple[int, float, float]) -> Account:
    return Account(1.0, 100.0, 0.5, None, 3, tuple(Mark(*mark) for mark in marks))


def found(saves: list[Manifest], *accounts: Account, lag: float = 2.0) -> list[Times]:
    marks = Marks()
    for one in accounts:
        marks.add(GENERATION, one)
    marks.add(GENERATION, None)
    times = times_of(saves, {m.save: m.created + lag for m in saves}, marks, deadline_s=60.0)
    return [times[m.save] for m in saves]


def test_a_stall_lasts_from_one_mark_to_the_next() -> None:
    told = found(manifests(10, 20), account((0, 0.0, 0.0), (10, 5.0, 0.1), (20, 10.0, 0.4), (23, 11.5, 0.9)))
    assert [t.stall_s for t in told] == [pytest.approx(0.3), pytest.approx(0.5)]
    assert [t.since_steps for t in told] == [10, 10]
    assert [t.since_s for t in told] == [pytest.approx(5.1), pytest.approx(5.3)]
    assert [t.persist_s for t in told] == [2.0, 2.0]


def test_the_last_save_may_be_at_the_last_step() -> None:
    told = found(manifests(10), account((0, 0.0, 0.0), (10, 5.0, 0.1), (10, 5.0, 0.6)))
    assert told[0].stall_s == pytest.approx(0.5)
    assert told[0].since_s == pytest.approx(5.1)


def test_manifests_together_tell_of_all_saves() -> None:
    """Each has the latest ones only."""
    told = found(
        manifests(10, 20, 30),
        account((0, 0.0, 0.0), (10, 5.0, 0.1), (10, 5.0, 0.1)),
        account((0, 0.0, 0.0), (20, 10.0, 0.3), (20, 10.0, 0.3)),
        account((0, 0.0, 0.0), (30, 15.0, 0.6), (30, 15.0, 0.6)),
    )
    assert [t.stall_s for t in told] == [pytest.approx(0.2), pytest.approx(0.3), None]


def test_what_is_not_recorded_is_none() -> None:
    assert found(manifests(10)) == [Times(persist_s=2.0)]
    assert found(manifests(10), account((0, 0.0, 0.0), (5, 1.0, 0.0)))[0] == Times(persist_s=2.0)


@pytest.mark.parametrize(("lag", "persist"), [(-10.0, None), (-1.0, 0.0), (64.0, 64.0), (3600.0, None)])
def test_times_that_no_commit_can_have(lag: float, persist: float | None) -> None:
    """The root was copied, or the clock of the store is another one."""
    assert found(manifests(10), lag=lag)[0].persist_s == persist


def test_other_generations_do_not_count() -> None:
    marks = Marks()
    marks.add(GenerationId(2, "00000002"), account((0, 0.0, 0.0), (10, 5.0, 0.1), (12, 6.0, 0.3)))
    saves = manifests(10)
    assert times_of(saves, {saves[0].save: 3.0}, marks, 60.0)[saves[0].save].stall_s is None
    assert isinstance(saves[0].save, SaveId)
