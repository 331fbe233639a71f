"""The `ckptlib` command: lists a root, verifies and cleans it, and checks a host. No torch."""

from __future__ import annotations

import sys


def main() -> None:
    """Runs the command line and exits: 0 good, 1 damage or failure, 2 wrong usage."""
    try:
        from ckptlib.cli.app import run
    except ModuleNotFoundError as error:
        package = (error.name or "").partition(".")[0]
        if package not in ("click", "rich"):
            raise
        sys.exit(f"the ckptlib command needs {package}, which is not installed: pip install 'ckptlib[cli]'")
    except KeyboardInterrupt:  # the imports take a while, too
        sys.exit("\nAborted!")
    run()
