"""Writers that tests fork are what those of a training are: see `helpers.forked_writers`."""

from __future__ import annotations

import os
import resource
import signal
from contextlib import suppress
from functools import partial
from pathlib import Path

import pytest
from helpers.forked_writers import ForkedWriter
from helpers.writers import Bench, alive, hear, until
from workers.crash_spare import setup

from ckptlib.writer.client import Writer


def is_forked(writer: Writer) -> bool:
    return b"ckptlib.writer" not in Path(f"/proc/{writer.pid}/cmdline").read_bytes().split(b"\0")


def open_files(writer: Writer) -> dict[int, str]:
    found = {}
    for fd in Path(f"/proc/{writer.pid}/fd").iterdir():
        with suppress(FileNotFoundError):  # closed meanwhile
            found[int(fd.name)] = os.readlink(fd).split(":")[0]
    return found


def has_open(writer: Writer, path: Path) -> bool:
    return str(path) in open_files(writer).values()


def seen(writer: Writer) -> dict[str, object]:
    """What the kernel tells of one that has an open slot and nothing to do."""
    home, files = Path(f"/proc/{writer.pid}"), open_files(writer)
    own, status = str(writer.log_path), (home / "status").read_text().splitlines()
    return {
        "parent": (home / "stat").read_text().rsplit(")", 1)[1].split()[1],
        "leads a session": os.getsid(writer.pid) == writer.pid,
        "has torch": "torch" in (home / "maps").read_text(),
        "cwd": os.readlink(home / "cwd"),
        "limits": (home / "limits").read_text(),
        "priority": os.getpriority(os.PRIO_PROCESS, writer.pid),
        "signals": [line for line in status if line.startswith(("SigB", "SigI", "SigC"))],
        "open": sorted(name.replace(own, "log") for name in files.values()),
        "standard": [files[fd].replace(own, "log") for fd in range(3)],
    }


def test_the_kernel_tells_no_difference(bench: Bench, request: pytest.FixtureRequest) -> None:
    found = []
    _, slot = bench.slot(1)
    for forked in (True, False):
        if not forked:
            request.getfixturevalue("executed_writers")
        writer = bench.writer()
        writer.add_slot(slot.path)
        hear(writer, "ready")
        until(partial(has_open, writer, slot.path))
        assert is_forked(writer) is forked
        found.append(seen(writer))
    assert found[0] == found[1]
    assert found[0]["parent"] == str(os.getpid())
    assert found[0]["has torch"] is False


def test_a_killed_one_tells_its_status_and_is_replaced(bench: Bench) -> None:
    writer = bench.writer()
    hear(writer, "ready")
    first = writer.pid
    save, slot = bench.slot(1)
    writer.add_slot(slot.path)
    os.kill(first, signal.SIGKILL)
    until(lambda: not alive(first))
    writer.persist(save, slot.path)
    hear(writer, "committed")
    assert writer.pid != first
    assert is_forked(writer)


def test_one_that_waits_ends_when_it_is_let_go_of(bench: Bench) -> None:
    writer = Writer(setup(bench.root), wait_s=1e4)
    pid = writer.pid
    assert alive(pid)
    del writer
    until(lambda: not alive(pid))


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSEGV])
def test_status(bench: Bench, number: signal.Signals) -> None:
    writer = bench.writer()
    hear(writer, "ready")
    os.kill(writer.pid, number)
    assert isinstance(writer._process, ForkedWriter)
    assert writer._process.wait(60) == -number
    assert writer._process.wait(0) == -number
    writer._process.kill()  # which is nobody any more


def test_one_that_is_closed_ends_well(bench: Bench) -> None:
    writer = bench.writer()
    hear(writer, "ready")
    writer.close(60)
    assert writer._process.wait(60) == 0


def test_what_is_not_handed_on_is_executed(bench: Bench) -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (soft - 1, hard))
    try:
        limited = bench.writer()
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    hear(limited, "ready")
    assert not is_forked(limited)
    assert resource.prlimit(limited.pid, resource.RLIMIT_NOFILE) == (soft - 1, hard)
