"""Finds slots on this host by their files."""

from __future__ import annotations

import os
import socket
import tempfile
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

from ckptlib.errors import CkptError, NoRoom
from ckptlib.slots import writer_lock
from ckptlib.slots.header import SlotHeader
from ckptlib.slots.slot import SUFFIX, Slot

MEMORY = Path("/dev/shm")


def usual() -> tuple[Path, ...]:
    """Returns where slots are, unless a job was told to make them elsewhere: the usual place first.

    Memory alone if there is no temporary directory, as in a container whose root is read-only.
    """
    try:
        return MEMORY, Path(tempfile.gettempdir())
    except FileNotFoundError:
        return (MEMORY,)


def check_given(directory: Path) -> None:
    """Raises NoRoom if a job was told to make its slots in a directory that is none.

    A full directory passes: what fills it may be slots of a dead job. So does one that takes no files now: a restore
    may come from other hosts, and its rights may be given back before the next snapshot.
    """
    if os.path.isdir(directory):
        return
    what = "is no directory" if os.path.exists(directory) else "does not exist"
    raise NoRoom(
        f"arena={str(directory)!r} {what} on {socket.gethostname()}, so no snapshot can be taken; make the directory "
        "on every host, or give another one"
    )


@dataclass(frozen=True, slots=True)
class SlotFile:
    """One slot of this user."""

    path: Path
    nbytes: int
    """Bytes of its file."""
    header: SlotHeader | None
    """None: the slot is empty, or torn."""
    in_use: bool
    """Whether a process has it open, and does not merely wait for a successor; or a late writer may open it."""

    @property
    def state(self) -> str:
        ready = "empty" if self.header is None else "ready" if self.header.ready else "being written"
        return ready if self.in_use else f"{ready}, left behind"


def find(directories: Iterable[Path]) -> Iterator[SlotFile]:
    """Yields the slots of this user."""
    directories = list(directories)
    late = {writer_lock.generation_of(path) for path in _locks(directories) if writer_lock.is_awaited(path)}
    for directory in directories:
        for path in sorted(directory.glob(f"ckptlib-*{SUFFIX}")):
            try:
                slot = Slot.open(path)
            except CkptError:
                continue
            try:
                in_use = writer_lock.generation_of(path) in late or not slot.abandoned()
                yield SlotFile(path, os.lstat(path).st_size, _header(slot), in_use)
            except FileNotFoundError:
                continue  # gone since it was listed
            finally:
                slot.close()


def _locks(directories: Iterable[Path], prefix: str = "ckptlib-") -> Iterator[Path]:
    return (path for directory in directories for path in directory.glob(f"{prefix}*{writer_lock.SUFFIX}"))


def clean_locks(directories: Iterable[Path], prefix: str) -> None:
    """Removes the locks that dead writers have left. `prefix`: the beginning of their names."""
    for path in _locks(directories, prefix):
        writer_lock.reclaim(path)


def _header(slot: Slot) -> SlotHeader | None:
    try:
        return slot.read_header()
    except CkptError:  # never written to, or being written
        return None


def is_taken_up(path: Path) -> bool:
    """Whether a process on this host uses a slot beside this one that a later generation of its root has made."""
    own = writer_lock.generation_of(path)
    root, *_ = own.rsplit("-", 2)
    later = (other for other in path.parent.glob(f"{root}-*{SUFFIX}") if writer_lock.generation_of(other) > own)
    return any(map(_is_in_use, later))


def _is_in_use(path: Path) -> bool:
    try:
        slot = Slot.open(path)
    except CkptError:
        return False
    try:
        return not slot.abandoned()
    finally:
        slot.close()
