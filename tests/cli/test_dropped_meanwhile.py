"""Those who only look at a root while retention drops steps, and while accounts are merged, at each of their requests.

No step that went away is an error, and no time that a start told is lost.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace

import pytest
from helpers.commands import Ckptlib
from support import age, make_generation, make_root, put_parts, state
from typing_extensions import Buffer, override

import ckptlib
from ckptlib import api
from ckptlib.catalog.accounts import MAX_OBJECTS, put_account, read_accounts
from ckptlib.catalog.catalog import Catalog
from ckptlib.catalog.commit import Committer
from ckptlib.catalog.retention import sweep
from ckptlib.cli import options
from ckptlib.format.account import DIED, Account, Mark
from ckptlib.format.keys import GenerationId
from ckptlib.format.manifest import Generation
from ckptlib.policy.keep import GRACE, Keep
from ckptlib.reading import opened
from ckptlib.reporting.gather import gather
from ckptlib.reporting.glance import Watcher
from ckptlib.stores import Store
from ckptlib.stores.memory import MemoryStore
from ckptlib.stores.testing import _HookedStore


class Meanwhile(_HookedStore):
    """Right before one of its operations, `other` is done to the store inside."""

    def __init__(self, inner: Store, at: int, other: Callable[[Catalog], object]) -> None:
        super().__init__(inner, "meanwhile")
        self.inner, self.num_operations = inner, 0
        self._lock = threading.Lock()
        self._at, self._other = at, other

    @override
    @contextmanager
    def _around(self, op: str, key: str, data: Buffer = b"") -> Iterator[Buffer]:
        with self._lock:  # documents are read by threads
            if self.num_operations == self._at:
                self._other(Catalog(self.inner))
            self.num_operations += 1
        yield data


def account(steps: int, end: str | None = None) -> Account:
    """One second for each step."""
    marks = (Mark(0, 0.0, 0.0), Mark(steps, float(steps), 0.0))
    return Account(1000.0, 10.0 + steps, 10.0, end, 1, marks)


def run() -> MemoryStore:
    """Steps 1 and 2 of a first start, whose manifests alone tell of its time; 3 to 5 of a second one; 1 is trash."""
    store = MemoryStore()
    catalog = make_root(store)
    committer = Committer(catalog)
    before = None
    for number, steps in ((1, (1, 2)), (2, (3, 4, 5))):
        generation = make_generation(catalog, number, before)
        for step in steps:
            before, names = put_parts(catalog, generation, step, state(step), account=account(step).to_json())
            committer.commit(before, names)
    sweep(Catalog(store), Keep(last=4), None)
    age(store, GRACE.total_seconds() + 60)
    return store


def drop(catalog: Catalog) -> None:
    """All steps but the newest, of which the trash is as old as it must be to be deleted."""
    assert len(sweep(catalog, Keep(last=1), None).dropped) == 3


def each_moment(make: Callable[[], MemoryStore], other: Callable[[Catalog], object]) -> Iterator[Meanwhile]:
    """A store for each request of whoever looks: the test uses it, and then the next one comes."""
    for at in range(1000):
        store = Meanwhile(make(), at, other)
        yield store
        if store.num_operations <= at:
            assert at > 4
            return
    raise AssertionError("whoever looks never ends")


def test_report_while_steps_are_dropped() -> None:
    for store in each_moment(run, drop):
        found = gather(Catalog(store))
        assert found.problems == []
        assert found.steps[-1].save.step == 5
        assert found.goodput.starts[-1].last == 5


def test_watch_while_steps_are_dropped() -> None:
    for store in each_moment(run, drop):
        found = Watcher(Catalog(store)).look()
        assert found.problems == []
        assert found.newest is not None
        assert found.newest.save.step == 5


def test_checkpoints_while_steps_are_dropped(monkeypatch: pytest.MonkeyPatch) -> None:
    listed = []
    for store in each_moment(run, drop):
        monkeypatch.setattr(api, "open_store", lambda url, given, store=store: store)
        listed.append([info.step for info in ckptlib.checkpoints("memory://run")])
    assert listed[0] == [5]
    assert listed[-1] == [2, 3, 4, 5]
    assert all(steps == sorted(steps) and steps[-1] == 5 for steps in listed)


@pytest.mark.parametrize("command", ["goodput", "report", "ls", "ls --all", "du", "show", "verify --all"])
def test_commands_while_steps_are_dropped(ckptlib: Ckptlib, monkeypatch: pytest.MonkeyPatch, command: str) -> None:
    name, *flags = command.split()
    for store in each_moment(run, drop):
        monkeypatch.setattr(options, "open_store", lambda url, given, store=store: store)
        shown = ckptlib(name, "memory://run", *flags, *(["-o", "-"] if name == "report" else []))
        assert (shown.code, shown.err) == (0, ""), store.num_operations


def delete(catalog: Catalog) -> None:
    """The same, and all that only these had: whoever looks has slept for a grace period."""
    drop(catalog)
    age(catalog.store, GRACE.total_seconds() + 60)
    sweep(catalog, Keep(last=1), None)
    assert not [entry for kind in ("packs", "parts") for entry in catalog.store.scan(f"{kind}/000000000003-")]


def test_verify_while_steps_are_deleted(ckptlib: Ckptlib, monkeypatch: pytest.MonkeyPatch) -> None:
    for store in each_moment(run, delete):
        monkeypatch.setattr(options, "open_store", lambda url, given, store=store: store)
        shown = ckptlib("verify", "memory://run", "--all")
        assert (shown.code, shown.err) == (0, ""), store.num_operations


def test_verify_while_its_step_is_deleted(ckptlib: Ckptlib, monkeypatch: pytest.MonkeyPatch) -> None:
    told = set()
    for store in each_moment(run, delete):
        monkeypatch.setattr(options, "open_store", lambda url, given, store=store: store)
        shown = ckptlib("verify", "memory://run", 3)
        assert (shown.code, "missing" in shown.out) == (1 if shown.err else 0, False), store.num_operations
        told |= {text for text in ("holds no step 3;", "holds no save 000000000003-", "any more") if text in shown.err}
    assert told == {"holds no step 3;", "holds no save 000000000003-", "any more"}


ENDS = (
    "to step 3: the next",
    "holds no step 3;",
    "holds no save",
    "has dropped it meanwhile",
    "retention dropped that",
)
"""Of a rewind."""


def test_rewind_while_its_step_is_deleted(ckptlib: Ckptlib, monkeypatch: pytest.MonkeyPatch) -> None:
    """It has gone back to a step that is there to stay, or says that it has not."""

    def sweeps(catalog: Catalog) -> None:
        sweep(catalog, Keep(last=1), None)

    def deletes(catalog: Catalog) -> None:
        for _ in range(2):
            sweeps(catalog)
            age(catalog.store, GRACE.total_seconds() + 60)

    for other in (sweeps, deletes):
        told = set()
        for store in each_moment(run, other):
            monkeypatch.setattr(options, "open_store", lambda url, given, store=store: store)
            said = ckptlib("rewind", "memory://run", 3, "--yes")
            (end,) = [text for text in ENDS if text in said.out + said.err] or [said.err]
            assert said.code == int(end != ENDS[0]), store.num_operations
            is_told = end in ENDS and "damaged" not in said.err
            assert is_told or other is deletes, "it has slept for a day behind its look at the step"
            sweeps(after := Catalog(store.inner))
            assert ({3, 5} & {save.step for save in after.visible()} == {3}) == (said.code == 0), store.num_operations
            told.add(end)
        assert told >= {*ENDS} - {ENDS[2]}, told


def test_rewind_while_another_one_goes_back(ckptlib: Ckptlib, monkeypatch: pytest.MonkeyPatch) -> None:
    """To step 4, and its record hides that of the first one, which is put behind it."""
    was_first = False

    def go_back(catalog: Catalog) -> None:
        nonlocal was_first
        was_first = len(catalog.generations.ids()) > 2
        (target,), following = (save for save in catalog.saves() if save.step == 4), catalog.next_generation()
        record = Generation(replace(following, number=following.number + 20), 1, target, 0.0, {}, "here", rewind=True)
        catalog.generations.put(record)

    codes = set()
    for store in each_moment(run, go_back):
        was_first = False
        monkeypatch.setattr(options, "open_store", lambda url, given, store=store: store)
        said = ckptlib("rewind", "memory://run", 3, "--yes")
        assert "has begun" in said.err if said.code else "to step 3: the next" in said.out, said.err + said.out
        if not was_first:
            assert (Catalog(store.inner).visible()[-1].step == 3) == (said.code == 0), store.num_operations
        codes.add(said.code)
    assert codes == {0, 1}


def go_on(catalog: Catalog) -> None:
    """The job saves one more step, and keeps no other."""
    (generation,) = {save.generation for save in catalog.saves() if save.step == 5}
    Committer(catalog).commit(*put_parts(catalog, generation, 6, state(6), account=account(6).to_json()))
    sweep(catalog, Keep(last=1), None)


def test_the_newest_step_is_opened_while_it_is_dropped(monkeypatch: pytest.MonkeyPatch) -> None:
    for store in each_moment(run, go_on):
        monkeypatch.setattr(opened, "open_store", lambda url, given, store=store: store)
        with ckptlib.open("memory://run", framework="numpy") as step:
            assert step.get_tensor("count") == step.step


def test_whoever_looks_finds_the_newest_step_while_it_is_dropped(
    ckptlib: Ckptlib, monkeypatch: pytest.MonkeyPatch
) -> None:
    """There is one at any time, so none is told of a root without."""
    for store in each_moment(run, go_on):
        monkeypatch.setattr(options, "open_store", lambda url, given, store=store: store)
        assert ckptlib("ls", "memory://run", "--json").json["steps"][-1]["step"] in (5, 6), store.num_operations
    for store in each_moment(run, go_on):
        assert gather(Catalog(store)).steps[-1].save.step in (5, 6), store.num_operations
    for store in each_moment(run, go_on):
        newest = Watcher(Catalog(store)).look().newest
        assert newest is not None, store.num_operations
        assert newest.save.step in (5, 6)


def test_checkpoints_while_the_newest_step_is_dropped(monkeypatch: pytest.MonkeyPatch) -> None:
    for store in each_moment(run, go_on):
        monkeypatch.setattr(api, "open_store", lambda url, given, store=store: store)
        steps = [info.step for info in ckptlib.checkpoints("memory://run")]
        assert steps == sorted({*steps}), store.num_operations
        assert steps[-1] in (5, 6), store.num_operations


def test_goodput_while_the_newest_step_is_dropped() -> None:
    for store in each_moment(run, go_on):
        found = read_accounts(Catalog(store))
        assert found.told[GenerationId(2, "00000002")].marks[-1].step in (5, 6), store.num_operations


def many_accounts() -> MemoryStore:
    """One less than are merged."""
    store = MemoryStore()
    catalog = make_root(store)
    for number in range(1, MAX_OBJECTS + 1):
        put_account(catalog, GenerationId(number, "0" * 8), account(number, DIED))
    return store


def merge(catalog: Catalog) -> None:
    put_account(catalog, GenerationId(MAX_OBJECTS, "1" * 8), account(1, DIED))


def test_goodput_while_accounts_are_merged() -> None:
    for store in each_moment(many_accounts, merge):
        found = read_accounts(Catalog(store))
        assert found.problems == []
        assert {of.number for of in found.told} == {*range(1, MAX_OBJECTS + 1)}


def test_a_start_without_a_step_has_no_account_yet() -> None:
    store = run()
    catalog = Catalog(store)
    make_generation(catalog, 3, catalog.saves()[-1])
    assert read_accounts(Catalog(store)).untold == []
    make_generation(catalog, 4, catalog.saves()[-1])
    assert read_accounts(Catalog(store)).untold == [GenerationId(3, "00000003")]


@pytest.mark.parametrize("command", ["show", "diff latest latest", "refresh latest"])
def test_the_newest_step_is_shown_and_marked_while_it_is_dropped(
    ckptlib: Ckptlib, monkeypatch: pytest.MonkeyPatch, command: str
) -> None:
    name, *steps = command.split()
    for store in each_moment(run, go_on):
        monkeypatch.setattr(options, "open_store", lambda url, given, store=store: store)
        shown = ckptlib(name, "memory://run", *steps)
        assert (shown.code, shown.err) == (0, ""), store.num_operations


def test_a_step_that_is_dropped_is_not_told_as_damaged(ckptlib: Ckptlib, monkeypatch: pytest.MonkeyPatch) -> None:
    for store in each_moment(run, lambda catalog: sweep(catalog, Keep(last=1), None)):
        monkeypatch.setattr(options, "open_store", lambda url, given, store=store: store)
        shown = ckptlib("rewind", "memory://run", 3, "--yes")
        assert "damaged" not in shown.err, store.num_operations
