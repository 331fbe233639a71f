"""The generations that a job knew of when it opened the root: any other that begins later is another job's.

A job enters history when its record is put, which may be long after it opened the root. Its number does not tell which
of two jobs is later, since it is also above the generations that the job's own hosts have left. No torch.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from typing_extensions import Self

from ckptlib.format import keys
from ckptlib.format.documents import Fields
from ckptlib.format.keys import GenerationId, SaveId
from ckptlib.format.values import Json


@dataclass(frozen=True, slots=True)
class KnownGenerations:
    """The generations that one job knew of."""

    newest: int
    """The highest number of the generations in the store; 0 if there were none."""
    left: tuple[GenerationId, ...] = ()
    """Generations above it that had left slots, writers or local steps on the job's hosts. Their records may still be
    put, by a writer that goes on alone, or by the job itself."""
    last: SaveId | None = None
    """The newest step of the history then; None if there was none, or if an earlier ckptlib did not note it."""

    def begun_since(self, ids: Iterable[GenerationId], own: GenerationId) -> list[GenerationId]:
        """Returns those of `ids` that this job, `own`, did not know of, ascending. Those up to the number of the newest
        are left out: they are older, and may save no more."""
        return sorted(id for id in {*ids} - {own, *self.left} if id.number > self.newest)

    def knew(self, save: SaveId) -> bool:
        """Whether this step of the history was there already. A job saves its steps in order, and the numbers of
        generations ascend along a history."""
        last = self.last
        return last is not None and save.step <= last.step and save.generation <= last.generation

    def to_json(self) -> Json:
        left = [str(generation) for generation in self.left]
        return {"newest": self.newest, "left": [*left], "last": None if self.last is None else str(self.last)}

    @classmethod
    def from_json(cls, data: Json, where: str) -> Self:
        """Reads what `to_json` returned. Raises FormatError."""
        fields = Fields(data, where)
        left = map(keys.parse_generation, fields.texts("left"))
        last = None if fields.get("last") is None else keys.parse_save(fields.text("last"))
        return cls(fields.integer("newest", 0, keys.MAX_GENERATION), tuple(left), last)
