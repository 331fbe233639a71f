"""This rank's snapshots in memory: those in flight, those it holds, and those that all ranks are known to hold.

What all ranks tell of themselves decides which slot may be overwritten, and whether peers are connected anew. Main
thread only.
"""

from __future__ import annotations

import logging
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from ckptlib.errors import NoRoom, TornSnapshot, describe
from ckptlib.events import Event, Failed, Held, Staged
from ckptlib.format.keys import SaveId
from ckptlib.peers.incoming import FindAlike
from ckptlib.peers.replicator import Replicator
from ckptlib.peers.rounds import ReplicaOutcome, Round
from ckptlib.policy.peers import Coverage
from ckptlib.ranks.held import NONE, HeldSteps
from ckptlib.slots.placement import ReplicaMap
from ckptlib.slots.slot import Slot
from ckptlib.staging.arena import NEVER, Arena
from ckptlib.staging.stager import COPY_TIMEOUT_S, CopyJob, Staging

log = logging.getLogger(__name__)

MOST_TORN = 3
"""How many snapshots in a row may be torn before none is copied behind the fence any more."""

RECLAIM_EVERY_S = 1.0
"""How often a job checks whether the writers of the job before have let go of its slots."""

NUM_SLOTS_WITH_PEERS = 3
"""With a snapshot at every step: one that all ranks hold, one on its way to them, and one that is begun. A holder has
as many for a rank's replicas, even if the rank itself has one more: see `make_room`."""


@dataclass(frozen=True, slots=True)
class InFlight:
    """A snapshot whose outcome is not known yet."""

    step: int
    staging: Staging | None
    """The copy on this rank; None if it failed before anything was copied."""
    persists: bool
    """Whether it goes to the store; if not, it is for memory only."""
    replicas: ReplicaOutcome | None
    """The outcome of its replicas; None if there are to be none."""

    @property
    def settled(self) -> bool:
        return (self.staging is None or self.staging.done) and (self.replicas is None or self.replicas.settled)

    @property
    def ready(self) -> bool:
        return self.staging is not None and self.staging.error is None

    @property
    def held(self) -> bool:
        return self.ready and not (self.replicas is not None and self.replicas.failed)


class Snapshots:
    """Keeps account of one rank's snapshots and their slots."""

    def __init__(
        self,
        root_id: str,
        arena: Arena,
        placement: ReplicaMap | None,
        replicator: Replicator | None,
        on_held: Callable[[int], None],
    ) -> None:
        """`on_held` is called with each step that all ranks hold by now, if snapshots have replicas."""
        self._root_id = root_id
        self.arena = arena
        self.placement = placement
        self.replicator = replicator
        self._on_held = on_held
        self._unsettled: deque[InFlight] = deque()
        self._on_the_way: deque[int] = deque()
        """Steps whose snapshots have not ended on all ranks, as far as this one knows."""
        self._persisting: dict[str, Slot] = {}
        """Slots that the writer reads, by save."""
        self.own = HeldSteps()
        self.held_by_all = NONE
        """The newest step that all ranks are known to hold."""
        self._trained = 0
        """The step that training is at."""
        self._untrained: int | None = None
        """The step that training began at; None if it has not begun."""
        self._settled_by_all = NONE
        self._voided: set[int] = set()
        """Steps whose snapshots all ranks hold, and that were found to differ."""
        self._sent: ReplicaOutcome | None = None
        """The replicas of the newest snapshot that has ended."""
        self._reclaim_at: float | None = None
        """When to look again for slots of the job before; None: not yet, or no more."""
        self._unkept = False
        """Whether the last snapshot for memory only failed, and that was reported."""
        self.may_begin: Callable[[], bool] = lambda: True
        """Returns whether everything that a snapshot needs beside a slot is there."""
        self.tell: Callable[[Event], None] = lambda event: None
        """Called with each event of a snapshot."""
        self._torn: InFlight | None = None
        self._changed: set[str] = set()
        self._num_torn = 0
        """How many in a row, of those that were copied behind the fence, were torn."""

    # Snapshots

    def take_slot(self, nbytes: int) -> Slot:
        """Takes a slot for a snapshot; the caller knows that there is one. Raises NoRoom."""
        slot = self.arena.take(nbytes, self.held_by_all, self._in_use())
        if slot is None:  # a writer was killed, and the kernel does not release it
            raise NoRoom("every slot is still open in a writer that does not end: a disk below the store hangs")
        return slot

    def local_replicas(self, save: SaveId, number: int, find: FindAlike) -> list[CopyJob]:
        """Returns copies of the shards of replicas that this rank has itself; see `begin`."""
        return [] if self.replicator is None else self.replicator.local_replicas(self._round(save, number), find)

    def begin(
        self, save: SaveId, number: int, staging: Staging | None, persists: bool, local_replicas: Sequence[CopyJob] = ()
    ) -> None:
        """Notes a snapshot that was begun on all ranks, or failed at once on this one: then `staging` is None.

        `number`: see `SlotHeader.number`. `local_replicas`: the copies that are made with it.
        """
        replicas = None
        if self.replicator is not None:
            replicas = self.replicator.begin(self._round(save, number), staging, local_replicas)
        if persists and staging is not None:
            self._persisting[str(save)] = staging.slot
        self._on_the_way.append(save.step)
        self._unsettled.append(InFlight(save.step, staging, persists, replicas))

    def _round(self, save: SaveId, number: int) -> Round:
        return Round(self._root_id, save, number, self.held_by_all, self._settled_by_all, frozenset(self._voided))

    def released(self, save: str) -> None:
        """Notes that the writer no longer reads the slot of this save.

        Only jobs with peers restore from such a slot; otherwise the next snapshot may reuse it immediately, so that a
        loop that waits for each save needs no second slot, whose pages would cost more than the save.
        """
        slot = self._persisting.pop(save, None)
        if slot is not None and self.placement is None:
            self.arena.mark_void(slot)

    def poll(self) -> None:
        """Notes the snapshots that have ended."""
        while self._unsettled and self._unsettled[0].settled:
            begun = self._unsettled.popleft()
            self._sent = begun.replicas
            self.own.note(begun.step, begun.held)
            if begun.staging is not None:
                self._changed |= {*begun.staging.changed}
                if begun.ready:
                    self.tell(staged(begun.staging))
                    self.arena.mark_ready(begun.staging.slot, begun.step)
                    self._unkept = False
                    if begun.staging.overlapped:
                        self._num_torn = 0
                elif isinstance(begun.staging.error, TornSnapshot):
                    self._torn = begun
                    self._num_torn += not begun.staging.changed  # what is frozen, and changes, no longer overlaps
                elif not begun.persists:  # else the writer tells of it
                    assert begun.staging.error is not None
                    self.tell_unkept(begun.step, begun.staging.error)

    def tell_unkept(self, step: int, error: Exception) -> None:
        """Reports that a snapshot for memory only failed on this rank; that alone ends no job."""
        self.tell(Failed(step, error, tier="memory"))
        if not self._unkept:
            self._unkept = True
            log.error("step %d is not kept in memory; said once, until one is again: %s", step, describe(error))

    def wait_staged(self) -> None:
        """Returns when no snapshot is being copied. Raises WaitTimeout."""
        for begun in list(self._unsettled):
            if begun.staging is not None:
                begun.staging.wait_done(COPY_TIMEOUT_S)

    def take_torn(self) -> InFlight | None:
        """Returns the last snapshot that was found torn since the last call."""
        torn, self._torn = self._torn, None
        return torn

    def take_changed(self) -> set[str]:
        """Returns the frozen parameters whose bytes were seen to differ since the last call."""
        changed, self._changed = self._changed, set()
        return changed

    @property
    def overlap(self) -> bool:
        """Whether to copy anything behind the fence: not once snapshot after snapshot was torn, each of which costs
        another one."""
        return self._num_torn < MOST_TORN

    def make_room(self) -> None:
        """Adds a slot if one is missing: a snapshot was due, and some rank had no slot for it.

        With peers, three slots are enough for a snapshot at every step (held by all, in flight, begun) until the writer
        keeps one: a rank whose writer takes longer than the time between snapshots gets a fourth.
        """
        if self.replicator is not None and self.persisting:
            self.arena.grow()

    def _in_use(self) -> list[Slot]:
        """Returns the slots that are being filled, sent to a peer, compared with what is sent, or persisted."""
        unsettled = [begun.staging.slot for begun in self._unsettled if begun.staging is not None]
        bases = [] if self.replicator is None else self.replicator.bases
        return [*self._persisting.values(), *unsettled, *bases]

    def is_persisting(self, save: str) -> bool:
        """Returns whether the writer has yet to let go of the slot of this save."""
        return save in self._persisting

    @property
    def persisting_saves(self) -> list[str]:
        """The saves whose slots the writer has yet to let go of, oldest first."""
        return list(self._persisting)

    @property
    def persisting(self) -> bool:
        """Whether the writer has yet to let go of a slot."""
        return bool(self._persisting)

    @property
    def behind(self) -> bool:
        """Whether no further save should be taken until the writer has let go of a slot.

        With peers, saves that queue up for a store that hangs would take one slot after the other, and memory would get
        nothing newer for as long as it hangs.
        """
        return self.replicator is not None and self.persisting

    @property
    def settling(self) -> bool:
        """Whether a snapshot has not ended."""
        return bool(self._unsettled)

    @property
    def settling_steps(self) -> list[int]:
        """Steps whose snapshots are being copied or sent to peers, oldest first."""
        return [begun.step for begun in self._unsettled]

    # What all ranks hold

    def note_trained(self, step: int) -> None:
        """Notes that training has done this step."""
        self._trained = step
        self._untrained = step - 1 if self._untrained is None else self._untrained

    def void(self, step: int) -> None:
        """Notes that the snapshot of `step` is worth nothing, though all ranks hold it; on all of them at the same
        time."""
        self._voided = {other for other in self._voided if other > self.held_by_all} | {step}
        self.own.void(step)

    def needs_held(self) -> int:
        """Returns the step that all ranks must hold before a slot is free, here and for replicas; see
        `Arena.needs_held`."""
        if not self.may_begin():
            return NEVER
        needs = self.arena.needs_held(self._in_use())
        most = NUM_SLOTS_WITH_PEERS - 1 - (self.held_by_all != NONE)
        if self.replicator is not None and self._unsettled and len(self._on_the_way) > most:
            return max(needs, self._on_the_way[-1 - most])
        return needs

    def note_all(self, oldest_newest: int, latest_since: int, settled: int) -> None:
        """Takes in all ranks' words on their own snapshots: minimum, maximum and minimum over them.

        Steps between the newest held by all and the newest settled on all failed on some rank. They must not keep their
        slots, or no other snapshot could ever be taken. Before the generation's record is in the store, none counts as
        held. If all ranks hold the newest settled step, it stays, since it counts once the record is there.
        """
        if oldest_newest == NONE and latest_since <= settled:
            settled -= 1
        before = self.held_by_all
        newest = HeldSteps.by_all(oldest_newest, latest_since)
        self.held_by_all = max(before, NONE if newest in self._voided else newest)
        if self.held_by_all != before:
            self.tell(Held(self.held_by_all))
        if self.held_by_all != before and self.replicator is not None:
            self._on_held(self.held_by_all)
            if before == NONE:
                self._reclaim_at = time.monotonic()
        self._reclaim()
        self._settled_by_all = settled
        while self._on_the_way and self._on_the_way[0] <= settled:
            self._on_the_way.popleft()
        if settled > self.held_by_all:
            self.arena.forget(self.held_by_all, settled)

    def keep_before(self, restored: SaveId | None, older: SaveId | None) -> None:
        """Removes all that earlier jobs have left in memory but these snapshots. They stay until all ranks hold one of
        this job; the older one only while no slot lacks its room: else no other would ever be held."""
        self.arena.others.reclaim(but=[*filter(None, (restored, older))])
        if older is not None:
            for arena in [self.arena, *([] if self.replicator is None else self.replicator.arenas)]:
                arena.others.needed = restored

    def _reclaim(self) -> None:
        """Removes the slots of the job before, which nobody needs any more. Its writers may keep some open for a while
        yet."""
        if self._reclaim_at is None or time.monotonic() < self._reclaim_at:
            return
        self.arena.others.reclaim()
        self._reclaim_at = time.monotonic() + RECLAIM_EVERY_S if self.arena.others.any_earlier else None

    @property
    def coverage(self) -> Coverage | None:
        """How well peers cover this rank's training; None without peers."""
        if self.placement is None or self.replicator is None:
            return None
        held = None if self.held_by_all == NONE else self.held_by_all
        newest = max((begun.step for begun in self._unsettled), default=self.own.settled)
        losses = 0 if held is None else self.placement.num_losses_survived
        since = held if held is not None else self._untrained or 0
        lag, linked, sent = max(newest, self._trained) - since, self.replicator.linked, self._sent
        if sent is None:
            return Coverage(held, lag, losses, linked, 0)
        return Coverage(held, lag, losses, linked, sent.sent, sent.coded, dict(sent.uncoded))

    def close(self, clean: bool) -> None:
        """Lets go of the slots. `clean`: nothing stays in memory; else all is left to the next job."""
        if self.replicator is not None:
            self.replicator.close(clean)
        self.arena.close(unlink=clean)


def staged(staging: Staging) -> Staged:
    """Returns the event of a snapshot that is ready."""
    return Staged(staging.step, staging.content.header.body_nbytes, staging.seconds, staging.fence_s)
