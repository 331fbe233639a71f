"""The Checkpointer: what a training loop holds.

Everything that could differ between ranks is said in one step and acted upon, by all, in the next (see `beat`).
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path
from types import TracebackType

import torch
import torch.distributed as dist
from typing_extensions import Self

from ckptlib.catalog.retention import Keep
from ckptlib.checkpoint import SAVE_DEADLINE, TIMEOUT, LoadReport, keepers, loads_of
from ckptlib.errors import (
    AgreementFailed,
    CkptError,
    NoRoom,
    ReplicasDiffer,
    SaveFailed,
    StateChanged,
    StateError,
    Superseded,
)
from ckptlib.format.digests import XXH3
from ckptlib.format.keys import SaveId, checked_step
from ckptlib.loading.loaded import Filled, Loads, Parts
from ckptlib.policy.peers import Coverage, Peers
from ckptlib.policy.stop_signal import StopSignal
from ckptlib.policy.when import Policy, Steps
from ckptlib.ranks.beat import Beat, Word
from ckptlib.ranks.group import together
from ckptlib.recovery.restore import restore
from ckptlib.saving.agreement import kind_of
from ckptlib.saving.ballots import Poll
from ckptlib.saving.pending import Pending
from ckptlib.saving.session import Session
from ckptlib.saving.settings import Settings
from ckptlib.staging.fence import Fence
from ckptlib.state.flatten import Leaf, flatten
from ckptlib.state.rng import LoadedRng
from ckptlib.stores import absolute

log = logging.getLogger(__name__)

MAX_FAILURES = 3
"""Background saves that may fail in a row before all ranks raise; one alone is a warning."""

CLOSE_TIMEOUT = timedelta(minutes=30)
"""How long a normal exit waits for the last save to be committed."""


class Checkpointer:
    """Saves and restores one training job.

    url:             a path, or any URL that fsspec knows.
    state:           a dict of modules, optimizers, objects with state_dict() and load_state_dict(), tensors, plain
                     values, and nestings of these. Random generators are saved without being named. `restore` puts
                     plain values back into the dict that holds them: of what shall stay as it was given to this run,
                     such as vars(args), save a copy, dict(vars(args)).
    every:           when to save; a policy, or a number of steps.
    keep:            which steps stay; None: all of them.
    peers:           snapshots in memory, and in that of other hosts, from which `restore` is quickest; None: none.
    process_group:   the ranks that hold the state; default: the world.
    storage_options: for fsspec's filesystem.
    arena:           the directory of the snapshots in memory; default: /dev/shm, and a file where that has no room.
    timeout:         how long ranks wait for one another.
    save_deadline:   after which a save that is not committed is given up; counts when the root is made.
    algorithm:       "xxh3", or "blake3" for a store that others can write to; counts when the root is made.
    tags:            kept with this generation: a git revision, a run's name.

    Collective: all ranks make it, call after_step with the same steps, and close it. Raises, on all ranks, what any of
    them finds wrong with the store.
    """

    def __init__(
        self,
        url: str | Path,
        state: Mapping[str, object],
        *,
        every: Policy | int,
        keep: Keep | None = None,
        peers: Peers | None = None,
        process_group: dist.ProcessGroup | None = None,
        storage_options: Mapping[str, object] | None = None,
        arena: str | Path | None = None,
        timeout: timedelta = TIMEOUT,
        save_deadline: timedelta = SAVE_DEADLINE,
        algorithm: str = XXH3,
        tags: Mapping[str, str] | None = None,
    ) -> None:
        settings = Settings(
            url=absolute(url),
            options=storage_options or {},
            timeout=timeout,
            save_deadline=save_deadline,
            algorithm=algorithm,
            arena=None if arena is None else Path(arena).absolute(),
            keep=keep,
            tags=tags or {},
            peers=peers,
        )
        self._state = state
        self._policy = Steps(every) if isinstance(every, int) else every
        if not callable(getattr(self._policy, "due", None)):
            raise TypeError(f"every={every!r}: expected a number of steps, or a policy such as Steps(500)")
        self._session = Session(settings, process_group, lambda: kind_of(flatten(self._state).leaves))
        self._group = self._session.group
        self._beat = Beat(self._group)
        self._fence = Fence()
        self._stop = StopSignal()
        self._stopping = False
        self._generators: LoadedRng | None = None
        self._last: Pending | None = None
        self._wants_inline = False
        self._local_failures = 0
        self._local_error: CkptError | None = None
        """Why the last save that failed here did."""
        self._restored: int | None = None
        self._unkept = False
        """Whether the last snapshot for memory only failed here; that alone ends no job."""
        self._owed = False
        """Whether a save is due that could not be taken yet."""
        self._owed_in_memory = False
        """The same, of a snapshot for memory only."""
        self._final: int | None = None
        self._poll = Poll((), [])
        """What was voted with the last word."""
        self._install()
        self.note_load(settings.url, loads_of(settings.url, process_group))
        keepers.add(self)

    def _install(self) -> None:
        """Looks at the state once, so that what cannot be saved is refused now, and makes room for it."""
        flat = together(self._group, "looking at the state", lambda: flatten(self._state))
        self._fence.install(flat.optimizers.values())
        self._to_warm: int | None = _estimate(flat.leaves, self._group.size)
        if self._session.settings.peers is None:
            self._warm()

    def _warm(self) -> None:
        """Makes the slots in the background. With peers not before `restore` has looked at those of the job before."""
        if self._to_warm is not None:
            self._session.holdings.arena.warm(self._to_warm)
            self._to_warm = None

    # Restoring

    def restore(self, *, strict: bool = True, device: str | torch.device | None = None) -> LoadReport:
        """Fills the state from the newest step that is whole, in memory or in the store; step 0 where there is none.

        Collective. What is damaged is skipped, loudly, on all ranks together, and the next is taken: another copy, the
        store, the step before. With peers, the restored state is kept in memory, and persisted where the store does
        not have it, at once. Comes before the first step: to go back, close the Checkpointer and make another one.
        `device`: see `ckptlib.load`.
        """
        self._check_open()
        if self._beat.started:  # what was agreed for the next step would be met by another one
            raise ValueError("restore comes before the first after_step; to go back, make another Checkpointer")
        report, self._generators = restore(self._session, self._state, strict, device)
        self._restored = report.step
        if self._group.rank == 0:
            log.info("restore: %s", report)
        if self._session.settings.peers is not None:
            self._session.holdings.arena.reclaim(but=report.save)
            self._warm()
            if report.save is not None:
                self._keep(report)
        return report

    def _keep(self, report: LoadReport) -> None:
        """Redundancy is down, and what memory alone had is in one process only; collective.

        No room for it, on all ranks alike, is no reason not to go on from what was restored.
        """
        try:
            pending = self._session.save(self._state, report.step, persist=not report.committed, spare=False)
        except NoRoom as error:
            log.error("step %d was restored, and is not kept in memory: %s", report.step, error)
        else:
            self._last = pending if pending.persists else None

    def refuse_going_back(self, url: str, save: SaveId, state: Mapping[str, object]) -> None:
        """See `checkpoint.Keeper`."""
        session = self._session
        if url != session.settings.url or not session.lineage.began:
            return
        if not Filled(Parts(state, ask=False)).all_of(Parts(self._state, ask=False)):
            return
        if save != SaveId(session.newest_step, session.generation):
            raise StateError(
                f"step {save.step} was to be loaded into the state of a Checkpointer that has saved since: what it "
                "saves next would seem to follow from that. To go back, close it, load, and make another one; to look "
                "at the step, load it into other objects"
            )

    def note_load(self, url: str, loads: Loads) -> None:
        """See `checkpoint.Keeper`."""
        into = loads.into(Parts(self._state, ask=False)) if url == self._session.settings.url else None
        if into is not None and not self._session.lineage.began:
            self._session.lineage.resumed_from = into

    # The loop

    def loop(self, start: int, total: int) -> Iterator[int]:
        """Yields the steps from `start` up to `total`, and calls `after_step` behind each body.

        The random generators are put back as the first body begins, whatever was drawn since `restore`. The state after
        the last step is saved. Ends early, after a last save, when a rank is told to stop: by SIGTERM, unless the
        program had a handler of its own for it before the Checkpointer was made.
        """
        if self._generators is not None:
            self._generators.restore()
            self._generators = None
        self._final = total
        for step in range(start, total):
            yield step
            self.after_step(step + 1)
            if self._stopping:
                return

    def after_step(self, step: int, metrics: Mapping[str, object] | None = None) -> None:
        """Says that `step` steps are done; saves when all ranks agreed that it is time.

        Call it on every rank, after optimizer.step(), with steps that follow one another; what is due while no slot is
        free is saved a few steps later, and what is due at the end of a loop of another shape than `loop` may be left
        out: ask `save` of it. Raises SaveFailed after several background saves failed in a row, Superseded when a newer
        job has taken the root over, on all ranks at the same step.
        """
        self._check_open()
        step = checked_step(step)
        if not self._beat.started:
            self._warm()
            self._say(step)
        word = self._beat.agreed(step)
        self._session.conclude(self._poll, self._beat.votes)
        self._check_counted(step)
        self._session.outcomes.poll()
        self._note_torn()
        compare = self._note_differing() or bool(word.agree)
        self._raise_agreed(word)
        self._stopping = bool(word.stop)
        if self._stopping and self._group.rank == 0:
            log.warning("told to stop: step %d is the last, and is saved", step)
        holdings = self._session.holdings
        holdings.note_all(-word.minus_held, word.held_since, -word.minus_settled)
        holdings.mend_link(self._group, bool(word.link_failed), not word.not_calm)
        last = bool(word.stop) or step == self._final
        if last:
            self._session.await_room()
        taken = None
        if last or ((word.due or word.snap) and word.needs_held <= holdings.held_by_all):
            # a last one is compared before it is taken: no other could be, should it turn out to differ
            compare = compare or last
            taken = self._save(step, metrics, word, persist=bool(last or word.due), compare=compare)
        elif word.due or word.snap:
            holdings.make_room()
        try:
            if not self._stopping:
                self._say(step + 1)
        finally:
            if taken is not None:
                taken.staging.go()
        if last:  # no step of an optimizer follows, so nothing would wait at the fence
            self._fence.wait()
        self._fence.forget()

    def save(self, step: int, metrics: Mapping[str, object] | None = None) -> Pending:
        """Saves the state after `step` steps now, whatever the policy says. Collective; waits for a slot only.

        Raises, on all ranks, UnsupportedState, NoRoom, Superseded; SaveFailed when a rank could not save this step.
        """
        self._check_open()
        known = self._last is not None and step == self._last.step
        some, not_all = self._group.max([int(known), int(not known)])
        if some and not_all:  # a rank without it would go into another save alone
            raise SaveFailed(f"step {step} could not be saved on some rank, and will never be listed; save a later one")
        if self._last is None or not known:
            self._session.await_room()
            trained = self._beat.started  # by after_step: an iteration has been
            self._last = self._session.save(self._state, step, metrics=metrics, spare=trained)
        return self._last

    def _check_open(self) -> None:
        if self._session.closed:
            raise ValueError(f"this Checkpointer of {self._session.store.url} is closed; make another one")
        self._session.owner.check()

    def _check_counted(self, step: int) -> None:
        """All ranks have agreed on the step, so all raise."""
        if step == self._restored:
            raise ValueError(
                f"after_step({step}): {step} steps were done when the state was restored; behind the body of "
                "`step`, call after_step(step + 1)"
            )
        self._restored = None

    def _say(self, step: int) -> None:
        session, peers, holdings = self._session, self._session.settings.peers, self._session.holdings
        self._owed = self._owed or self._policy.due(step) or step == self._final
        self._owed_in_memory = self._owed_in_memory or (peers is not None and step % peers.every == 0)
        word = Word(
            step=step,
            minus_step=-step,
            due=int(self._owed),
            snap=int(self._owed_in_memory),
            inline=int(self._wants_inline),
            agree=int(session.planner.must_compare),
            stop=int(self._stop.wanted),
            needs_held=holdings.needs_held(),
            failures=max(session.outcomes.failures, self._local_failures),
            superseded=int(session.outcomes.superseded is not None),
            link_failed=int(holdings.link_failed),
            not_calm=int(not holdings.calm),
            minus_held=-holdings.own.newest,
            held_since=holdings.own.since,
            minus_settled=-holdings.own.settled,
        )
        self._poll = session.ballots.poll()  # after `own` was asked: what is held has been voted upon
        self._beat.start(word, self._poll.votes)

    def _raise_agreed(self, word: Word) -> None:
        if word.superseded:
            raise self._session.outcomes.superseded or Superseded(
                f"{self._session.store.url}: a newer generation has begun; this job may no longer save"
            )
        if word.failures >= MAX_FAILURES:
            last = self._local_error or (self._last and self._last.error)
            raise SaveFailed(
                f"{word.failures} saves in a row failed, on some rank; the last committed step is untouched. Last "
                f"error on this rank: {last or 'none'}"
            )

    def _save(
        self, step: int, metrics: Mapping[str, object] | None, word: Word, persist: bool, compare: bool
    ) -> Pending | None:
        """What was begun, and is to `go` on; None where there is nothing to save, or it failed."""
        self._owed = self._owed and not persist
        self._owed_in_memory = False
        if self._last is not None and step == self._last.step:
            return None
        inline = bool(word.inline) or self._wants_inline
        self._wants_inline = False
        try:
            pending = self._session.save(
                self._state,
                step,
                metrics=metrics,
                overlap=(lambda leaf: False) if inline else self._earned,
                compare=compare,
                persist=persist,
                go=False,
            )
        except ReplicasDiffer as error:  # on all ranks alike: the next save compares, too
            self._owed, self._owed_in_memory = self._owed or persist, True
            self._local_failures += 1
            self._local_error = error
            log.error("step %d is not saved: %s", step, error)
            return None
        except StateChanged as error:
            self._owed, self._owed_in_memory = self._owed or persist, True
            log.warning("step %d is not saved, the one after it is: %s", step, error)
            return None
        except (StateError, AgreementFailed):
            raise
        except CkptError as error:
            if persist:
                self._local_failures += 1
                self._local_error = error
                told = isinstance(error, SaveFailed)  # which says so itself
                log.error("%s", error if told else f"step {step} could not be saved: {error}")
            elif not self._unkept:
                self._unkept = True
                log.error("step %d is not kept in memory; said once, until one is again: %s", step, error)
            return None
        self._unkept = False
        if persist:
            self._local_failures, self._local_error = 0, None
            self._last = pending
        self._fence.guard(pending.staging)
        return pending

    def _earned(self, leaf: Leaf) -> bool:
        """Whether the leaf's only writer is an optimizer that was seen to wait at the fence."""
        return leaf.owner is not None and self._fence.fired(leaf.owner)

    def _note_torn(self) -> None:
        """A torn snapshot is owed once more, without overlap."""
        holdings = self._session.holdings
        torn, holdings.torn = holdings.torn, None
        if torn is None or torn.staging is None:
            return
        log.warning("%s; another one is taken as soon as can be, without overlap", torn.staging.error)
        self._wants_inline = self._owed_in_memory = True
        if torn.persists:
            self._owed = True
        if self._last is not None and self._last.staging is torn.staging:
            self._last = None

    def _note_differing(self) -> bool:
        """Whether a snapshot was found to differ between ranks; it is owed once more, and compared before."""
        differing, self._session.differing = self._session.differing, []
        for ballot in differing:
            self._owed_in_memory = True
            self._owed = self._owed or ballot.persists
            if self._last is not None and self._last.step == ballot.step:
                self._last = None
        return bool(differing)

    @contextmanager
    def updating(self) -> Iterator[None]:
        """Waits for the copy that may be under way: for a body that writes to the state outside of optimizer.step().

        EMA swaps, in-place clipping of weights between after_step and the next optimizer.step(), optimizers whose step
        is not torch's.
        """
        self._fence.wait()
        yield

    def drain(self) -> None:
        """Waits until nothing of the state is being copied, on devices too: before a CUDA graph is captured.

        What a graph replays is saved without overlap from then on, since a replay waits for no copy.
        """
        self._fence.drain()

    @property
    def stopping(self) -> bool:
        """Whether all ranks agreed to stop; for loops of another shape than `loop`."""
        return self._stopping

    @property
    def pending(self) -> Pending | None:
        """The newest save; None before the first."""
        return self._last

    @property
    def coverage(self) -> Coverage | None:
        """What the memory of the job's hosts protects just now; None without peers."""
        return self._session.holdings.coverage

    @property
    def fence_waited_s(self) -> float:
        """Seconds that training has waited at the fence, all in all."""
        return self._fence.waited_s

    def close(self, timeout: timedelta = CLOSE_TIMEOUT) -> None:
        """Waits until the last save is committed. Raises SaveFailed when it never will be, WaitTimeout."""
        try:
            if self._last is not None and self._session.owner.here:
                self._last.wait_committed(timeout.total_seconds())
        finally:
            self._let_go(clean=True, timeout=timeout)

    def _let_go(self, clean: bool, timeout: timedelta) -> None:
        self._stop.remove()
        self._fence.remove()
        keepers.discard(self)
        if self._session.owner.here:
            self._beat.forget()
            loads_of(self._session.settings.url, self._session.over)
        self._session.close(timeout, clean)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if error is None:
            self.close()
        else:  # nothing is waited for: the writer has the slot, and finishes alone
            self._let_go(clean=False, timeout=timedelta(0))


def _estimate(leaves: list[Leaf], num_ranks: int) -> int:
    """Bytes of this rank's snapshot: what is there, and two fp32 moments for what an optimizer has yet to make."""
    nbytes = 0
    for leaf in leaves:
        if leaf.tied is not None:
            continue
        local = sum(tensor.nbytes for _, tensor in leaf.pieces)
        moments = sum(tensor.numel() for _, tensor in leaf.pieces) * 8
        is_param = leaf.owner is not None and any(t.requires_grad for _, t in leaf.pieces)
        share = 1 if len(leaf.pieces) == 0 or leaf.pieces[0][0].shape != leaf.shape else num_ranks
        nbytes += (local + (moments if is_param else 0)) // share
    return nbytes + nbytes // 16 + (1 << 20)
