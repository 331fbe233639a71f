"""The link of a rank to its peers, and when it is made anew after it broke."""

from __future__ import annotations

import logging
import time
from datetime import timedelta

import torch.distributed as dist

from ckptlib.policy.peers import Peers
from ckptlib.ranks.link import Link

log = logging.getLogger(__name__)

FIRST_BACKOFF_S = 5.0
LAST_BACKOFF_S = 300.0
"""How long the ranks wait before they connect anew: from the first value to the last, doubled each time."""

RECONNECT = timedelta(seconds=5)
"""Least time-out for connecting anew, while the training waits; four times what the first time took, if that is
more."""


class Connection:
    """The connection of one rank to its peers; for the main thread. Any thread may call `prove`."""

    def __init__(self, over: dist.ProcessGroup | None, peers: Peers) -> None:
        self.link: Link | None = None
        """None until the ranks connect, and from when they agree that it broke until they connect anew."""
        self._over, self._peers = over, peers
        self._backoff_s = FIRST_BACKOFF_S
        self._retry_at = 0.0
        self._connect_within = peers.timeout
        self._broken: Link | None = None

    @property
    def failed(self) -> bool:
        """Whether a peer could not be reached: gloo has closed that connection for good, so all must connect anew."""
        return self.link is not None and self.link.broken

    @property
    def rested(self) -> bool:
        """Whether the ranks have waited long enough to connect anew."""
        return time.monotonic() >= self._retry_at

    def prove(self) -> None:
        """Notes that something went through: the next time that the link breaks is another one."""
        self._backoff_s = FIRST_BACKOFF_S

    def drop(self) -> None:
        """Gives up the link, since some rank lost a peer: nothing is replicated until all connect anew. Called on all
        ranks at the same step."""
        self._broken, self.link = self.link or self._broken, None
        self._retry_at = time.monotonic() + self._backoff_s
        log.warning(
            "a link between peers failed: snapshots have no replicas until the ranks connect anew, in %.0f s or later",
            self._backoff_s,
        )
        self._backoff_s = min(2 * self._backoff_s, LAST_BACKOFF_S)

    def connect(self) -> None:
        """Connects the ranks. Collective. Raises AgreementFailed."""
        if self._broken is not None:
            self._broken.close()
            self._broken = None
        if self._over is not None and self._peers.copies:
            began = time.monotonic()
            self.link = Link(self._over, self._peers.timeout, self._connect_within)
            took = timedelta(seconds=time.monotonic() - began)
            self._connect_within = min(max(RECONNECT, 4 * took), self._peers.timeout)

    def close(self) -> None:
        """Closes the link, if there is one."""
        if self.link is not None:
            self.link.close()
