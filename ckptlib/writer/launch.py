"""Starts a writer process: its arguments, and what it inherits from the trainer. No torch."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from pathlib import Path

from ckptlib.slots.writer_lock import WriterLock
from ckptlib.writer import logfile


def launch(
    end: socket.socket, log_path: Path, wait_s: float, unread: WriterLock | None, page: int | None
) -> subprocess.Popen[bytes]:
    """Starts a writer, whose orders come over `end`. Raises OSError.

    `wait_s`: the most seconds that it delays its imports, until its standard input says something. `page`: the
    descriptor of rank 0's account.
    """
    with logfile.append_to(log_path) as output:
        return subprocess.Popen(
            [
                *(sys.executable, "-m", "ckptlib.writer"),
                *(str(end.fileno()), str(os.getpid()), str(wait_s), str(log_path)),
                *(() if unread is None else (str(unread.fd), str(unread.path))),
            ],
            pass_fds=[
                end.fileno(),
                *(() if unread is None else (unread.fd,)),
                *(() if page is None else (page,)),
            ],
            stdin=subprocess.PIPE if wait_s else subprocess.DEVNULL,
            bufsize=0,
            stdout=output,
            stderr=output,
            start_new_session=True,
            env={
                **os.environ,
                "PYTHONPATH": os.pathsep.join(map(os.path.abspath, sys.path)),
                "PYTHONSAFEPATH": "1",
                "OPENBLAS_NUM_THREADS": "1",  # numpy would start threads, 0.1 s of CPU, that nothing here uses
            },
        )


def no_start(error: OSError) -> str:
    """Returns the message for an error of `launch`."""
    return (
        f"no writer process can be started: {error}; expected room for one process, a few open files, and a file in "
        "the temporary directory"
    )
