"""One process's hold on one root: its group, its generation, its slots and its writer.

`ckptlib.save` and the Checkpointer both stand on this. Main thread only.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from datetime import timedelta

import torch
import torch.distributed as dist

from ckptlib.catalog.catalog import Catalog
from ckptlib.catalog.local_disk import open_disk
from ckptlib.catalog.no_step import refuse_new
from ckptlib.errors import SaveFailed, describe
from ckptlib.events import Event
from ckptlib.format import keys, values
from ckptlib.format.keys import SaveId
from ckptlib.format.table import Table
from ckptlib.policy.peers import DEVICE
from ckptlib.ranks.group import Group, SoloGroup
from ckptlib.ranks.meeting import group_of, group_or_world, notices_over
from ckptlib.ranks.together import together
from ckptlib.saving.bounded_store import BoundedStore
from ckptlib.saving.forks import Owner, check_root
from ckptlib.saving.lineage import Lineage
from ckptlib.saving.listener import Listener
from ckptlib.saving.memory import open_memory
from ckptlib.saving.news import News
from ckptlib.saving.outcome import Outcomes
from ckptlib.saving.placement import agree_placement
from ckptlib.saving.planner import Plan, Planner
from ckptlib.saving.run_record import recorded_tags, run_record
from ckptlib.saving.settings import Settings
from ckptlib.saving.sources import Overlap
from ckptlib.saving.stdio import fill_stdio
from ckptlib.saving.step_metrics import encode_metrics
from ckptlib.saving.stopwatch import Stopwatch
from ckptlib.saving.store_state import StoreState
from ckptlib.saving.tier import TierState
from ckptlib.saving.verdicts import Verdicts
from ckptlib.saving.whole_state import whole_state
from ckptlib.slots.header import SlotHeader
from ckptlib.slots.host import check_platform
from ckptlib.staging.arena import searched
from ckptlib.staging.pair import CopySource
from ckptlib.staging.replica_digests import Reading
from ckptlib.staging.stager import CopyJob, Stager, Staging
from ckptlib.state.collector import Flat
from ckptlib.state.flatten import NO_OWNERS, flatten
from ckptlib.state.leaf import Leaf, PerRank
from ckptlib.state.memo import Memo
from ckptlib.state.rng import LoadedRng, RngState
from ckptlib.stores import open_store
from ckptlib.stores.probe import probe

WHOLE_EVERY = 20
"""Once in this many saves, all replicated tensors are digested whole, those of optimizers too."""


_open: weakref.WeakSet[Session] = weakref.WeakSet()
"""This process's open sessions. One that is dropped without `close` leaves its writer as a killed process does."""


def not_closed(url: str) -> list[Session]:
    """Returns the open sessions with which this process saves to a root."""
    return [session for session in _open if session.settings.url == url and not session.closed]


class Session:
    """One process's hold on one root. All ranks open it together; each closes its own."""

    def __init__(
        self,
        settings: Settings,
        over: dist.ProcessGroup | None,
        kind: Callable[[], str] = str,
        on_event: Callable[[Event], object] | None = None,
        alone: bool = False,
    ) -> None:
        """Opens the session. Collective. Raises on all ranks if one finds something wrong with the store, or `kind`
        raises.

        `kind`: describes the boxes that this rank holds; see `kind_of`. Called only if there are peers. `on_event`: of
        this rank alone; see `listener`. `alone`: this process is the whole job, whatever torch.distributed knows of.
        """
        check_platform()
        check_root(settings.url)
        fill_stdio()
        self.stopwatch = Stopwatch()
        self.settings = settings
        self.over = None if alone else group_or_world(over)
        self.group: Group = SoloGroup() if alone else group_of(over, settings.timeout)
        with ExitStack() as opened:  # a caller that catches the error may go on, and open another session
            opened.callback(self.group.close)
            opened.callback(self.stopwatch.let_go)
            self.store = BoundedStore(open_store(settings.url, settings.options), settings.timeout.total_seconds() / 2)
            opened.callback(self.store.close)
            self._open_root(kind)
            self.snapshots, self.writer, self.link = open_memory(
                settings, self.group, self.over, self.lineage, self.stopwatch
            )
            opened.callback(self.snapshots.close, clean=False)
            opened.callback(self.writer.leave)  # it has no order yet, so nothing is lost with it
            self._assemble(on_event)
            opened.callback(self.stager.close)
            together(self.group, "starting threads", self._start_threads)
            _open.add(self)
            opened.pop_all()

    def _open_root(self, kind: Callable[[], str]) -> None:
        """Opens what needs the store alone. Collective."""
        settings = self.settings
        self.catalog = Catalog(self.store)
        peers, local = settings.peers, settings.local
        replicas = None if peers is None else (peers.copies, peers.link)
        if not self.group.same(repr((settings.must_resume, local is None, replicas)).encode()):
            raise ValueError(
                f"{self.store.url}: must_resume= or local= was given on some ranks only, or peers=, its copies= or its "
                "link= are not the same on all ranks; every rank must give them alike, or none"
            )

        def look() -> None:  # one dry run for all ranks; each reads the root's document after it
            if self.group.rank == 0:
                if settings.must_resume:
                    refuse_new(self.catalog)
                probe(self.store, must_delete=False)

        together(self.group, f"opening {self.store.url}", look)
        self.lineage = Lineage(
            self.catalog,
            self.group,
            settings.algorithm,
            settings.save_deadline.total_seconds(),
            recorded_tags(settings.tags) if self.group.rank == 0 else {},
            run_record(settings.config, settings.record_code) if self.group.rank == 0 else {},
            searched(settings.arena),
            None if settings.resumable is None else settings.resumable.generation,
            None if local is None else local.path,
        )
        self.root, self.generation = self.lineage.root, self.lineage.generation
        if self.group.rank == 0:
            settings.warn_of_kept(self.root, self.store.url)
        self.lineage.best = None if settings.keep is None else settings.keep.rule
        if local is not None:
            seen = self.store if self.group.rank == 0 else None
            together(self.group, f"opening {local.path}", lambda: open_disk(str(local.path), self.root, seen))
        self.lineage.at_once = local is not None
        self.lineage.placement = None if peers is None else agree_placement(self.group, peers, kind)

    def _assemble(self, on_event: Callable[[Event], object] | None) -> None:
        """Makes what needs the slots and the writer. Collective."""
        settings, peers, local = self.settings, self.settings.peers, self.settings.local
        self.stager = Stager(self._on_sealed, self._on_begun, spare=peers is not None and peers.memory == DEVICE)
        self.snapshots.may_begin = lambda: self.stager.ready
        self.listener = Listener(on_event)
        """Takes events at any time, and delivers them where training can wait."""
        self.snapshots.tell = self.listener.tell
        self.memo = Memo()
        self._rng = RngState()
        self.planner = Planner(self.group)
        self._num_saves = 0
        self._sequence = 0
        """The sequence number of the last slot that was filled; 0 if there is none."""
        self._to_persist: dict[SaveId, tuple[bool, bool]] = {}
        """Snapshots that the writer is told of as soon as they are ready: whether each is drained then, and whether
        this rank puts its layout."""
        self.given_up: int | None = None
        """The last step whose save this rank gave up alone."""
        self.left_out: int | None = None
        """The last step whose snapshot the other ranks began without this one, whether it is saved or not."""
        self.newest_step = -1
        """The newest step that is to be persisted; -1 before there is one."""
        self.passed_step = -1
        """The last step that an earlier session of this process saved, and from which nobody went back; -1 if there is
        none."""
        self.follows: SaveId | None = None
        """The save that the first one comes after, if this process knows it: its last save, by a session that this one
        has replaced, or an earlier save that it went back to."""
        self.closed = False
        self.owner = Owner(settings.url)
        notices = notices_over(self.over, f"{self.root.id}/{self.generation}", settings.timeout)
        self.news = News(notices, self.group.rank, self.group.size, self.store.is_local)
        self.tier = TierState(local, self.generation, self.group.rank, self.writer)
        self.store_state = StoreState(self.writer, self.snapshots, self.lineage, self.group.size)
        self.outcomes = Outcomes(
            self.group.rank,
            self.writer,
            self.snapshots,
            self.store_state,
            self.owner,
            self.news,
            settings.max_outage.total_seconds(),
            self.tier,
            self.listener,
        )
        self.verdicts = Verdicts(self.group, self.generation, self.planner, self.snapshots, self.outcomes)

    def _start_threads(self) -> None:
        """Starts the threads before training begins, which later goes on even if the system has no more threads. Raises
        SaveFailed."""
        try:
            self.stager.start()
            if self.snapshots.replicator is not None:
                self.snapshots.replicator.start()
        except RuntimeError as error:
            raise SaveFailed(
                f"{error}: expected room for a thread that copies, and with peers for one for each rank that this one "
                "sends to or receives from. Raise the limit: ulimit -u, or pids.max of the container's cgroup"
            ) from error

    @property
    def place(self) -> SaveId | None:
        """The save that the next one comes after; None if this process has saved none, nor gone back to any."""
        return self.follows if self.newest_step < 0 else SaveId(self.newest_step, self.generation)

    @property
    def others(self) -> list[Session]:
        """Other sessions of the same root that this process has not closed."""
        return [other for other in _open if other is not self and other.root.id == self.root.id and not other.closed]

    # What a save asks for, in this order; see `checkpoint.save_step`

    def next_save(self, step: int) -> SaveId:
        """Returns the id of the next save. Raises ValueError if steps do not increase, TypeError for a value that is no
        step."""
        step = keys.checked_step(step)
        newest = max(self.newest_step, self.passed_step)
        if step <= newest:
            raise ValueError(
                f"step {step} does not come after step {newest}, which this process saved last; steps must increase. "
                "To go back, load the older step with ckptlib.load, then go on with ckptlib.save or a new Checkpointer"
            )
        return SaveId(step, self.generation)

    def count_save(self) -> int:
        """Returns the number of the save that begins now; the same on all ranks."""
        self._num_saves += 1
        return self._num_saves

    def look(
        self,
        state: object,
        metrics: Mapping[str, object] | None,
        owners: Mapping[int, torch.optim.Optimizer] = NO_OWNERS,
        generators: LoadedRng | None = None,
    ) -> tuple[Flat, dict[str, values.Json]]:
        """Returns the flattened state, with the random generators, and the encoded metrics.

        `generators`: the generator states that were restored; they are saved in place of what a `state_dict()` has
        drawn since. A flat state is saved as it is: an importer made it, and this process's generators have no part in
        it.
        """
        if self.store_state.superseded is not None:
            raise self.store_state.superseded
        encoded = encode_metrics(metrics or {})
        if isinstance(state, Flat):
            return state, encoded
        self._rng.restored = generators
        return flatten(whole_state(state, PerRank(self._rng)), self.memo, owners), encoded

    def is_exempt(self, step: int) -> bool:
        """Returns whether `Keep(exempt=)` says that the step stays for good. Only rank 0 asks."""
        keep = self.settings.keep
        return self.group.rank == 0 and keep is not None and keep.is_exempt(step)

    def give_up(self, save: SaveId, number: int, to_store: bool, drains: bool, reason: str) -> None:
        """Gives up a save on this rank alone: the others are told, and all compare before the next one."""
        self.left_out = save.step
        if to_store:
            self.given_up = save.step
            self.tier.expect(save.step)
            self.tier.note_failed(save.step)
            self.writer.void(save, reason, drains)
        self.snapshots.begin(save, number, None, to_store)
        self.verdicts.vote(save, number, to_store, None, None)
        self.planner.must_compare = True

    def forget_tensors(self) -> None:
        """Waits until no copy is in flight, on devices too, and drops every tensor of the state. Main thread. Raises
        WaitTimeout."""
        if self.owner.here:  # a forked child has none of the threads that copy
            with self.outcomes.turn:
                self.stager.fail_left()
            self.snapshots.wait_staged()
        self.stager.forget_tensors()
        self.planner.forget_tensors()
        self.memo = Memo()

    def header_of(self, save: SaveId, number: int, plan: Plan) -> SlotHeader:
        """Returns the header of a slot that is filled now, without documents."""
        self._sequence += 2
        rank, size = self.group.rank, self.group.size
        return SlotHeader(self.root.id, save, rank, size, number, self._sequence, plan.body_nbytes, {})

    def expect(self, save: SaveId, drains: bool, puts_layout: bool) -> None:
        """Has the writer persist this save as soon as it is sealed. `drains`: and drain it, with a local tier.
        `puts_layout`: and put its layout; else another rank does."""
        self.writer.expect(save, drains)
        self.tier.expect(save.step)
        self._to_persist[save] = drains, puts_layout
        self.newest_step = save.step

    def local_replicas(
        self, save: SaveId, number: int, leaves: list[Leaf], plan: Plan, overlap: Overlap
    ) -> list[CopyJob]:
        """Returns the copies of shards of other ranks' replicas that this rank has, too, and copies itself."""

        def find(rank: int, table: Table) -> tuple[list[CopySource], tuple[int, ...]] | None:
            alike = self.planner.alike(rank, table, plan)
            if alike is None:
                return None
            return self.planner.sources_alike(rank, alike, leaves, overlap), alike.offsets

        return self.snapshots.local_replicas(save, number, find)

    def read_shared(self, leaves: list[Leaf], plan: Plan, overlap: Overlap, number: int) -> Reading | None:
        """Starts digests of replicated shards, on which ranks vote after the snapshot; None for a single rank."""
        if self.group.size == 1:
            return None
        digests = self.planner.digests(leaves, plan, overlap)
        return digests.begin(number, whole=number % WHOLE_EVERY == 0)

    def _on_begun(self, staging: Staging) -> None:
        """Tells the writer of a snapshot that is about to be copied. From the staging thread."""
        save = staging.content.header.save
        if save in self._to_persist:
            self.writer.tell_expected(save)

    def _on_sealed(self, staging: Staging) -> None:
        """Hands a sealed snapshot to the writer, or tells it of a failed one. From the staging thread."""
        save = staging.content.header.save
        staging.slot.unlock()
        if save not in self._to_persist:
            return
        drains, puts_layout = self._to_persist.pop(save)
        if staging.error is None:
            self.writer.persist(save, staging.slot.path, drains, puts_layout)
        else:
            self.writer.void(save, describe(staging.error), drains)

    def close(self, timeout: timedelta, clean: bool) -> None:
        """Closes the session. `clean`: the writer finishes its saves, and the slots are removed; else it finishes
        alone.

        Does nothing in a forked child: everything belongs to the parent.
        """
        self.closed = True
        if not self.owner.here:
            return
        self.owner.let_go()
        self.stopwatch.close(clean)
        self.stager.close()
        self.planner.forget_tensors()  # the session lives until it is garbage collected; the model must not
        self.memo = Memo()
        try:
            self.outcomes.poll()
            if clean:
                self.outcomes.close(timeout)
                if self._sequence:  # else the slots of the job before may be all that there is of its last step
                    self.snapshots.arena.others.reclaim()
            else:
                self._leave_writer()
        except BaseException:  # the writer still reads the slots, and finishes alone
            clean = False
            self._leave_writer()
            raise
        finally:
            self.snapshots.close(clean)
            self.news.close()
            self.store.close()
            self.stopwatch.let_go()
            self.group.close()
            self.listener.deliver()

    def _leave_writer(self) -> None:
        """Leaves the writer to finish alone and remove the slots. A slot that it is not told of would stay."""
        try:
            self.snapshots.arena.await_made()
        finally:
            self.writer.leave()
