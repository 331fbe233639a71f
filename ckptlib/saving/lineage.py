"""The lineage: this job's place in the history of a root.

A job is a generation. All ranks agree on it as the root is opened; it enters history with its first save, or where a
restore says what it goes on from.
"""

from __future__ import annotations

import logging
import platform
import secrets
import socket
import time
from collections.abc import Mapping

import torch

from ckptlib._version import __version__
from ckptlib.catalog.catalog import Catalog
from ckptlib.format import keys
from ckptlib.format.keys import GenerationId, SaveId
from ckptlib.format.manifest import Generation, Root
from ckptlib.ranks.group import Group
from ckptlib.ranks.together import together
from ckptlib.slots.placement import ReplicaMap

log = logging.getLogger(__name__)


class Lineage:
    """One per process, the same on all ranks."""

    def __init__(
        self, catalog: Catalog, group: Group, algorithm: str, save_deadline_s: float, tags: Mapping[str, str]
    ) -> None:
        """Opens the root, or makes it with this algorithm and deadline. Collective.

        Raises, on all ranks, what is wrong with the root, and NewerFormat where a newer ckptlib has saved in it.
        """
        self._catalog = catalog
        self._group = group
        self._tags = tags
        self.root, self.generation = self._agree(Root(secrets.token_hex(16), algorithm, save_deadline_s))
        self.resumed_from: SaveId | None = None
        self.began = False
        """Whether it has saved, to the store or to memory."""
        self.placement: ReplicaMap | None = None
        """Of replicas, where snapshots are kept in memory."""

    def _agree(self, wanted: Root) -> tuple[Root, GenerationId]:
        def make() -> bytes:
            root = self._catalog.open_root(wanted)
            self._catalog.check_versions()
            generation = self._catalog.next_generation()
            return root.encode() + str(generation).encode()

        made = together(self._group, "opening the root", lambda: make() if self._group.rank == 0 else None)
        document, _, tail = self._group.broadcast(made).rpartition(b"\n")
        number, _, nonce = tail.decode().partition("-")
        return Root.decode(document + b"\n", keys.ROOT), GenerationId(int(number), nonce)

    def begin(self, step: int) -> None:
        """Puts this generation's record before its first save, of `step`."""
        if not self.began and self._group.rank == 0:
            if self.resumed_from is None or self.resumed_from.step > step:  # would mix with what follows on this one
                self.resumed_from = self._continued(step)
            self.put()
        self.began = True

    def _continued(self, step: int) -> SaveId | None:
        """What a job that did not restore continues: the newest step before its own first one."""
        visible = self._catalog.visible()
        hidden = [save.step for save in visible if save.step >= step]
        if hidden:
            log.warning(
                "%s holds steps up to %d, but this job saves step %d without having restored an earlier one: steps %d "
                "and later are no longer listed (they stay in the store)",
                self._catalog.store.url,
                hidden[-1],
                step,
                hidden[0],
            )
        return max((save for save in visible if save.step < step), default=None)

    def put(self) -> None:
        """From here on older generations may not commit. Rank 0."""
        placement = self.placement
        self._catalog.put_generation(
            Generation(
                id=self.generation,
                world_size=self._group.size,
                resumed_from=self.resumed_from,
                created=time.time(),
                versions={"ckptlib": __version__, "torch": torch.__version__, "python": platform.python_version()},
                host=socket.gethostname(),
                tags=self._tags,
                domains=() if placement is None else placement.domains,
                copies=0 if placement is None else placement.copies,
                kinds=() if placement is None else placement.kinds,
            )
        )
