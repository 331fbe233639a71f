"""Finds the step that a caller asks for, and reads its manifest. No torch.

Between the listing and the read, retention may drop the step; for `latest` and the like there is another one then.
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
"""How often a step is resolved, at most. If a job drops the step each time, it keeps none long enough to be read."""


def resolve_save(catalog: Catalog, step: str) -> SaveId:
    """Returns the save that `Catalog.resolve` finds. Raises as that does, but where there is no root, says that."""
    try:
        return catalog.resolve(step)
    except CheckpointNotFound:
        catalog.root()  # if there is no root, this error says more
        raise


def resolve_manifest(catalog: Catalog, step: int | str, best: Best | None = None) -> Manifest:
    """Returns the manifest of the step that `Catalog.resolve` finds. Raises as that and `Catalog.manifest` do."""
    return resolve_as_put(catalog, step, best)[0]


def resolve_as_put(catalog: Catalog, step: int | str, best: Best | None = None) -> tuple[Manifest, bytes]:
    """Returns the manifest and its document; else as `resolve_manifest`."""
    try:
        for _ in range(TRIES - 1):
            save = catalog.resolve(step, best)
            with suppress(CheckpointNotFound):
                return catalog.manifest_as_put(save)
        return catalog.manifest_as_put(catalog.resolve(step, best))
    except CheckpointNotFound:
        catalog.root()  # if there is no root, this error says more
        raise


def is_newest_there(catalog: Catalog, listed: Iterable[SaveId]) -> bool:
    """Whether the newest of these saves is still committed; True if there are none.

    If it is not, there is a newer one. A caller that has read the manifests of listed saves may have found neither, and
    lists again.
    """
    newest = max(listed, key=lambda save: (save.generation, save.step), default=None)
    return newest is None or catalog.is_committed(newest)
