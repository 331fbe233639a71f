"""A board: memory that the ranks of one host share, in which each writes its numbers and reads those of the others.

Between processes of one host, a collective over sockets costs a step some wake-ups of threads; here it costs a few
reads. The board has no name that a killed job could leave behind: others open it by the process that made it.

Collectives have numbers, the same on all ranks. Each has a place on the board, which a later one takes. A rank begins
one only when all ranks have begun the one that is AHEAD numbers older, and it has read all that every rank has begun;
so nobody needs what is overwritten. A digest over number and values tells whether a row is written, and seen whole:
processors may show another's writes in any order.
"""

from __future__ import annotations

import mmap
import os
import secrets
import struct
import time
from array import array
from collections import deque
from collections.abc import Collection, Sequence
from contextlib import suppress
from dataclasses import dataclass

import xxhash
from typing_extensions import Self

from ckptlib.errors import AgreementFailed
from ckptlib.libc import memory_file
from ckptlib.record_locks import held_by_another

with suppress(ImportError):  # on Windows, where no board is made
    import fcntl

WIDTH = 64
"""Integers of a row: a digest, and the values."""

PLACES = 32
"""Collectives that have a place on the board."""

AHEAD = PLACES // 2 - 1

ROOM = WIDTH - 1
"""Most values that a rank may give."""

ALIVE_EVERY_S = 0.25
"""How often a rank that waits looks whether the others live."""

AWAKE_S = 1.0
"""A rank that waits looks every 5 ms. If the clock went on by more than this in between, the rank was stopped, and the
others may have been, too: a scheduler suspends a job, a virtual machine is paused. No more counts as time waited."""

_NAME = "ckptlib-board"
_HEAD_NBYTES = 64
_TOKEN_NBYTES = 16
_INVITATION = struct.Struct(f"<qq{_TOKEN_NBYTES}s36s")


@dataclass(slots=True, eq=False)
class Collective:
    """A collective that this rank has begun."""

    number: int
    count: int
    found: list[list[int]] | None = None
    """The values of each rank; None: not read yet."""


class Board:
    """One rank's view of the board. For the main thread only."""

    def __init__(self, fd: int, rank: int, ranks: Sequence[int], timeout_s: float) -> None:
        """`ranks`: numbers in the job's world, by which errors name them; `rank` is this one's place among them."""
        self._fd, self._rank, self._ranks, self._timeout_s = fd, rank, ranks, timeout_s
        self._numbers = memoryview(mmap.mmap(fd, _nbytes(len(ranks))))[_HEAD_NBYTES:].cast("q")
        """A row of each rank, for each place."""
        self._begun = 0
        self._begun_by_all = -1
        """The last collective that every rank is known to have begun."""
        self._unread: deque[Collective] = deque()
        fcntl.lockf(fd, fcntl.LOCK_EX | fcntl.LOCK_NB, 1, rank)  # goes with the process, and is inherited by none

    @classmethod
    def make(cls, ranks: Sequence[int], timeout_s: float) -> tuple[Self, bytes] | None:
        """Makes a board, by rank 0, and an invitation for the others; None if the system has no such memory."""
        if (boot := _boot_id()) is None:
            return None
        token = secrets.token_bytes(_TOKEN_NBYTES)
        try:
            fd = memory_file(_NAME)
        except OSError:
            return None
        try:
            os.truncate(fd, _nbytes(len(ranks)))
            os.pwrite(fd, token, 0)
            board = cls(fd, 0, ranks, timeout_s)
        except OSError:
            os.close(fd)
            return None
        return board, _INVITATION.pack(os.getpid(), fd, token, boot)

    @classmethod
    def join(cls, invitation: bytes, rank: int, ranks: Sequence[int], timeout_s: float) -> Self | None:
        """Opens the board; returns None if it is on another host, or cannot be reached, as from another container."""
        if not invitation:
            return None
        pid, number, token, boot = _INVITATION.unpack(invitation)
        path = f"/proc/{pid}/fd/{number}"
        try:
            if _boot_id() != boot or not os.readlink(path).startswith(f"/memfd:{_NAME}"):
                return None
            fd = os.open(path, os.O_RDWR | os.O_CLOEXEC)
        except OSError:
            return None
        with suppress(OSError):
            if os.pread(fd, _TOKEN_NBYTES, 0) == token and os.fstat(fd).st_size == _nbytes(len(ranks)):
                return cls(fd, rank, ranks, timeout_s)
        os.close(fd)
        return None

    def begin(self, values: Sequence[int]) -> Collective:
        """Begins a collective with this rank's values: at most ROOM, and as many as the other ranks give."""
        number = self._begun
        self._read_old(number - AHEAD)
        begun = Collective(number, len(values))
        at, given = self._row(number, self._rank), array("q", values)
        self._numbers[at + 1 : at + 1 + len(given)] = given
        self._numbers[at] = _digest(number, given)
        self._begun = number + 1
        self._unread.append(begun)
        return begun

    def end(self, begun: Collective) -> list[list[int]]:
        """Returns the values of each rank. Raises AgreementFailed when one is gone, or does not come in time."""
        if begun.found is None:
            begun.found = self._await(begun)
            self._unread.remove(begun)
        return begun.found

    def _read_old(self, last: int) -> None:
        """Reads the collectives that all ranks are known to have begun. Waits until all have begun `last`."""
        unread = self._unread
        if last > self._begun_by_all:
            self.end(next(old for old in unread if old.number == last))
        while unread and unread[0].number <= self._begun_by_all:
            unread[0].found = self._await(unread[0])
            unread.popleft()

    def _await(self, begun: Collective) -> list[list[int]]:
        looked, look_at, waited = time.monotonic(), ALIVE_EVERY_S, 0.0
        while len(rows := self._read(begun)) < len(self._ranks):
            if waited > self._timeout_s:
                raise self._failed(self._missing(rows), f"did not answer within {self._timeout_s:.0f} s")
            if waited > look_at:
                gone = [rank for rank in self._missing(rows) if not self._lives(rank)]
                if gone and len(self._read(begun)) < len(self._ranks):  # it may have written just before
                    raise self._failed(gone, "is gone: its process ended, or left the group")
                look_at = waited + ALIVE_EVERY_S
            time.sleep(min(max(waited / 20, 2e-5), 5e-3))
            now = time.monotonic()
            waited += min(now - looked, AWAKE_S)
            looked = now
        self._begun_by_all = max(self._begun_by_all, begun.number)
        return [*rows.values()]

    def _read(self, begun: Collective) -> dict[int, list[int]]:
        """Returns the values of each rank that has given its own, in the order of the ranks."""
        rows, at = {}, self._row(begun.number, 0)
        for rank in range(len(self._ranks)):
            values = self._numbers[at + 1 : at + 1 + begun.count]
            if self._numbers[at] == _digest(begun.number, values):  # nobody writes there again before all have read
                rows[rank] = values.tolist()
            at += WIDTH
        return rows

    def _row(self, number: int, rank: int) -> int:
        """Returns where a row begins."""
        return (number % PLACES * len(self._ranks) + rank) * WIDTH

    def _missing(self, rows: Collection[int]) -> list[int]:
        return [rank for rank in range(len(self._ranks)) if rank not in rows]

    def _lives(self, rank: int) -> bool:
        return rank == self._rank or held_by_another(self._fd, rank)

    def _failed(self, places: Sequence[int], what: str) -> AgreementFailed:
        some = ", ".join(str(self._ranks[place]) for place in places[:16]) + (", ..." if len(places) > 16 else "")
        among = f"among {len(self._ranks)} ranks failed on rank {self._ranks[self._rank]}"
        return AgreementFailed(f"agreement {among}: rank {some} {what}")

    def close(self) -> None:
        """Leaves the board: a rank that waits for this one from here on is told that it is gone."""
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1


def _nbytes(size: int) -> int:
    return _HEAD_NBYTES + 8 * PLACES * size * WIDTH


def _digest(number: int, values: array[int] | memoryview) -> int:
    return xxhash.xxh3_64_intdigest(values, number) >> 1  # of 63 bits: it has a place among signed integers


def _boot_id() -> bytes | None:
    """Returns what tells this host from others, for as long as it is up."""
    try:
        with open("/proc/sys/kernel/random/boot_id", "rb") as file:
            return file.read().strip()
    except OSError:
        return None
