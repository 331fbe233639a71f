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
    with mounted(path, "tmpfs", "-o", f"size={nbytes}"):
        yield path


@contextmanager
def mounted(path: Path, kind: str, *options: str) -> Iterator[Path]:
    """The same of any file system that needs no device."""
    path.mkdir()
    done = subprocess.run(["mount", "-t", kind, *options, kind, path], capture_output=True, text=True)
    if done.returncode != 0:
        pytest.skip(f"no {kind} can be mounted here: {done.stderr}")
    try:
        yield path
    finally:
        subprocess.run(["umount", "-l", path], check=True)
