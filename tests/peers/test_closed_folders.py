"""A folder of slots whose rights its user loses, before a restore and below a live job, and is given back."""

from __future__ import annotations

from typing import Any

import pytest
from workers.peers_bench import MEMORY


@pytest.mark.parametrize("mode", [0o000, pytest.param(0o400, marks=pytest.mark.slow)])
def test_before_the_restore_its_snapshots_are_read_from_other_hosts(make: Any, mode: int) -> None:
    cluster = make(rights=False)
    cluster.start("AB", pauses=[2])
    cluster.until_paused(2)
    cluster.lose()
    folder = cluster.arena("A")
    folder.chmod(mode)
    try:
        cluster.start("AB", pauses=[3], patient=False)
        assert (cluster.restored(), cluster.received()) == ({(2, MEMORY)}, 1), cluster.story()
        assert str(folder) in cluster.jobs[0].log()
        cluster.wait_for("paused")
    finally:
        folder.chmod(0o700)
    cluster.say(3)
    cluster.finish()


@pytest.mark.parametrize("mode", [0o500, pytest.param(0o000, marks=pytest.mark.slow)])
def test_below_a_job_that_has_slots_of_the_last_one_to_remove(make: Any, mode: int) -> None:
    """Whoever tidies up ends no training: the other ranks would wait for one that raised."""
    cluster = make(rights=False)
    cluster.start("AB", pauses=[2])
    cluster.until_paused(2)
    cluster.lose()
    cluster.start("AB", pauses=[2, 8])
    assert cluster.restored() == {(2, MEMORY)}
    cluster.until_paused(2)
    left = {path for path in cluster.slots("A") if "-000001-" in path.name}
    assert left, "what was restored stays until the job holds its own"
    folder = cluster.arena("A")
    folder.chmod(mode)
    try:
        cluster.say(2)
        cluster.wait_for("paused", 2)
        assert {path for path in cluster.slots("A") if "-000001-" in path.name} == left
    finally:
        folder.chmod(0o700)
    cluster.say(8)
    assert [job.join() for job in cluster.jobs] == [0, 0], cluster.story()
