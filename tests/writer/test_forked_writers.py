"""Writers that tests fork are given what writers are given that are started as in production."""

from __future__ import annotations

import os
import re
import resource
import signal
from pathlib import Path

import pytest
from helpers.forked_writers import forked_writers
from helpers.writers import WAIT_S, Bench, hear
from workers.crash_oracle import writers_of

from ckptlib.writer.client import Writer

STATUS = r"(PPid|Uid|Umask|SigBlk|SigIgn|SigCgt|Cpus_allowed_list):\s*(.*)"


def given(writer: Writer) -> dict[str, object]:
    """What the kernel says of a writer that waits for orders."""
    proc = Path(f"/proc/{writer.pid}")
    opened = {path.name: os.readlink(path).replace(str(writer.log_path), "log") for path in (proc / "fd").iterdir()}
    return {
        "status": re.findall(STATUS, (proc / "status").read_text()),
        "session": os.getsid(writer.pid) == os.getpgid(writer.pid) == writer.pid,
        "niceness": os.getpriority(os.PRIO_PROCESS, writer.pid),
        "cwd": os.readlink(proc / "cwd"),
        "limits": (proc / "limits").read_text(),
        "standard": [opened[number] for number in "012"],
        "fds": sorted(re.sub(r"\d+", "", what) for what in opened.values()),  # sockets have numbers
    }


def test_they_are_given_the_same(bench: Bench, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (soft - 1, hard))
    try:
        started = bench.writer()
        with forked_writers():
            forked = bench.writer()
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    for writer in (started, forked):
        hear(writer, "ready")
    assert given(forked) == given(started)
    assert {started.pid, forked.pid} <= {*writers_of(os.getpid())}
    for writer in (started, forked):
        writer.close(WAIT_S)
        assert not writer.log_path.exists()


def test_their_trainer_is_told_of_their_deaths(bench: Bench) -> None:
    with forked_writers():
        writer = bench.writer()
        hear(writer, "ready")
        assert writer._child.reap(kill=True) == -signal.SIGKILL
