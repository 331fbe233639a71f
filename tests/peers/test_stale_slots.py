"""Slots of steps that not all ranks have, of an abandoned branch and of another root: they are not restored."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest
from workers.peers_bench import MEMORY


def test_steps_are_not_mixed(make: Any) -> None:
    """Rank 0 has steps 5 and 6, rank 1 has 4 and 5."""
    cluster = make()
    cluster.start("AB", pauses=[6])
    cluster.until_paused(6)
    cluster.lose()
    for path in cluster.slots_of(rank=1, step=6).values():
        path.unlink()
    cluster.start("AB")
    assert (cluster.restored(), cluster.received()) == ({(5, MEMORY)}, 0)
    cluster.finish()


@pytest.mark.slow
def test_abandoned_branch(make: Any) -> None:
    """What a job went back behind is not restored, though its steps are higher."""
    cluster = make(every=4)
    cluster.start("AB", pauses=[10])
    cluster.until_paused(10)
    cluster.wait_until_committed(4)
    cluster.wait_until_committed(8)
    cluster.lose()
    cluster.start("AB", load_step=4, pauses=[7])
    cluster.wait_for("paused")
    cluster.lose()
    cluster.start("AB", pauses=[9])
    assert (cluster.restored(), cluster.received()) == ({(7, MEMORY)}, 0)
    cluster.until_paused(9)
    cluster.lose("B")
    cluster.start("AB")
    assert (cluster.restored(), cluster.received()) == ({(9, MEMORY)}, 1)
    cluster.finish()


def test_slots_of_another_root(make: Any, tmp_path: Path) -> None:
    """In the same memory; one of them even has a name of this root."""
    cluster = make()
    cluster.start("AB", pauses=[9])
    cluster.until_paused(9)
    cluster.lose()
    others = cluster.slots()
    cluster.root = tmp_path / "another"
    cluster.start("AB", pauses=[3])
    assert cluster.restored() == {(0, False)}
    cluster.until_paused(3)
    cluster.lose()
    ours = [path for path in cluster.slots() if path not in others]
    prefix = ours[0].name.rsplit("-", 1)[0]
    for path in others:
        shutil.copy(path, path.parent / f"{prefix}-{path.name.rsplit('-', 1)[1]}")
    cluster.start("AB")
    assert (cluster.restored(), cluster.received()) == ({(3, MEMORY)}, 0)
    assert set(others) <= set(cluster.slots())
    for path in others:
        path.unlink()
    cluster.finish()
