"""The interface of every codec: it turns a chunk's bytes into a frame, and a frame into the chunk's bytes.

A frame holds everything needed to decode it, except the number of bytes it decodes to, which the part holds. Frames
come from a store, so they may be hostile: a decoder trusts no number in them before it has compared it with the size of
its output. Encoders and decoders may be called by several threads at once. No torch, no I/O.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import ClassVar, NamedTuple


class Content(NamedTuple):
    """The content of a chunk: a hint for encoders. Decoders do without."""

    dtype: str
    """torch's name of the dtype, such as "float32"; "" if the chunk holds several."""
    row: int
    """Elements in a row of the tensor: the product of all its dims but the first. 1 if it has fewer than two dims."""
    first: int = 0
    """Position of the chunk's first element in its row."""

    @property
    def lead(self) -> int:
        """Number of elements before the first row that begins in the chunk."""
        return -self.first % max(self.row, 1)


class Codec(ABC):
    """A codec whose frames are decoded by themselves."""

    name: ClassVar[str]
    """Name in parts and packs: [a-z0-9-]+."""
    lossless: ClassVar[bool] = True

    @abstractmethod
    def encode(self, raw: memoryview, content: Content) -> bytes | None:
        """Returns the frame of a chunk, or None if it would save less than 2 %: such a chunk is better stored raw."""

    @abstractmethod
    def decode(self, frame: memoryview, out: memoryview) -> None:
        """Fills all of `out` with the bytes that `frame` encodes. Allocates no more than a small multiple of its size.

        Raises FormatError, saying what is wrong, for a frame that is torn or decodes to another number of bytes.
        """


class BaseCodec(ABC):
    """A codec whose frames are decoded with the help of the bytes of an earlier chunk, the base."""

    name: ClassVar[str]
    lossless: ClassVar[bool] = True

    @abstractmethod
    def encode(self, raw: memoryview, base: memoryview, content: Content) -> bytes | None:
        """Does what `Codec.encode` does. `base` has as many bytes as `raw`."""

    @abstractmethod
    def decode(self, frame: memoryview, base: memoryview, out: memoryview) -> None:
        """Does what `Codec.decode` does. `base` has as many bytes as `out`."""


class SummaryCodec(BaseCodec):
    """A BaseCodec that can also encode when the bytes of the base are gone and a summary of them is left.

    Keep the digest of the base beside its summary: the wrong summary gives a frame that decodes to the wrong bytes.
    """

    @abstractmethod
    def summarize(self, chunk: memoryview, content: Content) -> bytes | None:
        """Returns what `encode_by_summaries` needs of a chunk, or None if this codec cannot help such content."""

    @abstractmethod
    def encode_by_summaries(
        self, raw: memoryview, summary: memoryview, base_summary: memoryview, content: Content
    ) -> bytes | None:
        """Returns what `encode` returns, from the summaries of `raw` and of its base.

        Raises FormatError for a summary that is not of a chunk of this size and content.
        """

    @abstractmethod
    def stand_in(
        self, raw: memoryview, summary: memoryview, base_summary: memoryview, content: Content, out: memoryview
    ) -> None:
        """Fills `out` with bytes that prove a frame of `encode_by_summaries` if the bytes of the base are gone.

        They equal `raw`, except in every place where the base differs by its summary, or may differ without its summary
        telling: no byte of `raw` stands there. If a frame makes `raw` of these bytes, it makes `raw` of the base, too,
        as far as the summaries are true.
        """
