"""What this rank tells of its snapshots in memory."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from helpers.stage import seal
from support import ROOT_ID

from ckptlib.errors import NoRoom, SaveFailed
from ckptlib.format.keys import GenerationId, SaveId
from ckptlib.peers.replicator import Replicator
from ckptlib.policy.peers import Peers
from ckptlib.ranks.held import NONE
from ckptlib.saving.snapshots import Snapshots
from ckptlib.slots.header import SlotHeader
from ckptlib.slots.placement import place
from ckptlib.staging.arena import Arena
from ckptlib.staging.stager import Content, Staging

GENERATION = GenerationId(1, "0" * 8)


def begun(snapshots: Snapshots, step: int, persists: bool) -> Staging:
    save = SaveId(step, GENERATION)
    slot: Any = snapshots.arena.take(4096, 100, ())
    content: Any = Content(SlotHeader(ROOT_ID, save, 0, 1, step, 2, 4096, {}), b"", None, {}, {}, 0.0, "xxh3")  # type: ignore[arg-type]
    staging = Staging(slot, content)
    snapshots.begin(save, step, staging, persists)
    return staging


@pytest.mark.parametrize("persists", [False, True])
def test_snapshots_that_fail_behind_the_training_are_told_once(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, persists: bool
) -> None:
    """Such as for the want of room behind the body. Of what is persisted the writer tells."""
    snapshots = Snapshots(ROOT_ID, Arena(ROOT_ID, GENERATION, tmp_path, 3), None, None, lambda step: None)

    def come_to_an_end(step: int, error: Exception | None) -> None:
        staging = begun(snapshots, step, persists)
        staging.error = error
        seal(staging)
        snapshots.poll()

    for step, error in enumerate([NoRoom("full"), NoRoom("full"), None, NoRoom("full again"), SaveFailed("no")], 1):
        come_to_an_end(step, error)
    told = [record.getMessage() for record in caplog.records]
    said = "is not kept in memory; said once, until one is again"
    assert told == ([] if persists else [f"step 1 {said}: full", f"step 4 {said}: full again"])
    snapshots.close(clean=True)


def test_no_snapshot_begins_for_which_holders_have_no_slot(tmp_path: Path) -> None:
    """They have three: of the one that all hold, and of two on their way. The rank itself has four."""
    placement = place(["A"], 0)
    replicator = Replicator(None, 0, placement, Peers(copies=0), lambda: Arena(ROOT_ID, GENERATION, tmp_path, 3))
    snapshots = Snapshots(ROOT_ID, Arena(ROOT_ID, GENERATION, tmp_path, 4), placement, replicator, lambda step: None)

    def has_room() -> bool:
        return snapshots.needs_held() <= snapshots.held_by_all

    def begin() -> Staging:
        steps.append(len(steps) + 1)
        return begun(snapshots, steps[-1], persists=False)

    def settle(staging: Staging, recorded: bool = True) -> None:
        """On all ranks. `recorded`: else nothing counts as held."""
        seal(staging)
        snapshots.poll()
        own = snapshots.own
        snapshots.note_all(own.newest if recorded else NONE, own.since, own.settled)

    steps: list[int] = []
    on_their_way = [begin(), begin()]
    assert has_room(), "none is held yet"
    on_their_way.append(begin())
    assert not has_room()
    settle(on_their_way.pop(0), recorded=False)
    assert has_room()
    on_their_way.append(begin())
    assert not has_room()
    settle(on_their_way.pop(0))
    assert snapshots.held_by_all == 2
    assert not has_room(), "one is held, and two are on their way"
    on_their_way[0].error = NoRoom("full")
    settle(on_their_way.pop(0))
    assert has_room(), "what failed is needed by nobody"
    settle(on_their_way.pop(0))
    assert has_room()
    snapshots.close(clean=True)
