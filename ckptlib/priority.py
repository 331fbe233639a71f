"""Lowers the priority of the processes that work beside the training."""

from __future__ import annotations

import os
import threading
import time
from pathlib import Path

NICENESS = 10
"""Training comes first if both want a core: it gets nine tenths of it."""

_SESSION = Path("/proc/self/autogroup")
_TRY_S = 60.0


def give_way() -> None:
    """Lowers the priority of this process, and of the session that it leads.

    Linux can divide the CPU between sessions first, and most distributions ask it to (kernel.sched_autogroup_enabled).
    Then a niceness counts within a session only: a writer of niceness 10 got half of a core that the training wanted.
    """
    os.nice(NICENESS)
    if os.getsid(0) == os.getpid() and not _lower_session():
        threading.Thread(target=_lower_session_later, name="ckptlib-priority", daemon=True).start()


def _lower_session() -> bool:
    """Returns whether there is nothing more to do."""
    try:
        _SESSION.write_text(str(NICENESS))
    except BlockingIOError:  # without CAP_SYS_ADMIN, only one such change per 0.1 s is allowed, by all processes
        return False
    except OSError:  # another kernel, or no /proc: niceness is all there is
        pass
    return True


def _lower_session_later() -> None:
    deadline = time.monotonic() + _TRY_S
    while not _lower_session() and time.monotonic() < deadline:
        time.sleep(0.1 + os.getpid() % 16 / 100)  # not all at once again
