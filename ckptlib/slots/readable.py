"""A slot to be read, be it on this host or on another one: its header and its documents, checked. No torch."""

from __future__ import annotations

from abc import ABC, abstractmethod

from ckptlib.errors import CorruptData, FormatError
from ckptlib.format.digests import XXH3, digester
from ckptlib.pages import PAGE_BYTES
from ckptlib.slots.header import SlotHeader


class ReadableSlot(ABC):
    """A slot to be read, wherever it lies. Any thread may use it."""

    where: str
    """The place, for messages."""

    @property
    @abstractmethod
    def capacity(self) -> int:
        """Bytes of the largest body that fits."""

    @property
    @abstractmethod
    def end(self) -> int:
        """No document reaches beyond this byte; looked up before memory is taken for one."""

    @abstractmethod
    def read_at(self, at: int, buffer: memoryview) -> None:
        """Fills `buffer`, from this byte of the slot on. Raises FormatError beyond the end."""

    def read_into(self, offset: int, buffer: memoryview) -> None:
        """Fills `buffer` from the body. Raises as `read_at` does."""
        self.read_at(PAGE_BYTES + offset, buffer)

    @abstractmethod
    def view(self, at: int, nbytes: int) -> memoryview:
        """Returns `nbytes` bytes from this one of the slot on; fewer where it ends. Raises as `read_at` does."""

    def read_header(self) -> SlotHeader:
        """Returns the header. Raises CorruptData or FormatError if it is torn or foreign."""
        page = bytearray(PAGE_BYTES)
        self.read_at(0, memoryview(page))
        header = SlotHeader.decode(bytes(page), self.where)
        if header.body_nbytes > self.capacity:
            found, most = header.body_nbytes, self.capacity
            raise FormatError(f"{self.where}: expected a body of at most {most} bytes, the header says {found}")
        end = max((offset + nbytes for offset, nbytes, _ in header.documents.values()), default=0)
        if header.ready and end > self.end:  # before anybody makes room for them
            raise FormatError(f"{self.where}: documents extend to byte {end}, past the end of the slot ({self.end})")
        return header

    def read_document(self, header: SlotHeader, name: str) -> bytes:
        """Returns a document. Raises FormatError if there is none, CorruptData if it does not match the header."""
        if name not in header.documents:
            raise FormatError(f"{self.where}: the slot holds no {name}")
        offset, nbytes, expected = header.documents[name]
        if offset + nbytes > self.end:
            raise CorruptData(f"{self.where}: {name} at [{offset}:+{nbytes}] is past the end of the slot")
        data = bytearray(nbytes)
        self.read_at(offset, memoryview(data))
        if digester(XXH3)(data) != expected:
            raise CorruptData(f"{self.where}: {name} at [{offset}:+{nbytes}] does not match its digest {expected}")
        return bytes(data)
