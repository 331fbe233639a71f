"""The generations that a job knew of when it opened the root: whichever begins behind its back is another job's.

A job enters history when its record is put, which may be long after it opened the root, and its number does not tell
which of two jobs is later: it is above those that the job's own hosts have left, too. No torch.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from typing_extensions import Self

from ckptlib.format import keys
from ckptlib.format.documents import Fields
from ckptlib.format.keys import GenerationId
from ckptlib.format.values import Json


@dataclass(frozen=True, slots=True)
class KnownGenerations:
    """As one job saw them."""

    newest: int
    """The highest number of those that the store had; 0: none."""
    left: tuple[GenerationId, ...] = ()
    """Those above it that had left slots, writers or local steps on the job's hosts. Their records may come yet, from a
    writer that goes on alone, or from the job itself."""

    def begun_since(self, ids: Iterable[GenerationId], own: GenerationId) -> list[GenerationId]:
        """Those of `ids` that this job, `own`, did not know of; ascending. One with a lower number than the newest is
        older, and may save no more."""
        return sorted(id for id in {*ids} - {own, *self.left} if id.number > self.newest)

    def to_json(self) -> Json:
        return {"newest": self.newest, "left": [str(generation) for generation in self.left]}

    @classmethod
    def from_json(cls, data: Json, where: str) -> Self:
        """Its inverse. Raises FormatError."""
        fields = Fields(data, where)
        left = map(keys.parse_generation, fields.texts("left"))
        return cls(fields.integer("newest", 0, keys.MAX_GENERATION), tuple(left))
