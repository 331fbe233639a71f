"""Slots on this host, found by their files. Reads only."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

from ckptlib.errors import CkptError
from ckptlib.slots.header import SlotHeader
from ckptlib.slots.slot import SUFFIX, Slot

MEMORY = Path("/dev/shm")


def usual() -> tuple[Path, ...]:
    """Where slots are, unless a job was told to make them elsewhere."""
    return MEMORY, Path(tempfile.gettempdir())


@dataclass(frozen=True, slots=True)
class SlotFile:
    """One slot of this user."""

    path: Path
    nbytes: int
    """Of its file."""
    header: SlotHeader | None
    """None: empty, or torn."""
    in_use: bool
    """Whether a process has it open, and does not merely wait for a successor."""

    @property
    def state(self) -> str:
        ready = "empty" if self.header is None else "ready" if self.header.ready else "being written"
        return ready if self.in_use else f"{ready}, left behind"


def find(directories: Iterable[Path]) -> Iterator[SlotFile]:
    """What is a slot of this user."""
    for directory in directories:
        for path in sorted(directory.glob(f"ckptlib-*{SUFFIX}")):
            try:
                slot = Slot.open(path)
            except CkptError:
                continue
            try:
                yield SlotFile(path, os.lstat(path).st_size, _header(slot), not slot.abandoned())
            except FileNotFoundError:
                continue  # gone since it was listed
            finally:
                slot.close()


def _header(slot: Slot) -> SlotHeader | None:
    try:
        return slot.read_header()
    except CkptError:  # never written to, or being written
        return None
