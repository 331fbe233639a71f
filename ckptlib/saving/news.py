"""How a rank that does not commit learns the outcome of a save: by rank 0's notices, or now and then from the store.
And how rank 0 learns that another rank's share will not come, though the store may be away for that rank."""

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

GIVEN_UP_EVERY_S = 1.0
"""How often rank 0 looks whether a rank gave up its share of the save that is to be committed. A usual commit is over
before it looks."""


class News:
    """What this rank hears of a session's saves; main thread."""

    def __init__(self, notices: Notices, rank: int, num_ranks: int, is_local: bool) -> None:
        """`is_local`: whether the store is local."""
        self._notices, self._rank = notices, rank
        self._num_ranks, self._is_local = num_ranks, is_local
        self._ended: deque[object] = deque(maxlen=ENDED)
        self._awaited, self._looks_at = "", 0.0
        """The save that rank 0 is about to commit, and when it looks next whether a rank gave that up."""

    def expect(self) -> None:
        """Notes that a save begins: its outcome may have to be told as the program ends."""
        self._notices.start()

    def tell(self, event: Mapping[str, object]) -> None:
        """Leaves rank 0's events as notices; of other ranks' events, tells rank 0 that their own share failed.

        The first of rank 0's events of each save counts: a writer that replaces one that hung says nothing of what that
        one left in doubt.
        """
        if self._rank == 0 and event["event"] in ("committed", "failed") and event["save"] not in self._ended:
            told = {name: str(event[name])[:most] for name, most in TOLD.items() if name in event}
            self._notices.leave(json.dumps(told))
            self._ended.append(event["save"])  # only now: after Ctrl-C above, the event comes again
        elif self._rank != 0 and event["event"] == "failed" and not event.get("seen"):
            why = json.dumps([self._rank, str(event["error"])[: TOLD["error"]]])
            self._notices.give_up(str(event["save"]), why)

    def of(self, save: str) -> Mapping[str, object] | None:
        """Returns the event that ended a save, if rank 0 has left it. Returns at once."""
        told = (json.loads(notice) for notice in self._notices.look())
        return next((event for event in told if event["save"] == save), None)

    def given_up(self, save: str) -> Mapping[int, str]:
        """Returns the other ranks that have said that their share of a save failed, and why. Returns at once. For rank
        0, about the save that it is about to commit."""
        now = time.monotonic()
        if save != self._awaited:
            self._awaited, self._looks_at = save, now + GIVEN_UP_EVERY_S
        if now < self._looks_at:
            return {}
        self._looks_at = now + GIVEN_UP_EVERY_S
        return dict(json.loads(told) for told in self._notices.given_up(save))

    def looks(self, timeout_s: float) -> Looks:
        """Returns the schedule by which this rank asks the store from now on."""
        return Looks(time.monotonic(), timeout_s, self._num_ranks, self._is_local)

    def is_due(self, looks: Looks) -> bool:
        """Returns whether the store is to be asked now."""
        return looks.due(time.monotonic(), self._notices.lost)

    def close(self) -> None:
        self._notices.close()
