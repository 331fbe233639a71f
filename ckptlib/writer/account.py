"""The account of a start: the writer of its first rank puts it into the store when the trainer is gone. No torch.

It does so in threads of its own: no save and no commit waits for it.
"""

from __future__ import annotations

import logging
import mmap
import os
import threading
import time
from collections.abc import Callable
from functools import partial

from ckptlib.catalog.accounts import keep_account_in, keep_account_of, put_account
from ckptlib.catalog.catalog import Catalog
from ckptlib.catalog.shared_documents import SharedDocuments
from ckptlib.errors import CkptError, describe
from ckptlib.format.account import PAGE_NBYTES, read_page
from ckptlib.format.keys import SaveId, parse_generation
from ckptlib.format.manifest import Manifest

log = logging.getLogger(__name__)

FINISH_S = 30.0
"""How long a writer that ends waits for a store that does not answer."""


class StartAccount:
    """Puts the account of this start, and of the start that it goes on from. Each writer of a first rank has one."""

    def __init__(self, fd: int, generation: str, shared: SharedDocuments, dead: bool) -> None:
        """`fd`: the inherited descriptor of the trainer's page. `shared`: the documents of the root. `dead`: whether
        the trainer is already gone, for an unknown time."""
        self._dead = dead
        self._generation = parse_generation(generation)
        self._shared = shared
        self._page = memoryview(mmap.mmap(fd, PAGE_NBYTES, prot=mmap.PROT_READ))
        os.close(fd)
        self._origin: SaveId | None = None
        self._threads: list[threading.Thread] = []

    def continues(self, save: SaveId, manifest: Manifest | None, accounted: bool) -> None:
        """Notes that the job went on from this save. The start that made the save may have left no account. `manifest`:
        the save's, as the trainer read it. `accounted`: whether the trainer then found an account."""
        if save == self._origin or save.generation == self._generation:
            return
        self._origin = save
        if manifest is None:
            self._begin(partial(keep_account_of, Catalog(self._shared.store), save))
        elif not accounted:
            self._begin(partial(keep_account_in, Catalog(self._shared.store), manifest))

    def end(self) -> None:
        """Puts the account of this start: the trainer is gone, or has said that it ends."""
        account = read_page(self._page, None if self._dead else time.monotonic())
        if account is not None:
            self._begin(partial(put_account, Catalog(self._shared.store), self._generation, account))

    def finish(self) -> None:
        """Waits for the threads, FINISH_S at most: they may hang."""
        deadline = time.monotonic() + FINISH_S
        for thread in self._threads:
            thread.join(max(deadline - time.monotonic(), 0.0))

    def _begin(self, put: Callable[[], None]) -> None:
        def run() -> None:
            try:
                self._shared.check_there()  # else the account would make a directory where the root was
                put()
            except (CkptError, OSError) as error:
                log.warning("ckptlib goodput will lack a start of this job: %s", describe(error))

        thread = threading.Thread(target=run, name="ckptlib-account", daemon=True)
        self._threads.append(thread)
        thread.start()
