"""The trainer's part in the local tier: which saves are drained, and which steps all ranks have on their local disks.

All of it is said and agreed upon in the beat, so all ranks drain the same steps. Main thread only.
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
    """Of one rank. Without a local tier there is nothing to say, and every save goes to the store."""

    def __init__(self, settings: LocalTier | None, generation: GenerationId, rank: int, writer: Writer) -> None:
        self._settings, self._generation, self._rank = settings, generation, rank
        self._writer = writer
        self._due = DueDrains(None if settings is None else settings.drain)
        self.own = HeldSteps()
        """This rank's steps on its host's disk."""
        self._begun: dict[int, bool | None] = {}
        """Saves whose end is not in `own` yet, in their order: whether the share is on the disk; None: not known."""
        self._whole_by_all = NONE
        self._voided: set[int] = set()
        """Steps whose shares are on disks, and differ between ranks."""
        self._told: tuple[int, int, bool] | None = None
        """The writer was told: the newest step that all ranks have, the newest settled, and whether a record is there.
        """
        self._skipped = 0
        """Saves in a row that stay local since there is too much to drain."""

    @property
    def is_used(self) -> bool:
        """Whether there is a local tier."""
        return self._settings is not None

    def expect(self, step: int) -> None:
        """A save of it was begun; in ascending order."""
        self._begun[step] = None

    def note(self, step: int, held: bool) -> None:
        """The writer is done with the share of a save: it is on the disk, or never will be. The writer takes one after
        the other, so an earlier one of which it has said nothing never comes: whoever was to take it was interrupted.
        """
        if step not in self._begun:
            return
        for one, end in self._begun.items():
            if end is None and one <= step:
                self._begun[one] = held and one == step
        self._settle()

    def note_failed(self, step: int) -> None:
        """The share of a save will never be on the disk, while the writer may be busy with earlier ones."""
        if step in self._begun and self._begun[step] is None:
            self._begun[step] = False
            self._settle()

    def void(self, step: int) -> None:
        """The save of it differs between ranks, and is worth nothing on whatever disk; told on all ranks at the same
        step. Earlier ones, whose shares may still be on their way, are as good as before."""
        self._voided.add(step)

    def _settle(self) -> None:
        """`own` learns of the ends in the order of the saves: else one that comes late would not count."""
        for step, held in [*self._begun.items()]:
            if held is None:
                break
            self.own.note(step, held)
            del self._begun[step]

    def note_restored(self, step: int, on_disks: Collection[SaveId]) -> None:
        """The job goes on from `step`. `on_disks`: the earlier jobs' steps that the disks of all hosts hold.

        Of these, a restart needs the newest that is no later: the job's own may have come from memory, or the store.
        """
        if self._settings is not None:
            self._writer.earlier(max((save for save in on_disks if save.step <= step), default=None))

    def say(self, word: Word, failed: bool) -> Word:
        """This rank's word for the next step. `failed`: the last save did."""
        if self._settings is None:
            return word
        self._due.look_ahead(word.step)
        return word._replace(
            drain=int(self._due.owed or failed),
            drains_full=int(self._writer.num_undrained >= MAX_UNDRAINED),
            local_since=self.own.since,
        )

    def note_all(self, oldest_local: int, latest_since: int, settled: int, unrecorded: bool) -> None:
        """Takes note of all ranks' words on their disks: minimum, maximum and minimum.

        `unrecorded`: the record of the generation is not known to be in the store. A restart finds these steps by what
        is noted on the disk of rank 0, and those of earlier jobs stay until the record is there.

        Steps between the newest whole one and the newest settled on all failed on some rank. They must not fill the
        disks of the others, or no save could succeed any more where they all share one.
        """
        newest = HeldSteps.by_all(oldest_local, latest_since)
        whole = self._whole_by_all = max(self._whole_by_all, NONE if newest in self._voided else newest)
        if self._settings is None or whole == NONE or (whole, settled, not unrecorded) == self._told:
            return
        self._told = whole, settled, not unrecorded
        self._writer.whole(SaveId(whole, self._generation), settled, not unrecorded)

    def decide(self, step: int, word: Word, must: bool) -> bool:
        """Whether the save of `step` is drained; the same on all ranks. `must`: it is, whatever the policy says."""
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
        """A save that is drained is taken now."""
        self._due.begin()
        self._skipped = 0
