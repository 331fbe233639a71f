"""A job that was taken for dead, and saves on: its slots hold another snapshot by the time that they are read."""

from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path

import numpy as np
import pytest
import torch
from support import ROOT_ID
from typing_extensions import override
from workers.rank_slots import CAPACITY, STATE, seal

from ckptlib.errors import AgreementFailed, CheckpointNotFound, CkptError, CorruptData, ObjectNotFound
from ckptlib.ranks.group import SoloGroup
from ckptlib.recovery import memory_source
from ckptlib.recovery.candidates import Candidate
from ckptlib.recovery.inventory import Inventory, describe, look
from ckptlib.recovery.memory_source import InMemory
from ckptlib.recovery.skipped import Skipped
from ckptlib.slots.slot import Slot

NEWER = r"holds 000000000005-.* of rank 0 by now, expected 000000000004-.* of rank 0"


@pytest.mark.parametrize(
    "state",
    [{"another": np.arange(100)}, {{"w": "v"}.get(name, name): array for name, array in STATE.items()}],
    ids=["of another size", "of the same size"],
)
def test_a_layout_that_is_another_one_by_now_is_no_copy(tmp_path: Path, state: dict[str, np.ndarray]) -> None:
    """Another copy is used, or another step; the restore goes on."""
    slot = Slot.create(tmp_path, "slot", CAPACITY)
    seal(slot, 4, 0)
    (found,) = look([slot], ROOT_ID)
    inventory = Inventory([describe([found], [found.memory], "host", [0])])
    seal(slot, 5, 0, state)
    with pytest.raises(ObjectNotFound, match=NEWER):
        InMemory(SoloGroup(), None, inventory, found.snapshot, timedelta(seconds=1))


def test_a_layout_that_came_wrong_from_the_rank_that_read_it_is_no_copy(tmp_path: Path) -> None:
    """Only that rank has compared it with the digest in its slot."""

    class Alters(SoloGroup):
        @override
        def broadcast_from(self, rank: int, buffer: torch.Tensor) -> None:
            buffer[-2] ^= 1

    slot = Slot.create(tmp_path, "slot", CAPACITY)
    seal(slot, 4, 0)
    (found,) = look([slot], ROOT_ID)
    inventory = Inventory([describe([found], [found.memory], "host", [0])])
    with pytest.raises(CorruptData, match="its layout does not match"):
        InMemory(Alters(), None, inventory, found.snapshot, timedelta(seconds=1))


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
    with pytest.raises(ObjectNotFound, match=NEWER):
        source.part(0)
    assert source.drop_damaged()
    with pytest.raises(ObjectNotFound, match=r"in memory: no copy of the share of rank 0 is left: .* used again"):
        source.bring({0})
    assert not source.drop_damaged(), "it would be tried again, for ever"
    source.close()


def test_a_slot_that_is_read_from_is_nobody_elses(tmp_path: Path) -> None:
    """Else another rank of the host might remove it; a second descriptor of it would drop the locks of the first."""
    slot = Slot.create(tmp_path, "slot", CAPACITY)
    seal(slot, 4, 0)
    source = source_of(slot)
    (pack,) = source.part(0).packs
    source.read_into(pack.key, 0, memoryview(bytearray(8)))
    assert not source.drop_damaged()
    code = "import sys; from pathlib import Path; from ckptlib.slots.slot import Slot\n"
    code += "print(Slot.open(Path(sys.argv[1])).abandoned())"
    assert subprocess.check_output([sys.executable, "-c", code, slot.path], text=True) == "False\n"
    source.close()


def test_a_slot_without_its_file_is_no_damage(tmp_path: Path) -> None:
    """Gone between the look and the first read."""
    slot = Slot.create(tmp_path, "slot", CAPACITY)
    seal(slot, 4, 0)
    (found,) = look([slot], ROOT_ID)
    inventory = Inventory([describe([found], [found.memory], "host", [0])])
    slot.unlink()
    with pytest.raises(ObjectNotFound, match=r"does not hold 000000000004-.* any more: .*: No such file"):
        InMemory(SoloGroup(), None, inventory, found.snapshot, timedelta(seconds=1))


def let_go(slot: Slot) -> None:
    slot.unlink()
    slot.empty()


def damage(slot: Slot) -> None:
    slot.body[1000] ^= 1


@pytest.mark.parametrize(
    ("happens", "error", "says"),
    [
        (let_go, ObjectNotFound, "any more: "),
        (lambda slot: seal(slot, 5, 0), ObjectNotFound, "of rank 0 by now, expected"),
        (damage, CorruptData, "changed in memory after it was sealed. If this happens again, test the host's memory"),
    ],
    ids=["let go of", "overwritten", "damaged"],
)
def test_what_its_job_lets_go_of_as_it_is_read_is_not_taken_for_damage(
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
    happens: Callable[[Slot], None],
    error: type[CkptError],
    says: str,
) -> None:
    """As by a quick restart beside a job that closes: nobody is to test the memory of that host."""
    slot = Slot.create(tmp_path, "slot", CAPACITY)
    seal(slot, 4, 0)
    source = source_of(slot)
    source.part(0)
    happens(slot)
    assert source.drop_damaged()
    assert says in caplog.text
    assert ("test the host's memory" in caplog.text) == (error is CorruptData)
    assert not source.drop_damaged()
    with pytest.raises(error, match="step 4 in memory: no copy of the share of rank 0 is left"):
        source.bring({0})
    source.close()


def test_what_was_in_memory_alone_and_is_let_go_of_is_no_partial_copy(tmp_path: Path) -> None:
    slot = Slot.create(tmp_path, "slot", CAPACITY)
    seal(slot, 4, 0)
    (found,) = look([slot], ROOT_ID)
    source = source_of(slot)
    let_go(slot)
    with pytest.raises(ObjectNotFound) as caught:
        source.part(0)
    skipped = Skipped()
    skipped.add(Candidate(found.snapshot.save, found.snapshot, committed=False), caught.value)
    error = skipped.error("run")
    assert isinstance(error, CheckpointNotFound)
    assert re.search(r"nothing is damaged, .* in memory alone, .* Start this job again: step 0+4-", str(error))
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
