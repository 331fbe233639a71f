"""A job that was taken for dead, and saves on: its slots hold another snapshot by the time that they are read."""

from __future__ import annotations

from datetime import timedelta
from pathlib import Path

import numpy as np
import pytest
from support import ROOT_ID
from workers.rank_slots import CAPACITY, seal

from ckptlib.errors import CorruptData
from ckptlib.ranks.group import SoloGroup
from ckptlib.recovery.inventory import Inventory, describe, look
from ckptlib.recovery.memory_source import InMemory
from ckptlib.slots.slot import Slot


def test_a_layout_that_is_another_one_by_now_is_no_copy(tmp_path: Path) -> None:
    """Of another size than it was told to be. Another copy is used, or another step; the restore goes on."""
    slot = Slot.create(tmp_path, "slot", CAPACITY)
    seal(slot, 4, 0)
    (found,) = look([slot], ROOT_ID)
    inventory = Inventory([describe([found], [found.memory], "host", [0])])
    seal(slot, 5, 0, {"another": np.arange(100)})
    with pytest.raises(CorruptData, match="its layout is another one by now"):
        InMemory(SoloGroup(), None, inventory, found.snapshot, timedelta(seconds=1))
