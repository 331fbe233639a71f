"""Orders that a writer was given and has not carried out: its successor does, if it dies. No torch."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

from ckptlib.format.keys import SaveId
from ckptlib.writer.channel import Message

SAVES = ("persist", "commit", "void")
"""Orders that a writer answers within the deadline of a save."""


class _OrderKey(NamedTuple):
    """Identifies an open order: there is one for each key."""

    save: str
    elsewhere: bool
    """Whether another rank commits the save."""


class OpenOrders:
    """The open orders of one rank's writer, oldest first. The caller holds the lock."""

    def __init__(self, rank: int, has_local: bool) -> None:
        """`has_local`: whether saves go to a local disk first, and are drained from there."""
        self._rank, self._has_local = rank, has_local
        self._done = ("drain",) if has_local else ("persist", "commit")
        """Orders that a writer which is gone may have carried out, if it had begun: rank 0, or the next job, may commit
        the save."""
        self._open: dict[_OrderKey, Message] = {}

    def __len__(self) -> int:
        return len(self._open)

    def __iter__(self) -> Iterator[Message]:
        return iter(self._open.values())

    def add(self, order: Message) -> None:
        self._open[_OrderKey(order["save"], order["op"] == "await")] = order

    def begin(self, save: str) -> None:
        """Notes that a writer persists this save now: its successor would do so again."""
        order = self._open.get(_OrderKey(save, elsewhere=False))
        if order is not None and order["op"] == "persist":
            order["again"] = True

    def again(self) -> list[Message]:
        """Returns the orders for the successor of a writer, which may have done a part of each, but nothing of what it
        had only been told to persist."""
        return [order if order["op"] == "persist" else {**order, "again": True} for order in self]

    def expected(self, save: SaveId) -> Message | None:
        """Returns the order to expect the snapshot of `save`, if nothing more is known of it yet."""
        order = self._open.get(_OrderKey(str(save), elsewhere=False))
        return order if order is not None and order["op"] == "expect" else None

    def of(self, *ops: str) -> list[Message]:
        return [order for order in self._open.values() if order["op"] in ops]

    @property
    def num_undrained(self) -> int:
        """Number of saves to be drained that are not committed or, on other ranks than 0, not drained yet."""
        return sum(order["op"] != "void" and order.get("drains", False) for order in self)

    def note(self, event: Message) -> None:
        """Notes the writer's answer to an order, which ends the order or makes it another one."""
        kind, save = event["event"], event["save"]
        if kind != "undecided":
            self._note_own(event)
        if kind not in ("released", "drained"):
            self._open.pop(_OrderKey(save, elsewhere=True), None)

    def _note_own(self, event: Message) -> None:
        kind, save = event["event"], event["save"]
        key = _OrderKey(save, elsewhere=False)
        if kind == "released" and event["error"] is None and self._has_local:
            if self._open.pop(key, {}).get("drains"):
                self._open[key] = {"op": "drain", "save": save, "drains": True}
        elif kind == "drained" and self._rank == 0:
            pass  # another writer finds it in the store, and commits it
        elif kind == "released" and event["error"] is None and self._rank == 0:
            self._open[key] = {"op": "commit", "save": save, "began": event["began"]}  # its slot may be overwritten now
        elif kind == "failed" and event.get("replace"):  # nobody has told the other ranks
            self._open[key] = {"op": "void", "save": save, "error": event["error"]}
        elif kind == "failed" and event.get("seen"):
            pass  # this rank's share has no answer yet
        else:
            self._open.pop(key, None)

    def void_persists(self, error: str) -> list[Message]:
        """Makes orders to persist void, since no writer could be started; the next one tells the other ranks. Returns
        the answers."""
        failed = self.of("persist")
        for order in failed:
            self.add({**order, "op": "void", "error": error})
        return [self.failure(order, error) for order in failed]

    def drop_all(self, error: str) -> list[Message]:
        """Drops orders that no writer carries out, and returns the answers. They say nothing of a save that another
        rank commits: whoever asked for its outcome may ask again. Failures come first: what has failed needs no other
        answer. What is expected stays: no writer has read any of it, and the next one persists it when it is there."""
        orders = [order for order in self if order["op"] != "expect"]
        self._open = {key: order for key, order in self._open.items() if order["op"] == "expect"}
        failed = [self.failure(order, error) for order in orders if order["op"] != "await"]
        return failed + [{"event": "undecided", "save": order["save"]} for order in orders if order["op"] == "await"]

    def failure(self, order: Message, error: str) -> Message:
        """Returns the failure that stands for the answer of a writer that is gone, or does not run."""
        told = {"event": "failed", "save": order["save"], "kind": "SaveFailed", "error": error}
        may_be_done = order["op"] in self._done and (order["op"] != "persist" or "again" in order)
        return {**told, "in_doubt": True} if may_be_done else told
