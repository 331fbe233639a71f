"""The root that each test damages."""

from __future__ import annotations

import pytest
from helpers.findings import RANKS, tensors
from support import (
    make_generation,
    make_root,
    make_save,
)

from ckptlib.format.keys import SaveId
from ckptlib.stores.memory import MemoryStore


@pytest.fixture
def store() -> MemoryStore:
    return MemoryStore()


@pytest.fixture
def save(store: MemoryStore) -> SaveId:
    catalog = make_root(store)
    return make_save(catalog, make_generation(catalog, world_size=RANKS), 5, tensors(), RANKS)
