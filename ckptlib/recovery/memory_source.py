"""A snapshot in the memory of the job's hosts, as a source for a Reader.

A rank reads a shard where it lies: on its own host, or on another one, a rank of which reads it out. All ranks drop a
slot that proves damaged, and try the next copy.
"""

from __future__ import annotations

import json
import logging
import threading
from collections.abc import Collection, Mapping
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from typing import NamedTuple

import torch
import torch.distributed as dist

from ckptlib.catalog.unreadable import UNUSABLE
from ckptlib.errors import AgreementFailed, CkptError, CorruptData, FormatError, NotBrought, ObjectNotFound
from ckptlib.format.digests import XXH3, digester
from ckptlib.format.layout import Layout, decode_layout
from ckptlib.format.manifest import ranks_by_layout
from ckptlib.format.part import Pack, Part
from ckptlib.ranks.group import Group
from ckptlib.ranks.together import together, together_at_length
from ckptlib.recovery.inventory import Found, Inventory, SlotPlace, SnapshotId, Transfer, by_rank, snapshot_id
from ckptlib.recovery.remote_slots import GATHERED, Exchange, RemoteSlot, link_among
from ckptlib.slots.header import SlotHeader
from ckptlib.slots.readable import ReadableSlot
from ckptlib.slots.slot import Slot
from ckptlib.slots.snapshot import Snapshot, SnapshotReader, check_body
from ckptlib.stores.io_limits import THREADS, IoLimits

log = logging.getLogger(__name__)

CACHED = IoLimits(most=4 * 1024 * 1024, piece=256 * 1024)
"""Limits for slots on this host, but for the threads. Two ranks at once on two cores with 2 MiB of L2, 0.5 GB in
tensors of 3.3 MB, read and checked: 0.30 s per GB a tensor at a time, 0.26 in pieces of 128 to 512 KiB, 0.28 in those
of 1 MiB; the bare read takes 0.22."""


class _Share(NamedTuple):
    """The share of a saved rank that one rank needs."""

    reader: int
    saved: int
    """The rank whose share it is."""


class InMemory:
    """A snapshot in memory as a source, for all ranks together. `layout`, `part`, `read_into` are each rank's own."""

    where, in_memory = "memory", True

    def __init__(
        self,
        group: Group,
        over: dist.ProcessGroup | None,
        inventory: Inventory,
        snapshot: SnapshotId,
        timeout: timedelta,
    ) -> None:
        """Reads the layouts. Collective."""
        self._group = group
        self._over = over
        self._inventory = inventory
        self._snapshot = snapshot
        self._timeout = timeout
        self._cached = replace(CACHED, threads=min(THREADS, inventory.cores_each(group.rank)))
        self._opening = threading.Lock()
        self._slots: dict[str, ReadableSlot] = {}
        """The slots of this host and of others, by path."""
        self._asked: set[str] = set()
        """Slots that this rank has opened to read from, or tried to."""
        self._readers: dict[int, SnapshotReader] = {}
        self._read: dict[str, Snapshot] = {}
        self._at: dict[int, Found] = {}
        """The slot in which this rank reads each saved rank's share, by saved rank."""
        self._moves: dict[_Share, Transfer] = {}
        """Shards that are on other hosts only; the same on all ranks."""
        self._exchange: Exchange[Found] | None = None
        self._any_damaged = False
        """Whether any slot proved damaged; the same on all ranks."""
        self.save = snapshot.save
        self.world_size = snapshot.world_size
        there = sorted(inventory.of(snapshot).items())
        self.layouts: Mapping[str, tuple[int, ...]] = ranks_by_layout((found[0].layout, rank) for rank, found in there)
        self._decoded = {digest: self._share_layout(digest) for digest in sorted(self.layouts)}

    @property
    def num_received(self) -> int:
        """Number of slots of other hosts that this rank reads from."""
        return sum(share.reader == self._group.rank for share in self._moves)

    @property
    def nbytes_received(self) -> int:
        """Bytes that other hosts have read out to this rank."""
        return 0 if self._exchange is None else self._exchange.nbytes_received

    # What a Reader asks

    def layout(self, digest: str) -> Layout:
        return self._decoded[digest]

    def part(self, rank: int) -> Part:
        found = self._at.get(rank)
        if found is None:
            raise NotBrought(f"the share of rank {rank} was not transferred to this rank", rank)
        snapshot = self._snapshot_in(found)
        return Part(
            save=self.save,
            rank=rank,
            world_size=self.world_size,
            attempt="0" * 8,
            table=snapshot.table,
            packs=(Pack(found.path, found.body_nbytes, snapshot.created),),
            algorithm=snapshot.algorithm,
            digests=snapshot.digests,
            values=snapshot.values,
            metrics=snapshot.metrics,
            created=snapshot.created,
            exempt=snapshot.exempt,
            account=snapshot.account,
        )

    def read_into(self, pack: str, offset: int, buffer: memoryview) -> None:
        self._slots[pack].read_into(offset, buffer)

    @property
    def limits(self) -> IoLimits:
        return GATHERED if self.num_received else self._cached

    # Where it is

    def near(self, ranks: Collection[int]) -> tuple[int, ...]:
        """Returns the ranks of this job that have the shares of all these saved ranks on their host."""
        return self._inventory.readers(self._snapshot, ranks)

    def bring(self, ranks: Collection[int]) -> None:
        """Makes the shares of these saved ranks readable here. Collective.

        Raises CorruptData, on all ranks, when no whole copy of one is left; ObjectNotFound if none was damaged.
        """
        needs = [json.loads(data) for data in self._group.gather(json.dumps(sorted(ranks)).encode())]
        try:
            found = self._inventory.moves(self._snapshot, needs)
        except CorruptData as error:
            if self._any_damaged:
                raise
            raise ObjectNotFound(f"{error}: slots were let go of, or used again, since they were found") from error
        moves = {_Share(move.receiver, move.found.rank): move for move in found}
        new = {key: move for key, move in moves.items() if key not in self._moves}
        if new:
            self._offer([*new.values()])
            self._moves |= new
        memories = self._inventory.memories[self._group.rank]
        mine = ((share, move) for share, move in self._moves.items() if share.reader == self._group.rank)
        self._at = {share.saved: move.found for share, move in mine}
        self._at |= by_rank(self._inventory.of(self._snapshot), memories)

    def _offer(self, moves: list[Transfer]) -> None:
        """Offers slots, which are read out from now on. Collective."""
        if self._exchange is None:
            link = link_among(self._group, self._over, self._timeout)
            self._exchange = Exchange(link, self._timeout, self._open_here)
        exchange = self._exchange

        def offered() -> None:
            self._slots |= {found.path: RemoteSlot(there, found) for found, there in exchange.add(moves).items()}

        # on all ranks, before any asks; if one has no thread to serve with, all try the next candidate
        together(self._group, "offering snapshots", offered)

    def _snapshot_in(self, found: Found) -> Snapshot:
        if found.path not in self._read:
            slot, header = self._held(found)
            reader = self._readers.setdefault(found.rank, SnapshotReader())
            self._read[found.path] = reader.read(slot, header)
        return self._read[found.path]

    def _held(self, found: Found) -> tuple[ReadableSlot, SlotHeader]:
        """Returns the slot, and its header. Raises ObjectNotFound if it does not hold that snapshot any more: its job
        lives, or has ended as this one began."""
        try:
            slot = self._open(found)
            header = slot.read_header()
        except (CorruptData, FormatError) as error:  # its file is gone, or is emptied
            raise ObjectNotFound(f"{found.path}: does not hold {found.snapshot.save} any more: {error}") from error
        if not header.ready or (header.rank, snapshot_id(header)) != (found.rank, found.snapshot):
            raise ObjectNotFound(
                f"{slot.where}: holds {header.save} of rank {header.rank} by now, expected {found.snapshot.save} of "
                f"rank {found.rank}"
            )
        return slot, header

    def _open(self, found: Found) -> ReadableSlot:
        """Returns a slot that this rank can read. Any thread may call it."""
        self._asked.add(found.path)
        if found.memory in self._inventory.memories[self._group.rank]:
            return self._open_here(found)
        return self._slots[found.path]

    def _open_here(self, found: Found) -> ReadableSlot:
        """Opens a slot of this host once, since closing a second descriptor would drop the locks of the first. Any
        thread may call it."""
        with self._opening:
            if found.path not in self._slots:
                self._slots[found.path] = Slot.open(Path(found.path))
            return self._slots[found.path]

    def _share_layout(self, digest: str) -> Layout:
        """Returns a layout from the first copy that is whole. Collective. Raises one of UNUSABLE when there is none."""
        copies = [f for there in self._inventory.of(self._snapshot).values() for f in there if f.layout == digest]
        for n, found in enumerate(copies, 1):
            try:
                return self._read_layout(digest, found)
            except UNUSABLE as error:
                if n == len(copies):
                    self.close()
                    raise
                log.warning("the layout in %s is not used: %s", found.path, error)
        raise AssertionError("a layout that no slot has")

    def _read_layout(self, digest: str, found: Found) -> Layout:
        """Reads a layout on one rank, and spreads it. Collective."""
        owner = next(r for r, memories in enumerate(self._inventory.memories) if found.memory in memories)
        buffer = torch.zeros(found.layout_nbytes, dtype=torch.uint8, device="cpu")

        def read() -> None:
            if self._group.rank == owner:
                slot, header = self._held(found)
                buffer.copy_(torch.frombuffer(bytearray(slot.read_document(header, "layout")), dtype=torch.uint8))

        together(self._group, "reading a layout in memory", read)
        self._group.broadcast_from(owner, buffer)
        data = buffer.numpy().tobytes()
        if digester(XXH3)(data) != digest:
            raise CorruptData(f"{found.path}: its layout does not match {digest}")
        return decode_layout(data, found.path)

    # Damage, and the end

    def drop_damaged(self) -> bool:
        """Checks every slot that this rank has opened, and drops those that are damaged or gone, which are used no
        more. Returns whether any rank has dropped one.

        Collective; after a load failed.
        """
        lost: list[tuple[SlotPlace, bool]] = []
        """Slots that are of no use, and whether they are damaged."""

        def check() -> None:
            for rank, found in self._at.items():
                try:
                    if found.path in self._asked:
                        check_body(self._open(found), self._snapshot_in(found))
                except AgreementFailed:
                    raise
                except (CkptError, OSError) as error:
                    gone = self._why_gone(found)
                    log.error("the share of rank %d in %s is skipped: %s", rank, found.path, gone or error)
                    lost.append((found.place, gone is None))

        together_at_length(self._group, "looking for damage in memory", check)
        told = [json.loads(data) for data in self._group.gather(json.dumps(lost).encode())]
        dropped = {SlotPlace(*place) for rows in told for place, _ in rows}
        self._any_damaged = self._any_damaged or any(damaged for rows in told for _, damaged in rows)
        self._inventory.drop(dropped)
        self._moves = {k: m for k, m in self._moves.items() if m.found.place not in dropped}
        self._at = {rank: f for rank, f in self._at.items() if f.place not in dropped}  # if a bring fails, too
        return bool(dropped)

    def _why_gone(self, found: Found) -> ObjectNotFound | None:
        """Returns why the slot does not hold that snapshot any more; None if it does."""
        try:
            self._held(found)
        except AgreementFailed:
            raise
        except ObjectNotFound as error:
            return error
        except (CkptError, OSError):  # then it counts as damaged
            pass
        return None

    def close(self, together: bool = True) -> None:
        """Lets go of the slots. `together`: see `Exchange.close`."""
        if self._exchange is not None:
            self._exchange.close(together)
        for slot in self._slots.values():
            if isinstance(slot, Slot):
                slot.close()
        self._slots.clear()
