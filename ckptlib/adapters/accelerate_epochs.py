"""The epochs of Accelerate's data loaders: the one that a saved state is in, and the rest of it.

Accelerate counts an epoch (`iteration`, which orders it) when the loop asks for more than its last batch: while the
loop works on that batch, the epoch counts as under way.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from accelerate.state import GradientState

from ckptlib.state.rng import restore


def gave_last(loader: Any) -> bool:
    """Returns whether the loop has the last batch of an epoch that is not counted yet."""
    return _is_under_way(loader) and bool(getattr(loader, "end_of_dataloader", False))


def _is_under_way(loader: Any) -> bool:
    return any(each is loader for each in GradientState().dataloader_references)


class Resumed:
    """The rest of an epoch. Puts the random state back once, behind skipped batches, or before the epoch if none is.

    At its end it tells the whole loader that this epoch is over, which would otherwise shuffle the next one alike.
    """

    def __init__(self, loader: Any, whole: Any, num_skipped: int, random: Mapping[str, Any]) -> None:
        self._loader = loader
        self.whole = whole
        self._num_skipped = num_skipped
        self._random: Mapping[str, Any] | None = random

    def __iter__(self) -> Iterator[Any]:
        began = getattr(self._loader, "iteration", None)
        if not self._num_skipped:
            self._put_back()  # the saved epoch had not begun, and it draws as it begins
        for batch in self._loader:
            self._put_back()
            yield batch
        self._put_back()  # if all batches were skipped
        if began is not None:
            # Accelerate does not count an epoch with nothing left
            self.whole.iteration = max(self._loader.iteration, began + 1)

    def gave_last_of(self, loader: Any) -> bool:
        """Does what `gave_last` does, for the whole loader. A loop left by `break` may go on with its epoch."""
        if loader is not self.whole or _is_under_way(loader) or not gave_last(self._loader):
            return False
        return bool(loader.iteration == self._loader.iteration)

    def __len__(self) -> int:
        return len(self._loader)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._loader, name)

    def _put_back(self) -> None:
        random, self._random = self._random, None
        if random is not None:
            restore(random)
