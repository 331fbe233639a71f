"""Calls of one of fsspec's filesystems: within their time, again where that may help, and with errors of the contract.

fsspec's instances are shared by everybody who gives equal arguments. This one is our own.
"""

from __future__ import annotations

import contextlib
import errno
import inspect
import math
import os
import threading
import time
from collections.abc import Iterator, Mapping
from functools import partial
from typing import Any

from ckptlib.errors import CkptError, ObjectNotFound, ObjectUnreadable, StoreDenied, StoreError, StoreFull, StoreTimeout
from ckptlib.stores.bounded import in_thread, on_loop
from ckptlib.stores.fsspec_errors import ABSENT, NoBucket, concerns_all, is_forbidden, is_page, may_pass
from ckptlib.stores.fsspec_opening import open_filesystem
from ckptlib.stores.io_limits import IDLE_S, RETRY_S, SLOWEST_BPS
from ckptlib.stores.retries import Retries
from ckptlib.stores.secrets import Secrets, without_userinfo

_ONE_CONNECTION = ("sftp", "ssh", "ftp")  # their client mixes up answers to calls of several threads


class Client:
    """The filesystem behind a URL, and the directory or bucket in it."""

    def __init__(self, url: str, options: Mapping[str, object]) -> None:
        self.url = without_userinfo(url).rstrip("/")
        self._secrets = Secrets(url, options)
        try:
            self.fs, self.root = open_filesystem(url, options)
        except OSError as error:  # FTP and SFTP connect here
            told = self._secrets.hide(f"{type(error).__name__}: {error}")
            raise StoreTimeout(f"{self.url}: cannot be reached: {told}") from self._secrets.harmless(error)
        self.is_object_store: bool = self.fs.async_impl
        """Whether there are no directories, and calls may be made by many threads."""
        self._turns = threading.Semaphore(1 if url.partition("://")[0] in _ONE_CONNECTION else 10**6)
        self._was_there = False
        """Whether the server has answered."""

    def call(self, name: str, *args: Any, nbytes: int = 0, deadline: float | None = None, **kwargs: Any) -> Any:
        """Calls a method of the filesystem that moves `nbytes` bytes. Calls it again if it takes too long, or if the
        backend takes for a refusal what may pass.

        However long the first try took, another one follows. Raises its errors, and StoreTimeout.
        """
        began = time.monotonic()
        end = until = math.inf if deadline is None else deadline
        limit_s = IDLE_S + nbytes / SLOWEST_BPS
        again = Retries(deadline)
        while True:
            tried = time.monotonic()
            try:
                found = self._attempt(name, limit_s, end, *args, **kwargs)
                self._was_there = True
                return found
            except TimeoutError:
                now = time.monotonic()
                until = min(until, now + RETRY_S)
                if now >= until:
                    raise StoreTimeout(f"no answer within {now - began:.0f} s, for {nbytes} bytes") from None
                time.sleep(max(0.0, min(1.0, tried + limit_s - now)))  # the backend itself may be in a hurry
            except Exception as error:
                wait_s = again.wait_s() if may_pass(error) else None
                if wait_s is None:
                    raise
                time.sleep(wait_s)

    def _attempt(self, name: str, limit_s: float, end: float, /, *args: Any, **kwargs: Any) -> Any:
        """Makes one call. Raises TimeoutError, and the method's errors."""
        left_s = max(end - time.monotonic(), 0.0)
        coroutine = getattr(self.fs, f"_{name}", None) if self.is_object_store else None
        if inspect.iscoroutinefunction(coroutine):
            return on_loop(partial(coroutine, *args, **kwargs), self.fs.loop, min(limit_s, left_s))
        if not self._turns.acquire(timeout=min(RETRY_S, left_s)):
            raise TimeoutError
        try:
            left_s = max(end - time.monotonic(), 0.0)
            return in_thread(partial(getattr(self.fs, name), *args, **kwargs), min(limit_s, left_s))
        finally:
            self._turns.release()

    def check_there(self, path: str) -> None:
        """Raises StoreTimeout if nobody has answered yet, and nobody answers a read of this object."""
        if not self._was_there:
            try:
                self.call("cat_file", path, start=0, end=1)
            except StoreTimeout:
                raise
            except Exception:  # it answered; the call that follows tells what is wrong
                self._was_there = True

    @contextlib.contextmanager
    def failures(self, doing: str, key: str, nbytes: int = 0) -> Iterator[None]:
        """Turns errors of the backend into those of the contract, whatever tree they belong to.

        botocore, google, azure and paramiko each have their own, and none of them need be installed.
        """
        try:
            yield
        except StoreTimeout as error:
            why = "" if self._was_there else ", or not at this address: check the URL, the endpoint or account, and DNS"
            raise StoreTimeout(
                f"{self.url}/{key}: cannot {doing}: {error}; the store may be down, or too slow{why}"
            ) from None
        except CkptError:
            raise
        except ABSENT as error:
            if doing == "get" and not is_page(error):
                raise ObjectNotFound(f"{self.url}/{key}: no such object") from None
            raise self._failure(error, doing, key) from self._secrets.harmless(error)
        except Exception as error:
            if isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT):
                raise StoreFull(f"{self.url}/{key}: cannot put {nbytes} bytes: {os.strerror(error.errno)}") from None
            raise self._failure(error, doing, key) from self._secrets.harmless(error)

    def _failure(self, error: Exception, doing: str, key: str) -> StoreError:
        cause = self._secrets.hide(f"{type(error).__name__}: {error}")
        kind: type[StoreError] = StoreError
        if isinstance(error, NoBucket):
            return StoreDenied(f"{self.url}/{key}: cannot {doing}: {cause}; make it, or correct the URL")
        if is_page(error):
            kind, cause = StoreTimeout, f"{cause}; is there a proxy in the way?"
        elif is_forbidden(error):
            kind = ObjectUnreadable if doing == "get" and not concerns_all(error) else StoreDenied
            cause += "; check the credentials, and what they may do there"
        return kind(f"{self.url}/{key}: cannot {doing}: {cause}")
