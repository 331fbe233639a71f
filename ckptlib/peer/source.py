"""A snapshot in the memory of the job's hosts, as a source for a Reader.

What a rank needs and its host does not have is sent by a peer first, whole slot by whole slot and checked on arrival.
A slot that proves damaged is dropped by all ranks, and the next copy is tried.
"""

from __future__ import annotations

import json
import logging
import threading
from collections.abc import Collection, Mapping
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist

from ckptlib.arena import Arena
from ckptlib.digests import XXH3, digester
from ckptlib.errors import (
    AgreementFailed,
    CkptError,
    CorruptData,
    FormatError,
    NoRoom,
    ObjectNotFound,
    PeerRefused,
    ReplicationFailed,
)
from ckptlib.group import Group, together
from ckptlib.layout import Layout, decode_layout
from ckptlib.part import Pack, Part
from ckptlib.peer.inventory import Found, Inventory, Move, SnapshotId, by_rank, look, snapshot_id
from ckptlib.peer.link import Link
from ckptlib.peer.transfer import receive_slot, send_slot, withdraw
from ckptlib.slot import Slot, SlotHeader
from ckptlib.snapshot import Snapshot, SnapshotReader, check_body

log = logging.getLogger(__name__)

TRANSFERS = 4
"""Under way at once, of one rank."""


class InMemory:
    """Of all ranks together; `layout`, `part` and `read_into` are each rank's own."""

    where = "memory"

    def __init__(
        self,
        group: Group,
        over: dist.ProcessGroup | None,
        arena: Arena,
        inventory: Inventory,
        snapshot: SnapshotId,
        timeout: timedelta,
    ) -> None:
        """Collective. `arena`: where slots that come from peers are made."""
        self._group = group
        self._over = over
        self._arena = arena
        self._inventory = inventory
        self._snapshot = snapshot
        self._timeout = timeout
        self._slots: dict[str, Slot] = {}
        self._opening = threading.Lock()
        self._asked: set[str] = set()
        """Slots that this rank has opened, or tried to."""
        self._received: list[Slot] = []
        self._readers: dict[int, SnapshotReader] = {}
        self._read: dict[str, Snapshot] = {}
        self.save = snapshot.save
        self.world_size = snapshot.world_size
        self.num_received = 0
        """Slots that peers have sent to this rank."""
        layouts: dict[str, tuple[int, ...]] = {}
        for rank, there in sorted(inventory.of(snapshot).items()):
            layouts[there[0].layout] = (*layouts.get(there[0].layout, ()), rank)
        self.layouts: Mapping[str, tuple[int, ...]] = layouts
        self._decoded = {digest: self._share_layout(digest) for digest in sorted(layouts)}

    # What a Reader asks

    def layout(self, digest: str) -> Layout:
        return self._decoded[digest]

    def part(self, rank: int) -> Part:
        found = self._near().get(rank)
        if found is None:
            raise ObjectNotFound(f"the share of rank {rank} of step {self.save.step} is not in the memory of this host")
        snapshot = self._snapshot_in(found)
        return Part(
            save=self.save,
            rank=rank,
            world_size=self.world_size,
            attempt="0" * 8,
            table=snapshot.table,
            packs=(Pack(found.path, found.body_nbytes),),
            algorithm=snapshot.algorithm,
            digests=snapshot.digests,
            values=snapshot.values,
            metrics=snapshot.metrics,
            created=snapshot.created,
        )

    def read_into(self, pack: str, offset: int, buffer: memoryview) -> None:
        self._slots[pack].read_into(offset, buffer)

    # Where it is

    def near(self, ranks: Collection[int]) -> tuple[int, ...]:
        """The ranks of this job that have the shares of all these saved ranks on their host."""
        return self._inventory.readers(self._snapshot, ranks)

    def bring(self, ranks: Collection[int]) -> None:
        """Makes the shares of these saved ranks readable here. Collective.

        Raises CorruptData when no whole copy of one is left, on all ranks.
        """
        needs = [json.loads(data) for data in self._group.gather(json.dumps(sorted(ranks)).encode())]
        while moves := self._inventory.moves(self._snapshot, needs):
            self._carry_out(moves)

    def _near(self) -> dict[int, Found]:
        return by_rank(self._inventory.of(self._snapshot), self._inventory.memories[self._group.rank])

    def _snapshot_in(self, found: Found) -> Snapshot:
        if found.path not in self._read:
            slot = self._open(found)
            header = slot.read_header()
            if not header.ready or snapshot_id(header) != found.snapshot:
                raise CorruptData(f"{found.path}: holds {header.save}, expected {found.snapshot.save}")
            reader = self._readers.setdefault(found.rank, SnapshotReader())
            self._read[found.path] = reader.read(slot, header)
        return self._read[found.path]

    def _open(self, found: Found) -> Slot:
        """From any thread: once, since to close a second descriptor would drop the locks of the first."""
        with self._opening:
            self._asked.add(found.path)
            if found.path not in self._slots:
                self._slots[found.path] = Slot.open(Path(found.path))
            return self._slots[found.path]

    def _share_layout(self, digest: str) -> Layout:
        """From the first copy that is whole. Collective. Raises CorruptData or FormatError when there is none."""
        copies = [f for there in self._inventory.of(self._snapshot).values() for f in there if f.layout == digest]
        for n, found in enumerate(copies, 1):
            try:
                return self._read_layout(digest, found)
            except (CorruptData, FormatError) as error:
                if n == len(copies):
                    self.close()
                    raise
                log.warning("the layout in %s is not used: %s", found.path, error)
        raise AssertionError("a layout that no slot has")

    def _read_layout(self, digest: str, found: Found) -> Layout:
        """Read by one rank, and spread. Collective."""
        owner = next(r for r, memories in enumerate(self._inventory.memories) if found.memory in memories)
        buffer = torch.zeros(found.layout_nbytes, dtype=torch.uint8)

        def read() -> None:
            if self._group.rank == owner:
                slot = self._open(found)
                document = slot.read_document(slot.read_header(), "layout")
                buffer.copy_(torch.frombuffer(bytearray(document), dtype=torch.uint8))

        together(self._group, "reading a layout in memory", read)
        self._group.broadcast_from(owner, buffer)
        data = buffer.numpy().tobytes()
        if digester(XXH3)(data) != digest:
            raise CorruptData(f"{found.path}: its layout does not match {digest}")
        return decode_layout(data, found.path)

    # Transfers

    def _carry_out(self, moves: list[Move]) -> None:
        """Those that fail for what was sent drop the slot that it came from; the next copy is tried. Collective."""
        link = None if self._over is None else Link(self._over, self._timeout)
        assert link is not None, "one process shares all its memory with itself"
        mine = [move for move in moves if self._group.rank in (move.sender, move.receiver)]
        try:
            with ThreadPoolExecutor(TRANSFERS, "ckptlib-bring") as executor:  # all ranks in one order: none waits long
                done = list(executor.map(lambda move: self._transfer(link, move), mine))
        finally:
            link.close()
        received = [found for found, _ in done if found is not None]
        damaged = [source for _, source in done if source is not None]
        words = json.dumps({"received": [f.to_json() for f in received], "damaged": damaged}).encode()
        told = [json.loads(data) for data in self._group.gather(words)]
        self._inventory.add(Found.from_json(row) for word in told for row in word["received"])
        self._inventory.drop({(memory, path) for word in told for memory, path in word["damaged"]})

    def _transfer(self, link: Link, move: Move) -> tuple[Found | None, tuple[str, str] | None]:
        """What was received, and what is of no use: damaged, gone, or too large for the receiver."""
        found = move.found
        try:
            if self._group.rank == move.sender:
                self._send(link, move)
                return None, None
            return self._receive(link, move), None
        except AgreementFailed:
            raise
        except (CorruptData, FormatError, NoRoom, PeerRefused, ReplicationFailed) as error:
            log.error("%s is skipped: %s", found.path, error)
            return None, (found.memory, found.path)

    def _send(self, link: Link, move: Move) -> None:
        found = move.found
        try:
            slot = self._open(found)
            header = slot.read_header()
            if (header.rank, snapshot_id(header)) != (found.rank, found.snapshot):
                raise CorruptData(f"{found.path}: holds {header.save} of rank {header.rank} by now")
        except (CorruptData, FormatError) as error:
            withdraw(link, move.receiver, found.rank, str(error))
            raise
        send_slot(link, move.receiver, slot, header)

    def _receive(self, link: Link, move: Move) -> Found:
        taken: list[Slot] = []

        def take(header: SlotHeader) -> Slot:
            if snapshot_id(header) != move.found.snapshot:
                raise FormatError(f"rank {move.sender} offers {header.save}, expected {self.save}")
            taken.append(self._arena.borrow(header.body_nbytes))
            self._received.extend(taken)
            return taken[0]

        header = receive_slot(link, move.sender, move.found.rank, take, SnapshotReader())
        self._slots[str(taken[0].path)] = taken[0]
        self.num_received += 1
        return look(taken, header.root_id)[0]

    # Damage, and the end

    def drop_damaged(self) -> bool:
        """Checks all that this rank has opened; whether any rank found damage. What is damaged is used no more.

        Collective; after a load failed.
        """
        damaged = []
        for rank, found in self._near().items():
            if found.path in self._asked or found.path in self._slots:
                try:
                    check_body(self._open(found), self._snapshot_in(found))
                except (CkptError, OSError) as error:
                    log.error("the share of rank %d in %s is skipped: %s", rank, found.path, error)
                    damaged.append((found.memory, found.path))
        told = [json.loads(data) for data in self._group.gather(json.dumps(damaged).encode())]
        self._inventory.drop({(memory, path) for words in told for memory, path in words})
        return any(told)

    def close(self) -> None:
        """Lets go of the slots; those that peers have sent go."""
        for slot in self._received:
            self._slots.pop(str(slot.path), None)
            self._arena.give_back(slot)
        for slot in self._slots.values():
            slot.close()
        self._slots.clear()
