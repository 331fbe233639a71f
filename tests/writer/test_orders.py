"""What each answer of a writer leaves for the next one to do, should that writer die."""

from __future__ import annotations

from typing import Any

import pytest

from ckptlib.format.keys import GenerationId, SaveId
from ckptlib.writer.orders import OpenOrders

SAVE, OTHER = SaveId(1, GenerationId(1, "0" * 8)), SaveId(2, GenerationId(1, "0" * 8))

Order = dict[str, Any]


def order(op: str, save: SaveId = SAVE, **more: object) -> Order:
    return {"op": op, "save": str(save), **more}


def event(kind: str, save: SaveId = SAVE, **more: object) -> Order:
    return {"event": kind, "save": str(save), **more}


RELEASED = event("released", error=None, began=5.0)

TO_STORE, TO_DISK = False, True
"""Whether there is a local tier."""


@pytest.mark.parametrize(
    ("rank", "has_local", "given", "answer", "left"),
    [
        (0, TO_STORE, order("persist"), RELEASED, ["commit"]),
        (1, TO_STORE, order("persist"), RELEASED, []),
        (0, TO_STORE, order("persist"), event("released", error="torn"), []),
        (0, TO_DISK, order("persist", drains=True), RELEASED, ["drain"]),
        (1, TO_DISK, order("persist", drains=True), RELEASED, ["drain"]),
        (1, TO_DISK, order("persist", drains=True), event("released", error="torn"), []),
        (0, TO_DISK, order("persist", drains=False), RELEASED, []),
        (0, TO_DISK, order("drain", drains=True), event("drained"), ["drain"]),  # and to be committed
        (1, TO_DISK, order("drain", drains=True), event("drained"), []),
        (0, TO_STORE, order("commit"), event("committed"), []),
        (0, TO_STORE, order("commit"), event("undecided"), ["commit"]),
        (0, TO_STORE, order("persist"), event("failed", error="full"), []),
        (1, TO_STORE, order("persist"), event("failed", error="hung", replace=True), ["void"]),
        (1, TO_STORE, order("persist"), event("failed", error="another rank's", seen=True), ["persist"]),
        (1, TO_STORE, order("void"), event("failed", error="torn"), []),
        (1, TO_STORE, order("await"), event("undecided"), []),
        (1, TO_STORE, order("await"), event("committed"), []),
        (1, TO_STORE, order("await"), event("failed", error="full"), []),
        (1, TO_STORE, order("await"), RELEASED, ["await"]),
        (1, TO_DISK, order("await"), event("drained"), ["await"]),
    ],
)
def test_what_an_answer_leaves_to_be_done(
    rank: int, has_local: bool, given: Order, answer: Order, left: list[str]
) -> None:
    """And nothing of another save."""
    orders = OpenOrders(rank, has_local)
    orders.add(given)
    orders.add(order("persist", OTHER))
    orders.note(answer)
    assert [found["op"] for found in orders if found["save"] == str(SAVE)] == left
    assert order("persist", OTHER) in [*orders]
    assert len(orders) == len(left) + 1


def test_a_rank_that_waits_for_a_commit_still_has_its_own_share_to_do() -> None:
    """The outcome is told of both; that nobody knows of one, only of the question."""
    orders = OpenOrders(1, False)
    for op in ("persist", "await"):
        orders.add(order(op))
    orders.note(event("undecided"))
    assert [*orders] == [order("persist")]
    orders.add(order("await"))
    orders.note(event("committed"))
    assert not [*orders]


def test_the_next_writer_is_told_what_the_last_one_was() -> None:
    """When the save began, and why it failed."""
    orders = OpenOrders(0, False)
    orders.add(order("persist"))
    orders.note(RELEASED)
    assert [*orders] == [order("commit", began=5.0)]
    orders.note(event("failed", error="hung", replace=True))
    assert [*orders] == [order("void", error="hung")]
    orders = OpenOrders(0, True)
    orders.add(order("persist", drains=True))
    orders.note(RELEASED)
    assert [*orders] == [order("drain", drains=True)]


def test_only_what_is_to_come_to_the_store_has_yet_to_be_drained() -> None:
    orders = OpenOrders(0, True)
    for number, (op, drains) in enumerate([("persist", True), ("persist", False), ("drain", True), ("void", True)]):
        orders.add(order(op, SaveId(number, SAVE.generation), drains=drains))
    assert orders.num_undrained == 2


def test_a_snapshot_is_expected_until_more_is_known_of_it() -> None:
    orders = OpenOrders(0, False)
    assert orders.expected(SAVE) is None
    orders.add(order("expect"))
    assert orders.expected(SAVE) == order("expect")
    orders.add(order("persist"))
    assert orders.expected(SAVE) is None


def test_where_no_writer_starts_what_is_not_persisted_fails_and_is_still_told_to_other_ranks() -> None:
    orders = OpenOrders(0, False)
    orders.add(order("persist", slot="/slot"))
    orders.add(order("commit", OTHER))
    answers = orders.void_persists("no process")
    assert [(told["event"], told["save"], told["error"]) for told in answers] == [("failed", str(SAVE), "no process")]
    assert [*orders] == [order("void", slot="/slot", error="no process"), order("commit", OTHER)]


def test_what_is_dropped_is_told_once_failures_first_and_nothing_of_another_ranks_save() -> None:
    orders = OpenOrders(0, False)
    orders.add(order("await", OTHER))
    orders.add(order("commit"))
    assert [(told["event"], told["save"]) for told in orders.drop_all("died")] == [
        ("failed", str(SAVE)),
        ("undecided", str(OTHER)),
    ]
    assert orders.drop_all("died") == []


@pytest.mark.parametrize(
    ("rank", "has_local", "op", "in_doubt"),
    [
        (0, TO_STORE, "persist", True),  # the next job commits where all parts are there, and no word that it failed
        (1, TO_STORE, "persist", True),  # rank 0 commits where the part is there
        (1, TO_DISK, "persist", False),
        (0, TO_STORE, "commit", True),
        (0, TO_DISK, "drain", True),
        (1, TO_DISK, "drain", True),
        (1, TO_STORE, "void", False),
    ],
)
def test_what_a_writer_that_is_gone_may_have_done_is_in_doubt(
    rank: int, has_local: bool, op: str, in_doubt: bool
) -> None:
    orders = OpenOrders(rank, has_local)
    orders.add(order(op))
    orders.begin(str(SAVE))
    [told] = orders.drop_all("died")
    assert ("in_doubt" in told) == in_doubt


def test_a_snapshot_that_is_expected_is_not_dropped() -> None:
    orders = OpenOrders(0, False)
    orders.add(order("expect", OTHER))
    orders.add(order("persist"))
    assert [told["save"] for told in orders.drop_all("died")] == [str(SAVE)]
    assert [*orders] == [order("expect", OTHER)]


def test_what_no_writer_has_begun_is_in_no_doubt() -> None:
    """However many of them were told of it."""
    orders = OpenOrders(1, False)
    orders.add(order("persist"))
    orders.add(order("persist", OTHER))
    orders.begin(str(OTHER))
    assert ["again" in told for told in orders.again()] == [False, True]
    assert ["in_doubt" in told for told in orders.void_persists("no process")] == [False, True]


def test_what_another_writer_is_told_to_do_again() -> None:
    """All but what none has begun to persist: of the rest, one that is gone may have done a part."""
    orders = OpenOrders(0, False)
    for number, op in enumerate(["commit", "void", "persist", "persist"]):
        orders.add(order(op, SaveId(number, SAVE.generation)))
    orders.begin(str(SaveId(3, SAVE.generation)))
    orders.begin(str(SaveId(9, SAVE.generation)))
    assert [told.get("again", False) for told in orders.again()] == [True, True, False, True]
