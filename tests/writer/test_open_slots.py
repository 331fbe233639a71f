"""The slots that a writer has open."""

from __future__ import annotations

from pathlib import Path

import pytest

from ckptlib.errors import FormatError
from ckptlib.slots.slot import Slot
from ckptlib.writer.open_slots import OpenSlots


def test_why_a_slot_is_not_open_is_told_when_it_is_needed(tmp_path: Path) -> None:
    slots, path = OpenSlots(), tmp_path / "x.slot"
    with pytest.raises(FormatError, match="is not open in the writer"):
        slots.find(str(path))
    slots.open(str(path))
    with pytest.raises(FormatError, match="cannot be opened as a slot: No such file or directory"):
        slots.find(str(path))
    made = Slot.create(tmp_path, "x", 4096)
    assert slots.open(str(made.path)) is slots.find(str(made.path))
    made.close()
    slots.forget(str(made.path))
