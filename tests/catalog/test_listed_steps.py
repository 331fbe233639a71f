"""Which steps a save lists: all that matter to it, and of thousands the newest ones only, but for now and then."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from benchmarks.counting import CountingStore
from ckptlib.catalog import listed_steps as module
from ckptlib.catalog.catalog import Catalog, Steps
from ckptlib.catalog.listed_steps import LOOK_AGAIN_S, ListedSteps, list_steps
from ckptlib.format.keys import GenerationId, SaveId
from ckptlib.stores.memory import MemoryStore

MANY = 3_500


def save(step: int) -> SaveId:
    return SaveId(step, GenerationId(1, "00000001"))


class Root:
    """Of which nothing but names is asked."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, num_steps: int) -> None:
        self.store = CountingStore(MemoryStore())
        self.catalog = Catalog(self.store)
        self.now = 0.0
        monkeypatch.setattr(module, "time", SimpleNamespace(monotonic=lambda: self.now))
        self.commit(*range(1, num_steps + 1))
        self.newest = num_steps
        self.listed: ListedSteps | None = None

    def commit(self, *steps: int) -> None:
        for step in steps:
            self.store.put(save(step).manifest_key, b"{}")
            self.newest = step

    def look(self, oldest: int = 1) -> tuple[Steps, int]:
        """And how many requests that took."""
        with self.store.counted() as asked:
            self.listed = list_steps(self.catalog, save(oldest), save(self.newest - 2), self.listed)
        return self.listed.steps._replace(put={}), asked[0].list

    def all(self, since: SaveId | None = None) -> Steps:
        """As they are now, but for when their manifests were put, which is asked of whole listings alone."""
        return self.catalog.steps(since)._replace(put={})


def test_few_are_listed_each_time(monkeypatch: pytest.MonkeyPatch) -> None:
    root = Root(monkeypatch, 500)
    for _ in range(3):
        root.commit(root.newest + 1)
        steps, asked = root.look()
        assert (steps, asked) == (root.all(), 1)
    root.store.put(save(7).refresh_key, b"")
    root.store.delete(save(8).manifest_key)
    assert root.look() == (root.all(), 1), "what somebody does to old ones is seen at once"


def test_of_many_only_the_newest(monkeypatch: pytest.MonkeyPatch) -> None:
    root = Root(monkeypatch, MANY)
    steps, asked = root.look()
    assert (steps, asked) == (root.all(), 4)
    for number in range(20):
        root.commit(root.newest + 1)
        root.store.put(f"{save(root.newest).manifest_key[:-5]}-{number:08x}.pin", b"{}")
        root.store.put(save(root.newest).refresh_key, b"")
        steps, asked = root.look()
        assert (steps, asked) == (root.all(), 1)
        assert steps.has(save(1))
        assert steps.has(save(root.newest))
        assert not steps.has(save(root.newest + 1))


def test_old_ones_of_many_are_listed_again_in_time(monkeypatch: pytest.MonkeyPatch) -> None:
    root = Root(monkeypatch, MANY)
    root.look()
    root.store.put(save(7).refresh_key, b"")
    root.store.delete(save(8).manifest_key, save(root.newest).manifest_key)
    steps, asked = root.look()
    assert asked == 1
    assert not steps.has(save(root.newest)), "a parent is committed as of now"
    assert steps.has(save(8))
    assert not steps.refreshes
    root.now += LOOK_AGAIN_S + 1.0
    steps, asked = root.look()
    assert (steps, asked) == (root.all(), 4)
    assert not steps.has(save(8))
    assert steps.refreshes == [save(7)]
    assert root.look()[1] == 1


def test_older_ones_than_were_listed(monkeypatch: pytest.MonkeyPatch) -> None:
    root = Root(monkeypatch, MANY)
    assert root.look(oldest=2_000)[0] == root.all(save(2_000))
    assert root.look(oldest=1_000)[0] == root.all(save(1_000))
    assert root.look(oldest=3_000)[1] == 1
