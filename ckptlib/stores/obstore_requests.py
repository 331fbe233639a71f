"""Requests by obstore's client: how often one is sent, for how long, and what its failure means.

The store says which requests there are. This module has hasty clients for a server that has not answered yet, and
patient ones.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Coroutine, Mapping
from functools import cache, partial
from typing import Any, TypeVar

from obstore.exceptions import BaseError

from ckptlib.errors import StoreError, StoreTimeout
from ckptlib.stores import io_limits
from ckptlib.stores.obstore_config import client_of
from ckptlib.stores.obstore_errors import Failure
from ckptlib.stores.obstore_loop import ClientLoop, GivenUp
from ckptlib.stores.retries import Retries
from ckptlib.stores.secrets import Secrets, without_userinfo

T = TypeVar("T")


class Requests:
    """Sends requests to one bucket, by one client."""

    def __init__(self, url: str, options: Mapping[str, object]) -> None:
        self.url = without_userinfo(url).rstrip("/")
        self._secrets = Secrets(url, options)
        client = client_of(url, options)
        self.root, self.is_s3, self.lists_in_order = client.root, client.is_s3, client.lists_in_order
        one_by_one = {"disable_bulk_delete": True} if client.is_s3 else {}
        retry_s = io_limits.RETRY_S
        self.quick = client.open(io_limits.RUN_BYTES, True, min(io_limits.NOWHERE_S, retry_s), **one_by_one)
        """A hasty client, until the server has answered."""
        self._patient = client.open(io_limits.RUN_BYTES, True, retry_s, **one_by_one)
        self._open_uploads = cache(partial(client.open, idle=False, retry_s=retry_s))
        self._open_once = partial(client.open, retry_s=0.0)
        self.uploads = self._open_uploads(io_limits.PART_NBYTES)
        self.loop = ClientLoop("ckptlib-obstore")

    def uploads_of(self, part_nbytes: int) -> Any:
        """Returns a client for parts of this size, or of up to twice as much: few are made, and keep their
        connections."""
        nbytes = io_limits.PART_NBYTES
        while nbytes < part_nbytes:
            nbytes *= 2
        return self._open_uploads(nbytes)

    def deletes(self, num: int) -> Any:
        """Returns a client that deletes `num` objects, by as few requests as may be."""
        return self.uploads_of(int(io_limits.DELETE_S * num * io_limits.SLOWEST_BPS))

    def once(self, is_small: bool) -> Any:
        """Returns a client that sends nothing again, for objects that are put by one request."""
        return self._open_once(io_limits.RUN_BYTES if is_small else io_limits.PART_NBYTES, is_small)

    def below(self, key: str) -> str:
        """Returns where the key is in the bucket."""
        return "/".join(filter(None, [self.root, key]))

    def trust_address(self) -> None:
        """See `Store.trust_address`."""
        self.quick = self._patient

    def close(self) -> None:
        """Closes the loop: nothing may be asked afterwards."""
        self.loop.close()

    def run(
        self,
        doing: str,
        key: str,
        work: Callable[[], Coroutine[Any, Any, T]],
        deadline: float | None,
        nbytes: int = 0,
        more_s: float = 0.0,
    ) -> T:
        """Returns the result of `work`. The client repeats requests that it takes for harmless; all of ours are.
        `more_s`: how much longer than others one may take.

        Raises Beyond, and StoreErrors for the rest.
        """
        retries = Retries(deadline)
        while True:
            try:
                result = self.loop.run(work(), deadline)
                self.trust_address()
                return result
            except GivenUp:
                raise self.too_late(doing, key) from None
            except (BaseError, OSError) as error:
                failure = Failure.of(error)
                if self.quick is not self._patient and failure.kind != "Connect":
                    self.trust_address()
                    if failure.is_busy:  # only for as long as a hasty client asks
                        continue
                if failure.is_beyond:
                    raise Beyond from None
                may_pass = failure.may_pass or (doing == "put" and failure.lost_directory)
                wait_s = retries.wait_s() if may_pass and retries.elapsed_s < io_limits.RETRY_S + more_s else None
                if wait_s is None:
                    raise self.error(error, doing, key, nbytes) from None
                time.sleep(wait_s)

    def error(self, error: BaseException, doing: str, key: str, nbytes: int) -> StoreError:
        """Returns what a failure of the client means to whoever asked."""
        return Failure.of(error).as_error(error, doing, f"{self.url}/{key}", nbytes, self._secrets)

    def too_late(self, doing: str, key: str) -> StoreTimeout:
        """Returns the error for a request that was not done by its deadline."""
        return StoreTimeout(f"{self.url}/{key}: cannot {doing}: not done by its deadline; it was given up")


class Beyond(Exception):
    """The range asked for does not lie in the object."""
