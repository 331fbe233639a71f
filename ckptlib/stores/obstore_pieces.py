"""The pieces of an object, which are taken once and may have to be sent twice. No I/O."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from itertools import chain

from typing_extensions import Buffer

from ckptlib.stores.base import InPlace, as_bytes

KEPT_NBYTES = 32 << 20
"""Most bytes that are kept of pieces which may be all that holds their memory."""


class Pieces:
    """Keeps what was taken as long as it costs little: a sequence, and the views of InPlace, cost nothing.

    Any other view may be all that holds its memory.
    """

    def __init__(self, head: Buffer, pieces: Iterable[Buffer]) -> None:
        self._left = chain([head], pieces)
        self._is_kept = isinstance(pieces, Sequence)
        self._is_in_place = isinstance(pieces, InPlace)
        self._kept_nbytes = 0
        self.nbytes = 0
        """Bytes of what was taken."""
        self.views: list[memoryview] = []
        """The pieces that are kept, from the first on."""
        self.is_whole = False
        """Whether `views` are all pieces."""
        self.can_repeat = True
        """Whether `views` are all that was taken."""

    def take(self, nbytes: int) -> None:
        """Takes pieces until they are more than `nbytes`; all of a sequence.

        Nobody has seen them yet, so all are kept, however much memory they take: the header of a pack alone may have
        more than KEPT_NBYTES.
        """
        while (self._is_kept or self.nbytes <= nbytes) and self._next() is not None:
            pass

    def __iter__(self) -> Iterator[memoryview]:
        """Yields all pieces, from the first to the last; those that are not kept, once."""
        yield from list(self.views)
        while (view := self._next()) is not None:
            if self._kept_nbytes > KEPT_NBYTES:
                self.can_repeat = False
                self.views.clear()
            yield view

    def _next(self) -> memoryview | None:
        for piece in self._left:
            view = as_bytes(piece)
            if not view.nbytes:
                continue
            self.nbytes += view.nbytes
            # Copies are among what is in place.
            if not (self._is_kept or (self._is_in_place and isinstance(piece, memoryview))):
                self._kept_nbytes += view.nbytes
            if self.can_repeat:
                self.views.append(view)
            return view
        self.is_whole = self.can_repeat
        return None
