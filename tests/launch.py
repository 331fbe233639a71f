"""Starts a script of tests/workers on several ranks, for tests whose claim is about ranks."""

from __future__ import annotations

import atexit
import faulthandler
import os
import runpy
import signal
import sys
import tempfile
import time
from collections.abc import Iterable, Mapping
from contextlib import suppress
from pathlib import Path

import torch.distributed as dist
from helpers.forked_writers import fork_writers_from_here
from helpers.forkserver import context, start_server
from places import TESTS, WORKERS

from ckptlib.errors import EXIT_PREEMPTED


def environment() -> dict[str, str]:
    """Of a worker: it finds the tests' own modules, and leaves the other cores to the other ranks."""
    path = os.pathsep.join(filter(None, [str(TESTS), os.environ.get("PYTHONPATH", "")]))
    return {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": path}


class Program:
    """A process that is no rank, forked as `forked` does, in a process group of its own. For programs that do not care
    whether they have imported torch themselves, which takes three seconds of a core. As a context it is killed at last.
    """

    def __init__(
        self, program: Path | str, *args: object, log: Path | str, variables: Mapping[str, str] | None = None
    ) -> None:
        """`log`: where both of its outputs go; a file, or a terminal."""
        start_server()
        own = {**environment(), **(variables or {})}
        self._log = log
        self._process = context.Process(target=be_program, args=(str(log), own, program, [*map(str, args)]))
        self._process.start()
        assert self._process.pid is not None
        self.pid = self._process.pid

    def wait_for(self, line: str, timeout_s: float = 150) -> None:
        """Returns when it has printed this line."""
        deadline = time.monotonic() + timeout_s
        while line not in (lines := self.printed().splitlines()):
            assert time.monotonic() < deadline, lines
            assert self._process.exitcode is None or line in self.printed().splitlines(), lines
            time.sleep(0.01)

    def printed(self) -> str:
        path = Path(self._log)
        return path.read_text(errors="replace") if path.exists() else ""

    def wait(self, timeout_s: float) -> int | None:
        """The exit status; negative: the signal that killed it; None: it has not ended in time."""
        self._process.join(timeout_s)
        return self._process.exitcode

    def __enter__(self) -> Program:
        return self

    def __exit__(self, *error: object) -> None:
        self._process.kill()
        self._process.join()


def fork_one(
    program: Path | str, *args: object, log: Path | str, timeout_s: float, variables: Mapping[str, str] | None = None
) -> int | None:
    """The exit status of a `Program`. None: it had not ended in time, and was killed."""
    with Program(program, *args, log=log, variables=variables) as started:
        return started.wait(timeout_s)


def fork_ranks(script: str, num_ranks: int, *args: object, timeout_s: float) -> str:
    """Both outputs of all ranks of a script that does not care who starts it: see `forked`. Raises AssertionError with
    them when a rank fails, or when not all end in time."""
    codes, output = forked(WORKERS / script, num_ranks, *args, timeout_s=timeout_s)
    assert None not in codes or any(codes), f"{script} did not end within {timeout_s:.0f} s:\n{output[-20000:]}"
    assert codes == [0] * num_ranks, f"exit statuses {codes}:\n{output[-20000:]}"
    return output


def forked(
    program: Path | str,
    num_ranks: int,
    *args: object,
    timeout_s: float,
    variables: Mapping[str, str] | None = None,
    each: bool = False,
) -> tuple[list[int | None], str]:
    """The exit status of each rank, and both outputs of all. `program`: the path of a script, or the name of a module.

    Ranks are forked from a server that has imported torch. This process has their store, as torchrun's agent has. When
    one fails, the others are killed, unless `each` is to come to its own end. None: this rank had not ended when it was
    killed. `variables`: more of them.
    """
    start_server()
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    shared = {
        **environment(),
        "WORLD_SIZE": str(num_ranks),
        "LOCAL_WORLD_SIZE": str(num_ranks),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(store.port),
        "TORCHELASTIC_USE_AGENT_STORE": "True",
        "TORCHELASTIC_RESTART_COUNT": "0",
        **(variables or {}),
    }
    with tempfile.TemporaryDirectory() as directory:
        log, deadline = Path(directory) / "log", time.monotonic() + timeout_s + 10
        ranks = []
        for rank in range(num_ranks):
            own = {**shared, "RANK": str(rank), "LOCAL_RANK": str(rank)}
            ranks.append(context.Process(target=be_rank, args=(str(log), own, program, [*map(str, args)])))
            ranks[-1].start()
        while any(rank.exitcode is None for rank in ranks) and time.monotonic() < deadline:
            if not each and {rank.exitcode for rank in ranks} - {None, 0, EXIT_PREEMPTED}:
                break  # the others would wait for it
            time.sleep(0.02)
        codes = [rank.exitcode for rank in ranks]
        if time.monotonic() >= deadline:
            tell_places([rank.pid for rank in ranks if rank.pid is not None and rank.exitcode is None], log)
        for rank in ranks:
            rank.kill()
            rank.join()
        return codes, log.read_text(errors="replace") if log.exists() else ""


def tell_places(pids: Iterable[int], log: Path) -> None:
    """Has processes that do not end, and those that they forked, write to the log where each of their threads is. One
    that has ended, while its end was not told, is a zombie there."""
    for pid in pids:
        with suppress(OSError), log.open("a") as said:  # it may end just now
            status = Path(f"/proc/{pid}/status").read_text().splitlines()
            said.write(f"process {pid}: {status[2]}\n")
            said.flush()
            children = " ".join(path.read_text() for path in Path(f"/proc/{pid}/task").glob("*/children"))
            os.kill(pid, signal.SIGABRT)
            time.sleep(1)  # while faulthandler writes
            tell_places(map(int, children.split()), log)


def be_program(log: str, variables: dict[str, str], program: Path | str, args: list[str]) -> None:
    os.setpgid(0, 0)
    try:
        be_rank(log, variables, program, args)
    finally:  # behind an error, too
        atexit._run_exitfuncs()


def be_rank(log: str, variables: dict[str, str], program: Path | str, args: list[str]) -> None:
    """In a process that the server forked: runs the program as Python would, with these variables and arguments."""
    fd = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
    for standard in (1, 2):
        os.dup2(fd, standard)
    os.environ.clear()
    os.environ.update(variables)
    faulthandler.enable(fd)
    fork_writers_from_here()
    sys.argv = [str(program), *args]
    if isinstance(program, Path):
        sys.path.insert(0, str(program.parent))
        runpy.run_path(str(program), run_name="__main__")
    else:
        runpy.run_module(program, run_name="__main__", alter_sys=True)
    atexit._run_exitfuncs()  # multiprocessing has none of its own
