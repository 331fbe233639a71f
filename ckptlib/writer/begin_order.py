"""The order by which the trainer tells each of its writers how a generation begins. No torch."""

from __future__ import annotations

from dataclasses import dataclass

from typing_extensions import Self

from ckptlib.catalog.known_generations import KnownGenerations
from ckptlib.format.manifest import Generation
from ckptlib.writer.channel import Message

_WHERE = "the trainer's order"


@dataclass(frozen=True, slots=True)
class BeginOrder:
    """Tells a writer how the generation begins: with its first save, before which rank 0's writer puts the record."""

    record: Generation
    root_id: str
    """Id of the root that the job opened."""
    first_step: int
    """The first step that is saved."""
    continues: bool = False
    """Whether the job named no step to go on from, and so goes on from what is there."""
    now: bool = False
    """Whether the record is to be put at once; rank 0's writer answers with `begun` or `not-begun`."""
    is_put: bool = False
    """Whether the record is in the store already."""
    again: bool = False
    """Whether an earlier writer may have put the record; if so, that one counts."""
    is_new: bool = False
    """Whether the root had no step when it was opened."""
    seen: KnownGenerations | None = None
    """See `GenerationRecord`."""

    def to_message(self) -> Message:
        """Returns the order as a message for the channel."""
        return {
            "op": "begin",
            "record": self.record.encode().decode(),
            "root": self.root_id,
            "step": self.first_step,
            "continues": self.continues,
            "now": self.now,
            "is_put": self.is_put,
            "again": self.again,
            "is_new": self.is_new,
            "seen": None if self.seen is None else self.seen.to_json(),
        }

    @classmethod
    def from_message(cls, message: Message) -> Self:
        """Returns the order that `to_message` encoded."""
        return cls(
            record=Generation.decode(message["record"].encode(), _WHERE),
            root_id=message["root"],
            first_step=int(message["step"]),
            continues=message["continues"],
            now=message["now"],
            is_put=message["is_put"],
            again=message["again"],
            is_new=message["is_new"],
            seen=None if message["seen"] is None else KnownGenerations.from_json(message["seen"], _WHERE),
        )
