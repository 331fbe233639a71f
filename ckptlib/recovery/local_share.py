"""A saved rank's share on the disk of one host, as ranks of other hosts read it: its part, and the packs of that.

    [0, 8)                   how many bytes the part has
    [8, 8 + these)           the part
    [n * 2**44, ...)         its nth pack, from 1 on

So both ends need to know one offer only: the part tells which packs there are. No torch.
"""

from __future__ import annotations

import struct

from ckptlib.catalog.catalog import Catalog
from ckptlib.errors import AgreementFailed, FormatError
from ckptlib.format.documents import MAX_BYTES
from ckptlib.format.keys import PartName
from ckptlib.format.part import Part
from ckptlib.recovery.remote_slots import RemoteBytes

_PACK_BYTES = 1 << 44
"""More bytes than a pack has."""

_LENGTH = struct.Struct("<Q")


class LocalShare:
    """A share on this host, to be read out. Any thread may use it."""

    def __init__(self, disk: Catalog, name: PartName) -> None:
        """Reads the part. Raises CorruptData, FormatError, StoreError."""
        self.where = f"{disk.store.url}/{name.key}"
        self._store = disk.store
        part = disk.store.get(name.key)
        self._packs = [pack.key for pack in Part.decode(name, part).packs]
        self._part = memoryview(_LENGTH.pack(len(part)) + part)

    @property
    def end(self) -> int:
        return (1 + len(self._packs)) * _PACK_BYTES

    def view(self, at: int, nbytes: int) -> memoryview:
        """Returns bytes of the part or of a pack. Raises FormatError, StoreError."""
        n, offset = divmod(at, _PACK_BYTES)
        if n == 0:
            return self._part[offset : offset + nbytes]
        return memoryview(self._store.get(self._packs[n - 1], offset, nbytes) if at < self.end else b"")


class RemoteShare:
    """A share on another host. Any thread may use it; raises as `RemoteBytes.read_at` does."""

    def __init__(self, there: RemoteBytes) -> None:
        self._there = there

    def part(self) -> bytes:
        """Returns the part. Raises FormatError, too, if it is too large to be one."""
        head = bytearray(_LENGTH.size)
        self._read_at(0, memoryview(head))
        (nbytes,) = _LENGTH.unpack(head)
        if nbytes > MAX_BYTES:
            raise FormatError(f"rank {self._there.server} offers a part of {nbytes:,} bytes, expected {MAX_BYTES:,}")
        part = bytearray(nbytes)
        self._read_at(_LENGTH.size, memoryview(part))
        return bytes(part)

    def read_into(self, pack: int, offset: int, buffer: memoryview) -> None:
        """Fills `buffer` from a pack. `pack`: its position in the part."""
        self._read_at((1 + pack) * _PACK_BYTES + offset, buffer)

    def _read_at(self, at: int, buffer: memoryview) -> None:
        try:
            self._there.read_at(at, buffer)
        except AgreementFailed as error:
            raise AgreementFailed(
                f"{error}. Rank {self._there.server} reads its local disk: if that hangs, take its host out of the "
                "job, or start the job without `local`, which restores the newest step that the store has"
            ) from error
