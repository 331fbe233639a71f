"""How a rank that does not commit learns the outcome of a save: by rank 0's notices, or now and then from the store."""

from __future__ import annotations

import json
import time
from collections import deque
from collections.abc import Mapping

from ckptlib.ranks.notices import Notices
from ckptlib.saving.looks import Looks

TOLD = {"save": 100, "kind": 100, "error": 1000, "event": 100, "in_doubt": 100}
"""The fields of a writer's event that notices carry, and the most characters of each."""

ENDED = 100
"""How many saves are remembered whose end was told: more than are ever in flight."""


class News:
    """What this rank hears of a session's saves; main thread."""

    def __init__(self, notices: Notices, rank: int, num_ranks: int, is_local: bool) -> None:
        """`is_local`: whether the store is local."""
        self._notices, self._rank = notices, rank
        self._num_ranks, self._is_local = num_ranks, is_local
        self._ended: deque[object] = deque(maxlen=ENDED)

    def tell(self, event: Mapping[str, object]) -> None:
        """Leaves rank 0's events as notices; other ranks' events stay their own. The first event of each save counts: a
        writer that replaces one that hung says nothing of what that one left in doubt."""
        if self._rank == 0 and event["event"] in ("committed", "failed") and event["save"] not in self._ended:
            told = {name: str(event[name])[:most] for name, most in TOLD.items() if name in event}
            self._notices.leave(json.dumps(told))
            self._ended.append(event["save"])  # only now: after Ctrl-C above, the event comes again

    def of(self, save: str) -> Mapping[str, object] | None:
        """Returns the event that ended a save, if rank 0 has left it. Returns at once."""
        told = (json.loads(notice) for notice in self._notices.look())
        return next((event for event in told if event["save"] == save), None)

    def looks(self, timeout_s: float) -> Looks:
        """Returns the schedule by which this rank asks the store from now on."""
        return Looks(time.monotonic(), timeout_s, self._num_ranks, self._is_local)

    def is_due(self, looks: Looks) -> bool:
        """Returns whether the store is to be asked now."""
        return looks.due(time.monotonic(), self._notices.lost)

    def close(self) -> None:
        self._notices.close()
