"""How soon is a killed job back? Restores from this host's memory, from a peer's, and from the local store.

Two ranks, each a host of its own: with a directory in /dev/shm that the other does not look into. A job trains until
both hold a snapshot and its replica, and dies; the next one restores, in fresh processes, into memory that was touched.
Before that the bare speeds are measured by the same ranks: a warm copy on both at once, and a gloo transfer from one to
the other. A host is lost by removing its directory. What was restored is compared with what was saved.
"""

from __future__ import annotations

import ctypes
import os
import shutil
import tempfile
import time
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist

import ckptlib
from benchmarks import limits, peers
from benchmarks.common import tell, told
from benchmarks.figures import Figures, Options, rotated, run

MEMORY = Path("/dev/shm")
OWN, REPLICA, STORE = "own slots", "a peer's replica", "local store, cold"
WAIT_S = 60.0


def main(arguments: list[str]) -> None:
    run(arguments, "recover", measure, gb=0.5, rounds=5)


def measure(options: Options, directory: Path, figures: Figures) -> None:
    nbytes = int((0.004 if options.toy else options.gb) * 1e9)
    with tempfile.TemporaryDirectory(prefix="ckptlib-recover-", dir=MEMORY) as memory:
        given = {"nbytes": nbytes, "directory": str(directory), "memory": memory}
        lines = figures.attempt("setup", "ckptlib", __name__, 2, {**given, "doing": "train"}, options.timeout_s)
        saved = {line["rank"]: line["digest"] for line in lines}
        for number in range(1 if options.toy else options.rounds):
            for case in rotated((OWN, REPLICA, STORE), number) if saved else ():
                _lose(Path(memory), case)
                limits.evict(directory)
                order = {**given, "doing": "restore"}
                for line in figures.attempt(case, "ckptlib", __name__, 2, order, options.timeout_s):
                    _note(figures, case, line, saved, nbytes)


def _lose(memory: Path, case: str) -> None:
    for host in {OWN: (), REPLICA: (1,), STORE: (0, 1)}[case]:
        shutil.rmtree(memory / f"host{host}")


def _note(figures: Figures, case: str, line: dict[str, object], saved: dict[int, str], nbytes: int) -> None:
    if line["digest"] != saved[line["rank"]]:
        figures.failed(case, "ckptlib", "restored other bytes than were saved")
        return
    if line["in_memory"] != (case != STORE):
        figures.failed(case, "ckptlib", "restored from elsewhere")
        return
    if line["rank"] != 1:  # the one that needs a peer
        return
    phases = line["phases"]
    figures.add(case, "ckptlib", "restore", "s", [sum(phases.values())], nbytes=nbytes)
    for phase, seconds in phases.items():
        figures.add(case, "ckptlib", phase, "s", [seconds])
    if case == OWN:
        figures.add(case, "bare copy", "read", "s", [line["copy_s"]], nbytes=nbytes)
    if case == REPLICA:
        figures.add(case, "bare gloo", "bring", "s", [line["gloo_s"]], nbytes=nbytes)


# In the ranks


def work() -> None:
    """Trains until its snapshot is safe, or restores; and dies either way."""
    given = told()
    peers.start()
    rank = dist.get_rank()
    state = peers.make_state(given["nbytes"], 150)
    if given["doing"] == "restore":
        peers.clear(state)
    arena = Path(given["memory"]) / f"host{rank}"
    arena.mkdir(exist_ok=True)
    copy_s, gloo_s = (0.0, 0.0) if given["doing"] == "train" else _bare(given["nbytes"])
    checkpointer = ckptlib.Checkpointer(
        given["directory"],
        {"state": state},
        every=10**9,
        peers=ckptlib.Peers(copies=1, every=1, domain=f"host{rank}"),
        arena=arena,
    )
    if given["doing"] == "train":
        checkpointer.save(1).wait_committed()
        tell(digest=peers.digest(state))
        step = 1
    else:
        peers.barrier()
        report = checkpointer.restore()
        tell(
            digest=peers.digest(state),
            in_memory=report.in_memory,
            phases=report.phases,
            copy_s=copy_s,
            gloo_s=gloo_s,
        )
        step = report.step
    _until_held(checkpointer, step)
    peers.barrier()
    os._exit(0)  # as good as killed: nothing is closed


def _until_held(checkpointer: ckptlib.Checkpointer, step: int) -> None:
    deadline = time.monotonic() + WAIT_S
    while checkpointer.coverage.step is None or checkpointer.coverage.step < step:
        assert time.monotonic() < deadline, "no snapshot was held by both"
        time.sleep(0.02)
        checkpointer._session.await_room()  # no step is done, so what is restored next is what was saved


def _bare(nbytes: int) -> tuple[float, float]:
    """Seconds of a warm copy on both ranks at once, and of a transfer from the first to the second."""
    source, target = limits.aligned(nbytes), limits.aligned(nbytes)
    peers.barrier()
    began = time.perf_counter()
    ctypes.memmove(target.ctypes.data, source.ctypes.data, nbytes)
    copy_s = time.perf_counter() - began
    peers.barrier()
    began = time.perf_counter()
    for at in range(0, nbytes, 64 << 20):
        piece = torch.from_numpy(np.asarray(target[at : at + (64 << 20)]))
        if dist.get_rank() == 0:
            dist.send(piece, 1)
        else:
            dist.recv(piece, 0)
    return copy_s, time.perf_counter() - began


if __name__ == "__main__":
    work()
