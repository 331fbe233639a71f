"""What is made durable on a local disk: the calls of fsync, which go on to the kernel."""

from __future__ import annotations

import os
import shutil
from typing import Any

import pytest


def note_flushes(monkeypatch: pytest.MonkeyPatch) -> set[str]:
    """The paths whose fsync has returned from now on; it grows."""
    flushed, fsync = set[str](), os.fsync

    def noted(fd: int) -> None:
        fsync(fd)
        flushed.add(os.readlink(f"/proc/self/fd/{fd}"))

    monkeypatch.setattr(os, "fsync", noted)
    return flushed


class Killed(BaseException):
    """The process is gone: nothing handles this."""


class ForgetfulDisk:
    """Names that no fsync of their directory has followed are lost with the power. Files and directories that are made
    from now on, by links and mkdir."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self._volatile = set[str]()
        self.links_left = -1
        """The last of so many raises Killed when it is made; a negative number: none does."""
        fsync, link, mkdir = os.fsync, os.link, os.mkdir

        def noted_fsync(fd: int) -> None:
            fsync(fd)
            path = os.readlink(f"/proc/self/fd/{fd}")
            self._volatile = {name for name in self._volatile if os.path.dirname(name) != path}

        def noted_link(source: str, name: str, *, src_dir_fd: int, dst_dir_fd: int, **more: Any) -> None:
            link(source, name, src_dir_fd=src_dir_fd, dst_dir_fd=dst_dir_fd, **more)
            self._volatile.add(_path(dst_dir_fd, name))
            self.links_left -= 1
            if self.links_left == 0:
                raise Killed

        def noted_mkdir(name: str, mode: int = 0o777, *, dir_fd: int | None = None) -> None:
            mkdir(name, mode, dir_fd=dir_fd)
            self._volatile.add(_path(dir_fd, name))

        monkeypatch.setattr(os, "fsync", noted_fsync)
        monkeypatch.setattr(os, "link", noted_link)
        monkeypatch.setattr(os, "mkdir", noted_mkdir)

    def lose_power(self) -> None:
        """And start again: what is there then."""
        for path in self._volatile:
            if os.path.isdir(path):
                shutil.rmtree(path)
            elif os.path.lexists(path):
                os.unlink(path)
        self._volatile.clear()


def _path(fd: int | None, name: str) -> str:
    return os.path.abspath(name) if fd is None else f"{os.readlink(f'/proc/self/fd/{fd}')}/{name}"
