"""The copies of a snapshot in host memory that are made behind the fence, and whether anybody wrote past the fence."""

from __future__ import annotations

from collections.abc import Sequence
from random import Random
from typing import NamedTuple

from ckptlib.staging.copies import Pair

SAMPLE_BYTES = 128
"""Of each tensor, at a place drawn anew; a write to a whole tensor that leaves it alone is not to be expected. One
window and not several: the first look at a page that was not touched lately costs more than all the rest (0.5 us)."""


class _Sample(NamedTuple):
    """A window of a source, as it was before the copy."""

    offset: int
    data: bytes


class HostCopies:
    """Of one snapshot. Keeps its sources until it is cleared."""

    def __init__(self, pairs: Sequence[Pair], random: Random) -> None:
        """Takes a sample of each source."""
        self._pairs = list(pairs)
        self._samples = [_sample(pair, random) for pair in self._pairs]

    def __bool__(self) -> bool:
        """Whether there are any."""
        return bool(self._pairs)

    def move(self) -> None:
        """Makes the copies. On the staging thread."""
        for pair in self._pairs:
            pair.move()

    def written(self) -> list[str]:
        """The names of tensors that were written to meanwhile: slot and source do not both still show the sample."""
        found = []
        for pair, (offset, data) in zip(self._pairs, self._samples, strict=True):
            window = slice(offset, offset + SAMPLE_BYTES)
            if not data == pair.copied[window] == pair.now[window]:
                found.append(pair.source.name)
        return found

    def clear(self) -> None:
        """Lets go of the sources."""
        self._pairs.clear()
        self._samples.clear()


def _sample(pair: Pair, random: Random) -> _Sample:
    offset = int(random.random() * (pair.nbytes - SAMPLE_BYTES))
    return _Sample(offset, bytes(pair.now[offset : offset + SAMPLE_BYTES]))
