"""Tells a forked child from the process that opened the session. The child must leave alone what it inherits.

It shares its parent's files, sockets and writer; the parent's threads are not there. A normal exit of the child runs
the parent's exit handlers and unwinds its `with` blocks.
"""

from __future__ import annotations

import os
from collections import Counter

from ckptlib.errors import SaveFailed
from ckptlib.stores.secrets import without_userinfo

_open: Counter[str] = Counter()
"""Roots that this process saves to."""

_inherited: dict[str, int] = {}
"""Roots that the parent process saved to when this one was forked, each with the parent's id."""


class Owner:
    """The process that has taken one hold on one root."""

    def __init__(self, url: str) -> None:
        self._url = url
        self._pid = os.getpid()
        self._holds = True
        _open[url] += 1

    @property
    def here(self) -> bool:
        """Whether this is that process."""
        return os.getpid() == self._pid

    def check(self) -> None:
        """Raises SaveFailed in a process that was forked from the owner."""
        if os.getpid() != self._pid:
            raise _forked(self._url, self._pid)

    def let_go(self) -> None:
        """Gives up the hold. Calling it again changes nothing."""
        if self._holds:
            self._holds = False
            _open[self._url] -= 1


def check_root(url: str) -> None:
    """Raises SaveFailed if this process was forked from one that saves to the root."""
    if url in _inherited:
        raise _forked(url, _inherited[url])


def _forked(url: str, parent: int) -> SaveFailed:
    return SaveFailed(
        f"{without_userinfo(url)}: process {os.getpid()} was forked from process {parent}, which saves to this root, "
        "and is not a rank of the job; save in that process, or to another root"
    )


def _in_child() -> None:
    _inherited.update(dict.fromkeys(+_open, os.getppid()))
    _open.clear()


if hasattr(os, "register_at_fork"):  # Windows does not fork
    os.register_at_fork(after_in_child=_in_child)
