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


def account(*marks: tuple[int, float, float], num_saves: int | None = None) -> Account:
    """Of a start: its first step, snapshots, its last step."""
    num = len(marks) - 2 if num_saves is None else num_saves
    return Account(1.0, 1e6, 0.5, None, num, tuple(Mark(*mark) for mark in marks))


def found(saves: list[Manifest], *accounts: Account, lag: float = 2.0, in_memory: bool = False) -> list[Times]:
    marks = Marks()
    for one in accounts:
        marks.add(GENERATION, one)
    marks.add(GENERATION, None)
    at = {m.save: m.created + lag for m in saves}
    times = times_of(saves, at, marks, 60.0, {GENERATION} if in_memory else ())
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


def test_a_save_of_the_step_that_was_restored() -> None:
    told = found(manifests(10, 20), account((10, 0.0, 0.0), (10, 0.0, 0.2), (20, 5.0, 0.5), (20, 5.0, 0.9)))
    assert [t.stall_s for t in told] == [pytest.approx(0.3), pytest.approx(0.4)]
    assert [t.since_steps for t in told] == [None, 10]


def test_manifests_together_tell_of_all_saves() -> None:
    """Each has the latest ones only."""
    told = found(
        manifests(10, 20, 30),
        account((0, 0.0, 0.0), (10, 5.0, 0.1), (10, 5.0, 0.1)),
        account((0, 0.0, 0.0), (10, 5.0, 0.1), (20, 10.0, 0.3), (20, 10.0, 0.3)),
        account((0, 0.0, 0.0), (20, 10.0, 0.3), (30, 15.0, 0.6), (30, 15.0, 0.6), num_saves=3),
    )
    assert [t.stall_s for t in told] == [pytest.approx(0.2), pytest.approx(0.3), None]
    assert [t.since_steps for t in told] == [10, 10, 10]


def test_of_saves_that_were_dropped_nothing_falls_to_those_that_stayed() -> None:
    """Saves each ten steps up to 3000; those of 10 and 3000 are there, and each has the latest two in its account."""
    told = found(
        manifests(10, 3000),
        account((0, 0.0, 0.0), (10, 5.0, 0.1), (10, 5.0, 0.1)),
        account((0, 0.0, 0.0), (2990, 1495.0, 29.8), (3000, 1500.0, 29.9), (3004, 1502.0, 30.1), num_saves=300),
    )
    assert [t.stall_s for t in told] == [None, pytest.approx(0.2)]
    assert [t.since_steps for t in told] == [10, 10]


def test_snapshots_in_memory_are_no_saves() -> None:
    """Each step leaves a mark; each tenth is saved."""
    steps = [(step, 0.5 * step, 0.01 * step) for step in range(15, 21)]
    told = found(
        manifests(10, 20),
        account((0, 0.0, 0.0), (9, 4.5, 0.09), (10, 5.0, 0.1), (10, 5.0, 0.1), num_saves=10),
        account((0, 0.0, 0.0), *steps, (20, 10.0, 0.2), num_saves=20),
        account((0, 0.0, 0.0), (20, 10.0, 0.2), (21, 10.5, 0.24), (22, 11.0, 0.25), num_saves=21),
        in_memory=True,
    )
    assert [t.since_steps for t in told] == [None, 10]
    assert told[1].since_s == pytest.approx(5.1)
    assert told[1].stall_s == pytest.approx(0.04)


def test_what_is_not_recorded_is_none() -> None:
    assert found(manifests(10)) == [Times(persist_s=2.0)]
    assert found(manifests(10), account((0, 0.0, 0.0), (5, 1.0, 0.0), (6, 1.0, 0.0)))[0] == Times(persist_s=2.0)


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
