"""Decides how long to wait before a store is asked again for objects that others put. Pure."""

from __future__ import annotations

from ckptlib.stores import Store

GROWTH = 1.5

LOCAL_FIRST_S, LOCAL_LAST_S = 0.005, 0.5
"""Listing a directory costs nothing: it is listed often at first, and seldom when ranks are slow."""

REMOTE_FIRST_S, REMOTE_LAST_S = 0.05, 2.0

FIRST_SHARE, LAST_SHARE = 1 / 8, 1 / 4
"""The first and last pause for an object store, as fractions of the usual wait: requests cost money, so pauses grow
with the wait. A wait of up to twice the usual takes about five requests, and its end is noticed an eighth too late on
average."""


class Pauses:
    """Pauses that grow from the first to the last, which is then repeated."""

    def __init__(self, store: Store, usual_s: float = 0.0) -> None:
        """`usual_s`: how long the wait usually takes, if known."""
        if store.is_local:
            self._next, self._last = LOCAL_FIRST_S, LOCAL_LAST_S
        else:
            self._last = max(REMOTE_LAST_S, LAST_SHARE * usual_s)
            self._next = min(max(REMOTE_FIRST_S, FIRST_SHARE * usual_s), self._last)

    def next(self) -> float:
        """Returns the seconds of the next pause."""
        pause, self._next = self._next, min(GROWTH * self._next, self._last)
        return pause
