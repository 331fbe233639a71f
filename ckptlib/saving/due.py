"""What a Checkpointer has yet to save, and how its saves have gone: one rank's view, told to the others by the beat.

Pure: it knows neither ranks, nor tensors, nor the store.
"""

from __future__ import annotations

from ckptlib.policy.when import Policy


class DueSaves:
    """One per Checkpointer. A save that is due stays due until it is taken, and again if it comes to nothing."""

    def __init__(self, policy: Policy, every_in_memory: int | None) -> None:
        """`every_in_memory`: snapshots for memory are due at multiples of it; None: never."""
        self._policy = policy
        self._every_in_memory = every_in_memory
        self.final: int | None = None
        """The last step of the loop, which is always saved; None: not known."""
        self.to_store = False
        """Whether a save is due."""
        self.in_memory = False
        """Whether a snapshot is due, for memory at least."""
        self.inline = False
        """Whether the next snapshot is copied without overlap, since one was torn."""
        self.failures = 0
        """Saves in a row that failed on this rank before the writer had them."""
        self.error: Exception | None = None
        """Why the last of these did."""

    def look_ahead(self, step: int) -> None:
        """`step` comes next."""
        self.to_store = self.to_store or self._policy.due(step) or step == self.final
        every = self._every_in_memory
        self.in_memory = self.in_memory or (every is not None and step % every == 0)

    def begin(self, to_store: bool) -> None:
        """A snapshot is taken now: what it serves is due no longer."""
        self.skip(to_store)
        self.inline = False

    def skip(self, to_store: bool) -> None:
        """This step is saved already."""
        self.to_store = self.to_store and not to_store
        self.in_memory = False

    def owe(self, to_store: bool, inline: bool = False) -> None:
        """A snapshot came to nothing: another one is due as soon as can be."""
        self.to_store = self.to_store or to_store
        self.in_memory = True
        self.inline = self.inline or inline

    def succeed(self) -> None:
        """The writer will have the save that was begun."""
        self.failures, self.error = 0, None

    def fail(self, error: Exception) -> None:
        """A save failed on this rank."""
        self.failures += 1
        self.error = error
