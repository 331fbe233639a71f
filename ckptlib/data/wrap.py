"""Which loaders can be resumed, and how."""

from __future__ import annotations

from typing import Any

from torch.utils.data import DataLoader, IterableDataset

from ckptlib.data.loader import ResumableLoader
from ckptlib.data.map_style import MapStyleLoader
from ckptlib.data.sampler import ResumableSampler
from ckptlib.data.stream import StreamLoader


def resumable(loader: DataLoader[Any]) -> ResumableLoader:
    """Returns the same batches, as an object for a Checkpointer's state: after a restart it gives the batches that
    follow.

    `loader`: torch's own DataLoader, with any workers and any prefetching. With a data set that has a length, each item
    comes once per epoch, also when the world size changes within it; the loader takes a ResumableSampler as its
    batch_sampler. With an IterableDataset, it gives the batches that follow only while world size and workers stay as
    they are.
    """
    if callable(getattr(loader, "state_dict", None)):
        raise TypeError(
            f"a {type(loader).__name__} has a state of its own; put it into the Checkpointer's state as it is"
        )
    if not isinstance(loader, DataLoader):
        raise TypeError(f"expected a torch.utils.data.DataLoader, got a {type(loader).__name__}")
    if not getattr(loader, "in_order", True):  # torch 2.6 has no such option
        raise ValueError(
            "in_order=False gives batches as workers finish, so how many were taken does not tell which; leave it out"
        )
    if isinstance(loader.dataset, IterableDataset):
        return _stream(loader)
    return _map_style(loader)


def _map_style(loader: DataLoader[Any]) -> MapStyleLoader:
    sampler: object = loader.batch_sampler
    if isinstance(loader.sampler, ResumableSampler):
        raise ValueError("a ResumableSampler gives whole batches: pass it as batch_sampler=, not as sampler=")
    if not isinstance(sampler, ResumableSampler):
        raise ValueError(
            f"this DataLoader takes its order from a {_order_of(loader)}, whose place cannot be restored; leave out "
            "batch_size, shuffle, sampler and drop_last, and make it as DataLoader(dataset, "
            "batch_sampler=ckptlib.data.ResumableSampler(dataset, global_batch, seed=...), ...)"
        )
    if loader.generator is not None:
        raise ValueError("leave out generator=: ResumableSampler's seed decides on order and workers' seeds")
    num_items = len(loader.dataset)  # type: ignore[arg-type]
    if num_items != sampler.length:
        raise ValueError(f"the data set has {num_items} items, and its ResumableSampler was made for {sampler.length}")
    return MapStyleLoader(loader, sampler)


def _order_of(loader: DataLoader[Any]) -> str:
    own = loader.sampler if loader.batch_sampler is None or loader.batch_size is not None else loader.batch_sampler
    return type(own).__name__


def _stream(loader: DataLoader[Any]) -> StreamLoader:
    if loader.persistent_workers:
        raise ValueError(
            "an IterableDataset with persistent_workers=True: what its workers hold from epoch to epoch cannot be "
            "restored; leave persistent_workers out"
        )
    return StreamLoader(loader)
