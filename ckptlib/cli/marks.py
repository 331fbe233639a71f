"""The reasons to keep a step, whatever its age, which `ls` and `show` mark."""

from __future__ import annotations

from collections.abc import Collection
from contextlib import suppress
from dataclasses import dataclass

from ckptlib.catalog.catalog import Catalog
from ckptlib.catalog.metrics import best_of
from ckptlib.errors import CheckpointNotFound
from ckptlib.format.keys import SaveId
from ckptlib.format.manifest import Manifest


@dataclass(frozen=True, slots=True)
class Marks:
    """The marked steps of one root."""

    pinned: Collection[SaveId]
    best: SaveId | None
    """The best step, by the rule of the newest job that has one."""

    @classmethod
    def of(cls, catalog: Catalog, visible: Collection[SaveId]) -> Marks:
        """Reads the marks from one listing of the steps; and from the manifests of `visible` saves, if a job has a rule
        for the best."""
        rule, best = catalog.best_rule(visible), None
        if rule is not None:
            with suppress(CheckpointNotFound):
                best = best_of(catalog.known_metrics(sorted(visible)), rule, catalog.store.url)
        return cls(catalog.steps().pins.keys(), best)

    def on(self, save: SaveId, manifest: Manifest) -> tuple[str, ...]:
        """Returns the marks of a committed save."""
        found = {"pinned": save in self.pinned, "exempt": manifest.exempt, "best": save == self.best}
        return tuple(name for name, applies in found.items() if applies)
