"""The stores and the root that tests of this room begin with."""

from __future__ import annotations

from pathlib import Path

import pytest
from support import make_root

from ckptlib.catalog.catalog import Catalog
from ckptlib.stores import Store
from ckptlib.stores.local import LocalStore
from ckptlib.stores.memory import MemoryStore


@pytest.fixture(params=["local", "memory"])
def store(request: pytest.FixtureRequest, tmp_path: Path) -> Store:
    return LocalStore(str(tmp_path / "root")) if request.param == "local" else MemoryStore()


@pytest.fixture
def catalog(store: Store) -> Catalog:
    return make_root(store)
