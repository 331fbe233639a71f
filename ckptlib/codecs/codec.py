"""The seam that every codec implements: a chunk's bytes become a frame, and a frame becomes the chunk's bytes.

A frame tells everything that is needed to decode it, but for the number of bytes it decodes to: the part says that.
Frames come from a store, so they are hostile: a decoder believes no number in them before it has compared it with what
it may fill. Encoders and decoders may be called by several threads at once. No torch, no I/O.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import ClassVar, NamedTuple


class Content(NamedTuple):
    """What lies in a chunk: a hint for encoders. Decoders do without."""

    dtype: str
    """torch's name of it, as in "float32"; "" where the chunk holds several."""
    row: int
    """Elements in a row of the tensor: of all its dims but the first. 1 where it has no two dims."""
    first: int = 0
    """Place in its row of the chunk's first element."""

    @property
    def lead(self) -> int:
        """Elements before the first row that begins in the chunk."""
        return -self.first % max(self.row, 1)


class Codec(ABC):
    """Decodes a frame by itself."""

    name: ClassVar[str]
    """In parts and packs: [a-z0-9-]+."""
    lossless: ClassVar[bool] = True

    @abstractmethod
    def encode(self, raw: memoryview, content: Content) -> bytes | None:
        """The frame of a chunk, or None where it would save less than 2 %: such a chunk is better stored raw."""

    @abstractmethod
    def decode(self, frame: memoryview, out: memoryview) -> None:
        """Fills `out`, all of it, with what `frame` stands for. Takes memory for no more than a small multiple of it.

        Raises FormatError that says what is wrong with a frame that is torn, or that is of another number of bytes.
        """


class BaseCodec(ABC):
    """Decodes a frame with the help of the bytes of an earlier chunk, its base."""

    name: ClassVar[str]
    lossless: ClassVar[bool] = True

    @abstractmethod
    def encode(self, raw: memoryview, base: memoryview, content: Content) -> bytes | None:
        """As `Codec.encode`. `base`: as many bytes as `raw`."""

    @abstractmethod
    def decode(self, frame: memoryview, base: memoryview, out: memoryview) -> None:
        """As `Codec.decode`. `base`: as many bytes as `out`."""


class SummaryCodec(BaseCodec):
    """A BaseCodec that can also encode when the bytes of the base are gone and a summary of them is left.

    Keep the digest of the base beside its summary: the wrong summary gives a frame that decodes to the wrong bytes.
    """

    @abstractmethod
    def summarize(self, chunk: memoryview, content: Content) -> bytes | None:
        """What `encode_by_summaries` has to know of a chunk. None where this codec cannot help such content."""

    @abstractmethod
    def encode_by_summaries(
        self, raw: memoryview, summary: memoryview, base_summary: memoryview, content: Content
    ) -> bytes | None:
        """What `encode` gives, from the summaries of `raw` and of its base.

        Raises FormatError for a summary that is not of a chunk of this size and content.
        """

    @abstractmethod
    def stand_in(
        self, raw: memoryview, summary: memoryview, base_summary: memoryview, content: Content, out: memoryview
    ) -> None:
        """Fills `out` with what proves a frame of `encode_by_summaries`, where the bytes of the base are gone.

        It is `raw`, but for the places in which the base is another by its summary, or may be without its summary
        telling: no byte of `raw` stands there. A frame that makes `raw` of it makes `raw` of the base, too, as far as
        the summaries tell the truth.
        """
