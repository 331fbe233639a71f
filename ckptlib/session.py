"""One process's hold on one root: its group, its generation, its slots and its writer.

`ckptlib.save` and the Checkpointer both stand on this. Main thread only.
"""

from __future__ import annotations

import logging
import operator
import platform
import secrets
import socket
import time
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist

from ckptlib import __version__, keys, values
from ckptlib.arena import Arena
from ckptlib.box import Box
from ckptlib.catalog import Catalog, describe
from ckptlib.errors import CkptError, SaveFailed, Superseded, WaitTimeout
from ckptlib.group import Group, group_of, group_or_world, together
from ckptlib.held import NONE, Held
from ckptlib.keys import GenerationId, SaveId
from ckptlib.layout import Layout
from ckptlib.manifest import Generation, Root
from ckptlib.peer.peers import Coverage, Peers
from ckptlib.peer.replicate import Fate, Replicator, Round
from ckptlib.placement import Placement, place
from ckptlib.plan import assign, body_nbytes, lay_out, writes
from ckptlib.probe import probe
from ckptlib.replicas import Agreement, Row, agree, alone, entries_of, rows_of
from ckptlib.retention import Keep
from ckptlib.rng import RngState
from ckptlib.sections import same
from ckptlib.slot import Slot, SlotHeader
from ckptlib.stage import Content, Source, Stager, Staging, TornSnapshot
from ckptlib.state import Flat, Leaf, Memo, PerRank, flatten
from ckptlib.stores import open_store
from ckptlib.table import Table
from ckptlib.writer.client import Writer

log = logging.getLogger(__name__)

RNG = "@rng"
"""Where the random generators are kept, beside the user's own names."""

AGREE_EVERY = 20
"""Plain tensors are compared between ranks at the first save and at every so many."""

NUM_SLOTS = 2
"""One to be written to the store while the next snapshot is taken."""

NUM_SLOTS_WITH_PEERS = 3
"""At every step: one that all ranks hold, one on its way to them, one that is written."""

RECLAIM_EVERY_S = 1.0
"""How often a job looks whether the writers of the one before have let go of its slots."""

Overlap = Callable[[Leaf], bool]
"""Whether its only writer waits at the fence; asked once for all leaves of one owner."""


@dataclass(frozen=True)
class Settings:
    """What a session is opened with."""

    url: str
    options: Mapping[str, object]
    """For fsspec's filesystem."""
    timeout: timedelta
    """How long ranks wait for one another."""
    save_deadline: timedelta
    """After which a save that is not committed never will be; the root's own counts where there is one."""
    algorithm: str
    arena: Path | None
    keep: Keep | None
    tags: Mapping[str, str]
    peers: Peers | None
    """None: snapshots serve storage only."""


class Pending:
    """A snapshot under way, and the save that is made of it."""

    def __init__(self, session: Session, save: SaveId, staging: Staging, persists: bool) -> None:
        self.save = save
        self.persists = persists
        """Whether it goes to the store; else it is for memory only, and never committed."""
        self._session = session
        self._staging = staging
        self.committed = False
        """Whether the step is known to exist. On ranks other than 0 only after `wait_committed`."""
        self.error: Exception | None = None
        """Why it never will."""
        self.watched = False
        """Whether a rank that does not commit has asked what becomes of it."""

    @property
    def step(self) -> int:
        return self.save.step

    @property
    def group(self) -> Group:
        return self._session.group

    @property
    def patience_s(self) -> float:
        """See `Session.patience_s`."""
        return self._session.patience_s

    @property
    def staging(self) -> Staging:
        return self._staging

    def wait_staged(self, timeout: float | None = None) -> None:
        """Returns when the snapshot is whole in memory that outlives this process.

        Raises WaitTimeout after `timeout` seconds, or what made the snapshot fail.
        """
        self._staging.wait_sealed(timeout)

    def wait_committed(self, timeout: float | None = None) -> None:
        """Returns when the step exists and is durable. Any rank may ask alone.

        Raises SaveFailed when it never will; WaitTimeout after `timeout` seconds (default: the save's deadline).
        """
        self._session.wait_committed(self, timeout)


@dataclass(frozen=True, slots=True)
class _Begun:
    """A snapshot whose end is not known yet."""

    step: int
    pending: Pending | None
    """None: it failed on this rank before anything was copied."""
    fate: Fate | None
    """Of its replicas; None: there are to be none."""

    @property
    def settled(self) -> bool:
        return (self.pending is None or self.pending.staging.done) and (self.fate is None or self.fate.settled)

    @property
    def ready(self) -> bool:
        return self.pending is not None and self.pending.staging.error is None

    @property
    def held(self) -> bool:
        return self.ready and not (self.fate is not None and self.fate.failed)


@dataclass(frozen=True)
class _Plan:
    """What this rank stages, as long as the state's layout stays the same."""

    shape: tuple[tuple[str, str, tuple[int, ...], object], ...]
    """Of every leaf: what the plan depends upon."""
    layout: Layout
    table: Table
    order: tuple[tuple[int, int], ...]
    """Per shard of the table: the leaf and its piece."""
    body_nbytes: int
    """Of a slot."""


@dataclass(frozen=True)
class _Sources:
    """What a save copied, and what that depended upon."""

    plan: _Plan
    leaves: list[Leaf]
    late: Mapping[torch.optim.Optimizer | None, bool]
    """By owner: whether what it owns is copied behind the fence."""
    sources: list[Source]
    """In the order of the plan's table."""


class Session:
    """Opened by all ranks together; closed by each."""

    def __init__(self, settings: Settings, over: dist.ProcessGroup | None) -> None:
        """Collective. Raises, on all ranks, what any of them finds wrong with the store."""
        self.settings = settings
        self.over = group_or_world(over)
        self.group: Group = group_of(over, settings.timeout)
        self.store = open_store(settings.url, settings.options)
        self.catalog = Catalog(self.store)
        together(self.group, f"opening {self.store.url}", lambda: probe(self.store))
        document, generation = self._agree_on_root()
        self.root = document
        self.generation = generation
        self.resumed_from: SaveId | None = None
        self._began = False
        self.placement = self._place()
        self.arena, self.writer = together(self.group, "making room for snapshots", self._make_room)
        self.replicator = self._make_replicator()
        self._stager = Stager(self._on_sealed)
        self._memo = Memo()
        self._rng = RngState()
        self._agreement: Agreement | None = None
        self._plan: _Plan | None = None
        self._leaves: list[Leaf] = []
        """Those that the plan stood for last."""
        self._sources: _Sources | None = None
        self._num_saves = 0
        self._sequence = 0
        self.layout_changed = False
        """Whether the state changed since all ranks last agreed on it."""
        self._pending: dict[str, Pending] = {}
        self._in_use: dict[str, Slot] = {}
        self._unsettled: deque[_Begun] = deque()
        self._to_persist: set[SaveId] = set()
        """Snapshots that the writer is told of as soon as they are ready."""
        self.held = Held()
        self.held_by_all = NONE
        """The newest step that all ranks are known to hold."""
        self._settled_by_all = NONE
        self._reclaim_at: float | None = None
        """When slots of the job before are looked for again; None: not yet, or no more."""
        self.torn: Pending | None = None
        """The last snapshot that was found torn, until somebody has taken note of it."""
        self.failures = 0
        """Saves that failed in a row, as far as this rank knows."""
        self.superseded: Superseded | None = None
        self._steps_saved: set[int] = set()
        self.closed = False

    def _agree_on_root(self) -> tuple[Root, GenerationId]:
        s = self.settings

        def make() -> bytes:
            root = self.catalog.open_root(Root(secrets.token_hex(16), s.algorithm, s.save_deadline.total_seconds()))
            generation = self.catalog.next_generation()
            return root.encode() + str(generation).encode()

        made = together(self.group, "opening the root", lambda: make() if self.group.rank == 0 else None)
        data = self.group.broadcast(made)
        document, _, tail = data.rpartition(b"\n")
        number, _, nonce = tail.decode().partition("-")
        return Root.decode(document + b"\n", keys.ROOT), GenerationId(int(number), nonce)

    def _make_room(self) -> tuple[Arena, Writer]:
        if self.settings.keep is not None:
            self.settings.keep.check(self.root.save_deadline_s)
        writer = Writer(self._setup())
        arena = self._make_arena(writer)
        if self.settings.peers is None:
            arena.reclaim()
        return arena, writer

    def _make_arena(self, writer: Writer) -> Arena:
        num_slots = NUM_SLOTS if self.settings.peers is None else NUM_SLOTS_WITH_PEERS
        arena = Arena(self.root.id, self.generation, self.settings.arena, num_slots)
        arena.on_made, arena.on_gone = writer.add_slot, writer.forget_slot
        return arena

    def _place(self) -> Placement | None:
        peers = self.settings.peers
        if peers is None:
            return None
        domain = together(self.group, "looking for the failure domain", lambda: peers.domain_name)
        return place([name.decode() for name in self.group.gather(domain.encode())], peers.copies)

    def _make_replicator(self) -> Replicator | None:
        peers, placement = self.settings.peers, self.placement
        if peers is None or placement is None:
            return None

        def make_arena() -> Arena:
            return self._make_arena(self.writer)

        return Replicator(self.over, self.group.rank, placement, peers, make_arena)

    def _setup(self) -> dict[str, object]:
        s = self.settings
        return {
            "op": "setup",
            "url": s.url,
            "options": dict(s.options),
            "rank": self.group.rank,
            "world_size": self.group.size,
            "deadline_s": self.root.save_deadline_s,
            "keep": None if s.keep is None else s.keep.to_json(),
            "keep_slots_s": 0.0 if s.peers is None else s.peers.keep_for.total_seconds(),
        }

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
    ) -> Pending:
        """Takes a snapshot of `state`, and has it persisted unless it is for memory only. Collective when `compare`.

        Where ranks do not compare, what this rank alone finds wrong is published as its failure, and raised as
        SaveFailed; the next save compares.

        The caller knows, of all ranks, that there is a slot: from what they say in the beat, or from `await_room`.
        """
        step = self._checked_step(step)
        compare = compare or self._agreement is None or self._num_saves % AGREE_EVERY == 0
        self._num_saves += 1  # whatever becomes of it: ranks that count differently would not compare together
        save = SaveId(step, self.generation)
        try:
            flat, encoded, plan, slot = self._prepare(state, metrics or {}, step, compare)
        except CkptError as error:
            if compare:
                raise
            if persist:
                self.writer.void(save, describe(error))
            self._begun(step, None)
            self.layout_changed = True
            raise SaveFailed(f"step {step} could not be saved on rank {self.group.rank}: {error}") from error
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
            self._in_use[str(save)] = slot
            self._to_persist.add(save)
            self._steps_saved.add(step)
        staging = self._stager.begin(slot, content, self._sources_of(flat.leaves, plan, overlap))
        pending = Pending(self, save, staging, persist)
        if persist:
            self._pending[str(save)] = pending
        self._begun(step, pending)
        return pending

    def _begun(self, step: int, pending: Pending | None) -> None:
        """A snapshot was begun on all ranks; `pending`: None where it failed at once on this one."""
        fate = None
        if self.replicator is not None:
            round_ = Round(
                self.root.id, SaveId(step, self.generation), self._num_saves, self.held_by_all, self._settled_by_all
            )
            fate = self.replicator.begin(round_, None if pending is None else pending.staging)
        self._unsettled.append(_Begun(step, pending, fate))

    def _sources_of(self, leaves: list[Leaf], plan: _Plan, overlap: Overlap) -> list[Source]:
        """What is copied, in the table's order; the very sources of the last save where nothing changed."""
        late: dict[torch.optim.Optimizer | None, bool] = {}
        for leaf in leaves:
            if leaf.owner not in late:
                late[leaf.owner] = overlap(leaf)
        known = self._sources if self._sources is not None and self._sources.plan is plan else None
        if known is not None and known.late == late and same(known.leaves, leaves):
            return known.sources
        found = []
        for n, (i, piece) in enumerate(plan.order):
            leaf, is_late = leaves[i], late[leaves[i].owner]
            if known is not None and known.leaves[i] is leaf:
                source = known.sources[n]
                found.append(source if source.overlap == is_late else replace(source, overlap=is_late))
            else:
                # detached: what `p.data = x` puts in place of this memory must not be copied instead, least of all
                # past its end
                found.append(Source(leaf.name, leaf.pieces[piece][1].detach(), is_late))
        self._sources = _Sources(plan, leaves, late, found)
        return found

    def _prepare(
        self, state: object, metrics: Mapping[str, object], step: int, compare: bool
    ) -> tuple[Flat, dict[str, values.Json], _Plan, Slot]:
        """Everything that can fail, before anything is ordered; where ranks compare, it fails on all or on none."""

        def look() -> tuple[Flat, dict[str, values.Json], dict[str, Row]]:
            if self.superseded is not None:
                raise self.superseded
            self._begin(step)
            encoded = {k: values.encode(v, f"metrics[{k}]") for k, v in metrics.items()}
            flat = flatten({**_as_mapping(state), RNG: PerRank(self._rng)}, self._memo)
            return flat, encoded, rows_of(flat.leaves, self.group) if compare else {}

        def room(plan: _Plan) -> Slot:
            return self._take_slot(plan.body_nbytes)

        if not compare:
            flat, encoded, _ = look()
            plan = self._plan_for(flat, None)
            return flat, encoded, plan, room(plan)
        flat, encoded, rows = together(self.group, f"saving step {step}", look)
        plan = self._plan_for(flat, agree(flat.leaves, rows, self.group))
        return flat, encoded, plan, together(self.group, f"making room for step {step}", lambda: room(plan))

    def _checked_step(self, step: int) -> int:
        step = operator.index(step)  # numpy's integers, too; a float would fail only when it is made a name
        if not 0 <= step <= keys.MAX_STEP:
            raise ValueError(f"a step is between 0 and {keys.MAX_STEP}, got {step}")
        if step in self._steps_saved:
            raise ValueError(f"step {step} was saved already by this generation ({self.generation}); steps ascend")
        return step

    def _begin(self, step: int) -> None:
        """Puts this generation's record before its first save."""
        if not self._began and self.group.rank == 0:
            if self.resumed_from is None:
                self.resumed_from = self._continued(step)
            self.put_generation()
        self._began = True

    def _continued(self, step: int) -> SaveId | None:
        """What a job that did not restore continues: the newest step before its own first one."""
        visible = self.catalog.visible()
        hidden = [save.step for save in visible if save.step >= step]
        if hidden:
            log.warning(
                "%s holds steps up to %d, and this job begins to save at step %d without having restored: steps %d and "
                "later are no longer on its history (they stay in the store)",
                self.store.url,
                hidden[-1],
                step,
                hidden[0],
            )
        return max((save for save in visible if save.step < step), default=None)

    def put_generation(self) -> None:
        """From here on older generations may not commit. Rank 0."""
        self.catalog.put_generation(
            Generation(
                id=self.generation,
                world_size=self.group.size,
                resumed_from=self.resumed_from,
                created=time.time(),
                versions={"ckptlib": __version__, "torch": torch.__version__, "python": platform.python_version()},
                host=socket.gethostname(),
                tags=self.settings.tags,
                domains=() if self.placement is None else self.placement.domains,
                copies=0 if self.settings.peers is None else self.settings.peers.copies,
            )
        )

    def _plan_for(self, flat: Flat, agreement: Agreement | None) -> _Plan:
        """The plan for this state: the last one, as long as nothing it depends upon has changed.

        `agreement`: what all ranks have just agreed upon; None: the last one stands.
        """
        if self._plan is not None and same(self._leaves, flat.leaves):
            shape = self._plan.shape
        else:
            shape = tuple((leaf.name, leaf.dtype, leaf.shape, leaf.held) for leaf in flat.leaves)
        known = self._plan if self._plan is not None and self._plan.shape == shape else None
        if known is not None and (known.layout.aliases, known.layout.objects) != (flat.aliases, flat.objects):
            known = None
        if agreement is not None:
            if agreement != self._agreement or self.layout_changed:
                known = None
            self._agreement, self.layout_changed = agreement, False
        assert self._agreement is not None
        if known is None:
            if agreement is None:
                self.layout_changed = True
            by = alone(flat.leaves, self.group, self._agreement) if self.layout_changed else self._agreement
            self._plan = known = self._make_plan(flat, shape, by)
        self._leaves = flat.leaves
        return known

    def _make_plan(
        self, flat: Flat, shape: tuple[tuple[str, str, tuple[int, ...], object], ...], by: Agreement
    ) -> _Plan:
        entries = entries_of(flat.leaves, by)
        if not self.layout_changed:
            entries = assign(entries)
        layout = Layout(self.group.size, tuple(entries), flat.aliases, flat.objects)
        places: dict[tuple[str, Box], tuple[int, int]] = {}
        for i, leaf in enumerate(flat.leaves):
            entry = layout.tensors[layout.index[leaf.name]]
            if writes(entry, self.group.rank, by.holders.get(leaf.name)):
                places.update({(leaf.name, box): (i, piece) for piece, (box, _) in enumerate(leaf.pieces)})
        table = lay_out(layout, list(places))
        order = tuple(places[layout.tensors[t].name, box] for t, box in zip(table.tensors, table.boxes, strict=True))
        return _Plan(shape, layout, table, order, body_nbytes(table))

    def _take_slot(self, nbytes: int) -> Slot:
        slot = self.arena.take(nbytes, self.held_by_all, self._slots_in_use())
        if slot is None:
            raise AssertionError("no slot is free, and nobody asked")
        return slot

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

    def needs_held(self) -> int:
        """The step that all ranks must hold before a slot is free; see `Arena.needs_held`."""
        return self.arena.needs_held(self._slots_in_use())

    def _slots_in_use(self) -> list[Slot]:
        """Those that are written, sent to a peer or persisted."""
        unsettled = [begun.pending.staging.slot for begun in self._unsettled if begun.pending is not None]
        return [*self._in_use.values(), *unsettled]

    def poll(self, timeout_s: float = 0.0) -> None:
        """Takes note of what the staging thread and the writer have done."""
        while self._unsettled and self._unsettled[0].settled:
            begun = self._unsettled.popleft()
            self.held.note(begun.step, begun.held)
            if begun.pending is not None:
                if begun.ready:
                    self.arena.mark_ready(begun.pending.staging.slot, begun.step)
                elif isinstance(begun.pending.staging.error, TornSnapshot):
                    self.torn = begun.pending
        for event in self.writer.poll(timeout_s):
            self._note(event)

    def _note(self, event: Mapping[str, object]) -> None:
        kind = event["event"]
        if kind == "ready":
            return
        key = str(event["save"])
        pending = self._pending.get(key)
        if kind == "released":
            self._in_use.pop(key, None)
            if event["error"] is None and self.group.rank != 0:
                self.failures = 0
                if pending is not None and not pending.watched:
                    del self._pending[key]
        elif kind == "committed":
            self._pending.pop(key, None)
            self.failures = 0
            if pending is not None:
                pending.committed = True
        elif kind == "failed" and pending is not None:  # else it is known already
            self._in_use.pop(key, None)
            self._pending.pop(key, None)
            self._failed(pending, str(event["kind"]), str(event["error"]), key)

    def _failed(self, pending: Pending, kind: str, text: str, key: str) -> None:
        self.failures += 1
        error: SaveFailed
        if kind == "Superseded":
            error = self.superseded = Superseded(text)
        else:
            error = SaveFailed(f"the save {key} failed and will never be listed; earlier steps are untouched: {text}")
        log.error("%s", error)
        pending.error = error

    def note_held(self, oldest_newest: int, latest_since: int, settled: int) -> None:
        """Takes note of what all ranks said of their `held`: minimum, maximum and minimum over them.

        Steps between the newest held by all and the newest settled on all failed on some rank. They must not keep their
        slots, or no other snapshot could ever be taken.
        """
        before = self.held_by_all
        self.held_by_all = max(before, Held.by_all(oldest_newest, latest_since))
        if self.held_by_all != before and self.replicator is not None:
            self.writer.held(SaveId(self.held_by_all, self.generation))
            if before == NONE:
                self._reclaim_at = time.monotonic()
        self._reclaim()
        self._settled_by_all = settled
        if settled > self.held_by_all:
            self.arena.forget(self.held_by_all, settled)

    @property
    def coverage(self) -> Coverage | None:
        """None without peers."""
        if self.placement is None or self.replicator is None:
            return None
        held = None if self.held_by_all == NONE else self.held_by_all
        newest = max((begun.step for begun in self._unsettled), default=self.held.settled)
        losses = 0 if held is None else self.placement.num_losses_survived
        return Coverage(held, max(newest - (held or 0), 0), losses, self.replicator.linked)

    def _reclaim(self) -> None:
        """What the job before left in memory is needed no more; its writers may have it open for a while yet."""
        if self._reclaim_at is None or time.monotonic() < self._reclaim_at:
            return
        self.arena.reclaim()
        self._reclaim_at = time.monotonic() + RECLAIM_EVERY_S if self.arena.has_others else None

    def mend_link(self, failed: bool, calm: bool) -> None:
        """Does about the link between peers what all ranks agreed upon. Collective where `calm`.

        failed: some rank lost a peer. calm: no rank has anything under way, and all have waited long enough.
        """
        assert self.replicator is not None
        if failed:
            self.replicator.drop_link()
        elif calm and not self.replicator.linked:
            try:
                together(self.group, "connecting peers anew", self.replicator.connect)
            except CkptError as error:
                log.warning("%s", error)
                self.replicator.drop_link()
            else:
                log.warning("the ranks have connected anew: snapshots have replicas again")

    @property
    def patience_s(self) -> float:
        """How long a rank may wait by itself without making the others time out in a collective."""
        return self.settings.timeout.total_seconds() / 2

    def await_room(self) -> None:
        """Returns when every rank has a slot for another snapshot. Collective.

        Raises WaitTimeout after the deadline of a save: longer than ranks wait for one another in a collective.
        """
        deadline = time.monotonic() + self.root.save_deadline_s
        lacking = True
        while lacking:
            lacks = together(self.group, "waiting for a slot", lambda: self._lacks_room(deadline))
            held = self.held
            found = self.group.max([int(lacks), -held.newest, held.since, -held.settled])
            lacking = bool(found[0])
            self.note_held(-found[1], found[2], -found[3])

    def _lacks_room(self, deadline: float) -> bool:
        """Whether there is no slot after a while."""
        patience = time.monotonic() + self.patience_s
        while self._unsettled or self.needs_held() > self.held.newest:
            now = time.monotonic()
            if now > deadline:
                raise WaitTimeout(
                    f"no slot was free within {self.root.save_deadline_s:.0f} s: the store is slower than the saves"
                )
            if now > patience:
                return True
            self.poll(0.02)
        return False

    def wait_committed(self, pending: Pending, timeout: float | None) -> None:
        timeout_s = self.root.save_deadline_s if timeout is None else timeout
        deadline = time.monotonic() + timeout_s
        try:
            pending.wait_staged(timeout_s)
        except WaitTimeout:
            raise
        except Exception as error:
            raise SaveFailed(f"step {pending.step} was not saved: {error}") from error
        if self.group.rank != 0 and not pending.committed and pending.error is None:
            pending.watched = True
            self._pending[str(pending.save)] = pending
            self.writer.watch(pending.save, timeout_s)
        while not pending.committed:
            if pending.error is not None:
                raise pending.error
            if time.monotonic() > deadline:
                raise WaitTimeout(f"step {pending.step} was not committed within {timeout_s:.0f} s; it may still be")
            self.poll(0.05)

    def close(self, timeout: timedelta, clean: bool) -> None:
        """Lets go. `clean`: the writer finishes what it has and the slots go; else it finishes alone."""
        self.closed = True
        self._stager.close()
        self.poll()
        try:
            if clean:
                for event in self.writer.close(timeout.total_seconds()):
                    self._note(event)
                self.arena.reclaim()  # a job that came to its end needs nothing of the one before
            else:
                self.writer.leave()
        finally:
            if self.replicator is not None:
                self.replicator.close(clean)
            self.arena.close(unlink=clean)
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
