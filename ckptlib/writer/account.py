"""The account of a start, put by the writer of its first rank when the trainer is gone. No torch.

In threads of their own: no save and no commit waits for sums.
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
    """One per writer of a first rank."""

    def __init__(self, fd: int, generation: str, shared: SharedDocuments, dead: bool) -> None:
        """`fd`: of the trainer's page, inherited. `shared`: of the root. `dead`: whether the trainer is gone already,
        since whenever."""
        self._dead = dead
        self._generation = parse_generation(generation)
        self._shared = shared
        self._page = memoryview(mmap.mmap(fd, PAGE_NBYTES, prot=mmap.PROT_READ))
        os.close(fd)
        self._origin: SaveId | None = None
        self._threads: list[threading.Thread] = []

    def continues(self, save: SaveId, manifest: Manifest | None, accounted: bool) -> None:
        """The job went on from this save; the start that made it may have left no account. `manifest`: as the trainer
        read it, which has looked then whether there is an account."""
        if save == self._origin or save.generation == self._generation:
            return
        self._origin = save
        if manifest is None:
            self._begin(partial(keep_account_of, Catalog(self._shared.store), save))
        elif not accounted:
            self._begin(partial(keep_account_in, Catalog(self._shared.store), manifest))

    def end(self) -> None:
        """The trainer is gone, or has said that it ends."""
        account = read_page(self._page, None if self._dead else time.monotonic())
        if account is not None:
            self._begin(partial(put_account, Catalog(self._shared.store), self._generation, account))

    def finish(self) -> None:
        """Waits for the threads, if they do not hang."""
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
