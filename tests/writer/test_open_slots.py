"""The slots that a writer has open."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace

import pytest
from places import ROOT, WORKERS
from support import ROOT_ID

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

    def rescue(found: list[Slot]) -> None:
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


class Waiting:
    """A writer that waits for a successor, with two slots, and a clock that moves as it sleeps."""

    def __init__(self, directory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now, self.tried = 0.0, list[tuple[float, list[Path]]]()
        self.at: dict[float, Callable[[], object]] = {}
        """What happens when."""
        self.slots = OpenSlots()
        self.slots.keep_s = 900.0
        self.paths = list[Path]()
        for _ in range(2):
            made = Slot.create(directory, f"ckptlib-{ROOT_ID[:16]}-000002-aaaaaaaa", 4096)
            self.paths.append(made.path)
            made.close()
            self.slots.open(str(made.path))
        self.slots.abandon()
        monkeypatch.setattr(open_slots, "time", SimpleNamespace(monotonic=lambda: self.now, sleep=self._sleep))

    def _sleep(self, seconds: float) -> None:
        self.now += seconds
        for when in sorted(self.at):
            if self.now >= when:
                self.at.pop(when)()

    def wait(self) -> list[tuple[int, list[Path]]]:
        """When what was persisted: in periods of 15 s."""
        self.slots.await_successor(lambda left: self.tried.append((self.now, [slot.path for slot in left])))
        return [(int(when / open_slots.RESCUE_AFTER_S), paths) for when, paths in self.tried]


@pytest.fixture
def waiting(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Waiting:
    return Waiting(tmp_path, monkeypatch)


@contextmanager
def job(directory: Path, number: int, nonce: str, root_id: str = ROOT_ID) -> Iterator[subprocess.Popen[bytes]]:
    """One that has slots of its own."""
    command = [sys.executable, WORKERS / "slot_holder.py", "make", root_id, str(number), nonce, directory]
    given = {**os.environ, "PYTHONPATH": str(ROOT)}
    with subprocess.Popen(command, env=given, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        process.stdout.readline()
        yield process
        process.kill()


@pytest.mark.parametrize(("gone_at", "period"), [(100.0, 7), (500.0, 30)])
def test_a_job_that_has_slots_of_its_own_here_is_left_to_save_what_it_restored(
    tmp_path: Path, waiting: Waiting, gone_at: float, period: int
) -> None:
    """Until it is gone, or half of the time is over."""
    with job(tmp_path, 2, "bbbbbbbb") as successor:

        def end() -> None:
            successor.kill()
            successor.wait()

        waiting.at[gone_at] = end
        assert waiting.wait() == [(period, waiting.paths)]


def test_other_roots_and_earlier_generations_are_no_successors(tmp_path: Path, waiting: Waiting) -> None:
    with job(tmp_path, 1, "ffffffff"), job(tmp_path, 3, "00000000", root_id="f" * 32):
        assert waiting.wait() == [(1, waiting.paths)]


def test_what_a_job_has_left_of_them_is_persisted_as_well(waiting: Waiting) -> None:
    """It has restored from that, and is gone."""
    waiting.at[20.0] = waiting.paths[0].unlink
    assert waiting.wait() == [(1, waiting.paths), (2, waiting.paths[1:])]
    assert not waiting.paths[1].exists()
