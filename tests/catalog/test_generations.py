"""The generations of a root: listed, read once, and put."""

from __future__ import annotations

import pytest
from support import make_generation, make_root
from typing_extensions import override

from ckptlib.catalog.catalog import Catalog
from ckptlib.errors import FormatError, Superseded
from ckptlib.format import keys
from ckptlib.format.keys import GenerationId
from ckptlib.format.manifest import Generation
from ckptlib.stores import Store
from ckptlib.stores.memory import MemoryStore


def test_a_record_that_nobody_could_read_is_not_put(store: Store, catalog: Catalog) -> None:
    """From then on no job could open the root."""
    generation = make_generation(catalog, 1)
    record = Generation(GenerationId(2, "0" * 8), 1, None, 0.0, {}, "here", {"seed": 1})  # type: ignore[dict-item]
    with pytest.raises(FormatError, match=r"generations/000002-0{8}\.json: field 'tags' is not an object of strings"):
        catalog.generations.put(record)
    assert Catalog(store).generations.ids() == [generation]
    assert [entry.key for entry in store.scan("copies/generations/")] == [keys.copy_key(generation.key)]


def test_a_newer_generation_supersedes(catalog: Catalog) -> None:
    old = make_generation(catalog, 1)
    catalog.generations.check_head(old)
    new = make_generation(catalog, 2)
    catalog.generations.check_head(new)
    with pytest.raises(Superseded, match="Two jobs use one root"):
        catalog.generations.check_head(old)


class _Asked(MemoryStore):
    def __init__(self) -> None:
        super().__init__()
        self.asked: list[str] = []

    @override
    def get(self, key: str, offset: int = 0, nbytes: int | None = None) -> bytes:
        self.asked.append(key)
        return super().get(key, offset, nbytes)


def test_a_check_of_versions_asks_for_no_document_twice() -> None:
    store = _Asked()
    catalog = make_root(store)
    ids = [make_generation(catalog, number) for number in (1, 2)]
    fresh = Catalog(store)
    store.asked.clear()
    fresh.generations.check_versions()
    assert sorted(store.asked) == [keys.ROOT, *(one.key for one in ids)]
    store.asked.clear()
    fresh.generations.check_versions()
    assert store.asked == []
    third = make_generation(catalog, 3)
    store.asked.clear()
    fresh.generations.check_versions()
    assert store.asked == [third.key]
