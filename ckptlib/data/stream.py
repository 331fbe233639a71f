"""A DataLoader over an iterable data set, in which only reading moves on."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import torch.distributed as dist
from torch.utils.data import DataLoader
from typing_extensions import override

from ckptlib.data.batch import seed_of
from ckptlib.data.loader import ResumableLoader
from ckptlib.data.saved_state import checked_counts, refuse_others
from ckptlib.errors import StateMismatch
from ckptlib.state.rng import capture, restore


class StreamLoader(ResumableLoader):
    """A loader whose state is the number of batches that this rank consumed in this epoch.

    Workers take turns, so that number gives each worker's place, too, as long as the number of ranks and workers stays
    the same. A resume reads the stream again up to its place, with the same seeds.
    """

    def __init__(self, loader: DataLoader[Any]) -> None:
        super().__init__(loader)
        self._stream_seed = 0 if loader.generator is None else loader.generator.initial_seed()
        self._epoch = self._batches = 0

    @property
    @override
    def epoch(self) -> int:
        return self._epoch

    @override
    def state_dict(self) -> dict[str, Any]:
        return {"epoch": self._epoch, "batches": self._batches, **self._identity()}

    def _identity(self) -> dict[str, object]:
        return {
            "world size": dist.get_world_size() if dist.is_initialized() else 1,
            "num_workers": self.loader.num_workers,
            "batch_size": self.loader.batch_size,
            "drop_last": self.loader.drop_last,
            "seed": self._stream_seed,
        }

    @override
    def _load(self, state: Mapping[str, object]) -> None:
        counts = checked_counts(state, self._identity(), "epoch", "batches")
        refuse_others(state, self._identity(), ": a stream has a place per worker, and nobody can divide it anew")
        self._epoch, self._batches = counts

    @override
    def _seed(self) -> int:
        rank = dist.get_rank() if dist.is_initialized() else 0
        return seed_of("stream", self._stream_seed, self._epoch, rank)

    @override
    def _skip(self, batches: Iterator[Any]) -> None:
        """Reads the consumed batches again, and restores this process's generators, which are past those draws already:
        without workers, the stream draws from them."""
        if not self._batches:
            return
        generators = capture()
        for i in range(self._batches):
            if next(batches, self) is self:
                raise StateMismatch(
                    f"the stream ended after {i} batches of epoch {self._epoch}; {self._batches} were consumed when "
                    "the checkpoint was saved: it gives less than it gave. Resume with the data as it was"
                )
        restore(generators)

    @override
    def _count(self) -> None:
        self._batches += 1

    @override
    def _end(self) -> None:
        if not self._batches:
            raise ValueError(f"the data set gave no batch in epoch {self._epoch}: nothing to train on")
        self._epoch, self._batches = self._epoch + 1, 0
