"""Reads tensors that every rank wants once per job: each rank reads its share, and broadcasts it.

All ranks of a DDP job want each plain tensor whole; if N ranks read it N times, a store is N times as slow.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import NamedTuple

import torch

from ckptlib.devices import accelerator
from ckptlib.ranks.group import Group
from ckptlib.reading.reader import Want
from ckptlib.state.raw_bytes import bytes_of, copyable, dense, is_bytes

BUCKET_BYTES = 16 * 1024 * 1024
"""Smaller tensors travel together in one broadcast of about this size."""


Near = Callable[[Want[torch.Tensor]], Collection[int] | None]


class Bucket(NamedTuple):
    """Tensors that one rank reads for all, and broadcasts at once."""

    owner: int
    """The rank that reads it."""
    wants: list[Want[torch.Tensor]]


class Shares(NamedTuple):
    """The rank that reads each tensor."""

    reads: list[Want[torch.Tensor]]
    """Tensors that this rank reads."""
    buckets: list[Bucket]
    """Buckets to spread when all have read: the same on every rank."""
    by_links: bool
    """Whether devices may send by their own links: each rank's tensors are on the device that it has chosen, and no two
    ranks share one. NCCL refuses two ranks on one device."""


def share_out(wants: Sequence[Want[torch.Tensor]], group: Group, near: Near) -> Shares:
    """Returns the tensors that this rank reads, and the buckets to broadcast afterwards. Collective.

    `near`: returns the ranks that are nearest to a want, the same on all ranks; None or empty if all are alike. If
    ranks want different plain tensors, or have spread them over their devices differently, everybody reads its own.
    """
    if group.size == 1:
        return Shares(list(wants), [], by_links=False)
    shared = [want for want in wants if want.everywhere]
    if not group.same(_description(shared)) or not shared:
        return Shares(list(wants), [], by_links=False)
    by_readers: dict[tuple[int, ...], list[Want[torch.Tensor]]] = {}
    for want in shared:
        by_readers.setdefault(tuple(near(want) or ()), []).append(want)
    buckets = _buckets(by_readers, group.size)
    mine = {id(want) for bucket in buckets if bucket.owner == group.rank for want in bucket.wants}
    reads = [want for want in wants if not want.everywhere or id(want) in mine]
    elsewhere = any(not accelerator.is_chosen(want.pieces[0][1].device) for want in shared)
    return Shares(reads, buckets, by_links=not group.any(elsewhere))


def _description(shared: Sequence[Want[torch.Tensor]]) -> bytes:
    """Describes what ranks must share to cut buckets alike; devices by order, as numbers are each rank's own."""
    devices: dict[torch.device, int] = {}
    described = [
        [
            want.name,
            str(tensor.dtype),
            list(box.shape),
            tensor.device.type,
            devices.setdefault(tensor.device, len(devices)),
        ]
        for want in shared
        for box, tensor in want.pieces[:1]
    ]
    return json.dumps(described).encode()


@torch.inference_mode()  # otherwise a target made in inference mode could not be written to
def spread(buckets: Iterable[Bucket], group: Group, by_links: bool) -> None:
    """Broadcasts each bucket from the rank that read it. Collective; after all ranks have read their share.

    `by_links`: from `Shares`.
    """
    for owner, wants in buckets:
        targets = [want.pieces[0][1] for want in wants]
        device = accelerator.device_of(targets[0])
        if device is not None:
            _spread_there(owner, targets, group, device, by_links)
            continue
        if len(targets) == 1 and is_bytes(targets[0]):
            group.broadcast_from(owner, bytes_of(targets[0]))
            continue
        buffer = torch.empty(_nbytes(targets), dtype=torch.uint8, device="cpu")
        if group.rank == owner:
            _gather(targets, buffer)
        group.broadcast_from(owner, buffer)
        if group.rank != owner:
            _scatter(buffer, targets)


def _spread_there(owner: int, targets: list[torch.Tensor], group: Group, device: torch.device, by_links: bool) -> None:
    """Broadcasts tensors on a device: by its links if the trainers have a group for them, else in a pinned piece."""
    alone = len(targets) == 1 and is_bytes(targets[0])
    packed = bytes_of(targets[0]) if alone else torch.empty(_nbytes(targets), dtype=torch.uint8, device=device)
    if group.rank == owner and not alone:
        _gather(targets, packed)
    if not (by_links and group.broadcast_there(owner, packed, device)):
        host = accelerator.pinned(packed.numel())
        if group.rank == owner:
            host.copy_(packed)
        group.broadcast_from(owner, host)
        if group.rank != owner:
            packed.copy_(host)
    if group.rank != owner and not alone:
        _scatter(packed, targets)


def _nbytes(targets: list[torch.Tensor]) -> int:
    return sum(target.nbytes for target in targets)


def _gather(targets: list[torch.Tensor], buffer: torch.Tensor) -> None:
    for view, target in zip(torch.split(buffer, [t.nbytes for t in targets]), targets, strict=True):
        view.copy_(bytes_of(dense(target)))


def _scatter(buffer: torch.Tensor, targets: list[torch.Tensor]) -> None:
    for view, target in zip(torch.split(buffer, [t.nbytes for t in targets]), targets, strict=True):
        if is_bytes(target):
            bytes_of(target).copy_(view)
        else:
            copyable(target).copy_(copyable(view.clone().view(target.dtype).view(target.shape)))


def _buckets(by_readers: Mapping[tuple[int, ...], Sequence[Want[torch.Tensor]]], num_ranks: int) -> list[Bucket]:
    """Returns buckets, each with a rank that can read it, so that all read about as much. Without readers, any can."""
    loads = [0] * num_ranks
    buckets = []
    for readers, wants in by_readers.items():
        for cut in _cut(wants):
            owner = min(readers or range(num_ranks), key=lambda reader: loads[reader])
            loads[owner] += sum(want.pieces[0][1].nbytes for want in cut)
            buckets.append(Bucket(owner, cut))
    return buckets


def _cut(wants: Sequence[Want[torch.Tensor]]) -> list[list[Want[torch.Tensor]]]:
    """Cuts the wants, in order, into lists of about one broadcast's size, each on one device."""
    cuts: list[list[Want[torch.Tensor]]] = []
    filled, device = BUCKET_BYTES, None
    for want in wants:
        nbytes, here = want.pieces[0][1].nbytes, want.pieces[0][1].device
        if filled + nbytes > BUCKET_BYTES or here != device:
            cuts.append([])
            filled, device = 0, here
        cuts[-1].append(want)
        filled += nbytes
    return cuts
