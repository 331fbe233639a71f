"""The link between peers, which all ranks mend together; without peers, nothing is ever wrong with it."""

from __future__ import annotations

import logging

from ckptlib.errors import CkptError
from ckptlib.peers.replicator import Replicator
from ckptlib.ranks.group import Group
from ckptlib.ranks.together import together

log = logging.getLogger(__name__)


class PeerLink:
    """Decides with the other ranks when peers connect anew. One per rank; main thread."""

    def __init__(self, group: Group, replicator: Replicator | None) -> None:
        self._group = group
        self._replicator = replicator

    @property
    def failed(self) -> bool:
        """See `Connection.failed`."""
        return self._replicator is not None and self._replicator.connection.failed

    @property
    def calm(self) -> bool:
        """See `Replicator.calm`."""
        return self._replicator is None or self._replicator.calm

    def mend(self, failed: bool, calm: bool) -> None:
        """Drops or renews the link, as all ranks agreed. Collective if `calm`.

        `failed`: some rank lost a peer. `calm`: no rank has anything in flight, and all have waited long enough.
        """
        if self._replicator is None:
            return
        if failed:
            self._replicator.connection.drop()
        elif calm and not self._replicator.linked:
            try:
                together(self._group, "connecting peers anew", self._replicator.connection.connect)
            except CkptError as error:
                log.warning("%s", error)
                self._replicator.connection.drop()
            else:
                log.warning("the ranks have reconnected: snapshots have replicas again")
