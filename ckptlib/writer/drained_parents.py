"""Parents of saves that go to a local disk first: the newest part among those that the store is known to have
committed. The store is not asked: no save waits for it. No torch."""

from __future__ import annotations

from collections.abc import Callable

from ckptlib.catalog.catalog import Steps
from ckptlib.format.keys import SaveId
from ckptlib.format.part import Part
from ckptlib.slots.snapshot import Snapshot
from ckptlib.writer.parents import fits, keep_few, oldest_save


class DrainedParents:
    """Chooses the parents of one rank's saves on a local disk. The first save of a writer has none."""

    def __init__(self, known: Callable[[], Steps]) -> None:
        """`known`: returns the store's steps from the first one of `needs` on, as they were last listed."""
        self._known = known
        self._parts: list[Part] = []
        """Newest last."""
        self._parent: Part | None = None
        """The parent that was chosen last."""

    def remember(self, part: Part) -> None:
        """Remembers a part that is to be drained."""
        if all(other.save != part.save for other in self._parts):
            self._parts.append(part)
            keep_few(self._parts, self._parent)

    def needs(self) -> tuple[SaveId, SaveId] | None:
        """Returns the first step that matters to a choice, and the first that may be chosen; None: there is no part to
        choose. Any thread may call it."""
        parts = tuple(self._parts)
        return (min(map(oldest_save, parts)), min(part.save for part in parts)) if parts else None

    def choose(self, snapshot: Snapshot, patience_s: float) -> tuple[Part | None, Steps]:
        """Returns a snapshot's parent, or None if nothing can be taken over, together with the known steps. Never
        waits."""
        steps = self._known()
        committed = (part for part in reversed(self._parts) if steps.has(part.save) and fits(part, snapshot))
        self._parent = next(committed, None)
        return self._parent, steps
