"""Exchanges words from step to step: this rank's for the next step, and all ranks' agreed word for this one."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Mapping

from ckptlib.errors import SaveFailed, Superseded
from ckptlib.policy.preemption import Preemption
from ckptlib.policy.stop_signal import StopSignal
from ckptlib.policy.when import Policy
from ckptlib.ranks.beat import Beat, Word
from ckptlib.ranks.meeting import is_alone
from ckptlib.saving.ballots import Poll
from ckptlib.saving.due import DueSaves
from ckptlib.saving.failures import MAX_FAILURES
from ckptlib.saving.session import Session
from ckptlib.saving.standing import say
from ckptlib.saving.tuning import Tuning, kinds_of

log = logging.getLogger(__name__)

INTERVAL = "ckptlib.interval"
"""The metric that tells which interval was in force, if ranks keep to an overhead."""


class Turns:
    """Sends and receives the words of one Checkpointer. Main thread."""

    def __init__(
        self, session: Session, store: Policy, memory: Policy | None, preempted: Callable[[], bool] | None
    ) -> None:
        self.due = DueSaves(store, memory)
        self._session = session
        self._beat = Beat(session.group)
        self._poll = Poll((), [])
        """The votes that went with the last word."""
        self.tuning = Tuning(session, kinds_of(session.snapshots, self.due, store, memory))
        self.profile = self.tuning.profile
        """Is told when each `after_step` begins and ends."""
        self._said = -1
        """The step that the last word is for."""
        self._left: int | None = None
        """A step whose `after_step` was interrupted before it took in its word."""
        self._preemption = None if preempted is None else Preemption(preempted)
        self.stop = StopSignal(is_alone())  # last: if this is interrupted before, SIGTERM keeps its default effect

    @property
    def started(self) -> bool:
        """Whether this rank has sent a word for the next step."""
        return self._beat.started

    def say(self, step: int) -> None:
        """Sends this rank's word for `step`, which comes next."""
        due, self._said = self.due, step
        due.look_ahead(step, time.monotonic())
        word = Word(
            step=step,
            due=int(due.to_store),
            snap=int(due.in_memory),
            inline=int(due.inline),
            stop=int(self._must_stop),
            failures=due.failures,
            failed=int(due.failures >= MAX_FAILURES),
            **self.tuning.say(),
        )
        word, self._poll = say(self._session, word)
        self._beat.start(word, self._poll.votes)

    @property
    def _must_stop(self) -> bool:
        """Whether this rank was told to stop."""
        return self.stop.wanted or (self._preemption is not None and self._preemption.wanted)

    def agreed(self, step: int) -> Word:
        """Returns the agreed word for `step`. Raises AgreementFailed if ranks are at different steps."""
        self.stop.note_step()
        began = time.perf_counter()
        word = self._beat.agreed(step)
        self.profile.note_wait(time.perf_counter() - began)
        self._session.verdicts.conclude(self._poll, self._beat.votes)
        self.tuning.agree(word)
        return word

    def leave(self, step: int) -> None:
        """Notes that the `after_step` of `step` was interrupted, as by Ctrl-C."""
        if self.started and self._said == step:
            self._left = step

    def catch_up(self, step: int) -> None:
        """Takes in the word of an interrupted step, before that for `step`: it is no longer acted on, but the other
        ranks had it."""
        left, self._left = self._left, None
        if left is not None and left != step:
            self.agreed(left)

    def with_interval(self, metrics: Mapping[str, object] | None) -> Mapping[str, object] | None:
        """Returns the metrics of a save, and the interval that was in force, if ranks have agreed on one."""
        interval = self.due.store.agreed
        return metrics if interval is None else {**(metrics or {}), INTERVAL: interval}

    def check(self, word: Word) -> None:
        """Raises, on all ranks, if they agreed that training must end."""
        if word.stop:
            self.stop.heed()
        if word.superseded:
            raise self._session.store_state.superseded or Superseded(
                f"{self._session.store.url}: a newer generation has begun; this job may no longer save"
            )
        if word.failed:
            last = self.due.error or self._session.outcomes.run.error
            raise SaveFailed(
                f"{word.failures} saves in a row failed on some rank; the last committed step is untouched. Last "
                f"error on this rank: {last or 'none'}"
            )

    def tell_waiting(self) -> None:
        """Warns that a save is due and some rank has no slot for it, once that has lasted for two intervals."""
        session = self._session
        rank = session.group.rank
        if self.due.must_tell() and (rank == 0 or session.snapshots.persisting):
            log.warning(
                "no save for two intervals, and one is due: %s%s; training goes on%s",
                f"on rank {rank}, " if session.group.size > 1 else "",
                session.store_state.waits_for(),
                "" if (times := self.due.num_late) == 1 else f" ({times} times so far, told again after as many)",
            )

    def close(self) -> None:
        """Sends no further word, and drops the last one."""
        if not self._session.owner.here:
            return
        self.stop.remove()
        if self._preemption is not None:
            self._preemption.close()
        self._beat.forget()
