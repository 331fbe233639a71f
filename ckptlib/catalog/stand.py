"""The facts of a committed step that other steps and retention need. Pure; no torch."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

from ckptlib.catalog.metrics import numeric
from ckptlib.format.keys import PackSet
from ckptlib.format.manifest import Manifest, told_users


class Stand(NamedTuple):
    """The fields of a manifest that matter to other steps (the layouts and the packs of others that its step uses), and
    those by which retention decides."""

    created: float
    world_size: int
    uses: Mapping[PackSet, float]
    users: Mapping[PackSet, frozenset[int]]
    """The ranks that use each set, as far as the document tells; a set that is left out counts as used by all ranks."""
    nbytes: int
    layouts: tuple[str, ...]
    metrics: Mapping[str, float]
    """The metrics that are numbers."""
    exempt: bool

    @classmethod
    def of(cls, manifest: Manifest) -> Stand:
        return cls(
            manifest.created,
            manifest.world_size,
            manifest.uses,
            told_users(manifest.users),
            manifest.nbytes,
            tuple(manifest.layouts),
            numeric(manifest.metrics),
            manifest.exempt,
        )
