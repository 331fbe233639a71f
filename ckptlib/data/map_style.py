"""A DataLoader over a data set with a length, whose batches a ResumableSampler chooses."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from torch.utils.data import DataLoader
from typing_extensions import override

from ckptlib.data.batch import seed_of
from ckptlib.data.loader import ResumableLoader
from ckptlib.data.sampler import ResumableSampler


class MapStyleLoader(ResumableLoader):
    """A loader whose state is the sampler's. A resume reads nothing of what it skips."""

    def __init__(self, loader: DataLoader[Any], sampler: ResumableSampler) -> None:
        super().__init__(loader)
        self.sampler = sampler
        sampler.counted = True

    @property
    @override
    def epoch(self) -> int:
        return self.sampler.epoch

    @override
    def state_dict(self) -> dict[str, Any]:
        return self.sampler.state_dict()

    @override
    def _seed(self) -> int:
        sampler = self.sampler
        return seed_of("workers", sampler.seed, sampler.epoch, sampler.consumed, sampler.rank)

    @override
    def _skip(self, batches: Iterator[Any]) -> None:
        """Does nothing: the sampler begins behind what was consumed."""

    @override
    def _count(self) -> None:
        self.sampler.advance()

    @override
    def _end(self) -> None:
        """Does nothing: `_count` ended the epoch with the last batch."""

    @override
    def _load(self, state: Mapping[str, object]) -> None:
        self.sampler.load_state_dict(state)
