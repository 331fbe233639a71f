"""What the tests of the writer share."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from helpers.watched_planes import Watched
from helpers.writers import Bench

from ckptlib.codecs import registry


@pytest.fixture
def bench(tmp_path: Path) -> Iterator[Bench]:
    bench = Bench(tmp_path)
    yield bench
    bench.close()


@pytest.fixture
def planes(monkeypatch: pytest.MonkeyPatch) -> Iterator[Watched]:
    """What the coder takes for planes."""
    watched, find = Watched(), registry.find
    monkeypatch.setattr(registry, "find", lambda name: watched if name == "planes" else find(name))
    yield watched
    watched.gate.set()
