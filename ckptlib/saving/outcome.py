"""The outcome of each save, as this rank's writer reports it, and waiting for it."""

from __future__ import annotations

import logging
import math
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from datetime import timedelta

from ckptlib.errors import ReplicasDiffer, SaveFailed, StoreDenied, StoreFull, Superseded, WaitTimeout, describe
from ckptlib.events import Committed, Failed, Voided
from ckptlib.format import keys
from ckptlib.format.keys import SaveId
from ckptlib.saving.failures import FailureRun
from ckptlib.saving.forks import Owner
from ckptlib.saving.listener import Listener
from ckptlib.saving.looks import Looks
from ckptlib.saving.news import News
from ckptlib.saving.snapshots import Snapshots
from ckptlib.saving.store_state import TELL_OF_IT, StoreState
from ckptlib.saving.terminal import show
from ckptlib.saving.tier import TierState
from ckptlib.staging.stager import Staging
from ckptlib.writer.client import Writer

log = logging.getLogger(__name__)

LISTEN_FIRST_S, LISTEN_LAST_S = 0.005, 0.05
"""How long one turn of waiting listens to the writer: the first, and at most."""


@dataclass(eq=False)
class Outcome:
    """What became of one save, as far as this rank knows."""

    save: SaveId
    committed: bool = False
    """Whether the step is known to exist. On ranks other than 0 only after `wait_committed`."""
    error: Exception | None = None
    """Why the step will never exist."""
    local: bool = False
    """With a local tier: whether this rank's share is durable on its host's disk."""
    callbacks: list[Callable[[], object]] = field(default_factory=list)
    """Functions to call when the outcome is known."""
    looks: Looks | None = None
    """When a rank that does not commit asks the store next if nobody waits; None if nobody wants to know."""
    watches: int = 0
    """How often a rank that does not commit has asked for its outcome without an answer."""
    owed: bool = False
    """Whether the writer has yet to say what became of this rank's own share."""

    @property
    def decided(self) -> bool:
        """Whether the step is known to exist, or never to."""
        return self.committed or self.error is not None


class Outcomes:
    """The outcomes of a session's saves. One thread at a time calls the session; others may wait for a save."""

    def __init__(
        self,
        rank: int,
        writer: Writer,
        snapshots: Snapshots,
        store: StoreState,
        owner: Owner,
        news: News,
        max_outage_s: float,
        tier: TierState,
        listener: Listener,
    ) -> None:
        self.turn = threading.RLock()
        """Held while taking in what the writer says, and in calls of a session that take or give slots. Taken only
        after `Owner.check`: in a forked child there may be nobody to release it."""
        self._rank = rank
        self._news = news
        self._writer = writer
        self._snapshots = snapshots
        self._store = store
        self._owner = owner
        self.tier = tier
        self.listener = listener
        self._wanted: list[Outcome] = []
        """Undecided saves with a callback, on a rank that does not commit; none that stays on local disks."""
        self._events: deque[Mapping[str, object]] = deque()
        """Events of the writer that are still to be noted."""
        self._open: dict[str, Outcome] = {}
        """The outcomes that are still to come, by save."""
        self._asked_for: weakref.WeakSet[Outcome] = weakref.WeakSet()
        """Outcomes that somebody may still ask for."""
        self.run = FailureRun(max_outage_s)
        """The saves that failed in a row, as far as this rank knows."""

    def expect(self, outcome: Outcome) -> None:
        """Expects a save's outcome: from now on the writer may tell it."""
        outcome.owed = True
        self._news.expect()
        self._open[str(outcome.save)] = outcome
        self._asked_for.add(outcome)

    def drain(self, outcome: Outcome) -> None:
        """Sends a save that is on the disks of all ranks to the store after all."""
        self.expect(outcome)
        self._writer.drain(outcome.save)
        if outcome.callbacks:
            self._want(outcome)

    def may_be_asked(self) -> bool:
        """Returns whether somebody may still ask for the outcome of a save that this rank does not know."""
        self.poll()
        return not all(outcome.decided for outcome in self._asked_for)

    def forget(self, save: SaveId, error: Exception) -> bool:
        """Gives up a save whose failure this rank found out by itself. Returns whether it was still open."""
        outcome = self._open.pop(str(save), None)
        if outcome is not None:
            outcome.error = error
            self._call_back(outcome)
        return outcome is not None

    def poll(self, timeout_s: float = 0.0) -> None:
        """Takes in the events of the staging thread and the writer."""
        self._owner.check()
        if timeout_s > 0:  # without the turn, which training may need meanwhile
            self._writer.wait(timeout_s)
        with self.turn:
            self._snapshots.poll()
            self._events += self._writer.poll()
            while self._events:
                event = self._events[0]
                try:
                    self._news.tell(event)
                    self.note(event)
                except Exception:
                    self._events.popleft()
                    raise
                self._events.popleft()  # only now: after Ctrl-C in `note`, the slot would count as read forever
            if self._wanted:
                self._ask_for_wanted()
            if self._rank == 0 and (save := self._writer.commits_next) is not None:
                for rank, why in self._news.given_up(save).items():
                    self._writer.stop_waiting(save, rank, why)

    def note(self, event: Mapping[str, object]) -> None:
        """Takes in one event of the writer. An event that was seen of another rank's save says nothing of this rank's
        slot, nor of whether this rank's share will be on its disk."""
        kind = event["event"]
        if kind in TELL_OF_IT:
            self._store.note(event)
            return
        key = str(event["save"])
        outcome = self._open.get(key)
        if kind == "released":
            durable = event["error"] is None
            for asked in self._asked_for:  # even if rank 0 was heard before to have given it up
                asked.local = asked.local or (durable and str(asked.save) == key)
            self._snapshots.released(key)
            self.tier.note(keys.parse_save(key).step, durable)
            if durable and (self._rank != 0 or event.get("drains") is False):
                self.run.succeed()
                if outcome is not None:
                    outcome.owed = bool(event.get("drains"))
                    self._let_go(outcome)
        elif kind == "drained":
            if self._rank != 0 and outcome is not None:
                outcome.owed = False
                self._let_go(outcome)
        elif kind == "committed":
            self._open.pop(key, None)
            self.run.succeed()
            if self._rank == 0:
                self._tell_committed(keys.parse_save(key).step, event)
            elif outcome is not None:
                self.listener.tell(Committed(outcome.save.step, None, None))
            if outcome is not None:
                outcome.committed = True
                self._call_back(outcome)
        elif kind == "undecided" and outcome is not None:  # whoever asked was told by a timeout, and may ask again
            outcome.watches -= 1
            self._let_go(outcome)
        elif kind == "failed":
            if not event.get("seen"):
                self._snapshots.released(key)
                self.tier.note_failed(keys.parse_save(key).step)
            if outcome is None:  # its outcome is known already
                return
            self._open.pop(key, None)
            self._failed(outcome, str(event["kind"]), str(event["error"]), "in_doubt" in event)

    def _let_go(self, outcome: Outcome) -> None:
        """Forgets a save if the writer will say no more of it unless it is asked."""
        if not outcome.owed and not outcome.watches:
            del self._open[str(outcome.save)]

    def _tell_committed(self, step: int, event: Mapping[str, object]) -> None:
        nbytes, seconds = event["nbytes"], event["seconds"]
        assert isinstance(nbytes, int)
        assert isinstance(seconds, (int, float))
        show(log, "step %d is committed: %s bytes in %.3f s", step, f"{nbytes:,}", seconds)
        self.listener.tell(Committed(step, nbytes, float(seconds)))

    def _failed(self, outcome: Outcome, kind: str, text: str, in_doubt: bool) -> None:
        """Notes that a save failed. `in_doubt`: the step may exist, or come to exist, all the same. So may one that is
        on local disks: a restart goes on from the newest of these, and drains it."""
        error: SaveFailed
        is_local = self.tier.is_used and outcome.local
        if kind == ReplicasDiffer.__name__:  # the votes tell that, too; the next save compares, and its failure counts
            outcome.error = ReplicasDiffer(text)
            log.warning("%s", text)
            self.listener.tell(Voided(outcome.save.step, outcome.error))
            self._call_back(outcome)
            return
        if kind == "Superseded":
            error = self._store.superseded = Superseded(text)
        else:
            what = "and will never be committed"
            if in_doubt or is_local:
                what = (
                    "and may be committed all the same: `ckptlib ls` tells whether the step is there, and the next "
                    "start of the job may commit it"
                )
            error = SaveFailed(f"save {outcome.save} failed {what}; earlier steps are untouched: {text}")
        remedy = ""
        if kind == StoreDenied.__name__:
            remedy = (
                "; no save will succeed before somebody changes that, and training ends when saves have failed for "
                f"{self.run.max_outage_s / 60:g} min (max_outage)"
            )
        self.run.fail(time.monotonic(), error, is_local and kind == StoreFull.__name__)
        log.error("%s%s", error, remedy)
        outcome.error = error
        self.listener.tell(Failed(outcome.save.step, error, tier="store"))
        self._call_back(outcome)

    # Asking for one

    def is_known(self, outcome: Outcome, staging: Staging) -> bool:
        """Returns whether the outcome is known. Waits for nothing; a rank that does not commit asks the store now and
        then."""
        self.poll()
        if self._rank != 0 and staging.done and not outcome.decided:
            outcome.looks = outcome.looks or self._news.looks(math.inf)
            self._ask(outcome, outcome.looks)
        return outcome.decided or (staging.done and staging.error is not None)

    def call_back(self, outcome: Outcome, function: Callable[[], object], drains: bool) -> None:
        """Has the listener call `function` when the outcome of the save is known; at once if it is. `drains`: whether
        the save goes to the store; if not, nobody is asked for an outcome that may never come."""
        self._owner.check()
        with self.turn:
            outcome.callbacks.append(function)
            if outcome.decided:
                self._call_back(outcome)
            elif drains:
                self._want(outcome)

    def _want(self, outcome: Outcome) -> None:
        """Asks for the outcome from now on, on a rank that does not commit."""
        if self._rank != 0:
            outcome.looks = outcome.looks or self._news.looks(math.inf)
            self._wanted.append(outcome)

    def _call_back(self, outcome: Outcome) -> None:
        callbacks, outcome.callbacks = outcome.callbacks, []
        for function in callbacks:
            self.listener.call("a done callback", function)

    def _ask_for_wanted(self) -> None:
        """Asks for the outcome of saves with a callback. Only ranks that do not commit have any."""
        self._wanted = [outcome for outcome in self._wanted if not outcome.decided]
        for outcome in self._wanted:
            if outcome.looks is not None and not self._snapshots.is_persisting(str(outcome.save)):
                self._ask(outcome, outcome.looks)

    # Waiting for one

    def wait_staged(self, staging: Staging, timeout_s: float | None) -> None:
        self._owner.check()
        with self.turn:  # another thread that has the turn is taking this snapshot, and is about to call `go`
            staging.fail_left()
        staging.wait_sealed(timeout_s)

    def wait_released(self, outcome: Outcome, staging: Staging, timeout_s: float) -> None:
        deadline = time.monotonic() + timeout_s
        self._wait_saved(outcome, staging, timeout_s)
        while self._snapshots.is_persisting(str(outcome.save)):
            if time.monotonic() > deadline:
                raise WaitTimeout(f"step {outcome.save.step} was not written within {timeout_s:.0f} s; it may still be")
            self._listen(outcome.save.step, 0.05)

    def wait_local(self, outcome: Outcome, staging: Staging, timeout_s: float) -> None:
        step, deadline = outcome.save.step, time.monotonic() + timeout_s
        self._wait_saved(outcome, staging, timeout_s)
        while not outcome.local:
            writes = self._snapshots.is_persisting(str(outcome.save))  # read first: another thread may note it
            if outcome.error is not None and not writes and not outcome.local:
                raise outcome.error
            if time.monotonic() > deadline:
                raise WaitTimeout(
                    f"step {step} was not on the local disk within {timeout_s:.0f} s; it may still come to be"
                )
            self._listen(step, 0.05)

    def _wait_saved(self, outcome: Outcome, staging: Staging, timeout_s: float) -> None:
        try:
            self.wait_staged(staging, timeout_s)
        except WaitTimeout:
            raise
        except Exception as error:
            raise SaveFailed(f"step {outcome.save.step} was not saved: {describe(error)}") from error

    def wait_committed(self, outcome: Outcome, staging: Staging, timeout_s: float) -> None:
        step, deadline = outcome.save.step, time.monotonic() + timeout_s
        self._wait_saved(outcome, staging, timeout_s)
        looks, listen_s = self._news.looks(deadline - time.monotonic()), LISTEN_FIRST_S
        while not outcome.committed:
            if outcome.error is not None:
                raise outcome.error
            if time.monotonic() > deadline:
                why = self._store.waits_for()
                raise WaitTimeout(f"step {step} was not committed within {timeout_s:.0f} s; it may still be: {why}")
            if self._rank != 0:
                self._ask(outcome, looks)
            if not outcome.decided:
                self._listen(step, listen_s)
            listen_s = min(2 * listen_s, LISTEN_LAST_S)

    def _listen(self, step: int, timeout_s: float) -> None:
        """Polls while waiting for a save. Raises WaitTimeout if nothing more will be heard of it."""
        if self._writer.left:
            raise WaitTimeout(
                f"step {step}: its Checkpointer is closed, so this process hears no more of what became of the save; "
                "its writer may finish it still, and `ckptlib ls` tells whether it is committed"
            )
        self.poll(timeout_s)

    def _ask(self, outcome: Outcome, looks: Looks) -> None:
        """Looks for the outcome of a save that rank 0 commits: by its notices, or now and then from the store."""
        with self.turn:
            event = self._news.of(str(outcome.save))
            if event is not None:
                self._open[str(outcome.save)] = outcome
                self.note({**event, "seen": True})
            elif self._news.is_due(looks) and not outcome.watches:
                outcome.watches += 1
                self._open[str(outcome.save)] = outcome
                self._writer.watch(outcome.save, 0.0)

    def close(self, timeout: timedelta) -> None:
        """Closes the writer, which finishes its saves, and notes their outcome. Until then, ranks tell each other of
        shares that failed."""
        began, timeout_s = time.monotonic(), timeout.total_seconds()
        while (self._writer.awaited or self._writer.commits_next) and time.monotonic() < began + timeout_s:
            self.poll(LISTEN_LAST_S)
        with self.turn:
            try:
                self._events += self._writer.close(timeout_s, waited_s=time.monotonic() - began)
            finally:
                self.poll()
