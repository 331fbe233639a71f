"""Jobs of the examples that are killed at a certain step: see workers/held_example.py."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from launch import environment
from places import ROOT, WORKERS

EXAMPLES = ROOT / "examples"


class Job(NamedTuple):
    """Processes that belong together, each with a log of its own."""

    processes: list[subprocess.Popen[bytes]]
    logs: list[Path]

    def told(self) -> str:
        return "".join(log.read_text(errors="replace") for log in self.logs)

    def end(self, timeout_s: float = 200) -> str:
        """What it printed. Raises AssertionError where it failed."""
        try:
            codes = [process.wait(timeout_s) for process in self.processes]
        finally:
            for process in self.processes:
                process.kill()
        assert not any(codes), f"{codes}\n{self.told()}"
        return self.told()

    def await_held(self, held: int, timeout_s: float = 200) -> list[int]:
        """The processes, once that many are held at their step. They may be children, as torchrun's are."""
        end = time.monotonic() + timeout_s
        while len(found := re.findall(r"^held (\d+)$", self.told(), re.M)) < held:
            assert time.monotonic() < end, self.told()
            assert all(process.poll() is None for process in self.processes), self.told()
            time.sleep(0.02)
        return [int(pid) for pid in found]

    def kill(self, held: int, timeout_s: float = 200) -> None:
        """SIGKILL to all, once that many processes are held at their step."""
        found = self.await_held(held, timeout_s)
        for process in self.processes:
            process.kill()
        for pid in found:
            os.kill(pid, signal.SIGKILL)
        for process in self.processes:
            process.wait(timeout_s)


def start(directory: Path, commands: Sequence[Sequence[object]], **variables: str) -> Job:
    """One process for each of these arguments of Python."""
    given = {**environment(), **variables, "PYTHONPATH": os.pathsep.join([str(ROOT), *filter(None, sys.path)])}
    processes, logs = [], []
    for command in commands:
        logs.append(directory / f"log-{len([*directory.glob('log-*')])}")
        with open(logs[-1], "wb") as log:
            whole = [sys.executable, *map(str, command)]
            processes.append(subprocess.Popen(whole, env=given, cwd=directory, stdout=log, stderr=subprocess.STDOUT))
    return Job(processes, logs)


def held(example: str, held_at: int, root: Path, then: str, *args: object) -> list[object]:
    """The arguments of Python that run the example so. `then`: "on" or "killed"."""
    return [WORKERS / "held_example.py", held_at, root, then, EXAMPLES / example, *args]
