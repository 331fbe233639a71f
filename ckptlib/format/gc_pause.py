"""Pauses Python's cyclic garbage collector, for code that makes many objects which all stay."""

from __future__ import annotations

import gc
import os
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager

_lock = threading.RLock()  # a finalizer may enter another pause while its thread holds the lock
_pauses = 0
"""Number of pauses that are active in all threads; guarded by the lock."""
_enabled = True
"""Whether collections were on before the first pause."""


@contextmanager
def kept() -> Iterator[Callable[[], None]]:
    """Pauses collections inside, until the yielded function is called. For work that ends soon: other threads make
    garbage meanwhile. If several threads are inside, collections resume when the last of them leaves.

    A process that has imported torch holds about a million objects, and planning 20,000 tensors makes enough new ones
    to start a collection of all of them: 0.24 s, where the rest of a load takes 0.36 s. It starts as soon as
    collections are on again, so temporary objects should be gone by then.
    """
    ended = False

    def collect_again() -> None:
        nonlocal ended
        if not ended:
            _end()
            ended = True

    try:  # interrupted anywhere: a pause that ends twice only lets collections resume early; one that stays is worse
        _begin()
        yield collect_again
    finally:
        collect_again()


def _begin() -> None:
    global _pauses, _enabled
    with _lock:
        if not _pauses:
            _enabled = gc.isenabled()
        _pauses += 1  # before collections are off: a child that is forked in between turns them on by this count
        if _pauses == 1:
            gc.disable()


def _end() -> None:
    global _pauses
    with _lock:
        _pauses = max(_pauses - 1, 0)  # a forked child has none left
        if not _pauses and _enabled:
            gc.enable()


def _in_child() -> None:
    """Ends all pauses in a forked child, which has one thread: the pauses of other threads would never end there."""
    global _lock, _pauses
    _lock = threading.RLock()
    if _pauses:
        _pauses = 1
        _end()


if hasattr(os, "register_at_fork"):  # Windows does not fork
    os.register_at_fork(after_in_child=_in_child)
