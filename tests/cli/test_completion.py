"""What shells make of a TAB: real ones, on a terminal of their own. zsh and fish are skipped where they are missing."""

from __future__ import annotations

import fcntl
import os
import pty
import shutil
import subprocess
import sys
import termios
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from helpers.commands import Ckptlib

import ckptlib as library
from ckptlib.cli.completion import MOST_STEPS, steps_in

COMMAND = f"""#!/bin/sh
if [ -z "$_CKPTLIB_COMPLETE" ] && [ "$1" != completion ]; then
    printf '%s\\n' "$*" >> "$RAN"
    exit
fi
exec {sys.executable} -m ckptlib.cli "$@"
"""

Typed = Callable[..., list[str]]

SHELLS = {
    "bash": (["bash", "--norc", "--noprofile", "-i"], 'eval "$(ckptlib completion bash)"'),
    "zsh": (["zsh", "-f", "-i"], 'autoload -Uz compinit; compinit -u -D; eval "$(ckptlib completion zsh)"'),
    "fish": (["fish", "--no-config", "-i"], "ckptlib completion fish | source"),
}


def own_terminal() -> None:
    """Of a new session, whose shell controls its jobs by it."""
    fcntl.ioctl(0, termios.TIOCSCTTY, 0)


@pytest.fixture
def typed(tmp_path: Path) -> Typed:
    """Types into a shell and gives the arguments with which the shell ran the command."""
    (tmp_path / "bin").mkdir()
    (tmp_path / "bin" / "ckptlib").write_text(COMMAND)
    (tmp_path / "bin" / "ckptlib").chmod(0o755)
    ran = tmp_path / "ran"
    environment = {"PATH": f"{tmp_path / 'bin'}:{os.environ['PATH']}", "RAN": str(ran), "HOME": str(tmp_path)}
    environment |= {"TERM": "dumb", "LANG": "C.UTF-8", "LC_ALL": "C.UTF-8"}
    for name in ("LD_LIBRARY_PATH", "PYTHONPATH"):
        if name in os.environ:
            environment[name] = os.environ[name]

    def type_in(shell: str, *lines: str) -> list[str]:
        command, begin = SHELLS[shell]
        if shutil.which(command[0]) is None:
            pytest.skip(f"{shell} is not installed")
        ours, theirs = pty.openpty()
        with subprocess.Popen(
            command,
            cwd=tmp_path,
            env=environment,
            stdin=theirs,
            stdout=theirs,
            stderr=theirs,
            start_new_session=True,
            preexec_fn=own_terminal,
        ) as process:
            os.close(theirs)
            os.write(ours, "\n".join([begin, *lines, "exit", ""]).encode())
            shown = b""
            try:
                while chunk := os.read(ours, 65536):
                    shown += chunk
            except OSError:  # so a terminal ends that nobody holds any more
                pass
            finally:
                os.close(ours)
            process.wait(60)
        return ran.read_text().splitlines() if ran.exists() else [f"nothing ran: {shown.decode(errors='replace')}"]

    return type_in


@pytest.fixture
def root(tmp_path: Path) -> Path:
    for step in (100, 250):
        library.save(tmp_path / "runs", {"w": torch.ones(2)}, step=step)
    return tmp_path / "runs"


@pytest.mark.timeout(120)
@pytest.mark.parametrize("shell", SHELLS)
def test_a_tab_completes(typed: Typed, root: Path, shell: str) -> None:
    assert root.name == "runs"
    lines = typed(
        shell, "ckptlib verif\truns --a\t", "ckptlib du ru\t", "ckptlib pin runs 25\t", "ckptlib plan --pre\tfp\t"
    )
    assert [line.replace("runs/", "runs").split() for line in lines] == [  # zsh takes the slash away again
        ["verify", "runs", "--all"],
        ["du", "runs"],
        ["pin", "runs", "250"],
        ["plan", "--precision", "fp32"],
    ]


def test_steps_of_what_is_no_root(tmp_path: Path) -> None:
    for url in ("", "s3://bucket/run", str(tmp_path), "a\0b", str(tmp_path / "none")):
        assert steps_in(url) == []
    (tmp_path / "steps").write_text("a file")
    assert steps_in(str(tmp_path)) == []


def test_steps_are_the_newest_first(tmp_path: Path) -> None:
    (tmp_path / "steps").mkdir()
    numbers = np.random.default_rng(1).permutation(MOST_STEPS + 50)
    for number in map(int, numbers):
        (tmp_path / "steps" / f"{number:012d}-000001-00000000.json").touch()
    for other in ("000000999999-000001-00000000.refresh", "notes.txt", "999999999999.json"):
        (tmp_path / "steps" / other).touch()
    assert steps_in(f"file://{tmp_path}") == list(range(MOST_STEPS + 49, 49, -1))


def test_other_shells_are_refused(ckptlib: Ckptlib) -> None:
    found = ckptlib("completion", "csh")
    assert found.code == 2
    assert "'csh' is not one of 'bash', 'zsh', 'fish'" in found.err
