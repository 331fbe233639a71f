"""The saves that a step stands on: their packs hold chunks of it that have not changed since. Pure."""

from __future__ import annotations

from dataclasses import dataclass

from ckptlib.format.keys import SaveId
from ckptlib.format.manifest import Manifest
from ckptlib.words import age


@dataclass(frozen=True, slots=True)
class Stands:
    """The saves that one step stands on."""

    on: tuple[SaveId, ...]
    """Other saves, ascending."""
    oldest: float | None
    """When the oldest save with a chunk of the step was taken, its own included; seconds since the epoch. None if the
    manifest of one of these saves could not be read when the step was committed."""

    @property
    def oldest_age(self) -> str:
        """The age of the oldest save, for people."""
        return "?" if self.oldest is None else age(self.oldest)


def stands_of(manifest: Manifest) -> Stands:
    """Returns the saves that this manifest's step stands on."""
    on = tuple(sorted({needed.save for needed in manifest.uses}))
    times = [manifest.created, *manifest.uses.values()]
    return Stands(on, None if 0.0 in manifest.uses.values() else min(times))
