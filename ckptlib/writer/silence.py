"""A writer that says nothing though it has work, for longer than any work may take: it is not running.

The writer's own watchdog ends it when the store does not answer. That does nothing if the process is stopped (SIGSTOP,
a frozen control group, a debugger), or hangs in the kernel as it starts. Pure: times are given. No torch.
"""

from __future__ import annotations

from ckptlib.writer.watchdog import slack_of


class Silence:
    """Measures how long one writer has been silent, for its trainer."""

    def __init__(self, deadline_s: float) -> None:
        """`deadline_s`: how long a save may take."""
        self._slack_s = slack_of(deadline_s)
        self._limit_s = deadline_s + 3 * self._slack_s
        """By then the writer's watchdog has given up, and has said so."""
        self._since: float | None = None
        """Since when it has work and says nothing."""
        self._noticed: float | None = None

    def lasts(self, works: bool, heard: bool, now: float) -> float | None:
        """Returns how long the silence has lasted, if it is too long; else None. `works`: whether the writer has orders
        that a save waits for.

        It is too long only if it was so a while ago, too: after a pause of the whole job (Slurm suspends it by SIGSTOP)
        the writer needs a moment to speak, as well.
        """
        if heard or not works or self._since is None:
            self._since, self._noticed = (now if works else None), None
            return None
        if now - self._since <= self._limit_s:
            return None
        if self._noticed is None:
            self._noticed = now
        return now - self._since if now - self._noticed > self._slack_s else None
