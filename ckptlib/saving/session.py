"""One process's hold on one root: its group, its generation, its slots and its writer.

`ckptlib.save` and the Checkpointer both stand on this. Main thread only.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Mapping, Sequence
from datetime import timedelta
from functools import partial
from operator import attrgetter

import torch.distributed as dist

from ckptlib.catalog.catalog import Catalog
from ckptlib.errors import CkptError, ReplicasDiffer, SaveFailed, StateChanged, WaitTimeout, describe
from ckptlib.format import keys, values
from ckptlib.format.keys import SaveId
from ckptlib.format.table import Table
from ckptlib.peers.replicator import Replicator
from ckptlib.policy.peers import DEVICE
from ckptlib.ranks.group import Group, group_of, group_or_world, together
from ckptlib.saving.agreement import Row
from ckptlib.saving.ballots import Ballot, Ballots, Poll
from ckptlib.saving.forks import Owner, check_root
from ckptlib.saving.lineage import Lineage
from ckptlib.saving.outcome import Outcomes
from ckptlib.saving.pending import Pending
from ckptlib.saving.planner import Overlap, Plan, Planner
from ckptlib.saving.settings import Settings
from ckptlib.saving.snapshots import Holdings, agree_placement
from ckptlib.slots.slot import Slot, SlotHeader, check_platform
from ckptlib.staging.arena import Arena
from ckptlib.staging.copies import Source
from ckptlib.staging.stager import Content, Stager, Staging
from ckptlib.state.flatten import Flat, Memo, flatten
from ckptlib.state.leaf import Leaf, PerRank
from ckptlib.state.rng import RngState
from ckptlib.stores import open_store
from ckptlib.stores.probe import probe
from ckptlib.writer.client import Writer

log = logging.getLogger(__name__)

RNG = "@rng"
"""Where the random generators are kept, beside the user's own names."""

WHOLE_EVERY = 20
"""Every so many saves, what several ranks hold is digested whole, also what an optimizer owns."""

NUM_SLOTS = 2
"""One to be written to the store while the next snapshot is taken."""

NUM_SLOTS_WITH_PEERS = 3
"""At every step: one that all ranks hold, one on its way to them, one that is begun. See `Holdings.make_room`."""


class Session:
    """Opened by all ranks together; closed by each."""

    def __init__(self, settings: Settings, over: dist.ProcessGroup | None, kind: Callable[[], str] = str) -> None:
        """Collective. Raises, on all ranks, what any of them finds wrong with the store, or what `kind` raises.

        `kind`: names what this rank holds of the state; see `kind_of`. Asked for where there are peers.
        """
        check_platform()
        check_root(settings.url)
        self.settings = settings
        self.over = group_or_world(over)
        self.group: Group = group_of(over, settings.timeout)
        self.store = open_store(settings.url, settings.options)
        self.catalog = Catalog(self.store)
        together(self.group, f"opening {self.store.url}", lambda: probe(self.store))
        self.lineage = Lineage(
            self.catalog, self.group, settings.algorithm, settings.save_deadline.total_seconds(), settings.tags
        )
        self.root, self.generation = self.lineage.root, self.lineage.generation
        self.holdings, self.writer = self._hold(kind)
        peers = settings.peers
        self._stager = Stager(self._on_sealed, spare=peers is not None and peers.memory == DEVICE)
        self.holdings.may_begin = lambda: self._stager.ready
        self._memo = Memo()
        self._rng = RngState()
        self.planner = Planner(self.group)
        self.ballots = Ballots(self.group.size)
        self.differing: list[Ballot] = []
        """Snapshots that the ranks found to differ, until somebody has taken note of them."""
        self._num_saves = 0
        self._compared = 0
        """The last of them that the ranks compared before."""
        self._sequence = 0
        self._to_persist: set[SaveId] = set()
        """Snapshots that the writer is told of as soon as they are ready."""
        self.newest_step = -1
        """That was given to be persisted; -1 before there is one."""
        self.closed = False
        self.owner = Owner(settings.url)
        self.outcomes = Outcomes(self.group.rank, self.writer, self.holdings, self.planner, self.owner)

    def _hold(self, kind: Callable[[], str]) -> tuple[Holdings, Writer]:
        """Placement, slots, writer, and the link between peers. Collective."""
        peers = self.settings.peers
        placement = self.lineage.placement = None if peers is None else agree_placement(self.group, peers, kind)
        arena, writer = together(self.group, "making room for snapshots", self._make_room)
        replicator = None
        if peers is not None and placement is not None:
            replicator = Replicator(
                self.over, self.group.rank, placement, peers, lambda: self._make_arena(writer, pin=False)
            )

        def on_held(step: int) -> None:
            writer.held(SaveId(step, self.generation))

        return Holdings(self.root.id, arena, placement, replicator, on_held), writer

    def _make_room(self) -> tuple[Arena, Writer]:
        if self.settings.keep is not None:
            self.settings.keep.check(self.root.save_deadline_s)
        writer = Writer(self.settings.for_writer(self.group.rank, self.group.size, self.root.save_deadline_s))
        arena = self._make_arena(writer)
        if self.settings.peers is None:
            arena.reclaim()
        return arena, writer

    def _make_arena(self, writer: Writer, pin: bool = True) -> Arena:
        num_slots = NUM_SLOTS if self.settings.peers is None else NUM_SLOTS_WITH_PEERS
        arena = Arena(self.root.id, self.generation, self.settings.arena, num_slots, pin)
        arena.on_made, arena.on_gone = writer.add_slot, writer.forget_slot
        return arena

    # Saving, top to bottom

    def save(
        self,
        state: object,
        step: int,
        *,
        metrics: Mapping[str, object] | None = None,
        overlap: Overlap = lambda leaf: False,
        compare: bool = True,
        persist: bool = True,
        go: bool = True,
        spare: bool = True,
    ) -> Pending:
        """Takes a snapshot of `state`, and has it persisted unless it is for memory only. Collective when `compare`.

        `go`, `spare`: see `Stager.begin`.

        Where ranks do not compare what they hold before, they vote on it after. What this rank alone finds wrong is
        published as its failure then, and raised as SaveFailed; the next save compares.

        The caller knows, of all ranks, that there is a slot: from what they say in the beat, or from `await_room`.
        """
        self.owner.check()
        step = self._checked_step(step)
        compare = compare or not self.planner.agreed
        self._num_saves += 1  # whatever becomes of it: ranks that count differently would not compare together
        save = SaveId(step, self.generation)
        try:
            flat, encoded, plan, slot = self._prepare(state, metrics or {}, step, compare)
        except CkptError as error:
            if compare:
                raise
            if persist:
                self.writer.void(save, describe(error))
            self.holdings.begin(save, self._num_saves, None, persist)
            self.ballots.begin(Ballot(step, self._num_saves, persist, None, None))
            self.planner.must_compare = True
            if isinstance(error, StateChanged):
                raise
            raise SaveFailed(f"step {step} could not be saved on rank {self.group.rank}: {error}") from error
        if compare:
            self._compared = self._num_saves
        content = Content(
            header=SlotHeader(
                self.root.id,
                save,
                self.group.rank,
                self.group.size,
                self._num_saves,
                self._next_sequence(),
                plan.body_nbytes,
                {},
            ),
            layout=plan.layout.encoded,
            table=plan.table,
            values=flat.values,
            metrics=encoded,
            created=time.time(),
            algorithm=self.root.algorithm,
        )
        if persist:
            self.writer.expect(save)
            self._to_persist.add(save)
            self.newest_step = step
        sources = self.planner.sources(flat.leaves, plan, overlap)
        twins = self.holdings.twins(save, self._num_saves, partial(self._find_alike, flat.leaves, plan, overlap))
        reading = None
        if not compare and self.group.size > 1:
            digests = self.planner.digests(flat.leaves, plan, overlap)
            reading = digests.begin(self._num_saves, whole=self._num_saves % WHOLE_EVERY == 0)
        staging = self._stager.begin(slot, content, sources, twins, go, spare, reading)
        if not compare:
            self.ballots.begin(Ballot(step, self._num_saves, persist, staging, reading))
        if any(map(attrgetter("lent"), flat.leaves)):
            self.planner.let_go()
        pending = Pending(self.outcomes, self.group, save, staging, persist, self.root.save_deadline_s)
        self.holdings.begin(save, self._num_saves, staging, persist, twins)
        return pending

    def _find_alike(
        self, leaves: list[Leaf], plan: Plan, overlap: Overlap, rank: int, table: Table
    ) -> tuple[list[Source], tuple[int, ...]] | None:
        """See `FindAlike`."""
        alike = self.planner.alike(rank, table, plan)
        if alike is None:
            return None
        return self.planner.sources_alike(rank, alike, leaves, overlap), alike.offsets

    def _prepare(
        self, state: object, metrics: Mapping[str, object], step: int, compare: bool
    ) -> tuple[Flat, dict[str, values.Json], Plan, Slot]:
        """Everything that can fail, before anything is ordered; where ranks compare, it fails on all or on none."""

        def look() -> tuple[Flat, dict[str, values.Json], dict[str, Row]]:
            if self.outcomes.superseded is not None:
                raise self.outcomes.superseded
            self.lineage.begin(step)
            encoded = {k: values.encode(v, f"metrics[{k}]") for k, v in metrics.items()}
            flat = flatten({**_as_mapping(state), RNG: PerRank(self._rng)}, self._memo)
            return flat, encoded, self.planner.rows(flat) if compare else {}

        def room(plan: Plan) -> Slot:
            return self.holdings.take_slot(plan.body_nbytes)

        if not compare:
            flat, encoded, _ = look()
            plan = self.planner.plan(flat)
            return flat, encoded, plan, room(plan)
        flat, encoded, rows = together(self.group, f"saving step {step}", look)
        plan = self.planner.agree(flat, rows)
        return flat, encoded, plan, together(self.group, f"making room for step {step}", lambda: room(plan))

    def _checked_step(self, step: int) -> int:
        step = keys.checked_step(step)
        if step <= self.newest_step:
            raise ValueError(
                f"step {step} was saved already by this generation ({self.generation}), or comes before step "
                f"{self.newest_step}, which was; steps ascend. To go back, load the older step with ckptlib.load, then "
                "go on with ckptlib.save or a new Checkpointer"
            )
        return step

    def _next_sequence(self) -> int:
        self._sequence += 2
        return self._sequence

    def _on_sealed(self, staging: Staging) -> None:
        """From the staging thread."""
        save = staging.content.header.save
        staging.slot.unlock()
        if save not in self._to_persist:
            return
        self._to_persist.discard(save)
        if staging.error is None:
            self.writer.persist(save, staging.slot.path)
        else:
            self.writer.void(save, str(staging.error))

    # What became of it

    def conclude(self, poll: Poll, sums: Sequence[int]) -> None:
        """Acts upon what all ranks found of snapshots; on all of them at the same step."""
        for verdict in self.ballots.conclude(poll, sums):
            ballot = verdict.ballot
            if verdict.alike and ballot.reading is not None:
                self.planner.note_moved(ballot.reading.moved)
            if verdict.differs:
                self._void(ballot)

    def _void(self, ballot: Ballot) -> None:
        """The writers may put their parts still; nobody commits these."""
        self.holdings.void(ballot.step)
        if ballot.number > self._compared:  # else a later one is there already
            self.planner.must_compare = True
            self.differing.append(ballot)
        error = ReplicasDiffer(
            f"step {ballot.step} is not kept: what several ranks hold, and one of them writes for all, is not the same "
            "on all of them"
        )
        untold = self.outcomes.forget(SaveId(ballot.step, self.generation), error)
        if self.group.rank == 0 and (untold or not ballot.persists):  # else the committer has told it
            log.warning("%s; the next save compares all of it, and tells what it is", error)

    def await_room(self) -> None:
        """Returns when every rank has a slot for another snapshot. Collective.

        Raises WaitTimeout after the deadline of a save: longer than ranks wait for one another in a collective.
        """
        deadline = time.monotonic() + self.root.save_deadline_s
        lacking = True
        while lacking:
            lacks = together(self.group, "waiting for a slot", lambda: self._lacks_room(deadline))
            own = self.holdings.own
            found = self.group.max([int(lacks), -own.newest, own.since, -own.settled])
            lacking = bool(found[0])
            poll = self.ballots.poll()
            if poll.votes:
                self.conclude(poll, self.group.start_sum(poll.votes)())
            self.holdings.note_all(-found[1], found[2], -found[3])

    def _lacks_room(self, deadline: float) -> bool:
        """Whether there is no slot after a while."""
        patience = time.monotonic() + self.group.patience_s
        while self.holdings.settling or self.holdings.needs_held() > self.holdings.own.newest:
            now = time.monotonic()
            if now > deadline:
                raise WaitTimeout(
                    f"no slot was free within {self.root.save_deadline_s:.0f} s: the store is slower than the saves"
                )
            if now > patience:
                return True
            self.outcomes.poll(0.02)
        return False

    def close(self, timeout: timedelta, clean: bool) -> None:
        """Lets go. `clean`: the writer finishes what it has and the slots go; else it finishes alone.

        A forked child has nothing to let go of: all of it is its parent's.
        """
        self.closed = True
        if not self.owner.here:
            return
        self.owner.let_go()
        self._stager.close()
        self.outcomes.poll()
        try:
            if clean:
                self.outcomes.close(timeout)
                self.holdings.arena.reclaim()  # a job that came to its end needs nothing of the one before
            else:
                self.writer.leave()
        finally:
            self.holdings.close(clean)
            self.store.close()
            self.group.close()


def _as_mapping(state: object) -> Mapping[object, object]:
    if isinstance(state, Mapping):
        if RNG in state:
            raise ValueError(f"{RNG!r} is ckptlib's own name; call that entry of the state something else")
        return state
    raise TypeError(
        f"the state is a dict of what is to be saved, such as {{'model': model, 'optim': optim}}; got "
        f"{type(state).__name__}"
    )
