"""Counts which bytes of packs are needed by which steps, range by range. Pure: callers pass parts and a listing.

It takes memory for each pack that a step needs: a few hundred bytes, and 24 more for each stretch that is needed by
other steps than the stretch before it.
"""

from __future__ import annotations

from collections.abc import Iterable, Set
from dataclasses import dataclass, field

import numpy as np

from ckptlib.catalog.uses import Needed, is_needed
from ckptlib.format import keys
from ckptlib.format.keys import SaveId
from ckptlib.format.part import Part
from ckptlib.stores import Entry

NOBODY, SEVERAL = -1, -2
"""Marks a byte that no step needs, or several; otherwise a byte has the number of the one step that needs it."""


@dataclass(slots=True)
class StepUsage:
    """Bytes of one committed step."""

    logical: int = 0
    """Bytes of its chunks, as a load returns them."""
    stored: int = 0
    """Bytes that they take in packs, whichever step the packs were put for."""
    own: int = 0
    """The part of `stored` that no other committed step needs."""

    @property
    def shared(self) -> int:
        """The part of `stored` that other committed steps need, too."""
        return self.stored - self.own


@dataclass(slots=True)
class PacksUsage:
    """Bytes in the packs that were put for one save, as far as they are still there."""

    written: int = 0
    """All bytes."""
    needed: int = 0
    """Bytes of chunks of committed steps."""
    framing: int = 0
    """Headers, and gaps that align chunks, in packs of a committed step that hold needed chunks."""
    dead: int = 0
    """Bytes kept only because other bytes of the same set of packs are needed."""
    idle: int = 0
    """Bytes in packs that no committed step needs."""


@dataclass(slots=True)
class _Stretches:
    """Which step needs each byte of a pack, as stretches between edges."""

    edges: np.ndarray
    """Offsets in the pack, ascending."""
    owners: np.ndarray
    """The owner between each two edges: NOBODY, SEVERAL, or the number of a step."""


@dataclass(slots=True)
class Usage:
    """Which steps need which bytes of the packs of one root."""

    steps: dict[SaveId, StepUsage] = field(default_factory=dict)
    """The committed steps whose parts were added."""
    missing: list[str] = field(default_factory=list)
    """Packs that steps need, but that are not there, or are too short."""
    _numbers: dict[SaveId, int] = field(default_factory=dict)
    _packs: dict[str, _Stretches] = field(default_factory=dict)

    def add(self, part: Part) -> None:
        """Adds the bytes that a part of a committed step needs."""
        step = self.steps.setdefault(part.save, StepUsage())
        number = self._numbers.setdefault(part.save, len(self._numbers))
        step.logical += part.table.nbytes_data
        for pack, (starts, stops) in _ranges(part).items():
            step.stored += int((stops - starts).sum())
            self._packs[pack] = _needed_by(self._packs.get(pack), starts, stops, number)

    def finish(self, entries: Iterable[Entry], committed: Set[SaveId], needed: Needed) -> dict[SaveId, PacksUsage]:
        """Returns what lies in the packs of each save. Called once, after all parts were added.

        `entries`: a listing of the packs that are there. `needed`: the sets of packs that committed steps have or use,
        by their manifests.
        """
        found: dict[SaveId, PacksUsage] = {}
        saves = [*self._numbers]
        for entry in entries:
            of = keys.pack_set(entry.key)
            if of is None:
                continue
            packs = found.setdefault(of.save, PacksUsage())
            packs.written += entry.nbytes
            stretches = self._packs.pop(entry.key, None)
            if stretches is None:
                if is_needed(needed, entry.key):
                    packs.dead += entry.nbytes
                else:
                    packs.idle += entry.nbytes
                continue
            if stretches.edges[-1] > entry.nbytes:
                self.missing.append(entry.key)
            here = min(self._count(stretches, saves), entry.nbytes)
            packs.needed += here
            if of.save in committed:
                packs.framing += entry.nbytes - here
            else:
                packs.dead += entry.nbytes - here
        for key, stretches in self._packs.items():
            self._count(stretches, saves)
            self.missing.append(key)
        self._packs.clear()
        return found

    def _count(self, stretches: _Stretches, saves: list[SaveId]) -> int:
        """Returns how many bytes of a pack any step needs. Adds those that only one step needs to its `own`."""
        nbytes = np.diff(stretches.edges)
        for number in np.unique(stretches.owners[stretches.owners >= 0]):
            self.steps[saves[number]].own += int(nbytes[stretches.owners == number].sum())
        return int(nbytes[stretches.owners != NOBODY].sum())


def _ranges(part: Part) -> dict[str, tuple[np.ndarray, np.ndarray]]:
    """Returns the ranges of each pack that hold chunks of a part, or bases of these chunks; ascending, disjoint."""
    bases = [coding.base for coding in part.codings.values() if coding.base is not None]
    packs = np.array([*part.table.packs, *(base.pack for base in bases)], np.int64)
    starts = np.array([*part.table.offsets, *(base.offset for base in bases)], np.int64)
    stops = starts + np.array([*part.stored, *(base.stored for base in bases)], np.int64)
    order = np.lexsort((starts, packs))
    packs, starts, stops = packs[order], starts[order], stops[order]
    cuts = np.flatnonzero(np.diff(packs)) + 1
    found = {}
    for first, last in zip([0, *cuts], [*cuts, len(packs)], strict=True):
        if first < last:
            found[part.packs[packs[first]].key] = _merged(starts[first:last], stops[first:last])
    return found


def _merged(starts: np.ndarray, stops: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Joins ranges that touch or overlap. They must be ascending by their starts."""
    ends = np.maximum.accumulate(stops)
    new = np.concatenate(([True], starts[1:] > ends[:-1]))
    return starts[new], ends[np.concatenate((new[1:], [True]))]


def _needed_by(before: _Stretches | None, starts: np.ndarray, stops: np.ndarray, number: int) -> _Stretches:
    """Returns the stretches of a pack, once the step of this number needs these ranges of it, too."""
    if before is None:
        before = _Stretches(np.array([starts[0], stops[-1]]), np.array([NOBODY], np.int32))
    edges = np.unique(np.concatenate((before.edges, starts, stops)))
    at = np.searchsorted(before.edges, edges[:-1], "right") - 1
    inside = (at >= 0) & (at < len(before.owners))
    owners = np.where(inside, before.owners[np.clip(at, 0, len(before.owners) - 1)], NOBODY)
    at = np.searchsorted(starts, edges[:-1], "right") - 1
    mine = (at >= 0) & (edges[:-1] < stops[np.maximum(at, 0)])
    owners[mine] = np.where((owners[mine] == NOBODY) | (owners[mine] == number), number, SEVERAL)
    kept = np.concatenate(([True], owners[1:] != owners[:-1]))
    return _Stretches(edges[np.concatenate((kept, [True]))], owners[kept].astype(np.int32))
