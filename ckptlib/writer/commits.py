"""What follows once a save is persisted: rank 0's writer commits it and removes old steps, others wait. No torch."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial

from ckptlib.catalog.catalog import Catalog
from ckptlib.catalog.commit import Committer, choose_parts
from ckptlib.catalog.elapsed import Elapsed
from ckptlib.catalog.failed_parts import raise_if_failed
from ckptlib.catalog.sweeper import Sweeper
from ckptlib.catalog.unreadable import UNREADABLE
from ckptlib.catalog.uses import DROPPED
from ckptlib.errors import CkptError, SaveFailed, StoreError, StoreFull, describe
from ckptlib.format.check import alike
from ckptlib.format.keys import STEPS, SaveId
from ckptlib.format.manifest import Manifest
from ckptlib.jobs import JobThread
from ckptlib.policy.keep import Keep
from ckptlib.writer.channel import Channel
from ckptlib.writer.failures import Failures
from ckptlib.writer.tier import Tier
from ckptlib.writer.trainer import Trainer
from ckptlib.writer.watchdog import Watchdog

log = logging.getLogger(__name__)


class _InDoubt(Exception):
    """Rank 0 has given the save up, but all of its parts are there, and alike: the manifest may be on its way."""


class Commits:
    """Carries out the commits of one writer. One thread commits, or waits for rank 0's; another removes old steps."""

    def __init__(
        self,
        channel: Channel,
        trainer: Trainer,
        watchdog: Watchdog,
        failures: Failures,
        catalog: Catalog,
        world_size: int,
        keep: Keep | None,
        tier: Tier | None,
    ) -> None:
        self._channel, self._trainer, self._watchdog, self._failures = channel, trainer, watchdog, failures
        self._world_size, self._tier = world_size, tier
        self._catalog, self._swept = catalog, Catalog(catalog.store)  # a second one: no commit waits for a sweep
        self._sweeper = None if keep is None else Sweeper(self._swept, keep)
        self.committer = Committer(catalog)
        self._jobs, self._sweeps = JobThread("commit"), JobThread("sweep")
        self._sweeping = threading.Lock()
        self._nbytes = 0
        """Bytes of the packs of the last step."""
        self._undecided: dict[SaveId, Elapsed] = {}
        """Time since this rank first heard of each save."""
        self._given_up: tuple[SaveId | None, Mapping[int, str]] = None, {}
        """The last save that other ranks gave up, these ranks, and why."""

    def expect(self, save: SaveId) -> None:
        """Notes that the save has begun."""
        self._undecided.setdefault(save, Elapsed())

    def forget(self, save: SaveId, error: BaseException | None = None) -> None:
        """Notes that the save will not be committed. `error`: why this rank's part will not come."""
        self._undecided.pop(save, None)
        if isinstance(error, StoreFull):
            self._jobs.put(partial(self._make_room, save, is_full=True))  # after those that are decided before it

    def put(self, save: SaveId, began: float, again: bool = False) -> None:
        """Queues the commit of the save, which waits until all its parts are there. `began`: when it was begun, by the
        monotonic clock. `again`: whether a writer that is gone may have committed it."""
        self._jobs.put(partial(self._commit, save, began, again))

    def stop_waiting(self, save: SaveId, rank: int, why: str) -> None:
        """Notes that a rank gave up its share of the save: its commit waits no longer for that one's part."""
        self._given_up = save, {**self._told_of(save), rank: why}

    def put_wait(self, save: SaveId, timeout_s: float) -> None:
        """Queues a wait for another rank's commit, whose outcome the trainer is then told."""
        self._jobs.put(partial(self._await, save, timeout_s))

    def finish(self) -> None:
        """Waits for all commits that were asked for."""
        self._jobs.finish()

    def finish_sweeps(self) -> None:
        """Waits for the removal of old steps."""
        self._sweeps.finish()

    def _commit(self, save: SaveId, began: float, again: bool) -> None:
        if again:
            self.committer.doubt(save)
        left, usual_s = partial(self._trainer.seconds_left, began), time.monotonic() - began
        given_up = partial(self._told_of, save)
        once = partial(self.committer.commit_when_whole, save, self._world_size, left, usual_s, given_up=given_up)
        commit = partial(self._once_more, save, once)
        try:
            end = max(began + self._trainer.deadline_s, time.monotonic())
            with self._watchdog.work("commit", save, end, since=began):
                manifest = commit() if self._tier is None else self._tier.commit(save, commit, left)
        except (CkptError, OSError) as error:
            in_doubt = self.committer.may_have_put(save)
            self._failures.give_up(save, error, in_doubt, is_put=True)  # the other ranks still wait for the step
            self._undecided.pop(save, None)
            if in_doubt and self._sweeper is not None:
                self._sweeps.put(self._sweeper.doubt)
            self._make_room(save, isinstance(error, StoreFull))
            return
        finally:
            if self._tier is not None:
                self._tier.settle(save)
        self._undecided.pop(save, None)
        seconds, self._nbytes = time.monotonic() - began, manifest.nbytes
        log.info("step %d is committed: %d bytes in %.3f s", save.step, manifest.nbytes, seconds)
        sweeps = self._sweeper is not None and not self._trainer.gone
        told = {"seconds": seconds, "nbytes": manifest.nbytes, "sweeps": int(sweeps)}
        self._channel.send({"event": "committed", "save": str(save), **told})
        if self._tier is not None:
            with self._tier.watched(save):  # after one that hangs nothing would be committed any more
                self._tier.look_again()
        if self._sweeper is not None and sweeps:
            self._sweeps.put(partial(self._sweep, self._sweeper, save))
        self._make_room(save)

    def _told_of(self, save: SaveId) -> Mapping[int, str]:
        """Returns the ranks that have given up their shares of the save, and why."""
        of, ranks = self._given_up
        return ranks if of == save else {}

    def _once_more(self, save: SaveId, commit: Callable[[], Manifest]) -> Manifest:
        """Calls `commit`, and once more if its manifest may be there though the store failed. Raises as it does."""
        try:
            return commit()
        except StoreError as error:
            if not self.committer.may_have_put(save):
                raise
            log.info("step %d may be committed; the store is asked once more: %s", save.step, describe(error))
        return commit()

    def _sweep(self, sweeper: Sweeper, save: SaveId) -> None:
        """Removes old steps."""
        with self._removing(), self._sweeping:
            sweeper.sweep(save)
        self._channel.send({"event": "swept"})

    def _make_room(self, save: SaveId, is_full: bool = False) -> None:
        """Makes room if the store is full, or nearly. Runs in the thread that commits, after this save and before the
        next: what is removed could be what a save that is being committed uses."""
        if self._sweeper is None or self._trainer.gone:
            return
        with self._removing():
            if is_full or self._is_nearly_full():
                with self._sweeping:
                    in_flight = [*self._undecided.values()]
                    self._sweeper.make_room(save, max((elapsed.at_most() for elapsed in in_flight), default=0.0))

    @contextmanager
    def _removing(self) -> Iterator[None]:
        self._swept.shared.opened_id = self._catalog.shared.opened_id
        try:
            with self._watchdog.work("sweep", None, time.monotonic() + self._trainer.deadline_s, minor=True):
                yield
        except (CkptError, OSError) as error:
            log.warning("old steps could not be removed: %s", describe(error))

    def _is_nearly_full(self) -> bool:
        """Returns whether there is no room for two more steps like the last one."""
        free = self._catalog.store.free_nbytes()
        return free is not None and free < 2 * self._nbytes

    def _await(self, save: SaveId, timeout_s: float) -> None:
        deadline, pause = time.monotonic() + timeout_s, 0.01
        try:
            with self._watchdog.work("await", save, deadline + self._trainer.deadline_s, minor=True):
                while not self._is_decided(save):
                    if time.monotonic() > deadline:  # an answer for whoever asked; the save goes on
                        self._channel.send({"event": "undecided", "save": str(save)})
                        return
                    time.sleep(pause)
                    pause = min(pause * 1.5, 0.5)
        except _InDoubt as error:
            self._failures.report(save, SaveFailed(str(error)), seen=True, in_doubt=True)
            return
        except (CkptError, OSError) as error:
            self._failures.report(save, error, seen=True)
            return
        self._channel.send({"event": "committed", "save": str(save), "seconds": 0.0, "nbytes": 0})

    def _is_decided(self, save: SaveId) -> bool:
        """Returns whether the save is committed; False if the store does not say. Raises SaveFailed if it never will
        be, _InDoubt if it may be, and Superseded if a newer job has begun."""
        try:
            if self._catalog.is_committed(save):
                self._catalog.store.flush(STEPS)  # rank 0 may not have done so yet
                return True
            found = self._catalog.parts(save)
            try:
                raise_if_failed(self._catalog, save, found)
            except SaveFailed as error:
                # All ranks raise one class: nobody may act on Superseded alone.
                self._catalog.generations.check_goes_on(save)
                if self._was_dropped(save):  # given up in doubt, but committed
                    return True
                names, missing = choose_parts(self._catalog.parts(save), self._world_size)
                if not missing and alike(name.check for name in names):
                    raise _InDoubt(str(error)) from error
                raise
            return not choose_parts(found, self._world_size)[1] and self._was_dropped(save)
        except StoreError as error:  # rank 0 may be answered, or has been
            log.info("step %d: the store does not say what became of it: %s", save.step, describe(error))
        return False

    def _was_dropped(self, save: SaveId) -> bool:
        """Returns whether the save was committed and retention has dropped it since: a rank may ask late."""
        try:
            return self._catalog.trash_record(save).reason == DROPPED
        except UNREADABLE:
            return False
