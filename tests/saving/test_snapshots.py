"""What this rank tells of its snapshots in memory."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from helpers.stage import seal
from support import ROOT_ID

from ckptlib.errors import NoRoom, SaveFailed
from ckptlib.format.keys import GenerationId, SaveId
from ckptlib.saving.snapshots import Snapshots
from ckptlib.slots.header import SlotHeader
from ckptlib.staging.arena import Arena
from ckptlib.staging.stager import Content, Staging

GENERATION = GenerationId(1, "0" * 8)


@pytest.mark.parametrize("persists", [False, True])
def test_snapshots_that_fail_behind_the_training_are_told_once(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, persists: bool
) -> None:
    """Such as for the want of room behind the body. Of what is persisted the writer tells."""
    snapshots = Snapshots(ROOT_ID, Arena(ROOT_ID, GENERATION, tmp_path, 3), None, None, lambda step: None)

    def come_to_an_end(step: int, error: Exception | None) -> None:
        save = SaveId(step, GENERATION)
        slot: Any = snapshots.arena.take(4096, 100, ())
        content: Any = Content(SlotHeader(ROOT_ID, save, 0, 1, step, 2, 4096, {}), b"", None, {}, {}, 0.0, "xxh3")  # type: ignore[arg-type]
        staging = Staging(slot, content)
        snapshots.begin(save, step, staging, persists)
        staging.error = error
        seal(staging)
        snapshots.poll()

    for step, error in enumerate([NoRoom("full"), NoRoom("full"), None, NoRoom("full again"), SaveFailed("no")], 1):
        come_to_an_end(step, error)
    told = [record.getMessage() for record in caplog.records]
    said = "is not kept in memory; said once, until one is again"
    assert told == ([] if persists else [f"step 1 {said}: full", f"step 4 {said}: full again"])
    snapshots.close(clean=True)
