"""One committed step of a store, as a source for a reader."""

from __future__ import annotations

from collections.abc import Collection, Iterator
from contextlib import contextmanager

from ckptlib.catalog.catalog import Catalog
from ckptlib.errors import ObjectNotFound
from ckptlib.format.layout import Layout
from ckptlib.format.manifest import Manifest
from ckptlib.format.part import Part
from ckptlib.stores.io_limits import RUN_BYTES, IoLimits

NEAR = IoLimits()
"""Limits for local stores."""

FAR = IoLimits(direct_from=RUN_BYTES // 2, reads=2)
"""Limits for remote stores. A request costs tens of milliseconds, in which a connection brings some megabytes, so
tensors of a few megabytes are read several at a time, which costs a copy of them."""


class Committed:
    """A committed step, as a source for a Reader."""

    def __init__(self, catalog: Catalog, manifest: Manifest) -> None:
        self._catalog = catalog
        self._parts = manifest.parts
        self.save = manifest.save
        self.world_size, self.layouts = manifest.world_size, manifest.layouts
        self.where, self.in_memory = catalog.store.url, False
        self.limits = NEAR if catalog.store.is_local else FAR

    def layout(self, digest: str) -> Layout:
        with self._needed():
            return self._catalog.layout(digest)

    def part(self, rank: int) -> Part:
        with self._needed():
            return self._catalog.part(self._parts[rank])

    def read_into(self, pack: str, offset: int, buffer: memoryview) -> None:
        with self._needed():
            self._catalog.store.get_into(pack, offset, buffer)

    def near(self, ranks: Collection[int]) -> None:
        """Returns None: a store is equally far from all ranks."""

    def bring(self, ranks: Collection[int]) -> None:
        """Does nothing: all of a store is readable everywhere."""

    @contextmanager
    def _needed(self) -> Iterator[None]:
        """Adds to an ObjectNotFound what to do about it."""
        try:
            yield
        except ObjectNotFound as error:
            step = self.save.step
            raise ObjectNotFound(
                f"{error}; step {step} needs it. Try another step, or: ckptlib verify URL {step}"
            ) from error
