"""What was saved in any layout loads into any other, bit for bit, and training goes on from it."""

from __future__ import annotations

import json
from itertools import product
from pathlib import Path

import layouts
import pytest
from launch import fork_ranks

import ckptlib

ALL = list(layouts.LAYOUTS)


def some_pairs() -> list[tuple[str, str]]:
    """Every layout twice as source and twice as target, and those whose names are tied in their own ways."""
    tied = [("stages-2", "boxes-3"), ("boxes-3", "stages-2"), ("one", "stages-2"), ("stages-2", "one")]
    return [(ALL[i], ALL[(i + turn) % len(ALL)]) for turn in (1, 5) for i in range(len(ALL))] + tied


def run(tmp_path: Path, pairs: list[tuple[str, str]], timeout_s: float) -> list[str]:
    """What was wrong. The process of this test is the one that has no process group."""
    root, pairs_path = tmp_path / "root", tmp_path / "pairs.json"
    pairs_path.write_text(json.dumps(pairs))
    layouts.save(root, "one")
    fork_ranks("layouts.py", 8, root, pairs_path, timeout_s, timeout_s=timeout_s)
    wrong = [line for rank in range(8) for line in json.loads(pairs_path.with_suffix(f".rank{rank}").read_text())]
    for source, target in pairs:
        if target == "one":
            wrong += [f"{source} -> one: {line}" for line in layouts.load(root, source, "one")]
    assert {info.step for info in ckptlib.checkpoints(root)} == {layouts.step_of(name) for name in ALL}
    return wrong


@pytest.mark.timeout(200)
@pytest.mark.slow
def test_some_layouts_into_some_others(tmp_path: Path) -> None:
    assert run(tmp_path, some_pairs(), timeout_s=180) == []


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_all_layouts_into_all_others(tmp_path: Path) -> None:
    assert run(tmp_path, list(product(ALL, ALL)), timeout_s=880) == []


@pytest.mark.slow
@pytest.mark.timeout(150)
def test_wrapped_partly_loaded_and_renamed(tmp_path: Path) -> None:
    fork_ranks("wrapped.py", 2, tmp_path, 120, timeout_s=120)
    for rank in range(2):
        assert json.loads((tmp_path / f"wrong.rank{rank}").read_text()) == []
