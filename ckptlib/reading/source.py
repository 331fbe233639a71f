"""Sources of a step: the interface of a store, of this host's memory and of a peer's, for a reader."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Protocol

from ckptlib.format.keys import SaveId
from ckptlib.format.layout import Layout
from ckptlib.format.part import Part
from ckptlib.stores.io_limits import IoLimits


class StepSource(Protocol):
    """One step, wherever it lies: in a store, or in memory."""

    save: SaveId
    world_size: int
    layouts: Mapping[str, tuple[int, ...]]
    """The saved ranks that have each layout, by its digest."""
    where: str
    """Where it lies, for people."""
    in_memory: bool
    """Whether it lies in the memory of the job's hosts."""

    @property
    def limits(self) -> IoLimits:
        """Limits for reads; asked for when everything to read has been brought."""

    def layout(self, digest: str) -> Layout:
        """Returns a layout. Raises CorruptData, FormatError, ObjectNotFound."""

    def part(self, rank: int) -> Part:
        """Returns a saved rank's part, checked against its layout. Raises what `layout` raises, and NotBrought."""

    def read_into(self, pack: str, offset: int, buffer: memoryview) -> None:
        """Fills `buffer` with bytes of one of a part's packs. From any thread. Raises StoreError."""

    def near(self, ranks: Collection[int]) -> Collection[int] | None:
        """Returns the ranks of this job to which the shares of all these saved ranks are near; None: to all alike."""

    def bring(self, ranks: Collection[int]) -> None:
        """Makes the shares of these saved ranks readable here, before they are asked for. Collective."""


def own_rank(rank: int, world_size: int) -> int:
    """Returns the saved rank whose values and per-rank tensors a rank takes: its own, or 0 if it is new."""
    return rank if rank < world_size else 0
