"""Exports that wait to be looked at: a small one is over before a busy machine has come to that."""

from __future__ import annotations

import os
import signal
import subprocess
from typing import Any


def hold_first() -> None:
    """Stops the next export that this process begins, before it has its order. It goes on by SIGCONT."""
    begin: Any = subprocess.Popen

    def held(command: Any, *args: Any, **kwargs: Any) -> Any:
        process = begin(command, *args, **kwargs)
        if "ckptlib.exporting" in command:
            subprocess.Popen = begin  # type: ignore[misc]
            os.kill(process.pid, signal.SIGSTOP)
        return process

    subprocess.Popen = held  # type: ignore[misc, assignment]
