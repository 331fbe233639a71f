"""The step that somebody asks for, with its manifest. No torch.

Between the listing and the read, retention may drop the step: of `latest` and the like there is another one then.
"""

from __future__ import annotations

from collections.abc import Iterable
from contextlib import suppress

from ckptlib.catalog.catalog import Catalog
from ckptlib.errors import CheckpointNotFound
from ckptlib.format.keys import SaveId
from ckptlib.format.manifest import Manifest
from ckptlib.policy.best import Best

TRIES = 5
"""A job that drops the newest step within each of so many pairs of requests keeps none long enough to be read."""


def resolve_manifest(catalog: Catalog, step: int | str, best: Best | None = None) -> Manifest:
    """Of the step that `Catalog.resolve` finds. Raises as that and `Catalog.manifest` do."""
    return resolve_as_put(catalog, step, best)[0]


def resolve_as_put(catalog: Catalog, step: int | str, best: Best | None = None) -> tuple[Manifest, bytes]:
    """As `resolve_manifest`: the manifest and its document."""
    try:
        for _ in range(TRIES - 1):
            save = catalog.resolve(step, best)
            with suppress(CheckpointNotFound):
                return catalog.manifest_as_put(save)
        return catalog.manifest_as_put(catalog.resolve(step, best))
    except CheckpointNotFound:
        catalog.root()  # raises where there is none, which says more
        raise


def is_newest_there(catalog: Catalog, listed: Iterable[SaveId]) -> bool:
    """Whether the newest of these saves is still committed; True where there are none. Else there is a newer one: who
    has read the manifests of what was listed may have found neither, and lists again.
    """
    newest = max(listed, key=lambda save: (save.generation, save.step), default=None)
    return newest is None or catalog.is_committed(newest)
