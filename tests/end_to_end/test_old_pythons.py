"""Pythons that were built on an old system, as those of conda are, save and restore as others do."""

from __future__ import annotations

import mmap
import os
import re
import signal
from pathlib import Path

import pytest
from helpers.writers import until
from launch import fork_ranks, forked
from places import ROOT, WORKERS
from workers.old_python import TOTAL

import ckptlib
from ckptlib import libc

TIMEOUT_S = 240.0


def test_a_job_of_an_old_python_is_killed_and_goes_on(tmp_path: Path) -> None:
    """They have no pidfd_open, so each save was refused, and no memfd_create, so each start failed."""
    codes, printed = forked(WORKERS / "old_python.py", 2, tmp_path, "killed", timeout_s=TIMEOUT_S, each=True)
    assert codes == [-signal.SIGKILL] * 2, printed
    until(lambda: [step.step for step in ckptlib.checkpoints(tmp_path / "root")][-1:] == [TOTAL])
    printed = fork_ranks("old_python.py", 2, tmp_path, "whole", timeout_s=TIMEOUT_S)
    for rank in range(2):
        assert f"rank {rank}: restored {TOTAL}, weights [{float(TOTAL)}]" in printed
    with ckptlib.open(tmp_path / "root", 2 * TOTAL) as checkpoint:
        assert checkpoint.get_tensor("w").unique().tolist() == [2.0 * TOTAL]


def test_what_old_pythons_lack_is_asked_of_one_module() -> None:
    lacking = re.compile(
        r"\bos\.(memfd_create|RWF_\w+|MFD_\w+|pidfd_open|copy_file_range|eventfd\w*|getrandom|splice)\b"
    )
    found = {path.name for path in (ROOT / "ckptlib").rglob("*.py") if lacking.search(path.read_text())}
    assert found == {"libc.py", "trainer.py"}


@pytest.mark.parametrize("old", [False, True], ids=["new", "old"])
def test_the_c_library_gives_what_python_lacks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, old: bool) -> None:
    if old:
        monkeypatch.delattr(os, "memfd_create", raising=False)
        monkeypatch.delattr(os, "RWF_NOWAIT", raising=False)
    fd = libc.memory_file("mine")
    try:
        assert os.readlink(f"/proc/self/fd/{fd}").startswith("/memfd:mine")
        assert not os.get_inheritable(fd)
    finally:
        os.close(fd)
    path = tmp_path / "file"
    path.write_bytes(bytes(range(256)) * 64)
    room = memoryview(mmap.mmap(-1, 8192))
    with path.open("rb") as file:
        count = libc.read_cached(file.fileno(), room[:4096], 4096 + 1)
        assert count > 0
        assert room[:count] == path.read_bytes()[4097:][:count]
        assert libc.read_cached(file.fileno(), room[:4096], 1 << 20) == 0
    with pytest.raises(OSError, match="Bad file descriptor"):
        libc.read_cached(1 << 20, room[:4096], 0)
