"""Makes one rank's error an error on every rank, so that all of them go on, or none.

Knows which classes of errors travel between ranks: those of ckptlib.
"""

from __future__ import annotations

import logging
import socket
import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor, wait
from functools import partial
from typing import TypeVar

from ckptlib import errors
from ckptlib.errors import AgreementFailed
from ckptlib.jobs import JobFutures
from ckptlib.ranks.group import Group

log = logging.getLogger(__name__)

Result = TypeVar("Result")

TOLD_AFTER_S = 60.0
"""Seconds after which a rank says that most others wait for it; again after twice as long each time."""


def together(group: Group, what: str, call: Callable[[], Result]) -> Result:
    """Returns the result of `call`, if it succeeds on every rank; collective.

    Otherwise all ranks raise an error of one class, since callers act on it: that of the first rank that failed, or its
    first base class that is ckptlib's, or else AgreementFailed. A rank whose own error is of that class raises its own.
    No rank goes on alone, and none waits for one that gave up.
    """
    own: Exception | None = None
    try:
        result = call()
    except Exception as error:
        own = error
    told = group.gather(b"" if own is None else f"{_known(own)}: {own}".encode(errors="backslashreplace"))
    failures = {rank: text.decode() for rank, text in enumerate(told) if text}
    if not failures:
        return result
    rank, text = min(failures.items())
    name, _, message = text.partition(": ")
    try:
        if own is not None and _known(own) == name:
            raise own
        cls = getattr(errors, name, AgreementFailed)
        raise cls(f"{what} failed on {len(failures)} of {group.size} ranks; on rank {rank}: {message}") from own
    finally:
        del own, call  # whose trace has this frame, and those of all callers, with a model in their locals


def by_rank_0(group: Group, what: str, call: Callable[[], bytes]) -> bytes:
    """Returns what `call` returns on rank 0, which alone makes it; collective. Raises as `together` does."""
    return group.broadcast(together(group, what, lambda: call() if group.rank == 0 else None))


def _known(error: Exception) -> str:
    """Returns the name of the class by which every rank knows an error: a user's store may raise a class of its own."""
    own = type(error)
    known = (cls.__name__ for cls in own.__mro__ if cls.__module__ == errors.__name__)
    return next(known, f"{own.__module__}.{own.__qualname__}")


def together_at_length(group: Group, what: str, call: Callable[[], Result]) -> Result:
    """Does what `together` does, for calls that may take one rank longer than a collective waits.

    The call runs in a thread; the ranks meet now and then, so that a slow rank is waited for, and a dead one is not. A
    rank that most others have waited for says so after a while: its disk may hang, for ever. If one has lost another,
    none is waited for, and all raise AgreementFailed. Returns, or raises, when the call has ended here.
    """
    if group.size == 1:
        return together(group, what, call)
    with ThreadPoolExecutor(1, "ckptlib-at-length") as executor:
        return _meet_until_done(group, what, partial(executor.submit, call))


def together_while_all_live(group: Group, what: str, call: Callable[[], Result]) -> Result:
    """Does what `together_at_length` does, for a call that waits for the other ranks up to a time-out of its own. If
    one of them is gone, the call is left to itself, and nothing may depend on what it does then."""
    calling = JobFutures("while-all-live")
    try:
        return _meet_until_done(group, what, partial(calling.submit, call))
    finally:
        calling.leave()


def _meet_until_done(group: Group, what: str, submit: Callable[[], Future[Result]]) -> Result:
    try:
        work = submit()
    except RuntimeError as error:  # no thread: nobody waits for this rank, as if it had lost another
        work = Future()
        work.set_exception(AgreementFailed(f"{error}. See ulimit -u, and pids.max of the container's cgroup"))
    began = most_done = time.monotonic()
    told_s = TOLD_AFTER_S
    try:
        while True:
            ended = bool(wait([work], group.patience_s).done)
            lost = ended and isinstance(work.exception(), AgreementFailed)
            left, num_lost = group.start_sum([int(not ended), int(lost)])()
            if not left:
                return together(group, what, work.result)
            if num_lost:  # nobody raises another error: callers would go on together, without those that are left
                together(group, what, work.result if lost else lambda: None)
            now = time.monotonic()
            if 2 * left > group.size:
                most_done = now
            elif not ended and now - most_done > told_s:
                log.warning(
                    "%s: rank %d, on %s, is still at it after %.0f s; %d ranks have done it",
                    what,
                    group.global_rank(group.rank),
                    socket.gethostname(),
                    now - began,
                    group.size - left,
                )
                told_s *= 2
    finally:
        del work  # as `together` lets go of its error
