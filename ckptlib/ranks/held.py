"""Which snapshots one rank holds, so that all can tell the newest that every one of them does.

A snapshot is held when it is whole in this rank's slot and, with peers, in all of its replicas. A snapshot that all
ranks hold can bring the job back, so it stays until all of them hold a newer one.
"""

from __future__ import annotations

NONE = -1
"""No step."""


class HeldSteps:
    """One rank's record. Every rank begins the same snapshots in the same order, and each of them comes to an end."""

    def __init__(self) -> None:
        self.newest = NONE
        """The newest step held."""
        self.since = 0
        """No snapshot of this step or later that has come to an end has failed."""
        self.settled = NONE
        """The newest step whose snapshot has come to an end."""

    def note(self, step: int, held: bool) -> None:
        """Notes that the snapshot of `step` came to an end; in the order in which they were begun."""
        self.settled = step
        if held:
            self.newest = step
        else:
            self.since = max(self.since, step + 1)

    def void(self, step: int) -> None:
        """Notes that the snapshot of `step` is worth nothing after all; on all ranks at the same step."""
        self.since = max(self.since, step + 1)

    @staticmethod
    def by_all(oldest_newest: int, latest_since: int) -> int:
        """Returns the newest step that all ranks surely hold, by the minimum of `newest` and the maximum of `since`.

        The minimum alone could name a step that failed on a rank which holds a later one. NONE if it is not sure.
        """
        return oldest_newest if oldest_newest >= latest_since else NONE
