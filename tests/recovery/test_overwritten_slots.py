"""A job that was taken for dead, and saves on: its slots hold another snapshot by the time that they are read."""

from __future__ import annotations

from datetime import timedelta
from pathlib import Path

import numpy as np
import pytest
from support import ROOT_ID
from workers.rank_slots import CAPACITY, STATE, seal

from ckptlib.errors import AgreementFailed, CorruptData
from ckptlib.ranks.group import SoloGroup
from ckptlib.recovery import memory_source
from ckptlib.recovery.inventory import Inventory, describe, look
from ckptlib.recovery.memory_source import InMemory
from ckptlib.slots.slot import Slot


@pytest.mark.parametrize(
    ("state", "says"),
    [
        ({"another": np.arange(100)}, "its layout is another one by now"),
        ({{"w": "v"}.get(name, name): array for name, array in STATE.items()}, "its layout does not match"),
    ],
    ids=["of another size", "of the same size"],
)
def test_a_layout_that_is_another_one_by_now_is_no_copy(
    tmp_path: Path, state: dict[str, np.ndarray], says: str
) -> None:
    """Another copy is used, or another step; the restore goes on."""
    slot = Slot.create(tmp_path, "slot", CAPACITY)
    seal(slot, 4, 0)
    (found,) = look([slot], ROOT_ID)
    inventory = Inventory([describe([found], [found.memory], "host", [0])])
    seal(slot, 5, 0, state)
    with pytest.raises(CorruptData, match=says):
        InMemory(SoloGroup(), None, inventory, found.snapshot, timedelta(seconds=1))


def source_of(slot: Slot) -> InMemory:
    """Of the snapshot that it holds now."""
    (found,) = look([slot], ROOT_ID)
    inventory = Inventory([describe([found], [found.memory], "host", [0])])
    source = InMemory(SoloGroup(), None, inventory, found.snapshot, timedelta(seconds=1))
    source.bring({0})
    return source


def test_a_later_step_is_not_taken_for_the_one_that_was_found(tmp_path: Path) -> None:
    """It has the same layout, and is whole: nothing else tells them apart."""
    slot = Slot.create(tmp_path, "slot", CAPACITY)
    seal(slot, 4, 0)
    source = source_of(slot)
    seal(slot, 5, 0)
    with pytest.raises(CorruptData, match=r"holds 000000000005-.* of rank 0, expected 000000000004-.* of rank 0"):
        source.part(0)
    assert source.drop_damaged()
    with pytest.raises(CorruptData, match="step 4 in memory: no copy of the share of rank 0 is left"):
        source.bring({0})
    assert not source.drop_damaged(), "it would be tried again, for ever"
    source.close()


def test_a_host_that_is_gone_is_no_damage(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An older step would be restored, and the newest removed: the job ends instead, and its next start finds it."""
    slot = Slot.create(tmp_path, "slot", CAPACITY)
    seal(slot, 4, 0)
    source = source_of(slot)
    source.part(0)

    def gone(*_: object) -> None:
        raise AgreementFailed("asking rank 1 failed on rank 0: it is gone")

    monkeypatch.setattr(memory_source, "check_body", gone)
    with pytest.raises(AgreementFailed, match="it is gone"):
        source.drop_damaged()
    monkeypatch.undo()
    assert not source.drop_damaged()
    source.close()
