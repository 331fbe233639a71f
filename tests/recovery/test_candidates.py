"""Which older snapshot stays in memory behind a restart, beside the one that was restored."""

from __future__ import annotations

import pytest

from ckptlib.format.keys import GenerationId, SaveId
from ckptlib.recovery.candidates import Candidate, safer_of
from ckptlib.recovery.inventory import Found, Inventory, SnapshotId, describe


def snapshot(step: int) -> SnapshotId:
    return SnapshotId(SaveId(step, GenerationId(1, "00000001")), step, 2)


def inventory(shares: dict[int, tuple[str, str]]) -> Inventory:
    """`shares`: by step, the hosts that have the share of each of two ranks."""
    found = {
        host: [
            Found(snapshot(step), rank, host, f"/dev/shm/{step}-{rank}-{n}.slot", "0" * 32, 100, 4096)
            for step, hosts in shares.items()
            for rank in range(2)
            for n in range(hosts[rank].count(host))
        ]
        for host in "AB"
    }
    return Inventory([describe(found[host], [host], host, [0]) for host in "AB"])


NEWEST = {9: ("A", "AB")}
"""Of which rank 1 has a replica, and rank 0 none."""


@pytest.mark.parametrize(
    ("shares", "committed", "stays"),
    [
        ({8: ("AB", "AB")}, [], 8),
        ({8: ("AB", "AB"), 7: ("AB", "AB")}, [], 8),
        ({8: ("A", "AB"), 7: ("AB", "AB")}, [], 7),
        ({8: ("A", "B")}, [], None),
        ({8: ("AA", "BB")}, [], None),
        ({}, [], None),
        ({8: ("AB", "AB")}, [9], None),
        ({8: ("AB", "AB")}, [8], None),
        ({7: ("AB", "AB")}, [8], None),
        ({8: ("AB", "AB")}, [7], 8),
    ],
)
def test_one_of_which_more_hosts_have_each_share(
    shares: dict[int, tuple[str, str]], committed: list[int], stays: int | None
) -> None:
    """Unless the store has it, or a later step."""
    first, *left = [
        Candidate(snapshot(step).save, snapshot(step) if tier == "memory" else None, step in committed)
        for step in sorted({9, *shares, *committed}, reverse=True)
        for tier, there in (("memory", step in {9, *shares}), ("store", step in committed))
        if there
    ]
    found = safer_of(inventory({**NEWEST, **shares}), first, left)
    assert found == (None if stays is None else snapshot(stays).save)


def test_none_beside_a_step_of_the_store() -> None:
    left = [Candidate(snapshot(8).save, snapshot(8), False)]
    assert safer_of(inventory({8: ("AB", "AB")}), Candidate(snapshot(9).save, None, True), left) is None
