"""A small disk of one's own."""

from __future__ import annotations

import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest


@contextmanager
def tmpfs(path: Path, nbytes: int) -> Iterator[Path]:
    """Mounted there within. Skips the test where none can be."""
    path.mkdir()
    command = ["mount", "-t", "tmpfs", "-o", f"size={nbytes}", "tmpfs", path]
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode != 0:
        pytest.skip(f"no tmpfs can be mounted here: {done.stderr}")
    try:
        yield path
    finally:
        subprocess.run(["umount", "-l", path], check=True)
