"""The Checkpointer: what a training loop holds.

Each rank says in one step what could differ between ranks, and all act upon it in the next (see `beat`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from datetime import timedelta
from pathlib import Path
from types import TracebackType
from typing import NoReturn

import torch
import torch.distributed as dist
from typing_extensions import Self, override

from ckptlib.errors import Preempted
from ckptlib.events import Event
from ckptlib.exporting.asked import Export, check_export
from ckptlib.format import gc_pause
from ckptlib.format.digests import XXH3
from ckptlib.format.keys import checked_step
from ckptlib.imports.beginning import Init, begins_from
from ckptlib.loading.report import LoadReport
from ckptlib.loading.selection import Only, Rename
from ckptlib.policy.codec import AUTO, Asked, CodecRules
from ckptlib.policy.keep import Keep
from ckptlib.policy.overhead import overhead_in
from ckptlib.policy.peers import Coverage, Peers
from ckptlib.policy.preemption import check_preempted
from ckptlib.policy.tier import KEEP_LAST, directory_of, tier_of
from ckptlib.policy.when import Policy, When, policy_of
from ckptlib.ranks.together import together
from ckptlib.recovery.restore import Scope
from ckptlib.recovery.resumption import Resumption
from ckptlib.saving.agreement import kind_of
from ckptlib.saving.attempts import Attempts
from ckptlib.saving.ending import CLOSE_TIMEOUT, Ending
from ckptlib.saving.estimate import estimate
from ckptlib.saving.exports import Exports
from ckptlib.saving.keeper import StateKeeper
from ckptlib.saving.listener import check_listener
from ckptlib.saving.pending import Pending
from ckptlib.saving.run_record import encode_config
from ckptlib.saving.session import Session
from ckptlib.saving.settings import MAX_OUTAGE, REFRESH, SAVE_DEADLINE, TIMEOUT, Settings
from ckptlib.saving.step_metrics import StepMetrics, check_metrics
from ckptlib.saving.turns import Turns
from ckptlib.saving.whole_state import check_held, first_look
from ckptlib.staging.fence import Fence
from ckptlib.steps import TrainingSteps
from ckptlib.stores import absolute


class Checkpointer:
    """Saves and restores one training job.

    url:             a path, or any URL that fsspec knows.
    state:           a dict of modules, optimizers, objects with state_dict() and load_state_dict(), tensors and plain
                     values, nested as you like. RNG state is always saved. `restore` overwrites plain values in place;
                     pass a copy of anything this run must keep, such as dict(vars(args)).
    every:           when to save: a number of steps, a timedelta, a function of the step, or a policy, such as
                     Overhead(at_most=0.035), which says what saves may cost. `|` combines policies.
    keep:            which steps to keep; None keeps all of them.
    peers:           also keep snapshots in memory, and replicas in the memory of other hosts. `restore` is fastest from
                     these. None: the store only.
    process_group:   the ranks that hold the state; default: the world.
    storage_options: passed to fsspec's filesystem.
    local:           a directory on a disk of each host: saves go there first, which frees their slots, and to the store
                     in the background. Committed still means the store. `restore` takes the newest of both.
    drain:           which saves go from local disks to the store: a policy such as Steps(5000); None: all of them. The
                     last one of a loop and those of `save` always do.
    local_keep:      how many steps stay on local disks, at least.
    drain_bandwidth: the most that each rank sends to the store, in bytes per second; None: as fast as it goes.
    codec:           "auto", "raw" or "planes", or a dict of these and of `Lossy` by pattern of tensor names. "auto"
                     stores tensors as they are on local disks, and compressed if the store is slower than that.
    refresh:         each save refers to earlier ones for what has not changed since; what is older than this is written
                     again, so that no step hangs on one old object for ever.
    arena:           the directory for snapshots in memory; default: /dev/shm, or a file if /dev/shm is too small.
    timeout:         how long ranks wait for one another.
    save_deadline:   a save that is not committed by then is given up. Fixed when the root is created.
    max_outage:      how long saves may fail while training goes on. All ranks raise when at least three in a row have
                     failed, and this time has passed from the first to the last of them. Three in a row that a rank
                     could not even take, as for want of memory, are enough, however short the time.
    algorithm:       "xxh3", or "blake3" for a store that others can write to. Fixed when the root is created.
    tags:            texts by name, recorded with this run: a git revision, a name.
    preempted:       asked in the background every few seconds; True on any rank is as good as SIGTERM on it.
    config:          recorded with this run: a dict of plain values, such as dict(vars(args)). What looks like a secret
                     is left out, with a warning. `ckptlib show` prints it.
    record_code:     record the command line and the program's git revision, too.
    init_from:       what a run begins from as long as it has no step of its own: another root's URL, or a checkpoint
                     that `ckptlib import` reads; `Init` says more. `restore` fills the state from it, and the run
                     begins at step 0; RNG state is not taken from it. A run that has a step never looks at it.
    init_only:       the names, path prefixes or patterns of the state that are filled so, such as "model".
    must_resume:     this run has steps: raises CheckpointNotFound if nobody has saved at the URL, and puts nothing
                     there, and so does `restore` if it finds no step. Else a wrong URL begins a new run.
    export:          files for other libraries, written as the run ends, and at steps of your choice: see `Export`.
                     Another process does it. No save depends on it; only `close` waits for it, within its timeout.
    on_event:        called with each of `ckptlib.events`: snapshots and saves that began, ended or failed, restores,
                     changes of the interval. The thread that trains calls it, as `after_step`, `save`, `restore`,
                     `close` and waits for a save end; no save depends on it, and the training waits for it. What it
                     raises is logged once and harms no save. Ranks are told at different steps, so it must not be
                     collective. Give it on the ranks that are to be told; rank 0 knows the most.

    Collective: every rank creates it, calls after_step with the same steps, and closes it. If any rank finds something
    wrong with the store, all ranks raise.
    """

    def __init__(
        self,
        url: str | Path,
        state: Mapping[str, object],
        *,
        every: When,
        keep: Keep | None = None,
        peers: Peers | None = None,
        process_group: dist.ProcessGroup | None = None,
        storage_options: Mapping[str, object] | None = None,
        local: str | Path | None = None,
        drain: Policy | None = None,
        local_keep: int = KEEP_LAST,
        drain_bandwidth: float | None = None,
        codec: Asked = AUTO,
        refresh: timedelta = REFRESH,
        arena: str | Path | None = None,
        timeout: timedelta = TIMEOUT,
        save_deadline: timedelta = SAVE_DEADLINE,
        max_outage: timedelta = MAX_OUTAGE,
        algorithm: str = XXH3,
        tags: Mapping[str, str] | None = None,
        preempted: Callable[[], bool] | None = None,
        config: Mapping[str, object] | None = None,
        record_code: bool = False,
        on_event: Callable[[Event], object] | None = None,
        init_from: str | Path | Init | None = None,
        init_only: Only = None,
        must_resume: bool = False,
        export: Export | None = None,
    ) -> None:
        settings = Settings(
            url=absolute(url),
            options=storage_options or {},
            timeout=timeout,
            save_deadline=save_deadline,
            max_outage=max_outage,
            algorithm=algorithm,
            arena=None if arena is None else directory_of("arena", arena),
            keep=keep,
            codec=CodecRules.of(codec),
            refresh=refresh,
            tags=tags or {},
            config=None if config is None else encode_config(config),
            record_code=record_code,
            peers=peers,
            local=tier_of(local, drain, local_keep, drain_bandwidth),
            must_resume=must_resume,
        )
        check_held(state)
        self._state = state
        policy = policy_of(every)
        overhead_in(policy)  # refuses two budgets before anything is opened
        check_preempted(preempted)
        check_listener(on_event)
        check_export(export)
        with ExitStack() as opened:  # a caller that catches an error here may create another one
            self._session = Session(settings, process_group, lambda: kind_of(first_look(self._state).leaves), on_event)
            opened.callback(self._session.close, timedelta(0), clean=False)
            beginning = begins_from(init_from, init_only, self._session)
            self._turns = Turns(self._session, policy, None if peers is None else peers.policy, preempted)
            opened.callback(self._turns.close)
            self._due = self._turns.due
            self._fence = Fence()
            opened.callback(self._fence.remove)
            metrics = StepMetrics(None if keep is None else keep.rule, 0 if keep is None else keep.last)
            self._attempts = Attempts(self._session, self._due)
            self._steps = TrainingSteps(self._session, state, self._turns, self._fence, self._attempts, metrics)
            self._exports = Exports(export, self._session)
            begin = None if beginning is None else beginning.load
            self._resumption = Resumption(self._session, state, self._turns, self._attempts, self._exports, begin)
            self._install()
            self._keeper = StateKeeper(self._session, state)
            self._ending = Ending(self._session, self._turns, self._fence, self._keeper, self._exports, self._attempts)
            self._keeper.begin()
            opened.pop_all()

    def _install(self) -> None:
        """Looks at the state once: refuses unsupported state before training begins; makes room for snapshots."""
        session = self._session
        with gc_pause.kept():
            flat = together(session.group, "looking at the state", lambda: first_look(self._state, session.memo))
        self._fence.install(flat.optimizers.values())
        self._resumption.install(estimate(flat.leaves, session.group.size))

    # Restoring

    def restore(
        self,
        *,
        step: int | str | None = None,
        strict: bool = True,
        only: Only = None,
        map: Rename = None,
        optional: str | Sequence[str] = (),
        device: str | torch.device | None = None,
    ) -> LoadReport:
        """Fills the state from the newest complete step, in memory, on local disks or in the store; step 0 for none.

        Collective. All ranks skip a damaged copy together, log why, and try the next: another copy, the store, the
        previous step. With peers, the restored state is kept in memory at once; with peers or a local tier, it is saved
        again if the store lacks it. Call it once, before the first step and the first save. To go back later, close the
        Checkpointer and create another one.

        `strict`, `only`, `map`, `optional`, `device`: see `ckptlib.load`. With `only`, each restart leaves the RNG
        state and the rest of the state as they are, and nothing is saved again.

        `step`: goes back to this step, a number or a name as `ckptlib ls --json` prints it. This abandons the later
        steps: whatever happens to this job, no restart comes back to them, in memory or on local disks either. They
        stay in the store until `ckptlib gc --abandoned`. Each start of a program with `step=` goes back again; `ckptlib
        rewind` does it once. Raises CheckpointNotFound, CorruptData, ObjectUnreadable or NewerFormat if the step cannot
        be restored; then nothing is abandoned.

        If there are steps, a run never begins anew. If none can be restored, raises CorruptData; ObjectUnreadable if
        some cannot be read; CheckpointNotFound if all lack objects; NewerFormat if a newer ckptlib wrote some, or has
        begun a run in the root.
        """
        self._check_open()
        report = self._resumption.restore(step, Scope(only, map, optional), strict, device, self._steps.has_saved)
        self._steps.restored = report.step
        return report

    def restore_random(self) -> None:
        """Puts the random generators back to where they were at the restored step; for loops that are not `loop`.

        Call it right before the first body, whatever was drawn since `restore`. Does nothing on a fresh run.
        """
        self._check_open()
        if self._turns.started:
            raise ValueError("call restore_random before the first after_step: steps drew from the generators since")
        self._resumption.put_back_random()

    # The loop

    def loop(self, start: int, total: int) -> Iterator[int]:
        """Yields the steps from `start` up to `total`, and calls `after_step` after each body.

        The RNG state is restored as the first body begins, as by `restore_random`. The state after the last step is
        always saved. When a rank receives SIGTERM or SIGUSR1, or `preempted` says so, all ranks save once more and the
        loop ends early, as does each later one, before its first body; a `with` block raises Preempted then, which ends
        the process with status 75. Handlers that the program installed before it created the Checkpointer stay.
        """
        self._check_open()
        if self._steps.stopping:  # since the loop before: a step of this loop would stand for bodies that never ran
            self._steps.preempted |= start < total
            return
        self._resumption.put_back_random()
        if not self._turns.started:
            self._keeper.warn_of_early_batches()
        self._due.final = total
        for step in range(start, total):
            yield step
            self.after_step(step + 1)
            if self._steps.stopping:
                return

    def log(self, metrics: Mapping[str, object]) -> None:
        """Notes metrics of the step that is under way: if it is saved, they are saved with it.

        For `loop`, which calls `after_step` itself. Metrics of a step that is not saved are dropped, so measure what
        `Keep(best=)` asks for at the steps that are saved. Rank 0's are recorded.
        """
        self._steps.metrics.note(metrics)

    def after_step(self, step: int, metrics: Mapping[str, object] | None = None) -> None:
        """Tells that `step` steps are done; saves when all ranks have agreed that a save is due.

        `metrics`: saved with the step; those of `log`, too. Rank 0's are recorded.

        Call it on every rank, after optimizer.step(), with consecutive steps. A save that falls due while no slot is
        free is taken a few steps later. If you do not use `loop`, leave yours when `stopping` is true, and call `save`
        for the last step. Raises SaveFailed when saves have failed as `max_outage` says, and Superseded when a newer
        job has taken over the root; all ranks raise at the same step. If the step before was saved as the last one,
        since the job was told to stop, it closes the Checkpointer and raises Preempted.
        """
        self._check_open()
        if self._steps.stopping:  # a loop that does not ask would go on, saving each step, until it is killed
            self._steps.preempted = True  # also where this follows the last step of a `loop`
            self.close()
            raise Preempted
        step = checked_step(step)
        if metrics is not None:
            check_metrics(metrics)
        try:
            if not self._turns.started:
                self._resumption.end()
            self._steps.done(step, metrics)
            self._exports.poll(self._attempts.last, step)
        finally:
            self._session.listener.deliver()

    def save(self, step: int, metrics: Mapping[str, object] | None = None) -> Pending:
        """Saves the state after `step` steps now, whatever the policy says. Collective; blocks until a slot is free.

        Returns the Pending of the last save if that was of this step. Raises UnsupportedState, NoRoom or Superseded on
        all ranks, AgreementFailed if their steps differ, SaveFailed if a rank could not save this step, WaitTimeout if
        no slot is free within 1.5 times `save_deadline`, and ValueError for a step below the last one saved.
        """
        self._check_open()
        step = checked_step(step)
        if metrics is not None:
            check_metrics(metrics)
        with self._turns.stop.busy():
            pending = self._steps.save(step, metrics)
        self._exports.poll(pending, step)
        self._session.listener.deliver()
        return pending

    def _check_open(self) -> None:
        if self._session.closed:
            raise ValueError(f"this Checkpointer of {self._session.store.url} is closed; create another one")
        self._session.owner.check()

    @contextmanager
    def updating(self) -> Iterator[None]:
        """Waits for an in-flight copy before the body writes to the state outside of optimizer.step().

        Use it for EMA swaps and for in-place clipping of weights between after_step and the next optimizer.step().
        """
        self._fence.wait()
        yield

    def drain(self) -> None:
        """Waits until nothing of the state is being copied, on devices too, and lets go of its tensors.

        Call it before you capture a CUDA graph. A replay runs no hook and waits for no copy, so the tensors it writes
        are saved without overlap from then on. And call it before you move the state off a device to have its memory:
        from one save to the next, what was copied is kept at hand, and with `memory="device"` a copy of it.
        """
        self._session.forget_tensors()  # first: a snapshot whose begin was interrupted fails there, and is waited for
        self._fence.drain()

    @property
    def stopping(self) -> bool:
        """Whether all ranks have agreed to stop, and saved the last step. `loop` ends by itself; leave any other."""
        return self._steps.stopping

    @property
    def pending(self) -> Pending | None:
        """The latest save; None before the first."""
        return self._attempts.last

    @property
    def coverage(self) -> Coverage | None:
        """How well the snapshots in the memory of the job's hosts protect it right now; None without peers."""
        return self._session.snapshots.coverage

    @property
    def interval(self) -> int | None:
        """Steps between saves that all ranks have agreed upon; None without Overhead, and before the first step."""
        return self._due.store.agreed

    @property
    def memory_interval(self) -> int | None:
        """Steps between snapshots of `Peers(every=Overhead(...))` that all ranks have agreed upon; else None."""
        return None if self._due.memory is None else self._due.memory.agreed

    @property
    def fence_waited_s(self) -> float:
        """Total seconds that training has waited at the fence."""
        return self._fence.waited_s

    def close(self, timeout: timedelta = CLOSE_TIMEOUT) -> None:
        """Waits until the last save is committed; after SIGTERM no longer than ranks wait for one another.

        Then waits until old steps are removed, after SIGTERM for a few seconds. If that takes longer, the writer goes
        on with it alone, and nothing is raised.

        Raises SaveFailed if the last save failed, or could not be taken; with `peers`, memory keeps its snapshots for
        the next start of the job then. Raises WaitTimeout after `timeout`. Then, or if Ctrl-C ends the wait, the writer
        goes on alone.
        """
        self._ending.close(timeout, self._steps.stop_timeout_s, self._steps.preempted)

    @override
    def __reduce__(self) -> NoReturn:
        raise TypeError("a Checkpointer cannot be copied, pickled or sent to a process; make one in each that saves")

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if error is None:
            self.close()
            if self._steps.preempted:
                raise Preempted
        else:
            self._ending.leave()
