"""Looks into, waits for and unlinks slots of the same root that other generations have left on this host.

Slots that no live process has open are unlinked when the next incarnation of the root asks for it. A writer that has
yet to read its orders has none open, and may need any of its generation.
"""

from __future__ import annotations

import logging
import os
import re
import stat
from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path

from ckptlib.errors import CorruptData, FormatError
from ckptlib.format.keys import GenerationId, SaveId, parse_generation
from ckptlib.slots import writer_lock
from ckptlib.slots.slot import SUFFIX, Slot
from ckptlib.slots.writer_lock import generation_of

log = logging.getLogger(__name__)

OPEN: set[Path] = set()
"""Slots that any arena of this process has open: its locks do not exclude its own process, so only this tells them
apart."""


def root_prefix(root_id: str) -> str:
    """Returns the common prefix of the names of all slots of a root."""
    return f"ckptlib-{root_id[:16]}-"


def prefix_of(root_id: str, generation: GenerationId) -> str:
    """Returns the common prefix of the names of all slots of a generation, and of its writers' locks."""
    return f"{root_prefix(root_id)}{generation}"


def left_generations(root_id: str, directories: Sequence[Path]) -> set[GenerationId]:
    """Returns the generations of the root that have left slots, or writers' files, of this user. A writer that is left
    may have yet to put the record of its generation, even if no slot is left to it.

    The names tell the generations. Slots that are open in this process are included.
    """
    prefix, found = root_prefix(root_id), set[GenerationId]()
    for directory in directories:
        for path in (*directory.glob(f"{prefix}*{SUFFIX}"), *directory.glob(f"{prefix}*{writer_lock.SUFFIX}")):
            match = _GENERATION.match(path.name.removeprefix(prefix))
            try:
                status = path.lstat()
            except OSError:
                continue  # removed since it was listed, or the directory may not be entered
            if status.st_uid == os.geteuid() and stat.S_ISREG(status.st_mode) and match is not None:
                found.add(parse_generation(match[0]))
    return found


_GENERATION = re.compile("[0-9]{6}-[0-9a-f]{8}")


class OtherSlots:
    """The slots of other generations, as one generation of a root sees them; owned by one thread."""

    def __init__(self, root_id: str, generation: GenerationId, directories: Sequence[Path]) -> None:
        """`directories`: where slots may be, the usual one first."""
        self.directories = directories
        self._generation = generation
        self._root_prefix = root_prefix(root_id)
        self._own_prefix = prefix_of(root_id, generation)
        self._left_alone: set[Path] = set()
        """Files that were logged already, and directories that cannot be listed."""
        self._stuck: set[Path] = set()
        """Slots that could not be removed; they are empty."""
        self.needed: SaveId | None = None
        """The snapshot that stays when memory has no room, if others are kept beside it; else None."""

    def under_way(self, after: SaveId | None = None) -> list[Path]:
        """Returns slots that writers of earlier jobs on this host have yet to finish with, and locks of writers that
        have yet to read their orders.

        `after`: returns slots alone, and only those with a newer snapshot than this one.
        """
        unread = self._unread()  # asked before the slots: a writer that has read its orders has locked them
        generations = {*map(generation_of, unread)}
        with self.opened() as slots:
            busy = [slot for slot in slots if slot.being_read() or generation_of(slot.path) in generations]
            if after is None:
                return [*unread, *(slot.path for slot in busy)]
            return [slot.path for slot in busy if (save := _held_in(slot)) is not None and save > after]

    def _unread(self) -> list[Path]:
        return [path for path in self._locks() if writer_lock.is_awaited(path)]

    def _locks(self) -> Iterator[Path]:
        for directory in self.directories:
            for path in directory.glob(f"{self._root_prefix}*{writer_lock.SUFFIX}"):
                if not path.name.startswith(self._own_prefix):
                    yield path

    def reclaim(self, but: Collection[SaveId] = ()) -> list[Path]:
        """Unlinks slots of earlier generations that no live process on this host has open, or may still open. Returns
        their paths.

        `but`: slots that hold these snapshots stay. So do slots that a later generation keeps for its successor.
        """
        spared = {*map(generation_of, self._unread())}
        for path in self._locks():
            if not self._is_later(path):
                writer_lock.reclaim(path)
        for path in (path for directory in self.directories for path in self._others_in(directory)):
            if not self._is_later(path) and _is_unmade(path):
                with suppress(OSError):  # the directory may not be writable; nothing is lost by that
                    path.unlink()
        with self.opened() as slots:
            left_behind = [
                slot
                for slot in slots
                if not self._is_later(slot.path)
                and slot.path not in self._stuck
                and generation_of(slot.path) not in spared
                and not (but and _held_in(slot) in but)
                and slot.abandoned()
            ]
            for slot in left_behind:
                if slot.unlink():
                    log.info("reclaimed the slot %s, whose processes are gone", slot.path)
                else:
                    self._stuck.add(slot.path)
                slot.empty()  # its old writer may have it open until the last of them is gone
            return [slot.path for slot in left_behind]

    def _is_later(self, path: Path) -> bool:
        """Returns whether a path is of a later generation, by its name, whose numbers have fixed width. Generations
        that began at one time may have one number."""
        own = f"{self._generation.number:06d}"
        return path.name.removeprefix(self._root_prefix)[: len(own)] > own

    @property
    def any_earlier(self) -> bool:
        """Whether there are slots of earlier generations."""
        with self.opened() as slots:
            return any(not self._is_later(slot.path) for slot in slots)

    @contextmanager
    def opened(self) -> Iterator[list[Slot]]:
        """Opens all of them for a moment. Files of other users are left alone.

        Opening them does not count as having them open: ranks of one host that look at the same time would each take
        the other for an owner, and none would reclaim anything.
        """
        slots = []
        for path in (path for directory in self.directories for path in self._others_in(directory)):
            try:
                slots.append(Slot.open(path))
                slots[-1].abandon()
            except FormatError as error:
                if not _is_gone(path):
                    self._tell_once(path, f"ignored a file among the slots: {error}")
        try:
            yield slots
        finally:
            for slot in slots:
                slot.close()

    def _others_in(self, directory: Path) -> list[Path]:
        """Returns the slots of others in a directory; none if it cannot be listed: its snapshots are lost as those of a
        lost host are, and no job ends by that."""
        try:
            names = os.listdir(directory)
        except OSError as error:
            self._tell_once(
                directory,
                f"{directory}: slots of earlier jobs there are neither used nor removed, since it cannot be listed: "
                f"{error.strerror}; expected a directory that this user may read, write and enter",
            )
            return []
        self._left_alone.discard(directory)
        others = (name for name in names if name.startswith(self._root_prefix) and name.endswith(SUFFIX))
        paths = (directory / name for name in others if not name.startswith(self._own_prefix))
        return [path for path in paths if path not in OPEN]

    def _tell_once(self, path: Path, text: str) -> None:
        if path not in self._left_alone:
            self._left_alone.add(path)
            log.warning("%s", text)


def _is_unmade(path: Path) -> bool:
    """Returns whether the path is an empty file of this user: whoever made it was killed before it had any bytes. If
    its maker still lives, it finds that its slot is lost, and makes another."""
    try:
        found = path.lstat()
    except OSError:
        return False
    is_own = stat.S_ISREG(found.st_mode) and found.st_uid == os.geteuid() and found.st_nlink == 1
    return is_own and found.st_size == 0


def _is_gone(path: Path) -> bool:
    try:
        path.lstat()
    except FileNotFoundError:
        return True
    except OSError:
        pass
    return False


def _held_in(slot: Slot) -> SaveId | None:
    """Returns the snapshot that the slot holds; None if it is not whole: its trainer was killed while filling it."""
    try:
        header = slot.read_header()
    except (CorruptData, FormatError):
        return None
    return header.save if header.ready else None
