"""A DataLoader that knows which of its batches training has consumed."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch.utils.data import DataLoader

from ckptlib.data.worker_signals import begun
from ckptlib.errors import StateError


class ResumableLoader(ABC):
    """Gives the batches of a DataLoader from where training stopped. Made by `ckptlib.data.resumable`.

    A batch counts as consumed when the loop gets it, not when a worker has read it ahead. So the state that is saved
    behind a step holds if the loop asks for the next batch only after that: let nothing read ahead between this and the
    loop. Iterate after `Checkpointer.restore`; an iterator that gave a batch before raises.
    """

    def __init__(self, loader: DataLoader[Any]) -> None:
        self.loader = loader
        self._current: object = None
        """A token for the only iterator that may go on."""
        self.batches_given = 0
        """How many batches the loop was given since this was made or its state was loaded. `Checkpointer.loop` reads
        it."""

    @property
    @abstractmethod
    def epoch(self) -> int:
        """The epoch of the next batch, counted from 0."""

    def __iter__(self) -> Iterator[Any]:
        """Yields the rest of this epoch."""
        current = self._current = object()
        # By default torch would draw the seed of the workers from the global generator: one draw per epoch, and one
        # more in an epoch that is resumed.
        self.loader.generator = torch.Generator().manual_seed(self._seed())
        batches = begun(self.loader)
        self._skip(batches)
        while True:
            if self._current is not current:
                raise StateError(
                    "this iterator is out of date: since it began, the loader's state was loaded, or another iteration "
                    "was begun. Its next batch is not the one that comes next; take batches from iter(loader) again, "
                    "and after restore()"
                )
            try:
                batch = next(batches)
            except StopIteration:
                self._end()
                return
            self._count()
            self.batches_given += 1
            yield batch

    def __len__(self) -> int:
        """Returns the number of batches per epoch, as the DataLoader tells it."""
        return len(self.loader)

    def endless(self) -> Iterator[Any]:
        """Yields the rest of this epoch, then all epochs that follow."""
        while True:
            yield from self

    @abstractmethod
    def state_dict(self) -> dict[str, Any]:
        """Returns plain values: the place of the next batch, and what must be the same for it to hold."""

    def load_state_dict(self, state: Mapping[str, object]) -> None:
        """Goes to the saved place. Raises StateMismatch if it means nothing for this loader."""
        self._load(state)
        self._current = None
        self.batches_given = 0

    @abstractmethod
    def _seed(self) -> int:
        """Returns the seed of the workers of the iteration that begins."""

    @abstractmethod
    def _skip(self, batches: Iterator[Any]) -> None:
        """Takes this epoch's consumed batches from an iterator that begins, if it yields them again."""

    @abstractmethod
    def _count(self) -> None:
        """Counts one more batch as consumed."""

    @abstractmethod
    def _end(self) -> None:
        """Notes that the iterator has yielded all of this epoch."""

    @abstractmethod
    def _load(self, state: Mapping[str, object]) -> None: ...
