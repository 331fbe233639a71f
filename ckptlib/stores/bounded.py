"""Calls that end in time: by threads, for functions that cannot be cancelled, and on an event loop."""

from __future__ import annotations

import asyncio
import concurrent.futures
import threading
from collections.abc import Callable, Coroutine
from typing import Any, TypeVar

from ckptlib.errors import StoreError
from ckptlib.jobs import fulfil

T = TypeVar("T")

LOOP_GRACE_S = 5.0
"""How long past its limit a cancelled coroutine may take to end, before its loop counts as stuck."""


def in_thread(call: Callable[[], T], limit_s: float) -> T:
    """Returns the result of `call`, or raises its error. Raises TimeoutError after `limit_s` seconds; the call goes on
    then. Raises StoreError if the call was not begun, since the system has no thread for it."""
    outcome: concurrent.futures.Future[T] = concurrent.futures.Future()
    try:
        threading.Thread(target=fulfil, args=(outcome, call), name="ckptlib-bounded", daemon=True).start()
    except RuntimeError as error:
        raise StoreError(f"the store was not asked: {error}. See ulimit -u, and pids.max of the cgroup") from error
    try:
        return _result(outcome, limit_s)
    finally:
        del outcome


def on_loop(make: Callable[[], Coroutine[Any, Any, T]], loop: asyncio.AbstractEventLoop, limit_s: float) -> T:
    """Returns the result of the coroutine, or raises its error. Raises TimeoutError after `limit_s` seconds, and
    cancels it."""

    async def run() -> T:
        return await asyncio.wait_for(make(), limit_s)

    future = asyncio.run_coroutine_threadsafe(run(), loop)
    try:
        return _result(future, limit_s + LOOP_GRACE_S)
    except BaseException:
        future.cancel()
        raise
    finally:
        del future


def _result(future: concurrent.futures.Future[T], limit_s: float) -> T:
    """Returns the result of a future; a time-out is the same class in all versions of Python.

    Nobody here keeps the future: an error in it that has this frame in its trace would keep all callers' locals, such
    as a model, until garbage is collected.
    """
    try:
        return future.result(limit_s)
    except (concurrent.futures.TimeoutError, asyncio.TimeoutError) as error:
        if isinstance(error, TimeoutError):
            raise
        raise TimeoutError(*error.args) from None
    finally:
        del future
