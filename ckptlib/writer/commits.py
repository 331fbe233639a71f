"""After a save is persisted: rank 0's writer commits it and removes old steps, others wait. No torch."""

from __future__ import annotations

import logging
import time
from functools import partial

from ckptlib.catalog.catalog import Catalog
from ckptlib.catalog.commit import Committer, raise_if_failed
from ckptlib.catalog.sweeper import Sweeper
from ckptlib.errors import CkptError, StoreError, describe
from ckptlib.format.keys import SaveId
from ckptlib.jobs import JobThread
from ckptlib.policy.keep import Keep
from ckptlib.writer.channel import Channel
from ckptlib.writer.failures import Failures
from ckptlib.writer.tier import Tier
from ckptlib.writer.trainer import Trainer
from ckptlib.writer.watchdog import Watchdog

log = logging.getLogger(__name__)


class Commits:
    """Of one writer. One thread commits, or waits for rank 0's; another removes old steps."""

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
        self._catalog, self._swept = catalog, Catalog(catalog.store)  # of its own: no commit waits for a sweep
        self._sweeper = None if keep is None else Sweeper(self._swept, keep)
        self.committer = Committer(catalog)
        self._jobs, self._sweeps = JobThread("commit"), JobThread("sweep")

    def put(self, save: SaveId, began: float) -> None:
        """It is committed when all its parts are there. `began`: when it was begun, by the monotonic clock."""
        self._jobs.put(partial(self._commit, save, began))

    def put_wait(self, save: SaveId, timeout_s: float) -> None:
        """The trainer of a rank that does not commit learns the outcome."""
        self._jobs.put(partial(self._await, save, timeout_s))

    def finish(self) -> None:
        self._jobs.finish()
        self._sweeps.finish()

    def _commit(self, save: SaveId, began: float) -> None:
        left, usual_s = partial(self._trainer.seconds_left, began), time.monotonic() - began
        commit = partial(self.committer.commit_when_whole, save, self._world_size, left, usual_s)
        try:
            with self._watchdog.work("commit", save, max(began + self._trainer.deadline_s, time.monotonic())):
                manifest = commit() if self._tier is None else self._tier.commit(save, commit, left)
        except (CkptError, OSError) as error:
            self._failures.give_up(save, error)  # its own part is there, but the others wait for the step
            return
        finally:
            if self._tier is not None:
                self._tier.settle(save)
        seconds = time.monotonic() - began
        log.info("step %d is committed: %d bytes in %.3f s", save.step, manifest.nbytes, seconds)
        sweeps = self._sweeper is not None and not self._trainer.gone
        told = {"seconds": seconds, "nbytes": manifest.nbytes, "sweeps": int(sweeps)}
        self._channel.send({"event": "committed", "save": str(save), **told})
        if self._tier is not None:
            self._tier.look_again()
        if self._sweeper is not None and sweeps:
            self._sweeps.put(partial(self._sweep, self._sweeper, save))

    def _sweep(self, sweeper: Sweeper, save: SaveId) -> None:
        """Removes old steps."""
        self._swept.shared.opened_id = self._catalog.shared.opened_id
        try:
            with self._watchdog.work("sweep", None, time.monotonic() + self._trainer.deadline_s, minor=True):
                sweeper.sweep(save)
        except (CkptError, OSError) as error:
            log.warning("old steps could not be removed: %s", describe(error))
        self._channel.send({"event": "swept"})

    def _await(self, save: SaveId, timeout_s: float) -> None:
        deadline, pause = time.monotonic() + timeout_s, 0.01
        try:
            with self._watchdog.work("await", save, deadline + self._trainer.deadline_s, minor=True):
                while not self._is_decided(save):
                    if time.monotonic() > deadline:  # for whoever asked; the save goes on
                        self._channel.send({"event": "undecided", "save": str(save)})
                        return
                    time.sleep(pause)
                    pause = min(pause * 1.5, 0.5)
        except (CkptError, OSError) as error:
            self._failures.report(save, error)
            return
        self._channel.send({"event": "committed", "save": str(save), "seconds": 0.0, "nbytes": 0})

    def _is_decided(self, save: SaveId) -> bool:
        """Whether it is committed. Raises SaveFailed when it never will be."""
        try:
            if self._catalog.is_committed(save):
                return True
            raise_if_failed(self._catalog, save)
        except StoreError:
            if self._tier is None:  # else it is drained when the store is back
                raise
        return False
