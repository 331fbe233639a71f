"""Counts, part by part, how the chunks of steps are stored, and in which saves' packs they lie. Pure."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np

from ckptlib.catalog.codings import Count, codecs_in, raw_first
from ckptlib.format import keys
from ckptlib.format.keys import SaveId
from ckptlib.format.part import Part
from ckptlib.reporting.records import Content


@dataclass(slots=True)
class Contents:
    """Counts the chunks of one step, whose parts are added."""

    _codecs: dict[str, Count] = field(default_factory=dict)
    _taken_over: Count = field(default_factory=Count)
    _packs: dict[SaveId, int] = field(default_factory=dict)

    def add(self, part: Part) -> None:
        """Counts the chunks of a part."""
        nbytes, stored = np.array(part.table.nbytes, np.int64), np.array(part.stored, np.int64)
        if not len(nbytes):
            return
        names, codec = codecs_in(part)
        for at, name in enumerate(names):
            if (chosen := codec == at).any():
                self._codecs.setdefault(name, Count()).add(_count(chosen, nbytes, stored))
        owners = [keys.pack_save(pack.key) for pack in part.packs]
        of = np.array(part.table.packs, np.int64)
        others = np.array([owner is not None and owner != part.save for owner in owners], bool)[of]
        self._taken_over.add(_count(others, nbytes, stored))
        for at, owner in enumerate(owners):
            if owner is not None:
                self._packs[owner] = self._packs.get(owner, 0) + int(stored[of == at].sum())

    @property
    def found(self) -> Content:
        return Content(raw_first(self._codecs), self._taken_over, dict(sorted(self._packs.items())))


def _count(chosen: np.ndarray, nbytes: np.ndarray, stored: np.ndarray) -> Count:
    return Count(int(chosen.sum()), int(nbytes[chosen].sum()), int(stored[chosen].sum()))
