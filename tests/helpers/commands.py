"""Commands that are run in this process or on a terminal, and the files they are about."""

from __future__ import annotations

import json
import os
import pty
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from ckptlib.stores.local import LocalStore

DAY_S = 86400.0


class Result:
    """How a command ended and what it said."""

    def __init__(self, code: int, out: str, err: str) -> None:
        self.code, self.out, self.err = code, out, err

    @property
    def json(self) -> Any:
        """Of all that is on stdout."""
        return json.loads(self.out)

    def lines(self) -> list[list[str]]:
        """Words of each line."""
        return [line.split() for line in self.out.splitlines()]


Ckptlib = Callable[..., Result]


def files(root: Path | str) -> dict[str, tuple[int, int]]:
    """Everything below a directory: size and time of change."""
    found = Path(str(root).removeprefix("file://")).rglob("*")
    return {str(path): (path.stat().st_size, path.stat().st_mtime_ns) for path in found if path.is_file()}


def path_of(store: LocalStore) -> Path:
    return Path(store.url.removeprefix("file://"))


def of_step(root: Path, kind: str, step: int, number: int = 0) -> Path:
    return sorted((root / kind).glob(f"{step:012d}-*/*"))[number]


def on_terminal(arguments: list[str], answer: bytes) -> tuple[int, str]:
    """Runs the command on a terminal of its own."""
    ours, theirs = pty.openpty()
    environment = {**os.environ, "TERM": "xterm-256color", "COLUMNS": "100"}
    command = [sys.executable, "-m", "ckptlib.cli", *arguments]
    process = subprocess.Popen(command, stdin=theirs, stdout=theirs, stderr=theirs, env=environment)
    os.close(theirs)
    said = b""
    if answer:
        os.write(ours, answer)
    try:
        while data := os.read(ours, 65536):
            said += data
    except OSError:  # how a terminal says that nobody is there any more
        pass
    os.close(ours)
    return process.wait(60), said.decode()
