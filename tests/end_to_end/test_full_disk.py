"""A disk that has room for a few steps: a job that keeps two goes on saving, hours before the grace period is over."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from helpers.limits import short_limits
from helpers.plain_reader import tensors_of
from helpers.tmpfs import tmpfs
from launch import forked
from places import WORKERS

from ckptlib.stores.local import LocalStore

MIB = 2**20
ROOM = 40 * MIB
"""Nine steps of two ranks."""
SAVES = 40


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[Path]:
    with tmpfs(tmp_path / "disk", ROOM) as path:
        yield path


def run(disk: Path, early_s: float, pause_s: float) -> list[int]:
    """The steps that were committed, of SAVES. Those that are listed in the end hold what they held, on both ranks."""
    limits = short_limits(EARLY_S=early_s)
    root = disk / "root"
    codes, output = forked(WORKERS / "full_disk.py", 2, root, SAVES, pause_s, timeout_s=200, variables=limits)
    assert codes == [0, 0], output[-5000:]
    told = [json.loads(line)["committed"] for line in output.splitlines() if line.startswith('{"rank"')]
    assert told[0] == told[1]
    store = LocalStore(str(root))
    listed = []
    for manifest in sorted(root.glob("steps/*.json")):
        step = int(manifest.name[:12])
        listed.append(step)
        found = tensors_of(store.get, manifest.read_bytes())
        first, second = np.split(found["all"], 2)
        assert (first == 1000 * step).all()
        assert (second == 1000 * step + 1).all()
    assert listed == told[0][-2:]
    return told[0]


@pytest.mark.slow
def test_what_was_dropped_makes_room(disk: Path) -> None:
    """40 saves, of which nine have room. Some may fail, while what they need is a second old."""
    committed = run(disk, early_s=1.0, pause_s=0.2)
    assert len(committed) > SAVES / 2
    assert committed[-1] > SAVES - 5, "it never ends"


@pytest.mark.slow
def test_not_before_it_was_dropped_as_long_ago_as_it_may_be_read(disk: Path) -> None:
    committed = run(disk, early_s=1000.0, pause_s=0.0)
    assert len(committed) < 12
