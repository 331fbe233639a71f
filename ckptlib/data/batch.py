"""The indices of one batch, with the seed of what its items draw at random."""

from __future__ import annotations

import hashlib
import random
from collections.abc import Callable, Iterable

import numpy as np
import torch
from torch.utils.data import get_worker_info
from typing_extensions import override


def seed_of(*parts: object) -> int:
    """Returns a 63-bit integer that depends on all of `parts` and on nothing else."""
    digest = hashlib.sha256(" ".join(map(str, parts)).encode()).digest()
    return int.from_bytes(digest[:8], "little") >> 1


class Batch(list[int]):
    """A batch's indices, which seed a worker process's generators on arrival, right before the worker reads the items.

    Otherwise a worker's draws would depend on the batches that it happened to read before, and a restarted worker has
    read none. In the trainer's own process nothing is seeded: ckptlib saves and restores its generators.
    """

    def __init__(self, items: Iterable[int] = (), seed: int = 0) -> None:
        super().__init__(items)
        self.seed = seed

    @override
    def __reduce__(self) -> tuple[Callable[[list[int], int], list[int]], tuple[list[int], int]]:
        return _arrived, ([*self], self.seed)


def _arrived(items: list[int], seed: int) -> list[int]:
    """Rebuilds what was sent, and seeds a worker's generators. There the result is a plain list, of which a copy seeds
    nothing."""
    if get_worker_info() is None:
        return Batch(items, seed)
    random.seed(seed)
    np.random.seed(seed % 2**32)
    torch.default_generator.manual_seed(seed)
    return items
