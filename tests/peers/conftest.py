"""Snapshots in the memory of peers: real trainers, real writers, SIGKILL, lost hosts, damage and dead links.

After each fault: the newest step that the faults have left whole is restored, on all ranks the same one; training goes
on to the very bits of a training without faults; and neither slots nor processes stay behind.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from workers.peers_bench import Cluster


@pytest.fixture
def make(tmp_path: Path) -> Iterator[Any]:
    """Makes clusters; see `Cluster`."""
    made: list[Cluster] = []

    def make(**options: Any) -> Cluster:
        made.append(Cluster(tmp_path, **options))
        return made[-1]

    yield make
    for cluster in made:
        cluster.close()
