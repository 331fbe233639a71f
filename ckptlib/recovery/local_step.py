"""A step on the local disks of the job's hosts, as a source for a Reader: which steps are whole, and how one is read.

Each rank lists its own host's disk. It tells the others which parts of the newest visible saves it has, and all
conclude the same. A rank reads on its own host what is there. Tensors that all ranks want are read where they lie, and
broadcast. Whatever else a rank needs, such as a box that its replica wrote, is read out to it by a rank of the host
that has it.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta
from functools import lru_cache
from typing import NamedTuple

import torch.distributed as dist

from ckptlib.catalog.catalog import Catalog
from ckptlib.catalog.commit import choose_parts
from ckptlib.catalog.local_disk import by_save
from ckptlib.catalog.unreadable import UNUSABLE
from ckptlib.errors import CkptError, CorruptData, NotBrought, ObjectNotFound, ObjectUnreadable, StoreError
from ckptlib.format import keys
from ckptlib.format.check import alike
from ckptlib.format.digests import XXH3, digester
from ckptlib.format.keys import PartName, SaveId, parse_save
from ckptlib.format.layout import Layout, decode_layout
from ckptlib.format.manifest import ranks_by_layout
from ckptlib.format.part import Part
from ckptlib.ranks.group import Group
from ckptlib.ranks.together import together
from ckptlib.recovery.local_share import LocalShare, RemoteShare
from ckptlib.recovery.remote_slots import GATHERED, Exchange, link_among
from ckptlib.stores.io_limits import IoLimits

log = logging.getLogger(__name__)

LOOKED_AT = 16
"""How many saves on the job's history are looked at, newest first; older ones only when one of them is asked for."""


@dataclass(frozen=True, slots=True)
class LocalStep:
    """A step of which the disks of all hosts together hold a part of every rank."""

    save: SaveId
    parts: tuple[PartName, ...]
    """The part of each saved rank, by rank."""
    seen: tuple[frozenset[int], ...]
    """The saved ranks whose parts are on the disk of each rank's host, by rank of this job."""


class OnHosts(NamedTuple):
    """The newest steps on the local disks of the job's hosts."""

    whole: Mapping[SaveId, LocalStep]
    in_part: Mapping[SaveId, list[int]]
    """The saved ranks whose parts of a step are on no disk."""


def saves_on(disk: Catalog) -> bytes:
    """Returns the saves that this rank's host has something of. Raises StoreError."""
    return "\n".join(map(str, _parts_on(disk))).encode()


def parse_saves(told: Sequence[bytes]) -> set[SaveId]:
    """Returns the saves of all ranks. `told`: by rank, see `saves_on`."""
    return {parse_save(line) for data in told for line in data.decode().splitlines()}


def newest(visible: Sequence[SaveId], on_disks: Collection[SaveId], step: int | str | None) -> list[SaveId]:
    """Returns the saves to look at. Pure. `visible`: the job's history, ascending. `step`: only what it may mean."""
    there = [save for save in visible if save in on_disks]
    if step not in (None, "latest"):
        return [save for save in there if str(step) in (str(save.step), str(save))]
    return there[-LOOKED_AT:]


def _parts_on(disk: Catalog) -> Mapping[SaveId, Mapping[int, list[PartName]]]:
    names = [keys.parse_part_key(entry.key) for entry in disk.store.scan(keys.PARTS)]
    return by_save(name for name in names if name is not None)


def look(disk: Catalog, saves: Collection[SaveId]) -> bytes:
    """Returns the parts of these saves on this rank's host: of each save its number of ranks, and the parts' keys.

    Raises StoreError.
    """
    found = _parts_on(disk)
    told: dict[str, list[object]] = {}
    for save in sorted(found.keys() & {*saves}):
        there = [name for some in found[save].values() for name in some]
        try:
            size = disk.part(there[0]).world_size
        except UNUSABLE as error:
            log.warning("step %d on the local disk is not used: %s", save.step, error)
            continue
        told[str(save)] = [size, [name.key for name in there]]
    return json.dumps(told).encode()


def on_hosts(told: Sequence[bytes]) -> OnHosts:
    """Returns what the hosts hold together. `told`: each rank's findings, by rank. Pure; the same on all ranks."""
    by_rank = [json.loads(data) for data in told]
    whole: dict[SaveId, LocalStep] = {}
    in_part: dict[SaveId, list[int]] = {}
    for text in {save for rows in by_rank for save in rows}:
        mine = [{*rows[text][1]} if text in rows else set[str]() for rows in by_rank]
        sizes = {int(rows[text][0]) for rows in by_rank if text in rows}
        names = [name for key in sorted(set[str]().union(*mine)) if (name := keys.parse_part_key(key)) is not None]
        save = parse_save(text)
        parts, missing = choose_parts(by_save(names).get(save, {}), max(sizes))
        if len(sizes) == 1 and not missing and alike(name.check for name in parts):
            seen = tuple(frozenset(name.rank for name in parts if name.key in there) for there in mine)
            whole[save] = LocalStep(save, tuple(parts), seen)
        elif missing:
            in_part[save] = missing
    return OnHosts(whole, in_part)


class Move(NamedTuple):
    """A share that one rank reads out to another."""

    saved: int
    """The saved rank whose share it is."""
    sender: int
    receiver: int


def moves(seen: Sequence[frozenset[int]], needs: Sequence[Collection[int]]) -> list[Move]:
    """Returns the shares that ranks need, and do not have on their hosts. Pure.

    `seen`: see `LocalStep`. `needs`: by rank, the saved ranks whose shares it needs.
    """
    holders: dict[int, list[int]] = {}
    for rank, there in enumerate(seen):
        for saved in there:
            holders.setdefault(saved, []).append(rank)
    loads, found = [0] * len(seen), list[Move]()
    for receiver, needed in enumerate(needs):
        for saved in sorted({*needed} - seen[receiver]):
            sender = min(holders[saved], key=loads.__getitem__)
            loads[sender] += 1
            found.append(Move(saved, sender, receiver))
    return found


class OnDisks:
    """A step on local disks as a source, for all ranks together, though each reads its own host's disk."""

    def __init__(
        self, group: Group, over: dist.ProcessGroup | None, disk: Catalog, step: LocalStep, timeout: timedelta
    ) -> None:
        """Reads the layouts. Collective. Raises, on all ranks, the error of a damaged part or layout."""
        self._group, self._over, self._disk, self._step = group, over, disk, step
        self._timeout = timeout
        self.save, self.world_size = step.save, len(step.parts)
        self.where, self.in_memory = f"local disks ({disk.store.url})", False
        self._exchange: Exchange[int] | None = None
        self._there = [{*seen} for seen in step.seen]
        """The saved ranks whose shares each rank of this job can read, by rank."""
        self._far: dict[int, RemoteShare] = {}
        """The shares that this rank has from other hosts, by saved rank."""
        self._packs: dict[str, tuple[RemoteShare, int]] = {}
        """The packs of these shares, by key: the share, and the pack's position in the part."""
        told = together(group, f"opening step {step.save.step} on local disks", self._own_layouts)
        rows = [(str(digest), rank) for data in group.gather(told) for rank, digest in json.loads(data)]
        self.layouts: Mapping[str, tuple[int, ...]] = ranks_by_layout(sorted(rows, key=lambda row: row[1]))
        self._decoded = {digest: self._share_layout(digest, ranks[0]) for digest, ranks in self.layouts.items()}

    def _first(self, saved: int) -> int:
        """Returns the rank of this job that reads a saved rank's part for all."""
        return next(rank for rank, seen in enumerate(self._step.seen) if saved in seen)

    def _own_layouts(self) -> bytes:
        mine = [saved for saved in range(self.world_size) if self._first(saved) == self._group.rank]
        return json.dumps([[saved, self._read(saved).table.layout] for saved in mine]).encode()

    def _share_layout(self, digest: str, saved: int) -> Layout:
        """Returns a layout, which one rank reads, and tells to all. Collective."""
        owner = self._first(saved)

        def read() -> bytes:
            return self._disk.layout(digest).encoded if self._group.rank == owner else b""

        what = f"reading a layout of step {self.save.step} on local disks"
        data = self._group.gather(together(self._group, what, read))[owner]
        if digester(XXH3)(data) != digest:
            raise CorruptData(f"{self.where}: a layout does not match {digest}")
        return decode_layout(data, digest)

    # What a Reader asks

    def layout(self, digest: str) -> Layout:
        return self._decoded[digest]

    def part(self, rank: int) -> Part:
        if rank in self._step.seen[self._group.rank]:
            return self._read(rank)
        far = self._far.get(rank)
        if far is None:
            raise NotBrought(f"the part of rank {rank} is on the disk of another host", rank)
        name = self._step.parts[rank]
        part = Part.decode(name, far.part())
        part.table.check(self._decoded[part.table.layout], name.key)  # this host's disk may lack it
        self._packs.update((pack.key, (far, n)) for n, pack in enumerate(part.packs))
        return part

    def _read(self, saved: int) -> Part:
        try:
            return self._disk.part(self._step.parts[saved])
        except StoreError as error:
            raise _damage(error) from error

    def read_into(self, pack: str, offset: int, buffer: memoryview) -> None:
        if pack in self._packs:
            far, n = self._packs[pack]
            far.read_into(n, offset, buffer)
            return
        try:
            self._disk.store.get_into(pack, offset, buffer)
        except StoreError as error:
            raise _damage(error) from error

    @property
    def limits(self) -> IoLimits:
        return GATHERED if self._far else IoLimits()

    def near(self, ranks: Collection[int]) -> tuple[int, ...]:
        """Returns the ranks of this job that have the parts of all these saved ranks on their host."""
        return tuple(rank for rank, seen in enumerate(self._step.seen) if seen.issuperset(ranks))

    def bring(self, ranks: Collection[int]) -> None:
        """Makes ranks of other hosts read out, from now on, those of these shares that are not here. Collective."""
        told = self._group.gather(json.dumps(sorted(ranks)).encode())
        needs = [{*json.loads(data)} - there for data, there in zip(told, self._there, strict=True)]
        lacking = moves(self._step.seen, needs)
        if not lacking:
            return
        for move in lacking:
            self._there[move.receiver].add(move.saved)
        if self._exchange is None:
            link = link_among(self._group, self._over, self._timeout)
            self._exchange = Exchange(link, self._timeout, lru_cache(maxsize=None)(self._open))
        exchange = self._exchange

        def offered() -> None:
            self._far |= {saved: RemoteShare(there) for saved, there in exchange.add(lacking).items()}

        together(self._group, "offering shares on local disks", offered)  # before any rank asks, as from memory

    def _open(self, saved: int) -> LocalShare:
        return LocalShare(self._disk, self._step.parts[saved])

    def close(self, together: bool = True) -> None:
        """See `Exchange.close`."""
        if self._exchange is not None:
            self._exchange.close(together)


def _damage(error: StoreError) -> CkptError:
    """Returns the error as one copy's own: whatever a disk of one host has is no reason not to try another copy."""
    return error if isinstance(error, (ObjectNotFound, ObjectUnreadable)) else ObjectUnreadable(str(error))
