"""What runs in processes of their own: one rank that saves, and one that loads."""

from __future__ import annotations

import os
import tempfile
import time
from contextlib import nullcontext
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path

from benchmarks.conformance import tracer
from benchmarks.conformance.content import NEVER_SAVED, Content
from benchmarks.conformance.libraries import LIBRARIES
from benchmarks.conformance.library import Library


@dataclass(frozen=True)
class Job:
    """One rank's."""

    library: str
    url: str
    content: Content
    seen: Path
    """Of all that it writes on this host."""
    logs: Path
    """For what it prints."""
    meeting: Path
    """A file that does not exist yet."""
    rank: int = 0
    world_size: int = 1
    environment: tuple[tuple[str, str], ...] = ()


def save(job: Job, pipe: Connection, last: int) -> None:
    """Saves all steps but the last, says so, and saves the last one when it is told to go. Told "go on", it writes to
    the tensors while that save goes on, as soon as the library's documentation allows.

    Sends "ready"; then ("saved", seconds) or ("error", message). Ends at once, as if it were killed, when told "die".
    """
    _settle(job)
    try:
        library = _open(job)
        for step in range(1, last):
            library.begin(job.content.tensors(step, job.rank), step)()
        tensors = job.content.tensors(last, job.rank)
    except BaseException as error:
        pipe.send(("broken", said(error)))
        raise
    pipe.send("ready")
    goes_on = pipe.recv() == "go on"
    others = job.content.tensors(last + 1, job.rank) if goes_on else {}
    began = time.perf_counter()
    try:
        wait = library.begin(tensors, last)
        with library.changing() if goes_on else nullcontext():
            held = library.held(tensors)
            for name, other in others.items():
                held[name].copy_(other)
        wait()
    except BaseException as error:  # DCP's is no Exception
        pipe.send(("error", said(error)))
    else:
        pipe.send(("saved", time.perf_counter() - began))
    if pipe.recv() == "die":
        os._exit(0)
    library.close()
    os._exit(0)  # what its interpreter would do at exit is no part of the save


def load(job: Job, pipe: Connection, asked: int | None, last: int) -> None:
    """Sends ("loaded", judgement) or ("error", message)."""
    _settle(job)
    try:
        library = _open(job)
        loaded = library.load(job.content.tensors(NEVER_SAVED, job.rank), asked)
        judgement = job.content.judge(loaded, job.rank, range(1, last + 1))
    except BaseException as error:
        pipe.send(("error", said(error)))
    else:
        pipe.send(("loaded", judgement))
    pipe.recv()
    os._exit(0)


def said(error: BaseException) -> str:
    """Its kind and the beginning of its message."""
    text = " ".join(str(error).split())
    return f"{type(error).__name__}: {text}"[:300]


def _open(job: Job) -> Library:
    kind = LIBRARIES[job.library]
    if job.world_size > 1 or kind.needs_group:
        import torch.distributed as dist

        meeting = f"file://{job.meeting}"
        dist.init_process_group("gloo", init_method=meeting, rank=job.rank, world_size=job.world_size)
    return kind(job.url, job.seen, job.rank, job.world_size)


def _settle(job: Job) -> None:
    """Temporary files and output of its own; one thread, as several such processes run beside each other."""
    import torch

    temporary = job.seen / "tmp"
    tracer.allow()
    os.setpgid(0, 0)
    torch.set_num_threads(1)
    os.environ |= {"OMP_NUM_THREADS": "1", "TMPDIR": str(temporary)}
    os.environ |= {"RANK": str(job.rank), "LOCAL_RANK": str(job.rank), "WORLD_SIZE": str(job.world_size)}
    os.environ |= dict(job.environment)
    tempfile.tempdir = str(temporary)
    log = os.open(job.logs / f"rank-{job.rank}", os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
    os.dup2(log, 1)
    os.dup2(log, 2)
