"""Slots: files in memory that hold one snapshot each and outlive the trainer.

    [0, 4096)            header: a sealed document, padded; says "ready" only when all else is whole
    [4096, 4096 + body)  the shards, as a pack will hold them
    then                 three documents: layout, table, snapshot (digests and values)

The trainer writes, its writer process reads. A record lock on byte 0 is held shared by whoever reads the content and
exclusive by whoever overwrites it; one on byte 1 is held shared by every process that has the slot open. Record locks
go with the process that took them, and a forked data loader does not inherit them. A process opens a slot once:
closing any descriptor of a file drops all of the process's locks on it. No torch.
"""

from __future__ import annotations

import ctypes
import errno
import logging
import mmap
import os
import secrets
import stat
import weakref
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

from typing_extensions import Self, override

from ckptlib.errors import CorruptData, FormatError, NoRoom
from ckptlib.format.digests import XXH3, digester
from ckptlib.libc import give_back, populate
from ckptlib.pages import PAGE_BYTES
from ckptlib.record_locks import held_by_another
from ckptlib.slots.header import SlotHeader
from ckptlib.slots.readable import ReadableSlot

with suppress(ImportError):  # on Windows, where this module is only imported
    import fcntl

log = logging.getLogger(__name__)

SUFFIX = ".slot"

_CONTENT, _ALIVE = 0, 1
_FULL = (errno.ENOSPC, errno.EDQUOT, errno.ENOMEM)


class Mapped(NamedTuple):
    """A file, from an offset on, and where that is mapped in this process."""

    fd: int
    offset: int
    address: int


class Slot(ReadableSlot):
    """One slot, open in this process. Any thread may read it; for the rest, not several at once."""

    def __init__(self, path: Path, fd: int, nbytes: int, writable: bool) -> None:
        self.path = path
        self.where = str(path)
        self._fd = fd
        self._nbytes_mapped = nbytes
        access = mmap.PROT_READ | (mmap.PROT_WRITE if writable else 0)
        self._map = mmap.mmap(fd, nbytes, mmap.MAP_SHARED, access)
        fcntl.lockf(fd, fcntl.LOCK_SH, 1, _ALIVE)
        self._release = weakref.finalize(self, os.close, fd)  # also if its owner forgot to close it
        self._release.atexit = False

    @classmethod
    def create(cls, directory: Path, prefix: str, capacity: int) -> Self:
        """Makes a slot with room for a body of `capacity` bytes, all of it allocated.

        Raises NoRoom; allocating beforehand turns what would be a SIGBUS in mid-copy into this error.
        """
        path = directory / f"{prefix}-{secrets.token_hex(8)}{SUFFIX}"
        nbytes = PAGE_BYTES + capacity
        try:
            fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
        except OSError as error:
            raise NoRoom(f"cannot make a slot in {directory}: {error.strerror}") from error
        try:
            os.posix_fallocate(fd, 0, nbytes)
            return cls(path, fd, nbytes, writable=True)
        except OSError as error:
            os.close(fd)
            path.unlink(missing_ok=True)  # a later job may have removed it, as one that was never filled
            if error.errno == errno.EFBIG:
                raise NoRoom(
                    f"{directory} takes no slot of {nbytes:,} bytes: {error.strerror}; raise the limit on the size of "
                    "this process's files (ulimit -f)"
                ) from error
            if error.errno not in _FULL:
                raise NoRoom(
                    f"{directory} takes no slot of {nbytes:,} bytes, since none can be allocated there (fallocate): "
                    f"{error.strerror}; give a directory of another file system: arena="
                ) from error
            free = os.statvfs(directory)
            raise NoRoom(
                f"{directory} has no room for a slot of {nbytes:,} bytes ({free.f_bavail * free.f_frsize:,} free): "
                f"{error.strerror}; enlarge it, remove what ended jobs have left there (ckptlib slots --clean), or "
                "give another directory: arena="
            ) from error

    @classmethod
    def open(cls, path: Path) -> Self:
        """Opens a slot that another process made, for reading. Raises FormatError for a file that is not this user's
        slot, or that cannot be opened and mapped."""
        try:
            fd = os.open(path, os.O_RDWR | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
        except OSError as error:
            raise FormatError(f"{path}: cannot be opened as a slot: {error.strerror}") from error
        found = os.fstat(fd)
        if found.st_uid != os.geteuid() or found.st_size < PAGE_BYTES:
            os.close(fd)
            raise FormatError(f"{path}: not a slot of this user ({found.st_size} bytes, owner {found.st_uid})")
        if not stat.S_ISREG(found.st_mode) or found.st_nlink > 1 or found.st_mode & 0o022:
            # A file of ours under a second name, which others can make, would be emptied with the slots left behind.
            os.close(fd)
            raise FormatError(
                f"{path}: not a slot: expected a file with one name that only its owner may write to, got mode "
                f"{found.st_mode:o} and {found.st_nlink} names"
            )
        try:
            return cls(path, fd, found.st_size, writable=False)
        except (OSError, ValueError) as error:  # no memory for it, or it was cut meanwhile
            os.close(fd)
            raise FormatError(f"{path}: cannot be mapped as a slot: {error}") from error

    @property
    @override
    def capacity(self) -> int:
        return self._nbytes_mapped - PAGE_BYTES

    @property
    @override
    def end(self) -> int:
        return os.fstat(self._fd).st_size

    @property
    def is_lost(self) -> bool:
        """Whether somebody has removed its file, so that no other process can open it, or has cut it short, so that
        touching what is gone gives SIGBUS. Only for a slot made here."""
        found = os.fstat(self._fd)
        return found.st_nlink == 0 or found.st_size < self._nbytes_mapped

    @property
    def body(self) -> memoryview:
        """The mapped body, in its whole capacity."""
        return memoryview(self._map)[PAGE_BYTES:]

    @override
    def view(self, at: int, nbytes: int) -> memoryview:
        """Returns a view of the mapping."""
        return memoryview(self._map)[at : at + nbytes]

    @override
    def read_at(self, at: int, buffer: memoryview) -> None:
        """Reads without the GIL. The kernel copies what it would take a fault per page to map.

        Raises CorruptData if a file arena's disk does not give it.
        """
        done = 0
        while done < len(buffer):
            try:
                count = os.preadv(self._fd, [buffer[done:]], at + done)
            except OSError as error:
                raise CorruptData(f"{self.path}: [{at}:+{len(buffer)}] cannot be read: {error.strerror}") from error
            if count == 0:
                raise FormatError(f"{self.path}: [{at}:+{len(buffer)}] is past its end")
            done += count

    def prefault(self) -> None:
        """Maps every page now, without the GIL; where the kernel cannot, the first copy does it, and is slow."""
        address = ctypes.addressof(ctypes.c_char.from_buffer(self._map))
        with suppress(OSError):
            populate(address, self._nbytes_mapped)

    def address(self) -> int:
        """Returns the address of the body's first byte in this process. Only for a slot made here."""
        return ctypes.addressof(ctypes.c_char.from_buffer(self._map)) + PAGE_BYTES

    @property
    def mapped(self) -> Mapped:
        """The mapping of the body. Only for a slot made here."""
        return Mapped(self._fd, PAGE_BYTES, self.address())

    def write_header(self, header: SlotHeader) -> None:
        """Writes the header. Raises NoRoom; the slot then holds what it held before."""
        self._write(header.encode(), 0, "header")

    def write_documents(self, body_nbytes: int, documents: Mapping[str, bytes]) -> dict[str, tuple[int, int, str]]:
        """Puts the documents behind the body; returns their places. Raises NoRoom."""
        places, offset = {}, PAGE_BYTES + body_nbytes
        digest = digester(XXH3)
        for name, data in documents.items():
            self._write(data, offset, name)
            places[name] = (offset, len(data), digest(data))
            offset += len(data)
        return places

    def _write(self, data: bytes, offset: int, what: str) -> None:
        try:
            written = os.pwrite(self._fd, data, offset)
        except OSError as error:
            if error.errno not in (errno.ENOSPC, errno.EDQUOT):  # a file arena's disk
                raise NoRoom(
                    f"{self.path}: {len(data):,} bytes of {what} cannot be written: {error.strerror}; if that stays "
                    "so, give another directory: arena="
                ) from error
            written = 0
        if written != len(data):
            raise NoRoom(f"{self.path}: no room for {len(data):,} bytes of {what}")

    def try_write_lock(self) -> bool:
        """Locks the content for overwriting, unless somebody reads it."""
        return self._lock(_CONTENT, fcntl.LOCK_EX | fcntl.LOCK_NB)

    def read_lock(self) -> bool:
        """Locks the content for reading, unless it is being overwritten."""
        return self._lock(_CONTENT, fcntl.LOCK_SH | fcntl.LOCK_NB)

    def unlock(self) -> None:
        """Unlocks the content."""
        self._lock(_CONTENT, fcntl.LOCK_UN)

    def being_read(self) -> bool:
        """Returns whether another process reads the content, or overwrites it."""
        return held_by_another(self._fd, _CONTENT)

    def abandoned(self) -> bool:
        """Returns whether no other process has the slot open; asked by one that opened it after they did."""
        alone = self._lock(_ALIVE, fcntl.LOCK_EX | fcntl.LOCK_NB)
        if alone:
            self._lock(_ALIVE, fcntl.LOCK_SH)
        return alone

    def abandon(self) -> None:
        """Stops counting as a process that has the slot open; whoever comes next may unlink it."""
        self._lock(_ALIVE, fcntl.LOCK_UN)

    def _lock(self, byte: int, how: int) -> bool:
        """Takes or drops a lock; returns whether that was possible. It is not if another process holds the lock, or if
        the system has no lock to give: a caller that is refused one does without this slot, and a lock that is not
        dropped goes with the descriptor."""
        try:
            fcntl.lockf(self._fd, how, 1, byte)
        except OSError as error:
            if error.errno in (errno.EACCES, errno.EAGAIN, errno.ENOLCK):
                return False
            raise
        return True

    def close(self) -> None:
        """Unmaps the slot and drops the locks. Views of the body keep the mapping alive until they are gone."""
        self._fd = -1
        self._release()  # once

    def empty(self) -> None:
        """Gives the memory back now, even if others have it open still; what they read from here on is zeros."""
        size = os.fstat(self._fd).st_size
        with suppress(OSError):
            give_back(self._fd, size)

    def unlink(self) -> bool:
        """Removes the name; the memory is given back when nobody has it open. Returns whether there is no name now.

        Returns False, with a warning, if its directory does not let go of it: a file too many ends no job.
        """
        try:
            self.path.unlink(missing_ok=True)
        except OSError as error:
            log.warning("%s cannot be removed, and stays until a later job can: %s", self.path, error.strerror)
            return False
        return True

    @property
    def has_name(self) -> bool:
        """Whether nobody has unlinked it; asked of the file itself, since its directory may not be entered any more."""
        return os.fstat(self._fd).st_nlink > 0
