"""Notices from rank 0 to all others, and from these to rank 0, without a collective: they are found by who looks.

They are left under keys in the store that the ranks share, so that nobody waits for anybody. Looking is a hint at
best: the store may be gone with the host of another rank, and its client waits for an answer for ever. So a thread
asks, and a look returns its last answer.
"""

from __future__ import annotations

import logging
import time
from collections import deque
from functools import partial

from torch._C._distributed_c10d import PrefixStore, Store

from ckptlib.jobs import Job, JobThread

log = logging.getLogger(__name__)

KEPT = 8
"""How many notices stay. A rank that looks for an older one has waited for long, and asks the store."""

LOOKS_PER_S = 2000
"""How many looks of all ranks together one store answers with ease."""

LET_GO_S = 1.0


class Notices:
    """One rank's notices; for the main thread. Only rank 0 leaves any for all, and only the others give up."""

    def __init__(self, store: Store | None, name: str, size: int) -> None:
        """`store`: that of the ranks; None: there is but one rank. `name`: the same on all ranks, and new."""
        self._store = None if store is None else PrefixStore("notices", store)
        self._name = name
        self._left: deque[str] = deque(maxlen=KEPT)
        self._found = "", ""
        """The key that was looked for last, and what was found under it."""
        self._pause_s = size / LOOKS_PER_S
        self._looked = -self._pause_s
        self._thread: JobThread | None = None

    @property
    def lost(self) -> bool:
        """Whether no notice can be found any more."""
        return self._store is None

    def start(self) -> None:
        """Starts the thread now, for what is to be told as the program ends: since 3.12 Python starts none then."""
        if self._store is None:
            return
        self._thread = self._thread or JobThread("notices")
        try:
            self._thread.start()
        except RuntimeError as error:  # the system has no thread for it
            self._lose(error)

    def leave(self, notice: str) -> None:
        """Leaves a notice, of one line. It is found soon, unless the store is gone."""
        self._left.append(notice)
        self._have(partial(self._put, self._name, "\n".join(self._left)))

    def look(self) -> tuple[str, ...]:
        """Returns the last notices that are known by now, oldest first. Does not wait, but has a thread look."""
        return tuple(self._known(self._name).splitlines())

    def give_up(self, save: str, why: str) -> None:
        """Tells rank 0, in one line, why this rank gave up its share of a save. Rank 0 finds what each rank told."""
        self._have(partial(self._put, f"{self._name}/{save}", why + "\n", adds=True))

    def given_up(self, save: str) -> tuple[str, ...]:
        """Returns why ranks gave up their shares of a save, as far as is known by now. Looks as `look` does."""
        return tuple(self._known(f"{self._name}/{save}").splitlines())

    def _put(self, key: str, text: str, adds: bool = False) -> None:
        """Puts a text under the key, or adds it to what is there."""
        store = self._store
        if store is not None:
            try:
                if adds:
                    store.append(key, text)  # type: ignore[attr-defined]  # missing in torch's stubs
                else:
                    store.set(key, text)
            except Exception as error:  # of whatever class: the thread must go on, and torch has stores in Python
                self._lose(error)

    def _known(self, key: str) -> str:
        due = self._store is not None and time.monotonic() - self._looked >= self._pause_s
        if due and (self._thread is None or not self._thread.busy):
            self._looked = time.monotonic()
            self._have(partial(self._read, key))
        found_under, text = self._found
        return text if found_under == key else ""

    def _have(self, job: Job) -> None:
        """Has the thread do a job. Does not wait: a look may be waiting for the store, whose client asks one thing at a
        time."""
        self.start()
        if self._store is not None and self._thread is not None:
            self._thread.put(job)

    def _read(self, key: str) -> None:
        store = self._store
        try:
            if store is not None and store.check([key]):
                self._found = key, store.get(key).decode()
        except Exception as error:  # as in `_put`
            self._lose(error)

    def _lose(self, error: Exception) -> None:
        log.info("the store of the ranks cannot be asked, so this rank has no notices from now on: %s", error)
        self._store = None

    def close(self) -> None:
        """Lets go of the thread, unless it waits for a store that does not answer."""
        deadline = time.monotonic() + LET_GO_S
        while self._thread is not None and self._thread.busy and time.monotonic() < deadline:
            time.sleep(0.001)
        if self._thread is not None and not self._thread.busy:
            self._thread.finish()
        self._store = None
