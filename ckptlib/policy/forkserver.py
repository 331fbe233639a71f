"""Protects multiprocessing's forkserver, which imports this as it begins, from signals to all processes of a job.

Workers of a data loader are its children, and would be lost with it.
"""

from __future__ import annotations

import sys

from ckptlib.policy.stop_signal import StopSignal

if "multiprocessing.forkserver" in sys.orig_argv[-1]:  # an import elsewhere changes nothing
    _outlasts = StopSignal(alone=True)
    """Held as long as the server lives. Its children have the default handlers: signals may end them."""
