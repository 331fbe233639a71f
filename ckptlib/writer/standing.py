"""What each writer of a rank must know beside its orders, and what its successor is told, should it die. No torch."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from ckptlib.format.manifest import Generation
from ckptlib.writer.begin_order import BeginOrder
from ckptlib.writer.channel import Message


class Standing:
    """The slots of one rank, the generation, and which steps memory and local disks hold. Each method returns what the
    writer is to be told. The caller holds the lock, but for `keep`, which only the main thread calls."""

    def __init__(self, rank: int, has_local: bool) -> None:
        """`has_local`: whether saves go to a local disk first."""
        self._rank, self._has_local = rank, has_local
        self._slots: list[Path] = []
        self._kept: dict[str, Message] = {}
        """The last order of each op."""
        self._begun: BeginOrder | None = None
        self.owes_record = False
        """Whether the writer is to put the record at once, and has not said what became of that."""

    @property
    def is_kept(self) -> bool:
        """Whether there are snapshots that must not be lost, should no job go on from them."""
        return "held" in self._kept

    def slot(self, path: Path) -> Message:
        self._slots.append(path)
        return {"op": "slot", "path": str(path)}

    def forget(self, path: Path) -> Message:
        self._slots.remove(path)
        return {"op": "forget", "path": str(path)}

    def keep(self, order: Message) -> Message:
        """Notes which step memory or the local disks hold; it holds until the next order with its op."""
        self._kept[order["op"]] = order
        return order

    def begin(self, order: BeginOrder) -> Message:
        self._begun = order
        self.owes_record = order.now and self._rank == 0
        return order.to_message()

    def note(self, event: Message) -> None:
        """Notes the writer's word on the record."""
        if event["event"] == "begun" and self._begun is not None:  # what the job continues is known now
            record = Generation.decode(event["record"].encode(), "the writer's word")
            self._begun = replace(self._begun, record=record, continues=False)
        if event["event"] in ("begun", "not-begun"):
            self.owes_record = False

    def again(self) -> list[Message]:
        """Returns what the successor of a dead writer is told before its orders."""
        told = []
        if self._begun is not None:
            now = self.owes_record or self._has_local
            told.append(replace(self._begun, now=now, again=True).to_message())
        told += [{"op": "slot", "path": str(path)} for path in self._slots]
        return [*told, *self._kept.values()]
