"""What lies inside a reader: where its bytes come from, and what it would ask for."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from ckptlib.loading.reader import Reader
from ckptlib.reading.reader import Want
from ckptlib.reading.requests import Request
from ckptlib.stores import Store
from ckptlib.stores.io_limits import IoLimits


def store_of(reader: Reader) -> Store:
    return reader._source._catalog.store  # type: ignore[attr-defined]


def limit(reader: Reader, limits: IoLimits, monkeypatch: pytest.MonkeyPatch) -> None:
    """Has it read as its source likes it."""
    monkeypatch.setattr(reader._source, "limits", limits)


def plan_of(reader: Reader, wants: Sequence[Want], ranks: Sequence[frozenset[int]]) -> list[Request]:
    return reader._plan(wants, ranks)
