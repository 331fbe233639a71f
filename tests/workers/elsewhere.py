"""Reads a root without the calls that a platform lacks, and is told why it cannot save: elsewhere.py <platform> <root>.

What Python and the libraries need of them on Linux, they have by then.
"""

from __future__ import annotations

import ctypes
import os
import select
import signal
import subprocess
import sys
import tempfile
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.distributed.tensor
import torch.multiprocessing
import xxhash

LINUX_ONLY = {
    *("posix_fallocate", "pidfd_open", "preadv", "pwritev", "memfd_create", "sched_getaffinity", "O_DIRECT"),
    *("posix_fadvise", "copy_file_range", "sendfile", "O_PATH", "O_TMPFILE", "eventfd"),
}
UNIX_ONLY = {
    *("pread", "pwrite", "fork", "register_at_fork", "geteuid", "getuid", "nice", "statvfs", "fchmod", "chown"),
    *("O_CLOEXEC", "O_DIRECTORY", "O_NOFOLLOW", "O_NONBLOCK", "killpg", "uname", "getpgid", "sysconf", "mkfifo"),
}


def without(*modules: str) -> None:
    for name in modules:
        sys.modules[name] = None  # type: ignore[assignment]  # "import of it halted"


def become(platform: str) -> None:
    lacking = LINUX_ONLY | (UNIX_ONLY if platform == "windows" else set())
    for name in lacking:
        if hasattr(os, name):
            delattr(os, name)
    if platform == "windows":
        without("fcntl", "resource", "pwd", "grp", "termios")
        del select.poll, signal.pthread_sigmask, signal.SIGKILL
    library = ctypes.CDLL

    def load(name: str | None, *args: object, **more: object) -> object:
        if name is not None:
            return library(name, *args, **more)  # type: ignore[arg-type]
        if platform == "windows":
            raise TypeError("bad argument type for built-in operation")
        return object()  # no function that is asked for

    ctypes.CDLL = load  # type: ignore[assignment, misc]


def main() -> None:
    platform, root = sys.argv[1], Path(sys.argv[2])
    import click  # noqa: F401
    import fsspec  # noqa: F401
    import rich.console
    import rich.progress  # noqa: F401
    import safetensors.numpy
    import zstandard  # noqa: F401

    nonblock = os.O_NONBLOCK
    become(platform)
    import ckptlib
    from ckptlib.cli.app import run

    target = {"cut": torch.zeros(4, 3), "epoch": 0}
    report = ckptlib.load(root, target, only=["cut", "epoch"])
    assert (report.step, target["epoch"]) == (2, 4), report
    assert target["cut"].tolist() == [[0.0] * 3] * 2 + [[1.0] * 3] * 2  # type: ignore[attr-defined]
    assert [info.step for info in ckptlib.checkpoints(root)] == [1, 2]
    for command in ("ls", "show", "verify"):
        with pytest.raises(SystemExit) as ended:
            run([command, str(root)])
        assert ended.value.code in (None, 0), command
    if platform == "macos":
        with tempfile.TemporaryDirectory() as directory:
            ckptlib.export(root, f"{directory}/x.safetensors", only="cut")
            found = safetensors.numpy.load_file(f"{directory}/x.safetensors")
            assert found["cut"].tolist() == target["cut"].tolist()  # type: ignore[attr-defined]
    with tempfile.TemporaryDirectory() as directory:
        for save in (
            lambda: ckptlib.save(directory, target, 1),
            lambda: ckptlib.save_async(directory, target, 1),
            lambda: ckptlib.Checkpointer(directory, target, every=1),
        ):
            with pytest.raises(ckptlib.SaveFailed, match=r"^saving needs Linux: .* has no posix_fallocate"):
                save()
        assert os.listdir(directory) == []
        os.O_NONBLOCK = nonblock  # by which the end of the context removes the directory, from Python 3.13 on
    print("ok", flush=True)


_LOADED = (np, subprocess, xxhash, torch.distributed.tensor, torch.multiprocessing)

if __name__ == "__main__":
    main()
