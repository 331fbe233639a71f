"""What is made durable on a local disk: the calls of fsync, which go on to the kernel."""

from __future__ import annotations

import os

import pytest


def note_flushes(monkeypatch: pytest.MonkeyPatch) -> set[str]:
    """The paths whose fsync has returned from now on; it grows."""
    flushed, fsync = set[str](), os.fsync

    def noted(fd: int) -> None:
        fsync(fd)
        flushed.add(os.readlink(f"/proc/self/fd/{fd}"))

    monkeypatch.setattr(os, "fsync", noted)
    return flushed
