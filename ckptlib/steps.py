"""The work of a Checkpointer after each step of the training.

Each rank says in one step what could differ between ranks, and all act upon it in the next; see `ranks/beat.py`.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Mapping

from ckptlib.checkpoint import SaveOrder, save_step, without_overlap
from ckptlib.errors import AgreementFailed, CkptError, SaveFailed
from ckptlib.events import Stopping
from ckptlib.ranks.beat import Word
from ckptlib.saving.attempts import Attempts, begun
from ckptlib.saving.pending import Pending
from ckptlib.saving.session import Session
from ckptlib.saving.standing import await_local, await_room, follow
from ckptlib.saving.step_metrics import StepMetrics
from ckptlib.saving.turns import Turns
from ckptlib.staging.fence import Fence
from ckptlib.state.leaf import Leaf

log = logging.getLogger(__name__)


class TrainingSteps:
    """Does the work of one Checkpointer after each step. Main thread."""

    def __init__(
        self,
        session: Session,
        state: Mapping[str, object],
        turns: Turns,
        fence: Fence,
        attempts: Attempts,
        metrics: StepMetrics,
    ) -> None:
        self._session = session
        self._state = state
        self._turns = turns
        self._due = turns.due
        self._fence = fence
        self._attempts = attempts
        self.metrics = metrics
        """Metrics of the step that is under way."""
        self.restored: int | None = None
        """The step whose state this is, until the next one is done."""
        self.stopping = False
        """Whether all ranks have agreed that this is the last step."""
        self.preempted = False
        """Whether they agreed so before the end of the loop."""
        self._called = threading.Lock()
        self._took_slot = False
        """Whether `save` has taken a slot since the ranks said which slots they have."""
        self._waited_within_s = 0.0
        """Seconds waited at the fence within `done` so far; these count as time of `done` already."""

    @property
    def has_saved(self) -> bool:
        """Whether `save` has taken a step since the last `done`; the same on all ranks."""
        return self._took_slot

    def done(self, step: int, metrics: Mapping[str, object] | None) -> None:
        """Saves if all ranks have agreed that a save is due, and says what this rank wants of the next step."""
        waited_s, stopwatch, failed = self._fence.waited_s - self._waited_within_s, self._session.stopwatch, True
        try:
            stopwatch.begin_step(step, waited_s)
            self._turns.profile.begin()
            self._enter()  # no context manager: with one, a step that saves nothing takes a twentieth more calls
            try:
                with self._session.outcomes.turn:
                    self._done(step, metrics)
            finally:
                self._called.release()
            self._turns.profile.end(waited_s)
            failed = False
        except KeyboardInterrupt:  # the step may be done again
            self._turns.leave(step)
            raise
        except Exception:
            self.metrics.clear()
            raise
        finally:
            self._waited_within_s = self._fence.waited_s - waited_s
            stopwatch.end_step(step, failed)

    def _enter(self) -> None:
        """Marks this thread as the one within, until `_called` is released. Raises ValueError if another one is."""
        if not self._called.acquire(blocking=False):
            raise ValueError(
                f"{self._session.store.url}: two threads are in `after_step` or `save` of one Checkpointer at once. "
                "Call these in the thread that trains: what another one saves may change while it is copied. Other "
                "threads may wait for a save, as by `pending.wait_committed()`"
            )

    def _done(self, step: int, metrics: Mapping[str, object] | None) -> None:
        session = self._session
        session.stager.fail_left()
        self._turns.catch_up(step)
        if not self._turns.started:
            self._turns.say(step)
        word = self._turns.agreed(step)
        self._check_counted(step)
        session.outcomes.poll()
        compare = self._attempts.owe_again() or bool(word.agree)
        self._turns.check(word)
        if self._stops(word) or step == self._due.final:
            with self._turns.stop.busy():  # no step follows, so waiting here delays no training
                self._act(step, metrics, word, True, compare)
        else:
            self._act(step, metrics, word, False, compare)

    def _act(self, step: int, metrics: Mapping[str, object] | None, word: Word, last: bool, compare: bool) -> None:
        """Acts upon what all ranks have agreed for this step."""
        session = self._session
        follow(session, word)
        began = time.perf_counter()
        if last:
            await_room(session, self.stop_timeout_s)
        taken, to_store = None, bool(last or (word.due and not word.behind))
        due = to_store or word.snap
        takes = last or (due and self._has_room(word))
        self._took_slot = False  # before code that may raise on this rank alone: otherwise it would ask alone next time
        if takes:
            # the last save is compared before it is taken: no other could follow, should it turn out to differ
            compare = compare or last
            try:
                taken = self._take(step, self.metrics.of(metrics), word, to_store, compare)
            except CkptError:
                raise
            except Exception:  # the state's own; if ranks compare, all raise, and none says its word now
                if session.left_out == step and not self.stopping:
                    self._turns.say(step + 1)
                raise
        elif due:
            session.snapshots.make_room()
        if word.due and not (takes and to_store):
            self._turns.tell_waiting()
        try:
            if not self.stopping:
                self._turns.say(step + 1)
        finally:
            self.metrics.clear()
            if taken is not None:
                taken.staging.go()
                session.listener.tell(begun(taken, began))
        if last:  # no step of an optimizer follows, so nothing would wait at the fence
            self._fence.wait()
        self._fence.forget()

    def _has_room(self, word: Word) -> bool:
        """Returns whether every rank has a slot. Collective after a `save`, which the agreed word does not include."""
        snapshots = self._session.snapshots
        if not self._took_slot:
            return word.needs_held <= snapshots.held_by_all
        return not self._session.group.any(snapshots.needs_held() > snapshots.held_by_all)

    def _check_counted(self, step: int) -> None:
        """Raises ValueError if the restored step is told again. All ranks have agreed on the step, so all raise."""
        if step == self.restored:
            raise ValueError(
                f"after_step({step}): the restored state had {step} steps done already; after the body of `step`, "
                "call after_step(step + 1)"
            )
        self.restored = None

    def _stops(self, word: Word) -> bool:
        """Returns whether the training ends here because a rank was told to stop."""
        self.stopping = bool(word.stop)
        self.preempted = self.stopping and word.step != self._due.final
        if self.stopping:
            self._session.writer.hurries = True
            self._session.listener.tell(Stopping(word.step))
            if self._session.group.rank == 0:
                log.warning("asked to stop: saving step %d, the last one", word.step)
        return self.stopping

    @property
    def stop_timeout_s(self) -> float | None:
        """How long to wait for the last save if the job was told to stop; whoever told it will not wait for ever.

        None: it was not told.
        """
        return self._session.settings.timeout.total_seconds() if self.stopping else None

    def _take(
        self, step: int, metrics: Mapping[str, object] | None, word: Word, to_store: bool, compare: bool
    ) -> Pending | None:
        """Begins a save and returns it, to `go` on; returns None if there is nothing to save, or it failed."""
        due, last = self._due, word.stop or step == self._due.final
        if self._attempts.has(step):
            due.skip(to_store)
            return None
        self._turns.tuning.note_saved(to_store)
        inline = due.inline or word.inline or not self._session.snapshots.overlap
        order = SaveOrder(
            self._state,
            step,
            self._turns.with_interval(metrics),
            to_store=to_store,
            compare=compare,
            overlap=without_overlap if inline else self._earned if last else self._earned_or_frozen,
            drains=to_store and self._session.tier.decide(step, word, must=bool(last)),
        )
        taken = self._attempts.make(step, to_store, lambda: save_step(self._session, order))
        if taken is not None:
            self._fence.guard(taken.staging)
            if to_store:
                self._warn_of_metrics(step, metrics)
        return taken

    def _earned(self, leaf: Leaf) -> bool:
        """Returns whether the leaf's only writer is an optimizer that was seen to wait at the fence."""
        return leaf.owner is not None and self._fence.fired(leaf.owner)

    def _earned_or_frozen(self, leaf: Leaf) -> bool:
        """Returns whether that is so, or the leaf is frozen. Not for the last save: if it shows that the leaf has
        changed, there is no other."""
        return self._earned(leaf) or (leaf.owner is None and leaf.frozen)

    def _warn_of_metrics(self, step: int, metrics: Mapping[str, object] | None) -> None:
        problem = self.metrics.lacking(step, metrics)
        if problem is not None and self._session.group.rank == 0:
            log.warning("%s", problem)

    def save(self, step: int, metrics: Mapping[str, object] | None) -> Pending:
        """Saves now, whatever is due, unless this step is saved already. Collective; blocks until a slot is free."""
        self._enter()
        try:
            with self._session.outcomes.turn:
                return self._save(step, metrics)
        finally:
            self._called.release()

    def _save(self, step: int, metrics: Mapping[str, object] | None) -> Pending:
        self._session.stager.fail_left()
        session, before, known = self._session, self._attempts.last, self._attempts.has(step)
        # a save that was given up was published, and would be taken for the outcome of another try
        given_up = session.given_up is not None and session.given_up == step
        (some, not_all, failed, last), (first,) = session.group.extremes(
            [int(known), int(not known), int(given_up), step], [step]
        )
        if first != last:  # none of these steps would ever be whole
            raise AgreementFailed(
                f"this rank called save({step}), but the ranks are at steps {first} to {last}; every rank must call "
                "save with the same step. Nothing was saved"
            )
        if failed or (some and not_all):  # a rank without it would begin another save alone
            raise SaveFailed(f"some rank could not save step {step}, which will never be committed; save a later one")
        if before is not None and known:
            if metrics and session.group.rank == 0:
                log.warning(
                    "step %d is saved already, and the metrics that save() was given now are not with it: they do not "
                    "count for Keep(best=). Give them to after_step(metrics=) or log()",
                    step,
                )
            if not before.drains:
                await_local(session, before)
                session.tier.begin_drained()
                before.drain()
            return before
        began = time.perf_counter()
        await_room(session)
        trained = self._turns.started  # whether after_step has seen an iteration
        session.tier.begin_drained()
        told = self.metrics.of(metrics)
        taken = self._attempts.last = save_step(session, SaveOrder(self._state, step, told, spare=trained))
        self._took_slot = True
        self._warn_of_metrics(step, told)
        taken.staging.go()
        session.listener.tell(begun(taken, began))
        return taken
