"""A snippet of the documents, run as a program of its own."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from types import ModuleType

from helpers.forkserver import context, start_server

TIMEOUT_S = 120.0


def run(code: str, directory: Path) -> str | None:
    """What it wrote to stderr, where it failed. In a fork: torch is imported already, which takes a process three
    seconds else."""
    start_server()
    told = directory.with_name(f"{directory.name}.stderr")
    program = context.Process(target=_run, args=(code, str(directory), str(told)))
    program.start()
    program.join(TIMEOUT_S)
    if program.exitcode is None:
        program.kill()
        return f"it takes more than {TIMEOUT_S} s"
    return told.read_text() or f"exit status {program.exitcode}" if program.exitcode else None


def _run(code: str, directory: str, told: str) -> None:
    os.chdir(directory)
    fd = os.open(told, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    os.dup2(fd, 2)
    os.dup2(fd, 1)
    sys.argv = ["-c"]
    main = sys.modules["__main__"] = ModuleType("__main__")
    exec(compile(code, "<snippet>", "exec"), main.__dict__)
