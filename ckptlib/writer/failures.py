"""Tells of a save that failed: the other ranks through the store, the trainer by an event. No torch."""

from __future__ import annotations

import itertools
import logging
import threading
import time
from collections.abc import Callable

from ckptlib.catalog.shared_documents import SharedDocuments
from ckptlib.errors import CkptError, StoreError, StoreFull, describe
from ckptlib.format.keys import SaveId
from ckptlib.writer.channel import Channel, Message
from ckptlib.writer.persist import put_failure
from ckptlib.writer.told_warnings import ALREADY_TOLD
from ckptlib.writer.trainer import Trainer

log = logging.getLogger(__name__)

PAUSES_S = (1.0, 2.0, 4.0, 8.0, 15.0, 30.0, 60.0, 120.0)
"""Pauses between tries to publish a failure while the store is full or away; the last is repeated. Rank 0 commits
nothing later while it waits for the part that will not come."""


class Failures:
    """Tells of the saves that fail in one writer. Any thread may call it."""

    def __init__(self, channel: Channel, shared: SharedDocuments, rank: int, slack_s: float, trainer: Trainer) -> None:
        """`shared`: the documents of the root. `slack_s`: how long the next job waits for a failure to be published.
        Nobody waits for a part for longer than the trainer's saves may take."""
        self._channel, self._shared, self._rank = channel, shared, rank
        self._slack_s, self._trainer = slack_s, trainer

    def give_up(self, save: SaveId, error: BaseException, in_doubt: bool = False, is_put: bool = False) -> None:
        """Publishes that this rank's part, or its commit, will not come, so that nobody waits for it. Tells the trainer
        after the first try: a full store may have no room for the failure for long. `in_doubt`: the save may be
        committed all the same. `is_put`: this rank's part may be there, so the next job may commit the save unless the
        failure is published."""

        def tell(is_published: bool) -> None:
            self.report(save, error, in_doubt=in_doubt or (is_put and not is_published))

        self._publish(save, describe(error), tell)

    def publish(self, save: SaveId, error: str) -> None:
        """Publishes a failure to the other ranks alone."""
        self._publish(save, error, lambda is_published: None)

    def _publish(self, save: SaveId, error: str, then: Callable[[bool], None]) -> None:
        """Publishes a failure in a thread of its own, since that may hang as well, and waits at most `slack_s` for it;
        no longer than for the first try if the store is away.

        `then`: called after the first try, or if it hangs, with whether the failure is published.
        """
        log.error("step %d: %s", save.step, error, extra=ALREADY_TOLD)
        deadline = time.monotonic() + self._slack_s
        tried, waited, published = threading.Event(), threading.Event(), threading.Event()
        threading.Thread(target=self._put, args=(save, error, tried, waited, published), daemon=True).start()
        tried.wait(self._slack_s)
        then(published.is_set())
        waited.wait(max(deadline - time.monotonic(), 0.0))

    def _put(
        self, save: SaveId, error: str, tried: threading.Event, waited: threading.Event, published: threading.Event
    ) -> None:
        until = time.monotonic() + self._trainer.deadline_s
        for pause_s in itertools.chain(PAUSES_S, itertools.repeat(PAUSES_S[-1])):
            try:
                self._shared.check_there()  # else the failure would make a directory where the root was
                put_failure(self._shared.store, save, self._rank, error)
                published.set()
                waited.set()
                return
            except (CkptError, OSError) as second:
                is_full = isinstance(second, StoreFull)
                is_last = not isinstance(second, StoreError) or time.monotonic() + pause_s > until
                if is_last or not is_full:
                    waited.set()
                if is_last:
                    told = "step %d: the failure could not be published: %s"
                    log.error(told, save.step, describe(second), extra=ALREADY_TOLD)  # the trainer is told of the save
                    return
            finally:
                tried.set()
            time.sleep(pause_s)
            if (self._trainer.gone or self._trainer.dead) and (not is_full or pause_s == PAUSES_S[-1]):
                waited.set()  # the next job, or a rescue, may finish the save by now
                return

    def report(self, save: SaveId, error: BaseException, seen: bool = False, in_doubt: bool = False) -> None:
        """Tells the trainer alone. `seen`: another rank has published the failure; this one's slot may be read
        still."""
        told: Message = {"kind": type(error).__name__, "error": describe(error)}
        marks = {name: True for name, is_so in (("seen", seen), ("in_doubt", in_doubt)) if is_so}
        self._channel.send({"event": "failed", "save": str(save), **told, **marks})
