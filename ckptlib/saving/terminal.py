"""Shows lines to a person who watches a run in which nobody has set up logging."""

from __future__ import annotations

import logging
import sys


def show(log: logging.Logger, message: str, *args: object) -> None:
    """Logs at level INFO. If no handler would take the message and stderr is a terminal, writes it there."""
    log.info(message, *args)
    if not log.hasHandlers() and sys.stderr is not None and sys.stderr.isatty():
        sys.stderr.write(f"ckptlib: {message % args}\n")
        sys.stderr.flush()
