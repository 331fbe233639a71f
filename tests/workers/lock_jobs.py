"""A trainer that takes a writer's lock, and processes that it starts then: lock_jobs.py <directory> <kind>...

It tells the lock's path, and the pid of each. All of them stay until they are killed.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

from ckptlib.slots.writer_lock import WriterLock

STAY = ["sleep", "600"]


def start(kind: str, lock: WriterLock) -> int:
    """Its pid. "program": any other; "forked": a data loader; "heir": has the file open by other means than a fork of
    Python's; "writer"."""
    if kind == "program":
        return subprocess.Popen(STAY, close_fds=False, start_new_session=True).pid
    if kind == "heir":
        return subprocess.Popen(STAY, pass_fds=[lock.fd], start_new_session=True).pid
    if kind == "writer":
        command = [sys.executable, __file__, "--writer", str(lock.path), str(lock.fd)]
        return subprocess.Popen(command, pass_fds=[lock.fd], start_new_session=True).pid
    assert kind == "forked"
    pid = os.fork()
    if pid == 0:
        os.setsid()
        signal.pause()
    return pid


def train(directory: str, *kinds: str) -> None:
    lock = WriterLock.take([Path(directory)], "ckptlib-root-000001-abcdef01")
    assert lock is not None
    print(lock.path, *(start(kind, lock) for kind in kinds), flush=True)
    signal.pause()


def write(path: str, fd: str) -> None:
    """Reads its orders when there is a word in the trainer's input."""
    lock = WriterLock(Path(path), int(fd))
    sys.stdin.readline()
    lock.release()
    signal.pause()


if __name__ == "__main__":
    write(*sys.argv[2:]) if sys.argv[1] == "--writer" else train(*sys.argv[1:])
