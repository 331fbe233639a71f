"""The slots that a writer has open."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import pytest

from ckptlib.errors import FormatError, StoreError
from ckptlib.slots.slot import Slot
from ckptlib.writer import open_slots
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


@pytest.mark.parametrize("num_failures", [0, 3, 10**6])
def test_what_is_in_memory_only_is_persisted_when_the_store_is_back(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, num_failures: int
) -> None:
    """An outage that the writers meet as they would do it passes, as a rule, before they let the slots go."""
    now, tried = [0.0], list[float]()

    def sleep(seconds: float) -> None:
        now[0] += seconds

    def rescue(found: list[Slot], again: bool) -> None:
        assert again == bool(tried)
        tried.append(now[0])
        assert [slot.path for slot in found] == [made.path]
        if len(tried) <= num_failures:
            raise StoreError("away")

    monkeypatch.setattr(open_slots, "time", SimpleNamespace(monotonic=lambda: now[0], sleep=sleep))
    made, slots = Slot.create(tmp_path, "x", 4096), OpenSlots()
    slots.keep_s = 900.0
    slots.open(str(made.path))
    slots.await_successor(rescue)
    assert 900 <= now[0] < 901
    assert not made.path.exists()
    assert len(tried) == num_failures + 1 if num_failures < 10 else 50 < len(tried) < 60
    assert all(15 < later - earlier < 16 for earlier, later in zip([0.0, *tried], tried, strict=False))
