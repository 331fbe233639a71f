"""`du`: its numbers against the documents' own, before and after steps are dropped; and what it says of damage."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from helpers.commands import Ckptlib, files
from helpers.increments import SIDE, needed_bytes, needed_ranges
from support import age, make_generation, make_root

from ckptlib.format.keys import GenerationId, SaveId
from ckptlib.stores.local import LocalStore
from ckptlib.stores.testing import flip_bit

LARGE = SIDE * SIDE * 4


def needs(root: Path) -> dict[str, np.ndarray]:
    """Of each byte of each pack that is there: the steps that need it, as the sum of 2**step."""
    ranges = needed_ranges(root)
    packs = {str(path.relative_to(root)): path.stat().st_size for path in root.glob("packs/*/*")}
    return {key: needed_bytes(ranges.get(key, {}), nbytes) for key, nbytes in packs.items()}


def test_du_of_steps_that_share(ckptlib: Ckptlib, shared: Path) -> None:
    before = files(shared)
    document = ckptlib("du", shared, "--json").json
    every = np.concatenate([*needs(shared).values()])
    for row in document["steps"]:
        step = row["step"]
        assert row["state"] == "committed"
        assert row["stored"] == (every & 1 << step > 0).sum() == row["logical"]
        assert row["own"] == (every == 1 << step).sum() >= LARGE
        assert row["shared"] == row["stored"] - row["own"] >= 3 * LARGE
        assert row["dead"] == 0
    totals = document["totals"]
    assert totals["written"] == len(every) == sum(row["written"] for row in document["steps"])
    assert totals["needed"] == (every > 0).sum()
    assert totals["framing"] == totals["written"] - totals["needed"]
    assert (totals["dead"], totals["trash"], totals["uncommitted"]) == (0, 0, 0)
    assert document["problems"] == []
    shown = ckptlib("du", shared)
    assert shown.lines()[0] == ["STEP", "GEN", "STATE", "LOGICAL", "STORED", "SHARED", "OWN", "WRITTEN", "DEAD"]
    assert "by 5 steps of 7." in shown.out
    assert files(shared) == before


def test_du_tells_what_waits_and_what_is_dead(ckptlib: Ckptlib, sharing: Path) -> None:
    store = LocalStore(str(sharing))
    store.put(SaveId(9, GenerationId(1, "f" * 8)).pack_key(0, "0" * 8, 0), bytes(1000))
    written = {row["step"]: row["written"] for row in ckptlib("du", sharing, "--json").json["steps"]}
    ckptlib("gc", sharing, "--keep-last", 2)
    document = ckptlib("du", sharing, "--json").json
    states = {row["step"]: row["state"] for row in document["steps"]}
    assert states == {1: "trash", 2: "trash", 3: "trash", 4: "committed", 5: "committed", 9: "uncommitted"}
    by_pack = needs(sharing)
    first = next(key for key in by_pack if "/000000000001-" in key)
    unneeded = int((by_pack[first] == 0).sum())
    assert {row["step"]: row["dead"] for row in document["steps"] if row["dead"]} == {1: unneeded}
    totals = document["totals"]
    assert LARGE <= totals["dead"] == unneeded < LARGE + 20_000
    assert totals["trash"] == written[2] + written[3]
    assert totals["uncommitted"] == 1000
    parts = ("needed", "framing", "dead", "trash", "uncommitted")
    assert totals["written"] == sum(totals[name] for name in parts) == sum(written.values())

    age(store, 3 * 86400)
    ckptlib("gc", sharing, "--keep-last", 2)
    totals = ckptlib("du", sharing, "--json").json["totals"]
    assert (totals["trash"], totals["dead"], totals["uncommitted"]) == (1000, unneeded, 0)
    assert ckptlib("verify", sharing, "--all").code == 0


def test_du_of_what_cannot_be_read(ckptlib: Ckptlib, sharing: Path) -> None:
    flip_bit(next(sharing.glob("steps/*5-000001-*")), 300)
    flip_bit(next(sharing.glob("parts/*4-000001-*/*")), 300)
    next(sharing.glob("packs/*2-000001-*/*")).unlink()
    result = ckptlib("du", sharing, "--json")
    assert result.code == 1
    states = [(row["step"], row["state"]) for row in result.json["steps"]]
    assert states == [(1, "committed"), (2, "committed"), (3, "committed"), (4, "damaged"), (5, "damaged")]
    assert len(result.json["problems"]) == 3
    assert "what step 5 needs is not counted" in result.err
    assert "is not there, or shorter" in result.err


@pytest.mark.parametrize("command", ["du", "goodput", "report"])
def test_a_root_that_lost_its_document_is_not_told_to_be_empty(ckptlib: Ckptlib, sharing: Path, command: str) -> None:
    (sharing / "ckptlib.json").unlink()
    (sharing / "copies" / "ckptlib.json").unlink()
    result = ckptlib(command, sharing)
    assert result.code == 1
    assert "lacks ckptlib.json beside 5 checkpoints; a job that saves here puts it again" in result.err


def test_du_where_there_is_nothing(ckptlib: Ckptlib, tmp_path: Path) -> None:
    result = ckptlib("du", tmp_path / "nowhere")
    assert (result.code, result.out) == (1, "")
    make_generation(make_root(LocalStore(str(tmp_path / "empty"))))
    assert ckptlib("du", tmp_path / "empty", "--json").json["steps"] == []
