"""The order of a data set's items over epochs and ranks, and how many of them training has consumed."""

from __future__ import annotations

import logging
import os
from collections.abc import Iterator, Mapping, Sized

import numpy as np
import torch.distributed as dist
from torch.utils.data import Sampler
from typing_extensions import override

from ckptlib.data.batch import Batch, seed_of
from ckptlib.data.order import MAX_LENGTH, SHUFFLED, shuffled
from ckptlib.data.saved_state import checked_counts, refuse_others
from ckptlib.errors import StateError, StateMismatch

log = logging.getLogger(__name__)

IN_SEQUENCE = "in sequence"


class ResumableSampler(Sampler[list[int]]):
    """This rank's share of each global batch, for `DataLoader(dataset, batch_sampler=...)`.

    data:         the data set, or how many items it has.
    global_batch: items per batch over all ranks, a multiple of `world_size`. It may be another one after a restart.
    seed:         the order of an epoch is a function of (seed, epoch), the same on all ranks.
    shuffle:      False: every epoch goes through the items in sequence.
    drop_last:    leave out what is over at the end of an epoch when batches are taken from its items. Otherwise the
                  last batch of an epoch is filled up with the first items of the next, so that all batches are of one
                  size on all ranks and no item is lost.
    rank, world_size: among the ranks that read different data; default: those of the default process group. With
                  tensor or pipeline parallelism pass those of the data-parallel mesh.

    The state is (epoch, items consumed by all ranks together), the same on every rank. `ckptlib.data.resumable` counts
    the batches; a loop with a loader of its own calls `advance` once per batch that it trains on.
    """

    def __init__(
        self,
        data: int | Sized,
        global_batch: int,
        *,
        seed: int = 0,
        shuffle: bool = True,
        drop_last: bool = False,
        rank: int | None = None,
        world_size: int | None = None,
    ) -> None:
        length = _length_of(data)
        for name, value, least in [("length", length, 1), ("global_batch", global_batch, 1), ("seed", seed, 0)]:
            _check_int(name, value, least)
        if length > MAX_LENGTH or global_batch > MAX_LENGTH:
            raise ValueError(f"length={length}, global_batch={global_batch}: expected at most 2**62 of each")
        self._from_group = rank is None and world_size is None
        self.rank, self.world_size = _ranks(rank, world_size)
        if global_batch % self.world_size:
            below = global_batch - global_batch % self.world_size
            fits = " or ".join(str(n) for n in (below, below + self.world_size) if n)
            raise ValueError(
                f"global_batch={global_batch} on {self.world_size} ranks: expected a multiple of {self.world_size}, so "
                f"that every rank trains on as many items; use {fits}. It may differ from the checkpoint's"
            )
        if drop_last and global_batch > length:
            raise ValueError(
                f"global_batch={global_batch} with drop_last=True and {length} items: no epoch would have a batch; use "
                f"at most {length}, or drop_last=False"
            )
        self.length, self.global_batch, self.seed = length, global_batch, seed
        self.shuffle, self.drop_last = shuffle, drop_last
        self.counted = False
        """Whether somebody calls `advance`; `resumable` sets it."""
        self._taken = False
        self._epoch = self._consumed = 0
        if drop_last and length % global_batch and self.rank == 0:
            log.warning("drop_last: the last %d of %d items are left out of each epoch", length % global_batch, length)

    @property
    def epoch(self) -> int:
        """The epoch that the next batch begins in."""
        return self._epoch

    @property
    def consumed(self) -> int:
        """How many items of `epoch` all ranks together have trained on."""
        return self._consumed

    @override
    def __iter__(self) -> Iterator[list[int]]:
        """Yields the batches that are left of this epoch, from the first that was not consumed. Consumes none."""
        self._check_ranks()
        epoch, consumed = begun, _ = self._epoch, self._consumed
        while epoch == begun:
            self._taken = True
            yield self._share(epoch, consumed)
            epoch, consumed = self._after(epoch, consumed + self.global_batch)

    def __len__(self) -> int:
        """Returns the number of batches of a whole epoch; one less if its first items filled up the batch before."""
        return self.length // self.global_batch if self.drop_last else -(-self.length // self.global_batch)

    def advance(self) -> None:
        """Counts one global batch as trained on. `resumable` does so for each batch that it gives."""
        self.counted = True
        self._epoch, self._consumed = self._after(self._epoch, self._consumed + self.global_batch)

    def state_dict(self) -> dict[str, int | str]:
        if self._taken and not self.counted:
            raise StateError(
                "batches were taken from this ResumableSampler, and none was counted as trained on: a resume would "
                "train on them again. Wrap torch's DataLoader: loader = ckptlib.data.resumable(DataLoader(dataset, "
                "batch_sampler=sampler)); or call sampler.advance() for each batch"
            )
        return {"epoch": self._epoch, "consumed": self._consumed, **self._identity()}

    def load_state_dict(self, state: Mapping[str, object]) -> None:
        """Goes to the saved place. Raises StateMismatch if these are not the same items in the same order."""
        epoch, consumed = checked_counts(state, self._identity(), "epoch", "consumed")
        saved = state["length"]
        if saved != self.length:
            raise StateMismatch(
                f"the data set has {self.length} items and had {saved} when the checkpoint was saved, in epoch {epoch} "
                f"with {consumed} items consumed: the order depends on the length, so items would be trained on twice "
                "or never. Resume with the data set as it was. To train on this one from its beginning, put its loader "
                "under another name into the state and call restore(strict=False)"
            )
        refuse_others(state, self._identity())
        if consumed >= self.length:
            raise StateMismatch(f"consumed {consumed} of {self.length} items: the saved state is none of this sampler")
        self._epoch, self._consumed = self._after(epoch, consumed)
        if self._epoch > epoch and self.rank == 0:
            log.warning("drop_last: the last %d items of epoch %d are left out", self.length - consumed, epoch)

    def _identity(self) -> dict[str, int | str]:
        """Returns what determines the order; everything else may change between runs."""
        return {"length": self.length, "seed": self.seed, "order": SHUFFLED if self.shuffle else IN_SEQUENCE}

    def _after(self, epoch: int, consumed: int) -> tuple[int, int]:
        """Returns the epoch and place of the next batch after `consumed` items of `epoch`, which may be more than it
        has."""
        if self.drop_last:
            return (epoch, consumed) if consumed + self.global_batch <= self.length else (epoch + 1, 0)
        return epoch + consumed // self.length, consumed % self.length

    def _share(self, epoch: int, consumed: int) -> Batch:
        """Returns this rank's share: every `world_size`th item of the global batch, which may reach into the next
        epochs."""
        ahead = np.arange(self.rank, self.global_batch, self.world_size, dtype=np.uint64) + np.uint64(consumed)
        epochs, items = np.divmod(ahead, np.uint64(self.length))
        if self.shuffle:
            for further in range(int(epochs[-1]) + 1):
                at = epochs == further
                items[at] = shuffled(items[at], self.length, self.seed, epoch + further)
        return Batch(items.tolist(), seed_of(self.seed, epoch, consumed, self.rank))

    def _check_ranks(self) -> None:
        """Raises StateError if the process group was made after this sampler, which then took this for the only
        rank."""
        if self._from_group and (self.rank, self.world_size) != _ranks(None, None):
            raise StateError(
                f"this ResumableSampler was made for rank {self.rank} of {self.world_size}, and the process group has "
                f"{dist.get_world_size()} ranks: every rank would train on the same items. Make the sampler after "
                "init_process_group, or pass rank= and world_size="
            )


def _ranks(rank: int | None, world_size: int | None) -> tuple[int, int]:
    """Returns this rank, and how many ranks there are."""
    if rank is None and world_size is None:
        if dist.is_available() and dist.is_initialized():
            return dist.get_rank(), dist.get_world_size()
        if os.environ.get("WORLD_SIZE", "1") != "1":
            raise ValueError(
                f"WORLD_SIZE is {os.environ['WORLD_SIZE']}, and there is no process group: every rank would train on "
                "the same items. Call init_process_group first, or pass rank= and world_size="
            )
        return 0, 1
    if rank is None or world_size is None:
        raise ValueError(f"rank={rank}, world_size={world_size}: pass both or neither")
    _check_int("world_size", world_size, 1)
    _check_int("rank", rank, 0)
    if rank >= world_size:
        raise ValueError(f"rank={rank}: expected less than world_size={world_size}")
    return rank, world_size


def _length_of(data: int | Sized) -> int:
    if isinstance(data, Sized):
        return len(data)
    if isinstance(data, int):
        return data
    raise TypeError(
        f"ResumableSampler({data!r}): expected a data set with a length, or how many items it has. One that has none, "
        "such as an IterableDataset, needs no sampler: give its DataLoader to ckptlib.data.resumable"
    )


def _check_int(name: str, value: object, least: int) -> None:
    if not isinstance(value, int) or isinstance(value, bool) or value < least:
        raise ValueError(f"{name}={value!r}: expected an integer of at least {least}")
