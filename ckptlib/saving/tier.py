"""The trainer's part in the local tier: which saves are drained, and which steps all ranks have on their local disks.

Ranks tell and agree on all of it in the beat, so all drain the same steps. Main thread only.
"""

from __future__ import annotations

import logging
from collections.abc import Collection

from ckptlib.format.keys import GenerationId, SaveId
from ckptlib.policy.tier import MAX_UNDRAINED, DueDrains, LocalTier
from ckptlib.ranks.beat import Word
from ckptlib.ranks.held import NONE, HeldSteps
from ckptlib.words import is_told
from ckptlib.writer.client import Writer

log = logging.getLogger(__name__)


class TierState:
    """One rank's state of the local tier. Without a local tier it has nothing to say, and every save goes to the
    store."""

    def __init__(self, settings: LocalTier | None, generation: GenerationId, rank: int, writer: Writer) -> None:
        self._settings, self._generation, self._rank = settings, generation, rank
        self._writer = writer
        self._due = DueDrains(None if settings is None else settings.drain)
        self.own = HeldSteps()
        """This rank's steps on its host's disk."""
        self._begun: dict[int, bool | None] = {}
        """Saves whose end is not in `own` yet, in order, with whether the share is on the disk; None if not known."""
        self._whole_by_all = NONE
        self._voided: set[int] = set()
        """Steps whose shares are on disks and differ between ranks."""
        self._told: tuple[int, int, bool] | None = None
        """What the writer was told last: the newest step that all ranks have, the newest settled, and whether a record
        is there."""
        self._skipped = 0
        """How many saves in a row stayed local since there is too much to drain."""

    @property
    def is_used(self) -> bool:
        """Whether there is a local tier."""
        return self._settings is not None

    def expect(self, step: int) -> None:
        """Notes that a save of `step` was begun; called in ascending order."""
        self._begun[step] = None

    def note(self, step: int, held: bool) -> None:
        """Notes that the writer is done with the share of a save: it is on the disk, or never will be. The writer takes
        one after the other, so an earlier one of which it has said nothing never comes: whoever was to take it was
        interrupted."""
        if step not in self._begun:
            return
        for one, end in self._begun.items():
            if end is None and one <= step:
                self._begun[one] = held and one == step
        self._settle()

    def note_failed(self, step: int) -> None:
        """Notes that the share of a save will never be on the disk, while the writer may be busy with earlier ones."""
        if step in self._begun and self._begun[step] is None:
            self._begun[step] = False
            self._settle()

    def void(self, step: int) -> None:
        """Notes that the save of `step` differs between ranks, and is worth nothing on any disk; on all ranks at the
        same step. Earlier ones, whose shares may still be on their way, are as good as before."""
        self._voided.add(step)

    def _settle(self) -> None:
        """Tells `own` of the ends in the order of the saves: otherwise one that comes late would not count."""
        for step, held in [*self._begun.items()]:
            if held is None:
                break
            self.own.note(step, held)
            del self._begun[step]

    def note_restored(self, step: int, on_disks: Collection[SaveId]) -> None:
        """Notes that the job goes on from `step`. `on_disks`: the earlier jobs' steps that the disks of all hosts hold.

        A restart needs the newest of these that is no later than `step`, which may have come from memory or the store.
        """
        if self._settings is not None:
            self._writer.earlier(max((save for save in on_disks if save.step <= step), default=None))

    def say(self, word: Word, failed: bool) -> Word:
        """Completes this rank's word for the next step. `failed`: whether the last save failed."""
        if self._settings is None:
            return word
        self._due.look_ahead(word.step)
        return word._replace(
            drain=int(self._due.owed or failed),
            drains_full=int(self._writer.num_undrained >= MAX_UNDRAINED),
            local_since=self.own.since,
        )

    def note_all(self, oldest_local: int, latest_since: int, settled: int, unrecorded: bool) -> None:
        """Takes in all ranks' words on their disks: minimum, maximum and minimum over them.

        `unrecorded`: the generation's record is not known to be in the store. Until it is, a restart finds these steps
        by the notes on the disk of rank 0, and those of earlier jobs stay.

        Steps between the newest whole one and the newest settled on all failed on some rank. They must not fill the
        disks of the others, or no save could succeed any more if all share one disk.
        """
        newest = HeldSteps.by_all(oldest_local, latest_since)
        whole = self._whole_by_all = max(self._whole_by_all, NONE if newest in self._voided else newest)
        if self._settings is None or whole == NONE or (whole, settled, not unrecorded) == self._told:
            return
        self._told = whole, settled, not unrecorded
        self._writer.whole(SaveId(whole, self._generation), settled, not unrecorded)

    def decide(self, step: int, word: Word, must: bool) -> bool:
        """Returns whether the save of `step` is drained; the same on all ranks. `must`: it is, whatever the policy
        says."""
        if self._settings is None:
            return True
        drains = must or bool(word.drain and not word.drains_full)
        if drains:
            self.begin_drained()
        elif word.drain:
            self._skipped += 1
            if self._rank == 0 and is_told(self._skipped):
                log.warning(
                    "step %d stays on local disks: some rank has %d steps that are not drained yet, so the store is "
                    "slower than the drains, or away; the next save is drained when there is room (%d skipped so far, "
                    "told again after as many)",
                    step,
                    MAX_UNDRAINED,
                    self._skipped,
                )
        return drains

    def begin_drained(self) -> None:
        """Notes that a save is taken now that will be drained."""
        self._due.begin()
        self._skipped = 0
