"""From step to step: what this rank says for the next one, and what all ranks have agreed upon for this one."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager

from ckptlib.errors import SaveFailed, Superseded
from ckptlib.events import IntervalChanged
from ckptlib.policy.overhead import overhead_in
from ckptlib.policy.preemption import Preemption
from ckptlib.policy.stop_signal import StopSignal
from ckptlib.policy.tuner import Tuner
from ckptlib.policy.when import Policy
from ckptlib.ranks.beat import Beat, Word
from ckptlib.saving.ballots import Poll
from ckptlib.saving.due import DueSaves
from ckptlib.saving.failures import MAX_FAILURES
from ckptlib.saving.profile import Profile
from ckptlib.saving.session import Session

log = logging.getLogger(__name__)

INTERVAL = "ckptlib.interval"
"""The metric that says which interval was in force, where ranks keep to an overhead."""


class Turns:
    """One per Checkpointer; main thread."""

    def __init__(
        self, session: Session, policy: Policy, every_in_memory: int | None, preempted: Callable[[], bool] | None
    ) -> None:
        self.due = DueSaves(policy, every_in_memory)
        self._session = session
        self._beat = Beat(session.group)
        self._stop = StopSignal()
        self._preemption = None if preempted is None else Preemption(preempted)
        self._poll = Poll((), [])
        """What was voted with the last word."""
        overhead = overhead_in(policy)
        self._profile = None
        if overhead is not None:
            self._profile = Profile(Tuner(overhead, snapshots=every_in_memory is not None))
        self._said = 0, ""
        """The interval that this rank said last, and why."""

    @property
    def started(self) -> bool:
        """Whether something was said for the next step."""
        return self._beat.started

    @contextmanager
    def timed(self, fence_s: float) -> Iterator[None]:
        """Around what `after_step` does. `fence_s`: seconds waited at the fence so far."""
        if self._profile is None:
            yield
        else:
            with self._profile.step(fence_s):
                yield

    def say(self, step: int) -> None:
        """This rank's word for `step`, which comes next."""
        due = self.due
        due.look_ahead(step, time.monotonic())
        word = Word(
            step=step,
            due=int(due.to_store),
            snap=int(due.in_memory),
            inline=int(due.inline),
            stop=int(self._must_stop),
            failures=due.failures,
            failed=int(due.failures >= MAX_FAILURES),
        )
        if self._profile is not None:
            word = self._say_interval(word, self._profile)
        word, self._poll = self._session.say(word)
        self._beat.start(word, self._poll.votes)

    @property
    def _must_stop(self) -> bool:
        """Whether this rank was told so."""
        return self._stop.wanted or (self._preemption is not None and self._preemption.wanted)

    def _say_interval(self, word: Word, profile: Profile) -> Word:
        saves, writer = self._session.snapshots.persisting_saves, self._session.writer
        profile.note_under_way(saves)
        drains = self._session.settings.local is not None and writer.num_undrained > 0
        at_work = bool(saves) or drains or writer.finishes
        tuner = profile.tuner
        if tuner.interval != self._said[0]:
            self._said = tuner.interval, tuner.why
        return word._replace(interval=tuner.interval, widen=int(tuner.widens), at_work=int(at_work))

    def agreed(self, step: int) -> Word:
        """What all ranks said for `step`. Raises AgreementFailed where they are not at the same one."""
        self._stop.note_step()
        if self._profile is None:
            word = self._beat.agreed(step)
        else:
            with self._profile.waiting():
                word = self._beat.agreed(step)
            self._profile.note_agreed(bool(word.at_work))
        self._session.verdicts.conclude(self._poll, self._beat.votes)
        self._tell_interval(word)
        self.due.agree(word.interval, bool(word.widen))
        return word

    def _tell_interval(self, word: Word) -> None:
        """A new interval, and why; by rank 0, though another rank may be the one that needs it."""
        if self._session.group.rank != 0 or word.interval in (0, self.due.agreed):
            return
        own, why = self._said
        if own < word.interval:
            why = f"another rank needs it; rank 0 needs {own}, as {why}" if own else "another rank needs it"
        before = "" if self.due.agreed is None else f" instead of {self.due.agreed}"
        log.info("from step %d on a save every %d steps%s: %s", word.step + 1, word.interval, before, why)
        self._session.listener.tell(IntervalChanged(word.step, word.interval, self.due.agreed, why))

    def note_saved(self) -> None:
        """A save to the store begins at this step."""
        if self._profile is not None:
            self._profile.note_saved()

    def with_interval(self, metrics: Mapping[str, object] | None) -> Mapping[str, object] | None:
        """The metrics of a save, and the interval that was in force, if ranks have agreed upon one."""
        return metrics if self.due.agreed is None else {**(metrics or {}), INTERVAL: self.due.agreed}

    def check(self, word: Word) -> None:
        """Raises, on all ranks, what they agreed must end the training."""
        if word.stop:
            self._stop.heed()
        if word.superseded:
            raise self._session.outcomes.superseded or Superseded(
                f"{self._session.store.url}: a newer generation has begun; this job may no longer save"
            )
        if word.failed:
            last = self.due.error or self._session.outcomes.run.error
            raise SaveFailed(
                f"{word.failures} saves in a row failed on some rank; the last committed step is untouched. Last "
                f"error on this rank: {last or 'none'}"
            )

    def tell_waiting(self) -> None:
        """A save is due, and some rank has no slot for it: that is told once it has lasted for two intervals."""
        session = self._session
        if self.due.must_tell() and (session.group.rank == 0 or session.snapshots.persisting):
            log.warning("no save for two intervals, and one is due: %s; training goes on", session.outcomes.waits_for())

    def close(self) -> None:
        """Nothing more is said; what was said last is not asked for."""
        if not self._session.owner.here:
            return
        self._stop.remove()
        if self._preemption is not None:
            self._preemption.close()
        self._beat.forget()
