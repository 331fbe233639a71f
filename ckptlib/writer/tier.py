"""A writer's local tier: saves are persisted on the disk of this host, and drained from there to the store.

The thread that persists uses the disk alone, so no outage of the store holds it up. Another thread drains, in the order
of the saves, and tries again for as long as the store is away. No torch.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, nullcontext

from ckptlib.catalog.begun import Begun, note
from ckptlib.catalog.catalog import Catalog, Steps
from ckptlib.catalog.listed_steps import ListedSteps, list_steps
from ckptlib.catalog.local_disk import DiskSweeper, Stays, disk_for, part_there, sweep_quietly
from ckptlib.errors import CkptError, StoreError, StoreFull, describe
from ckptlib.format import keys
from ckptlib.format.keys import SaveId
from ckptlib.format.manifest import Manifest
from ckptlib.format.part import Part
from ckptlib.jobs import JobThread
from ckptlib.policy.tier import LocalTier
from ckptlib.slots.slot import Slot
from ckptlib.stores import Store
from ckptlib.writer.drain import Drain, NoteUpload, Pace
from ckptlib.writer.drained_parents import DrainedParents
from ckptlib.writer.own_parts import OwnParts

log = logging.getLogger(__name__)

AGAIN_FIRST_S = 1.0
AGAIN_LAST_S = 30.0
"""Seconds until a drain is tried again for which the store failed: from the first to the last, doubled each time."""

TELL_EVERY_S = 600.0
"""Seconds until a warning that the store is away is repeated."""


class Tier:
    """Drains the saves that one writer has persisted on the local disk, and removes what it need not keep there."""

    def __init__(self, settings: LocalTier, store: Store, rank: int, root_id: str) -> None:
        """`root_id`: id of the root that the job has opened in the store."""
        self._settings, self._rank = settings, rank
        self.disk: Store = disk_for(str(settings.path), store)
        self._local, self._bucket = Catalog(self.disk), Catalog(store)
        self._bucket.shared.opened_id = root_id
        self._steps = Steps([], [])
        """Steps of the store, from the first one on that matters to a save, as of the last drain."""
        self._listed: ListedSteps | None = None
        """The same, if it was known which one that is."""
        self._undrained: set[SaveId] = set()
        self._new: set[SaveId] = set()
        """Saves of which nothing can be in the store, since no other writer can have drained them: the newest one, and
        what is to be drained."""
        self._drained: SaveId | None = None
        """The save that was drained last."""
        self._whole: SaveId | None = None
        """The newest save that all ranks have on their disks, as the trainer told."""
        self._recorded = False
        """Whether the record of the generation is in the store, as the trainer told."""
        self._earlier: frozenset[SaveId] | None = None
        """What a restart needs of earlier jobs' steps, before there is a whole one and the record; None: not known."""
        self._settled = -1
        """The newest step whose saves have come to their end on all ranks."""
        self._lock = threading.Lock()
        self._sweeper = DiskSweeper(self._local, rank)
        self._told_gone = False
        self.begun: Begun | None = None
        """The generation as it began, until that is noted on the disk; on rank 0 only."""
        self.parents = DrainedParents(lambda: self._steps)
        self._drain: Drain | None = None
        self.jobs = JobThread("drain")
        """Runs what uses the store, but for commits."""
        self.gives_up_at: Callable[[], float] = lambda: float("inf")
        """Returns when a drain for which the store fails is tried no more, by the monotonic clock."""

        self.watched: Callable[[SaveId], AbstractContextManager[None]] = lambda save: nullcontext()
        """Returns the context of one try to drain, which may not take longer than a save may."""

    def open(self, deadline_s: float, note_upload: NoteUpload) -> None:
        """Prepares drains, before anything is drained. For the arguments see `Drain`."""
        executor = ThreadPoolExecutor(1, "ckptlib-check")
        pace = Pace(self._settings.bytes_per_second)
        self._drain = Drain(self._local, self._bucket, executor, self._rank, deadline_s, pace, note_upload)

    @property
    def parts(self) -> OwnParts:
        """The parts of this rank in the store."""
        assert self._drain is not None
        return self._drain.parts

    # The disk

    def expect(self, save: SaveId) -> None:
        """Notes that the save is to be drained, and stays here until then. Any thread may call it."""
        with self._lock:
            self._undrained.add(save)

    def note_new(self, save: SaveId) -> None:
        """Notes that the save is persisted here for the first time. Any thread may call it."""
        with self._lock:
            self._new = (self._new & self._undrained) | {save}

    def note_whole(self, save: SaveId, settled: int, recorded: bool) -> None:
        """Notes that all ranks have this save on their disks, and no later one up to the step `settled`. `recorded`:
        whether the store has the record of the generation. Any thread may call it."""
        self._whole, self._settled, self._recorded = save, settled, recorded

    def note_earlier(self, save: SaveId | None) -> None:
        """Notes the newest step of earlier jobs that a restart would find on the local disks; None: there is none. Any
        thread may call it."""
        self._earlier = frozenset() if save is None else frozenset({save})

    def look_there(self) -> None:
        """Warns, once, if the directory that the job has opened is gone; called before a save is persisted here, by the
        thread that persists. It is made anew: what is drained from there reaches the store all the same. Raises
        StoreError."""
        if self._told_gone or self.disk.scan(keys.ROOT):
            return
        self._told_gone = True
        log.warning(
            "local=%s is not there any more: it has no %s, which it had as the job began. Was it moved, or is its file "
            "system not mounted? Saves go into a directory of that name that is made anew: see that its disk has room. "
            "A restart finds no local step of before until what was there is back",
            *(self._settings.path, keys.ROOT),
        )

    def make_room(self, save: SaveId, least: bool = False) -> None:
        """Removes objects that the disk need not hold any longer; called before a save is persisted here, by the thread
        that persists. `least`: whether the disk is full. Then only what a restart needs or is to be drained stays, and
        nothing of the attempt at this save that found it full."""
        with self._lock:
            pinned = {*self._undrained}
        if least:
            stays = Stays(self._whole, self._settled, pinned - {save}, 1, self._recorded, self._earlier)
            sweep_quietly(self._sweeper, save.generation, stays)
            return
        if self._drained is not None and not self._failed(self._drained):
            pinned.add(self._drained)
        committed = [known for known in self._steps.saves if known.generation == save.generation]
        pinned |= {*committed[-1:]}
        stays = Stays(self._whole, self._settled, pinned, self._settings.keep_last, self._recorded)
        sweep_quietly(self._sweeper, save.generation, stays)

    def note_begun(self) -> None:
        """Notes on the disk that the generation has begun, before anything is persisted here: the next job finds it
        though the store has no record yet. Called by the thread that persists. Raises StoreError."""
        if self.begun is not None:
            note(self.disk, self.begun)
            self.begun = None

    def _failed(self, save: SaveId) -> bool:
        """Returns whether some rank is known not to have it on its disk."""
        return self._whole is not None and self._whole.step < save.step <= self._settled

    def persisted(self, slot: Slot, save: SaveId) -> Part | None:
        """Returns the part of the very snapshot in this slot, if a writer that died since has put it."""
        name = part_there(self._local, save, self._rank)
        if name is None or name.check != slot.read_header().check:
            return None
        self.disk.flush(save.parts_prefix)  # it may have died before the name was durable
        return self._local.part(name)

    # The store

    def drain(self, save: SaveId, before: Callable[[], None], puts_layout: bool = True) -> None:
        """Drains a share; returns when it is in the store. `before` is called in each try, before anything is put.
        `puts_layout`: see `Persister.persist`. Called by the thread that drains.

        Raises what makes that pointless, see `Drain.copy`, and StoreFull. While the store fails otherwise it tries
        again, until `gives_up_at`.
        """
        assert self._drain is not None
        began, told, pause = time.monotonic(), 0.0, AGAIN_FIRST_S
        while True:
            try:
                with self.watched(save):
                    before()
                    self._list()
                    nbytes = self._drain.copy(save, self._is_new(save), puts_layout)
                break
            except StoreFull:  # not an outage that passes: room is made after saves that are decided
                raise
            except StoreError as error:
                now = time.monotonic()
                if now > self.gives_up_at():
                    raise
                if not told or now - told > TELL_EVERY_S:
                    told = now
                    log.warning(
                        "step %d is on the local disk, and waits for %s, which fails; it is tried again: %s",
                        save.step,
                        self._bucket.store.url,
                        describe(error),
                    )
            time.sleep(pause)
            pause = min(pause * 2, AGAIN_LAST_S)
        self._drained = save
        log.info("step %d: %d bytes drained in %.3f s", save.step, nbytes, time.monotonic() - began)

    def _is_new(self, save: SaveId) -> bool:
        """Returns whether nothing of the save can be in the store; True only once, for the first try."""
        with self._lock:
            is_new = save in self._new
            self._new.discard(save)
        return is_new

    def commit(self, save: SaveId, commit: Callable[[], Manifest], seconds_left: Callable[[], float]) -> Manifest:
        """Calls `commit`, and again while the store fails, unless it is full; returns its result. Raises what `commit`
        raises. Any thread may call it."""
        pause = AGAIN_FIRST_S
        while True:
            try:
                return commit()
            except StoreFull:
                raise
            except StoreError as error:
                if seconds_left() < pause:
                    raise
                log.warning("step %d waits for its commit, which is tried again: %s", save.step, describe(error))
            time.sleep(pause)
            pause = min(pause * 2, AGAIN_LAST_S)

    def settle(self, save: SaveId) -> None:
        """Notes that the save is committed, or never will be: the disk need not keep it for that. From any thread."""
        with self._lock:
            self._undrained.discard(save)

    def look_before(self, save: SaveId) -> None:
        """Lists the steps while a save that is to be drained is being copied. A rank that commits nothing knows the
        steps as the last drain began: what the save would refer to may have been dropped since. Called by the thread
        that drains."""
        if self.parents.needs() is not None:
            with self.watched(save):
                self.look_again()

    def look_again(self) -> None:
        """Lists the steps after a commit. If the store is away, later saves refer to what was known before."""
        try:
            self._list()
        except CkptError as error:
            log.info("the steps of %s could not be listed: %s", self._bucket.store.url, describe(error))

    def _list(self) -> None:
        """Lists the steps that matter. Raises StoreError."""
        needs = self.parents.needs()
        if needs is None:
            self._steps = self._bucket.steps()
            return
        self._listed = list_steps(self._bucket, *needs, self._listed)
        self._steps = self._listed.steps
