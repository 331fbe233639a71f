"""What a writer was told to do and has not done: the next one does it, should this one die. No torch."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

from ckptlib.format.keys import SaveId
from ckptlib.writer.channel import Message

SAVES = ("persist", "commit", "void")
"""Orders that a writer answers within the deadline of a save."""


class _OrderKey(NamedTuple):
    """There is one open order for each."""

    save: str
    elsewhere: bool
    """Whether another rank commits the save."""


class OpenOrders:
    """The open orders of one rank's writer, oldest first; whoever calls holds the lock."""

    def __init__(self, rank: int, has_local: bool) -> None:
        """`has_local`: saves go to a local disk first, and are drained from there."""
        self._rank, self._has_local = rank, has_local
        self._done = ("drain",) if has_local else ("persist", "commit")
        """Orders of which a writer that is gone may have done all, where it had begun: rank 0, or the next job, may
        commit the save."""
        self._open: dict[_OrderKey, Message] = {}

    def __len__(self) -> int:
        return len(self._open)

    def __iter__(self) -> Iterator[Message]:
        return iter(self._open.values())

    def add(self, order: Message) -> None:
        self._open[_OrderKey(order["save"], order["op"] == "await")] = order

    def begin(self, save: str) -> None:
        """A writer persists it now: another one, in its place, does it again."""
        order = self._open.get(_OrderKey(save, elsewhere=False))
        if order is not None and order["op"] == "persist":
            order["again"] = True

    def again(self) -> list[Message]:
        """For a writer in the place of one that is gone, which may have done a part of each; of what it had only been
        told to persist, nothing."""
        return [order if order["op"] == "persist" else {**order, "again": True} for order in self]

    def expected(self, save: SaveId) -> Message | None:
        """The order to expect the snapshot of `save`, if nothing more is known of it yet."""
        order = self._open.get(_OrderKey(str(save), elsewhere=False))
        return order if order is not None and order["op"] == "expect" else None

    def of(self, *ops: str) -> list[Message]:
        return [order for order in self._open.values() if order["op"] in ops]

    @property
    def num_undrained(self) -> int:
        """Saves that are to be drained and are not committed or, on other ranks than 0, not drained yet."""
        return sum(order["op"] != "void" and order.get("drains", False) for order in self)

    def note(self, event: Message) -> None:
        """The writer's answer to one of them, which ends it or makes it another one."""
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
            pass  # its own share is still to be told of
        else:
            self._open.pop(key, None)

    def void_persists(self, error: str) -> list[Message]:
        """No writer could be started: what was to be persisted is void, which the next one tells the other ranks.
        Returns the answers."""
        failed = self.of("persist")
        for order in failed:
            self.add({**order, "op": "void", "error": error})
        return [self.failure(order, error) for order in failed]

    def drop_all(self, error: str) -> list[Message]:
        """Returns the answers to orders that no writer carries out. They say nothing of a save that another rank
        commits: whoever asked for its outcome may ask again. Failures come first: what has failed needs no other
        answer. What is expected stays: no writer has read any of it, and the next one persists it when it is there."""
        orders = [order for order in self if order["op"] != "expect"]
        self._open = {key: order for key, order in self._open.items() if order["op"] == "expect"}
        failed = [self.failure(order, error) for order in orders if order["op"] != "await"]
        return failed + [{"event": "undecided", "save": order["save"]} for order in orders if order["op"] == "await"]

    def failure(self, order: Message, error: str) -> Message:
        """The answer of a writer that is gone, or does not run."""
        told = {"event": "failed", "save": order["save"], "kind": "SaveFailed", "error": error}
        may_be_done = order["op"] in self._done and (order["op"] != "persist" or "again" in order)
        return {**told, "in_doubt": True} if may_be_done else told
