"""Who reads what out to whom: nothing that a rank can open itself, and not always the same one."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from pathlib import Path

import pytest
from support import ROOT_ID

from ckptlib.errors import CorruptData
from ckptlib.format.check import check_of
from ckptlib.format.keys import GenerationId, SaveId
from ckptlib.pages import PAGE_BYTES
from ckptlib.recovery.inventory import Found, Inventory, SlotPlace, SnapshotId, describe, look
from ckptlib.slots.header import SlotHeader
from ckptlib.slots.slot import Slot

SNAPSHOT = SnapshotId(SaveId(7, GenerationId(1, "00000001")), 3, 4)


def found(rank: int, memory: str) -> Found:
    return Found(SNAPSHOT, rank, memory, f"/dev/shm/{memory}-{rank}.slot", "0" * 32, 100, 4096)


def inventory(memories: str, slots: dict[int, str]) -> Inventory:
    """`memories`: by rank, the host. `slots`: by saved rank, the hosts that have its share."""
    found_by = {m: [found(rank, m) for rank, hosts in slots.items() if m in hosts] for m in set(memories)}
    return Inventory([describe(found_by[m], [m], m, [0]) for m in memories])


def moves(memories: str, slots: dict[int, str], needs: list[list[int]]) -> list[tuple[int, str, int, int]]:
    """(saved rank, host, sender, receiver) of each."""
    found = inventory(memories, slots).moves(SNAPSHOT, needs)
    return [(move.found.rank, move.found.memory, move.sender, move.receiver) for move in found]


def test_what_is_on_the_host_is_not_moved() -> None:
    slots = {0: "AB", 1: "AB", 2: "AB", 3: "AB"}
    assert moves("AABB", slots, [[0, 1, 2, 3]] * 4) == []


def test_every_rank_gets_what_it_lacks_from_one_that_has_it() -> None:
    slots = {0: "AB", 1: "AB", 2: "A", 3: "A"}
    assert moves("AABB", slots, [[0], [1], [2], [3, 0]]) == [(2, "A", 0, 2), (3, "A", 1, 3)]
    assert moves("AABB", slots, [[], [], [2], [2]]) == [(2, "A", 0, 2), (2, "A", 1, 3)], "each reads its own part of it"


def test_the_work_is_shared_among_hosts_and_their_ranks() -> None:
    slots = dict.fromkeys(range(4), "AB")
    senders = Counter(sender for *_, sender, _ in moves("AABBCCCC", slots, [[0, 1]] * 8))
    assert senders == {0: 2, 1: 2, 2: 2, 3: 2}


def cores_each(*ranks: tuple[str, range]) -> list[int]:
    """Of each rank: its host, and the cores that it may run on."""
    found = Inventory([describe([], [], host, cores) for host, cores in ranks])
    return [found.cores_each(rank) for rank in range(len(ranks))]


def test_ranks_of_a_host_share_its_cores() -> None:
    two, eight = range(2), range(8)
    assert cores_each(("A", two)) == [2]
    assert cores_each(("A", two), ("A", two)) == [1, 1]
    assert cores_each(("A", two), ("A", two), ("A", two)) == [1, 1, 1], "one at least"
    assert cores_each(("A", eight), ("A", eight), ("B", eight)) == [4, 4, 8]


def test_ranks_that_are_bound_to_cores_have_these_for_themselves() -> None:
    assert cores_each(("A", range(4)), ("A", range(4, 8)), ("A", range(100, 103))) == [4, 4, 3]


def test_who_can_read_several_shares_can_read_each_of_them() -> None:
    there = inventory("AABC", {0: "AB", 1: "A", 2: "BC", 3: "A"})
    assert there.readers(SNAPSHOT, [0]) == (0, 1, 2)
    assert there.readers(SNAPSHOT, [0, 1]) == (0, 1)
    assert there.readers(SNAPSHOT, [0, 2]) == (2,)
    assert there.readers(SNAPSHOT, [1, 2]) == there.readers(SNAPSHOT, []) == ()


def test_of_two_snapshots_of_one_step_the_later_one_comes_first() -> None:
    """As where `save` was asked for a step that was in memory already: the state may have been changed in between."""
    numbers = [replace(SNAPSHOT, number=number, world_size=1) for number in (4, 12, 3)]
    told = [describe([replace(found(0, "A"), snapshot=number) for number in numbers], ["A"], "A", [0])]
    assert [snapshot.number for snapshot in Inventory(told).whole()] == [12, 4, 3]


@pytest.mark.parametrize("odd", [0, 3])
def test_shares_that_differ_are_no_snapshot(odd: int) -> None:
    """Its job had no time to vote upon it."""

    def told(differs: bool) -> Inventory:
        digests = {rank: b"other" if differs and rank == odd else b"same" for rank in range(4)}
        checks = {rank: str(check_of(3, rank, {(0, 1, 2, 3): digest})) for rank, digest in digests.items()}
        return Inventory(
            [describe([replace(found(rank, "A"), check=checks[rank]) for rank in range(4)], ["A"], "A", [0])]
        )

    assert told(False).whole() == [SNAPSHOT]
    assert told(True).whole() == []


def test_a_share_that_is_nowhere() -> None:
    lost = inventory("AB", {0: "A", 1: "A", 2: "A", 3: "A"})
    lost.drop([SlotPlace("A", "/dev/shm/A-2.slot")])
    assert lost.whole() == []
    with pytest.raises(CorruptData, match="step 7 in memory: no copy of the share of rank 2 is left"):
        lost.moves(SNAPSHOT, [[0], [2]])


def test_a_share_that_no_rank_can_open() -> None:
    """As where its directory was unmounted after it was looked into."""
    told = describe([found(rank, "A") for rank in range(4)], ["B"], "host", [0])
    assert Inventory([told]).whole() == []


READY = SlotHeader(ROOT_ID, SNAPSHOT.save, 3, 4, 3, 2, 4096, {"layout": (PAGE_BYTES, 100, "0" * 32)})


@pytest.mark.parametrize(
    "header",
    [
        replace(READY, sequence=3),
        replace(READY, root_id="f" * 32),
        replace(READY, rank=4),
        replace(READY, documents={"table": (PAGE_BYTES, 100, "0" * 32)}),
        replace(READY, body_nbytes=4097),
        None,
    ],
    ids=["being written", "of another root", "of no rank of its job", "no layout", "more than fits", "torn"],
)
def test_a_slot_that_is_as_good_as_none(header: SlotHeader | None, tmp_path: Path) -> None:
    slots = [Slot.create(tmp_path, "ckptlib", 4096) for _ in range(2)]
    page = bytearray(READY.encode()) if header is None else header.encode()
    if header is None:
        page[40] ^= 1
    slots[0].view(0, PAGE_BYTES)[:] = page
    slots[1].write_header(READY)
    assert [(found.snapshot, found.rank, found.path) for found in look(slots, ROOT_ID)] == [
        (SNAPSHOT, 3, str(slots[1].path))
    ]
    for slot in slots:
        slot.close()
