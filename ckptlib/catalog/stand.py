"""What other steps, and retention, must know of a committed step. Pure; no torch."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

from ckptlib.catalog.metrics import numeric
from ckptlib.format.keys import PackSet
from ckptlib.format.manifest import Manifest, told_users


class Stand(NamedTuple):
    """The fields of a manifest that matter to other steps: the packs of others and the layouts that its step uses; and
    the facts by which retention decides."""

    created: float
    world_size: int
    uses: Mapping[PackSet, float]
    users: Mapping[PackSet, frozenset[int]]
    """As the document tells: for this process, too, all ranks use the sets that it tells without ranks."""
    nbytes: int
    layouts: tuple[str, ...]
    metrics: Mapping[str, float]
    """Those that are numbers."""
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
