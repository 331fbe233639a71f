"""Copies in host memory that a snapshot makes behind the fence, and whether anybody wrote past the fence."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from ckptlib.staging.copies import Pairs
from ckptlib.staging.pieces import Scratch
from ckptlib.staging.watch import Counts


class HostCopies:
    """Makes these copies for one snapshot, and keeps their sources until it is cleared."""

    def __init__(self, parts: Sequence[Pairs], random: np.random.Generator, scratch: Scratch) -> None:
        """Takes a sample of each source that is copied late."""
        self._parts = [part for part in parts if part.late]
        self._samples = [part.windows.look(random, scratch) for part in self._parts]

    def __bool__(self) -> bool:
        """Returns whether there are any copies to make."""
        return bool(self._parts)

    @property
    def counts(self) -> list[Counts]:
        return [part.counts for part in self._parts]

    def move(self) -> None:
        """Makes the copies. On the staging thread."""
        for part in self._parts:
            for pair in part.late:
                pair.move()

    def written(self) -> list[str]:
        """Returns the names of tensors that were written to meanwhile: slot and source do not both still show the
        sample."""
        found = []
        for part, sample in zip(self._parts, self._samples, strict=True):
            for i, (pair, offset) in enumerate(zip(part.late, sample.offsets, strict=True)):
                before = sample.window(i)
                window = slice(offset, offset + len(before))
                if not before == pair.copied[window] == pair.now[window]:
                    found.append(pair.source.name)
        return found

    def clear(self) -> None:
        """Lets go of the sources."""
        self._parts.clear()
        self._samples.clear()
