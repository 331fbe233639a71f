"""A pause of Python's cyclic garbage collector, for code that makes many objects which all stay."""

from __future__ import annotations

import gc
import os
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager

_lock = threading.RLock()  # a finalizer may come to another pause while its thread holds it
_pauses = 0
"""In which threads are just now; the lock's."""
_enabled = True
"""Whether collections were on before the first of them."""


@contextmanager
def kept() -> Iterator[Callable[[], None]]:
    """Nothing is collected inside, until what it yields is called. For work that ends soon: other threads make garbage
    meanwhile. Where several threads are inside, collections are on again when the last of them leaves.

    A process that has imported torch holds about a million objects, and planning 20,000 tensors makes enough new ones
    for a collection of all of them: 0.24 s where the rest of a load takes 0.36. It comes as soon as collections are on
    again, so what was made should be gone by then.
    """
    ended = False

    def collect_again() -> None:
        nonlocal ended
        if not ended:
            _end()
            ended = True

    try:  # interrupted anywhere: a pause that ends twice lets collections come early; one that stays is worse
        _begin()
        yield collect_again
    finally:
        collect_again()


def _begin() -> None:
    global _pauses, _enabled
    with _lock:
        if not _pauses:
            _enabled = gc.isenabled()
        _pauses += 1  # before they are off: a child that is forked in between turns them on by this
        if _pauses == 1:
            gc.disable()


def _end() -> None:
    global _pauses
    with _lock:
        _pauses = max(_pauses - 1, 0)  # none is left in a forked child
        if not _pauses and _enabled:
            gc.enable()


def _in_child() -> None:
    """A forked child has one thread, and the pauses of the others would never end there."""
    global _lock, _pauses
    _lock = threading.RLock()
    if _pauses:
        _pauses = 1
        _end()


if hasattr(os, "register_at_fork"):  # Windows does not fork
    os.register_at_fork(after_in_child=_in_child)
