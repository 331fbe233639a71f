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
import mmap
import os
import platform
import secrets
import stat
from abc import ABC, abstractmethod
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from typing_extensions import Self, override

from ckptlib.errors import CorruptData, FormatError, NoRoom, SaveFailed
from ckptlib.format.check import Check, decode_check
from ckptlib.format.digests import XXH3, digester
from ckptlib.format.documents import decode, encode
from ckptlib.format.keys import MAX_RANK, SaveId, parse_save
from ckptlib.format.values import Json
from ckptlib.pages import PAGE_BYTES

with suppress(ImportError):  # on Windows, where this module is only imported
    import fcntl

SUFFIX = ".slot"

_CONTENT, _ALIVE = 0, 1
_FALLOC_FL_KEEP_SIZE, _FALLOC_FL_PUNCH_HOLE = 1, 2
_MADV_POPULATE_WRITE = 23
"""Linux 5.14: map and touch pages at memory speed; a fault per page runs at a tenth of it."""


def check_platform() -> None:
    """Raises SaveFailed where there can be no slots, or none that outlive their process safely."""
    lacking = [name for name in ("posix_fallocate", "pidfd_open", "preadv") if not hasattr(os, name)]
    if lacking:
        raise SaveFailed(
            f"saving needs Linux: a snapshot outlives its process in shared memory, for which {platform.system()} "
            f"has no {' and no '.join(lacking)}; to load, and ckptlib ls, show and verify, work here"
        )


@dataclass(frozen=True, slots=True)
class SlotHeader:
    """What a slot says of itself."""

    root_id: str
    save: SaveId
    """The snapshot it holds, or is about to hold."""
    rank: int
    world_size: int
    number: int
    """Counts the snapshots of a generation, alike on all ranks: two of one step are not to be mixed."""
    sequence: int
    """Odd while the content is written, even when it is whole; never goes back."""
    body_nbytes: int
    documents: Mapping[str, tuple[int, int, str]]
    """By name: offset in the file, bytes, digest."""
    check: Check | None = None
    """What its rank says of what others hold, too. None while it is written, and in older slots."""

    @property
    def ready(self) -> bool:
        return self.sequence % 2 == 0

    def encode(self) -> bytes:
        documents: dict[str, Json] = {name: list(place) for name, place in self.documents.items()}
        body: dict[str, Json] = {
            "root": self.root_id,
            "save": str(self.save),
            "rank": self.rank,
            "world_size": self.world_size,
            "number": self.number,
            "sequence": self.sequence,
            "body_nbytes": self.body_nbytes,
            "documents": documents,
        }
        data = encode("slot", body if self.check is None else {**body, "check": str(self.check)})
        assert len(data) <= PAGE_BYTES
        return data.ljust(PAGE_BYTES, b"\0")

    @classmethod
    def decode(cls, data: bytes, where: str) -> SlotHeader:
        fields = decode("slot", data.rstrip(b"\0"), where)
        documents = {}
        for name, place in fields.mapping("documents").items():
            match place:
                case [int(offset), int(nbytes), str(digest)] if offset >= PAGE_BYTES and 0 <= nbytes < 2**40:
                    documents[name] = (offset, nbytes, digest)
                case _:
                    raise fields.fail(f"not the place of a document: {str(place)[:80]}")
        return cls(
            fields.digest("root"),
            parse_save(fields.text("save")),
            fields.integer("rank", 0, MAX_RANK),
            fields.integer("world_size", 1, MAX_RANK + 1),
            fields.integer("number"),
            fields.integer("sequence"),
            fields.integer("body_nbytes"),
            documents,
            decode_check(fields),
        )


class ReadableSlot(ABC):
    """A slot to be read, wherever it lies. From any thread."""

    where: str
    """For people."""

    @property
    @abstractmethod
    def capacity(self) -> int:
        """Bytes of the largest body that fits."""

    @property
    @abstractmethod
    def end(self) -> int:
        """No document reaches behind this byte; looked up before memory is taken for one."""

    @abstractmethod
    def read_at(self, at: int, buffer: memoryview) -> None:
        """Fills `buffer`, from this byte of the slot on. Raises FormatError behind the end."""

    def read_into(self, offset: int, buffer: memoryview) -> None:
        """Fills `buffer` from the body. Raises as `read_at` does."""
        self.read_at(PAGE_BYTES + offset, buffer)

    @abstractmethod
    def view(self, at: int, nbytes: int) -> memoryview:
        """So many bytes from this one of the slot on; fewer where it ends. Raises as `read_at` does."""

    def read_header(self) -> SlotHeader:
        """Raises CorruptData or FormatError for a header that is torn or foreign."""
        page = bytearray(PAGE_BYTES)
        self.read_at(0, memoryview(page))
        header = SlotHeader.decode(bytes(page), self.where)
        if header.body_nbytes > self.capacity:
            raise FormatError(f"{self.where}: a body of {header.body_nbytes} bytes in a slot for {self.capacity}")
        end = max((offset + nbytes for offset, nbytes, _ in header.documents.values()), default=0)
        if header.ready and end > self.end:  # before anybody makes room for them
            raise FormatError(f"{self.where}: documents up to {end} lie behind the end of the slot")
        return header

    def read_document(self, header: SlotHeader, name: str) -> bytes:
        """Raises CorruptData when it does not match the header."""
        if name not in header.documents:
            raise FormatError(f"{self.where}: the slot holds no {name}")
        offset, nbytes, expected = header.documents[name]
        if offset + nbytes > self.end:
            raise CorruptData(f"{self.where}: {name} at [{offset}:+{nbytes}] lies behind the end of the slot")
        data = bytearray(nbytes)
        self.read_at(offset, memoryview(data))
        if digester(XXH3)(data) != expected:
            raise CorruptData(f"{self.where}: {name} at [{offset}:+{nbytes}] does not match its digest {expected}")
        return bytes(data)


class Slot(ReadableSlot):
    """One slot, open in this process. To be read by any thread; for the rest, not by several at once."""

    def __init__(self, path: Path, fd: int, nbytes: int, writable: bool) -> None:
        self.path = path
        self.where = str(path)
        self._fd = fd
        self._nbytes_mapped = nbytes
        access = mmap.PROT_READ | (mmap.PROT_WRITE if writable else 0)
        self._map = mmap.mmap(fd, nbytes, mmap.MAP_SHARED, access)
        self._lock(_ALIVE, fcntl.LOCK_SH)

    @classmethod
    def create(cls, directory: Path, prefix: str, capacity: int) -> Self:
        """A new slot with room for a body of `capacity` bytes, all of it allocated.

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
            path.unlink()
            free = os.statvfs(directory)
            raise NoRoom(
                f"{directory} has no room for a slot of {nbytes:,} bytes ({free.f_bavail * free.f_frsize:,} free): "
                f"{error.strerror}; enlarge it, or give another directory: arena="
            ) from error

    @classmethod
    def open(cls, path: Path) -> Self:
        """A slot that another process made, to be read. Raises FormatError for a file that is not this user's slot."""
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
                f"{path}: not a slot: expected a file of one name that nobody else may write to, got mode "
                f"{found.st_mode:o} and {found.st_nlink} names"
            )
        return cls(path, fd, found.st_size, writable=False)

    @property
    @override
    def capacity(self) -> int:
        return self._nbytes_mapped - PAGE_BYTES

    @property
    @override
    def end(self) -> int:
        return os.fstat(self._fd).st_size

    @property
    def body(self) -> memoryview:
        """The mapped body, whole capacity."""
        return memoryview(self._map)[PAGE_BYTES:]

    @override
    def view(self, at: int, nbytes: int) -> memoryview:
        """As it is mapped."""
        return memoryview(self._map)[at : at + nbytes]

    @override
    def read_at(self, at: int, buffer: memoryview) -> None:
        """Without the GIL. The kernel copies what it would take a fault per page to map.

        Raises CorruptData where a file arena's disk does not give it.
        """
        done = 0
        while done < len(buffer):
            try:
                count = os.preadv(self._fd, [buffer[done:]], at + done)
            except OSError as error:
                raise CorruptData(f"{self.path}: [{at}:+{len(buffer)}] cannot be read: {error.strerror}") from error
            if count == 0:
                raise FormatError(f"{self.path}: [{at}:+{len(buffer)}] lies behind its end")
            done += count

    def prefault(self) -> None:
        """Maps every page now, without the GIL. Where the kernel cannot, the first copy does it."""
        address = ctypes.addressof(ctypes.c_char.from_buffer(self._map))
        _libc().madvise(ctypes.c_void_p(address), ctypes.c_size_t(self._nbytes_mapped), _MADV_POPULATE_WRITE)

    def address(self) -> int:
        """Of the body's first byte in this process. Only for a slot made here."""
        return ctypes.addressof(ctypes.c_char.from_buffer(self._map)) + PAGE_BYTES

    def write_header(self, header: SlotHeader) -> None:
        os.pwrite(self._fd, header.encode(), 0)

    def write_documents(self, body_nbytes: int, documents: Mapping[str, bytes]) -> dict[str, tuple[int, int, str]]:
        """Puts the documents behind the body; returns their places. Raises NoRoom."""
        places, offset = {}, PAGE_BYTES + body_nbytes
        digest = digester(XXH3)
        for name, data in documents.items():
            try:
                written = os.pwrite(self._fd, data, offset)
            except OSError as error:
                if error.errno not in (errno.ENOSPC, errno.EDQUOT):
                    raise
                written = 0
            if written != len(data):
                raise NoRoom(f"{self.path}: no room for {len(data):,} bytes of {name}")
            places[name] = (offset, len(data), digest(data))
            offset += len(data)
        return places

    def try_write_lock(self) -> bool:
        """Takes the content for overwriting, unless somebody reads it."""
        return self._lock(_CONTENT, fcntl.LOCK_EX | fcntl.LOCK_NB)

    def read_lock(self) -> bool:
        """Takes the content for reading, unless it is being overwritten."""
        return self._lock(_CONTENT, fcntl.LOCK_SH | fcntl.LOCK_NB)

    def unlock(self) -> None:
        """Gives the content free."""
        self._lock(_CONTENT, fcntl.LOCK_UN)

    def being_read(self) -> bool:
        """Whether another process reads the content, or overwrites it."""
        free = self.try_write_lock()
        if free:
            self.unlock()
        return not free

    def abandoned(self) -> bool:
        """Whether no other process has the slot open; asked by one that opened it after they did."""
        alone = self._lock(_ALIVE, fcntl.LOCK_EX | fcntl.LOCK_NB)
        if alone:
            self._lock(_ALIVE, fcntl.LOCK_SH)
        return alone

    def abandon(self) -> None:
        """No longer counts as a process that has it open; whoever comes next may unlink it."""
        self._lock(_ALIVE, fcntl.LOCK_UN)

    def _lock(self, byte: int, how: int) -> bool:
        try:
            fcntl.lockf(self._fd, how, 1, byte)
        except OSError as error:
            if error.errno in (errno.EACCES, errno.EAGAIN):
                return False
            raise
        return True

    def close(self) -> None:
        """Unmaps and drops the locks. Views of the body keep the mapping alive until they are gone."""
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1

    def empty(self) -> None:
        """Gives the memory back now, whoever has it open still; what they read from here on is zeros."""
        size = os.fstat(self._fd).st_size
        _libc().fallocate(self._fd, _FALLOC_FL_KEEP_SIZE | _FALLOC_FL_PUNCH_HOLE, 0, size)

    def unlink(self) -> None:
        """Removes the name; the memory is given back when nobody has it open."""
        self.path.unlink(missing_ok=True)


@cache
def _libc() -> ctypes.CDLL:
    libc = ctypes.CDLL(None, use_errno=True)
    libc.fallocate.argtypes = [ctypes.c_int, ctypes.c_int, ctypes.c_int64, ctypes.c_int64]
    libc.madvise.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
    return libc
