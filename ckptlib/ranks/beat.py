"""The beat: a few integers agreed upon by all ranks, once per step, without waiting.

Each rank gives its word in `after_step` i; all ranks act on the agreed words at `after_step` i + 1, never earlier. So
no rank saves, skips, stops or raises on its own knowledge.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

from ckptlib.errors import AgreementFailed
from ckptlib.ranks.group import Extremes, Group
from ckptlib.ranks.held import NONE


class Word(NamedTuple):
    """One rank's word; and, once agreed upon, the word of all ranks together.

    The largest value of each field counts, but from `calm` on the smallest.
    """

    step: int
    """The step that the word is for."""
    due: int = 0
    """1: the state after `step` should be saved."""
    snap: int = 0
    """1: it should be kept in memory."""
    inline: int = 0
    """1: it should be copied without overlap, since the last snapshot was torn."""
    agree: int = 0
    """1: a rank's layout changed, so the next save must compare all of them."""
    stop: int = 0
    """1: the job was told to stop."""
    needs_held: int = -1
    """The step that all ranks must hold before this rank has a slot for another snapshot; -1: it has one."""
    behind: int = 0
    """1: this rank's writer has yet to read a slot, and memory would keep too few beside one more."""
    failures: int = 0
    """Background saves that failed in a row."""
    failed: int = 0
    """1: they are too many, over too long a time, for the training to go on."""
    superseded: int = 0
    """1: a newer generation owns the root."""
    link_failed: int = 0
    """1: this rank lost a peer."""
    held_since: int = 0
    """The step from which on all snapshots of this rank have been held."""
    drain: int = 0
    """1: the next save should be drained from local disks to the store."""
    drains_full: int = 0
    """1: this rank has as much to drain already as it may."""
    local_since: int = 0
    """The step from which on all saves of this rank have come to be on its local disk."""
    unrecorded: int = 0
    """1: rank 0 has not heard that the record of the generation is in the store."""
    interval: int = 0
    """Steps between saves that this rank's overhead needs; 0: it keeps to none."""
    widen: int = 0
    """1: the next save should wait until this rank has a baseline to judge saves by."""
    at_work: int = 0
    """1: a save is being copied or written on this rank."""
    memory_interval: int = 0
    """The same as `interval`, for snapshots in memory."""
    memory_widen: int = 0
    """The same as `widen`, for snapshots in memory."""
    memory_at_work: int = 0
    """1: a snapshot is being copied, or sent to peers, by this rank."""
    calm: int = 1
    """1: this rank is ready to connect to its peers anew; when agreed upon, all are."""
    oldest_held: int = NONE
    """The newest step this rank holds (see `HeldSteps`); when agreed upon, the oldest of these."""
    oldest_settled: int = NONE
    """The newest step whose snapshot has come to an end on this rank; when agreed upon, the oldest of these."""
    oldest_local: int = NONE
    """The newest step of which this rank's share is on its local disk; when agreed upon, the oldest of these."""
    oldest_local_settled: int = NONE
    """The newest step whose way to this rank's local disk has come to an end; when agreed upon, the oldest of these."""


NUM_HIGHS = Word._fields.index("calm")
"""Number of fields of which the largest value counts."""


class Beat:
    """Agrees on words. One per Checkpointer; for the main thread only."""

    def __init__(self, group: Group) -> None:
        self._group = group
        self._pending: Callable[[], Extremes] | None = None
        self._pending_votes: Callable[[], list[int]] | None = None
        self.votes: list[int] = []
        """The votes of all ranks, added up, that came with the words agreed upon last; empty if there was no vote."""

    def start(self, word: Word, votes: Sequence[int] = ()) -> None:
        """Says this rank's word for the next step, and its votes: as many as the other ranks give, or none on any."""
        self._pending = self._start(word, word.step)
        self._pending_votes = self._group.start_sum(votes) if votes else None

    def _start(self, word: Word, first: int) -> Callable[[], Extremes]:
        """`first`: the smallest of `word.step`, which shows whether all ranks are at the same one."""
        return self._group.start_extremes(word[:NUM_HIGHS], [first, *word[NUM_HIGHS:]])

    def forget(self) -> None:
        """Drops the last word, which no rank will ask for."""
        self._pending = self._pending_votes = None

    @property
    def started(self) -> bool:
        return self._pending is not None

    def agreed(self, step: int) -> Word:
        """Returns the agreed word for `step`.

        Raises AgreementFailed when the ranks were not at the same step, or one did not come.
        """
        assert self._pending is not None
        pending, self._pending = self._pending, None
        votes, self._pending_votes = self._pending_votes, None
        highs, (first, *lows) = pending()
        word = Word(*highs, *lows)
        last = word.step
        if not first == last == step:
            if first == last:  # this rank alone is elsewhere: the others are told by their next word
                self._start(Word(max(step, last)), min(step, last))
                due = f"the next step was {last}"
            else:
                due = f"the ranks were at steps {first} to {last}"
            raise AgreementFailed(
                f"this rank called after_step({step}), but {due}; every rank must call after_step with the same "
                "consecutive steps, and leave none out (loop() does so itself)"
            )
        self.votes = [] if votes is None else votes()
        return word
