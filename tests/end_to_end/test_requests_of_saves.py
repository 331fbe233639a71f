"""The budget of a checkpoint in an object store: ranks x (parts of its upload + 4) + 12 requests, whoever waits."""

from __future__ import annotations

import json
from collections import Counter, defaultdict
from pathlib import Path

import pytest
from launch import fork_ranks

PARTS = 1
"""Of each rank's pack, which is small."""


def requests(directory: Path) -> dict[object, Counter[str]]:
    """By save: what the store was asked, by operation and room. Pieces of an object are no requests of their own."""
    found: dict[object, Counter[str]] = defaultdict(Counter)
    at: object = "open"
    for line in (directory / "plan.json.log").read_text().splitlines():
        entry = json.loads(line)
        at = entry.get("mark", at)
        if entry.get("op", "write") != "write":
            found[at][f"{entry['op']} {entry['key'].partition('/')[0]}"] += 1
    return found


@pytest.mark.parametrize("waits", ["all", "last", "nobody"])
@pytest.mark.parametrize("num_ranks", [2, 4])
def test_requests_per_checkpoint(tmp_path: Path, num_ranks: int, waits: str) -> None:
    fork_ranks("counted_saves.py", num_ranks, tmp_path, waits, timeout_s=120)
    found = requests(tmp_path)
    assert found.keys() >= {1, 2, 3, 4, 5}
    for step in (2, 3, 4, 5):
        asked = found[step]
        assert sum(asked.values()) <= num_ranks * (PARTS + 4) + 12, asked
        assert asked["commit packs"] == asked["put parts"] == num_ranks, "all of them wrote"
        assert asked["put steps"] == 1
        assert asked["get parts"] == 1, "of rank 0"
    # The first one reads all parts once, and every rank what the job resumed from and whether its layout is there.
    assert sum(found[1].values()) <= num_ranks * (PARTS + 8) + 20, found[1]
