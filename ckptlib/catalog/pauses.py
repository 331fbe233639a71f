"""How long to wait before a store is asked again for objects that others put. Pure."""

from __future__ import annotations

from ckptlib.stores import Store

GROWTH = 1.5

LOCAL_FIRST_S, LOCAL_LAST_S = 0.005, 0.5
"""A directory costs nothing to list: at once at first, seldom when ranks are slow."""

REMOTE_FIRST_S, REMOTE_LAST_S = 0.05, 2.0

FIRST_SHARE, LAST_SHARE = 1 / 8, 1 / 4
"""Of what is usual: every question is paid for, so those of an object store grow with what is waited for. Others that
take up to twice as long as is usual are asked about five times, and noticed an eighth too late on average."""


class Pauses:
    """They grow from the first to the last, which stays."""

    def __init__(self, store: Store, usual_s: float = 0.0) -> None:
        """`usual_s`: how long the wait mostly takes, as far as that is known."""
        if store.is_local:
            self._next, self._last = LOCAL_FIRST_S, LOCAL_LAST_S
        else:
            self._last = max(REMOTE_LAST_S, LAST_SHARE * usual_s)
            self._next = min(max(REMOTE_FIRST_S, FIRST_SHARE * usual_s), self._last)

    def next(self) -> float:
        """Seconds."""
        pause, self._next = self._next, min(GROWTH * self._next, self._last)
        return pause
