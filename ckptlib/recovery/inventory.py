"""The snapshots in the memory of a job's hosts, and which rank reads which shards out to which others to restore one.

Every rank looks at its own host once; all exchange their findings, and conclude the same. A slot is found by its
content, whichever rank it belonged to.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from ckptlib.errors import CorruptData, FormatError
from ckptlib.format.check import Check, alike
from ckptlib.format.keys import SaveId, parse_save
from ckptlib.slots.header import SlotHeader
from ckptlib.slots.host import memory_of
from ckptlib.slots.slot import Slot


@dataclass(frozen=True, slots=True, order=True)
class SnapshotId:
    """One snapshot of the job; its slots, one for each rank, belong together."""

    save: SaveId
    number: int
    """See `SlotHeader.number`."""
    world_size: int


class SlotPlace(NamedTuple):
    """Identifies a slot: no other has both."""

    memory: str
    path: str


@dataclass(frozen=True, slots=True, order=True)
class Found:
    """A ready slot, as its header tells. Nothing else of it was looked at."""

    snapshot: SnapshotId
    rank: int
    """The rank whose share of the snapshot it holds."""
    memory: str
    """Name of the memory that it lies in; ranks that share this memory can open the path."""
    path: str
    layout: str
    """Digest of its layout."""
    layout_nbytes: int
    body_nbytes: int
    check: str = ""
    """See `SlotHeader.check`; "" for none."""

    @property
    def place(self) -> SlotPlace:
        return SlotPlace(self.memory, self.path)

    def to_json(self) -> list[object]:
        s = self.snapshot
        return [
            *(str(s.save), s.number, s.world_size, self.rank, self.memory, self.path),
            *(self.layout, self.layout_nbytes, self.body_nbytes, self.check),
        ]

    @classmethod
    def from_json(cls, row: list[object]) -> Found:
        match row:
            case [str(save), int(n), int(size), int(rank), str(memory), str(path), str(layout), int(a), int(b), str(c)]:
                return cls(SnapshotId(parse_save(save), n, size), rank, memory, path, layout, a, b, c)
            case _:
                raise FormatError(f"invalid row of an inventory: {str(row)[:120]}")


def snapshot_id(header: SlotHeader) -> SnapshotId:
    """Returns the id of the snapshot that a slot holds a share of."""
    return SnapshotId(header.save, header.number, header.world_size)


def look(slots: Iterable[Slot], root_id: str) -> list[Found]:
    """Returns the ready slots of a root. One that is torn, or not ready, is as good as none."""
    found = []
    for slot in slots:
        try:
            header = slot.read_header()
        except (CorruptData, FormatError):
            continue
        ours = header.root_id == root_id and header.rank < header.world_size
        if header.ready and ours and "layout" in header.documents:
            _, nbytes, digest = header.documents["layout"]
            memory = memory_of(slot.path.parent)
            check = "" if header.check is None else str(header.check)
            found.append(
                Found(
                    snapshot_id(header), header.rank, memory, str(slot.path), digest, nbytes, header.body_nbytes, check
                )
            )
    return found


def describe(found: Iterable[Found], memories: Iterable[str], host: str, cores: Iterable[int]) -> bytes:
    """Encodes one rank's findings, and the memories in which it can open slots, its own first.

    `host`: the machine that it runs on; `cores`: the numbers of those that it may run on.
    """
    rows, mask = [f.to_json() for f in found], sum(1 << core for core in {*cores})
    return json.dumps({"found": rows, "memories": list(memories), "host": host, "cores": f"{mask:x}"}).encode()


class Transfer(NamedTuple):
    """A slot from which a rank needs something, read out to it by one that can open it."""

    found: Found
    sender: int
    receiver: int


class Inventory:
    """The findings of all ranks; the same on each of them."""

    def __init__(self, told: Sequence[bytes]) -> None:
        """`told`: each rank's description, by rank."""
        self.memories: list[list[str]] = []
        """The memories in which each rank can open slots, by rank."""
        self._cores: list[tuple[str, int]] = []
        """The host of each rank, and a bit for each core of that host that it may run on; by rank."""
        found: set[Found] = set()
        for data in told:
            words = json.loads(data)
            self.memories.append(words["memories"])
            self._cores.append((words["host"], int(words["cores"], 16)))
            found.update(map(Found.from_json, words["found"]))
        self._found = sorted(found)
        self._readers: dict[str, list[int]] = {}
        for rank, memories in enumerate(self.memories):
            for memory in memories:
                self._readers.setdefault(memory, []).append(rank)

    def cores_each(self, rank: int) -> int:
        """Returns a rank's share of the cores that it may run on, if other ranks of its host may run on them, too; 1 or
        more."""
        host, mine = self._cores[rank]
        users = sum(there == host and bool(theirs & mine) for there, theirs in self._cores)
        return max(1, mine.bit_count() // users)

    def drop(self, damaged: Collection[SlotPlace]) -> None:
        """Drops copies that proved damaged; all ranks drop the same."""
        self._found = [f for f in self._found if f.place not in damaged]

    def of(self, snapshot: SnapshotId) -> dict[int, list[Found]]:
        """Returns the slots of a snapshot, by the rank whose share they hold."""
        slots: dict[int, list[Found]] = {}
        for found in self._found:
            if found.snapshot == snapshot and found.memory in self._readers:
                slots.setdefault(found.rank, []).append(found)
        return slots

    def whole(self) -> list[SnapshotId]:
        """Returns the snapshots of which every rank's share is there, newest first.

        A snapshot that the job had no time to vote upon is voted upon here.
        """
        ids = {found.snapshot for found in self._found}
        return sorted((s for s in ids if self._is_whole(s, self.of(s))), reverse=True)

    def in_part(self) -> dict[SaveId, list[int]]:
        """Returns the snapshots that are not whole, and the ranks whose shares are lacking."""
        ids = {found.snapshot for found in self._found}
        return {s.save: lacking for s in ids if (lacking := sorted({*range(s.world_size)} - self.of(s).keys()))}

    def _is_whole(self, snapshot: SnapshotId, slots: Mapping[int, list[Found]]) -> bool:
        return len(slots) == snapshot.world_size and alike(Check.parse(there[0].check) for there in slots.values())

    def copies(self, snapshot: SnapshotId) -> int:
        """Returns how many memories, at least, have each share of a whole snapshot."""
        return min(len({found.memory for found in there}) for there in self.of(snapshot).values())

    def readers(self, snapshot: SnapshotId, saved: Collection[int]) -> tuple[int, ...]:
        """Returns the ranks that can open slots with the shares of all these saved ranks."""
        slots = self.of(snapshot)
        sets = [{r for f in slots.get(rank, []) for r in self._readers[f.memory]} for rank in saved]
        return tuple(sorted(set.intersection(*sets))) if sets else ()

    def moves(self, snapshot: SnapshotId, needs: Sequence[Collection[int]]) -> list[Transfer]:
        """Returns the slots that must be read out to ranks that cannot open a copy themselves. Pure.

        `needs`: by rank, the saved ranks whose shares it needs. Raises CorruptData when a share is nowhere.
        """
        slots = self.of(snapshot)
        moves: list[Transfer] = []
        loads = [0] * len(needs)
        for rank, needed in enumerate(needs):
            for saved in needed:
                there = slots.get(saved)
                if not there:
                    raise CorruptData(
                        f"step {snapshot.save.step} in memory: no copy of the share of rank {saved} is left"
                    )
                if not any(found.memory in self.memories[rank] for found in there):
                    senders = ((sender, source) for source in there for sender in self._readers[source.memory])
                    sender, source = min(senders, key=lambda choice: loads[choice[0]])
                    loads[sender] += 1
                    moves.append(Transfer(source, sender, rank))
        return moves


def by_rank(found: Mapping[int, list[Found]], memories: Collection[str]) -> dict[int, Found]:
    """Returns a slot in these memories for each saved rank that has one there."""
    near = ((rank, [f for f in there if f.memory in memories]) for rank, there in found.items())
    return {rank: there[0] for rank, there in near if there}
