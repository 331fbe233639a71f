"""A root to be damaged, and what `verify` finds in it."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

import numpy as np
from helpers.objects import objects_of
from support import (
    resealed,
    state,
)

from ckptlib.catalog.catalog import Catalog
from ckptlib.format.keys import SaveId
from ckptlib.format.part import Part
from ckptlib.stores import Store
from ckptlib.stores.memory import MemoryStore
from ckptlib.verify.findings import Finding
from ckptlib.verify.root import verify_root, verify_save

T = TypeVar("T")

RANKS = 2


def tensors() -> dict[str, np.ndarray]:
    """Small ones, one of several chunks, and enough slack between."""
    large = np.random.default_rng(0).random((2 * 7, 50_000), dtype=np.float32)
    return {**state(5), "large": large}


def findings(store: Store, save: SaveId) -> list[Finding]:
    """All of a root with one step."""
    catalog = Catalog(store)
    return [*verify_root(catalog), *verify_save(catalog, save)]


def only(found: list[Finding]) -> Finding:
    assert len(found) == 1, found
    return found[0]


def alter(store: MemoryStore, key: str, change: Callable[[bytes], bytes]) -> None:
    data, modified = objects_of(store)[key]
    objects_of(store)[key] = (change(data), modified)


def flip(at: int, mask: int = 1) -> Callable[[bytes], bytes]:
    return lambda data: data[:at] + bytes([data[at] ^ mask]) + data[at + 1 :]


def parts_of(store: Store, save: SaveId) -> list[Part]:
    catalog = Catalog(store)
    return [catalog.part(name) for name in catalog.manifest(save).parts]


def reseal(store: MemoryStore, key: str, **fields: object) -> None:
    alter(store, key, lambda data: resealed(data, **fields))
