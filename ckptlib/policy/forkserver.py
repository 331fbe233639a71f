"""Imported by multiprocessing's forkserver as it begins: what a scheduler sends to all processes does not end it.

Workers of a data loader are its children, and are lost with it.
"""

from __future__ import annotations

import sys

from ckptlib.policy.stop_signal import StopSignal

if "multiprocessing.forkserver" in sys.orig_argv[-1]:  # an import elsewhere changes nothing
    _outlasts = StopSignal(alone=True)
    """Held for as long as the server is there. What it forks has the default handlers: it may be told to end."""
