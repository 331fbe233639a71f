"""How soon is a killed job back? Restores from this host's memory, from a peer's, and from the local store.

Two ranks, each a host of its own: with a directory in /dev/shm that the other does not look into. A job trains until
both hold a snapshot and its replica, and dies; the next one restores, in fresh processes, into memory that was touched.
Before that the bare speeds are measured by the same ranks: a warm copy on both at once, and a gloo transfer from one to
the other. A host is lost by removing its directory. What was restored is compared with what was saved. Last, the whole
way of a torchrun job from the SIGKILL of a rank to the end of the first step after it, phase by phase.
"""

from __future__ import annotations

import ctypes
import itertools
import os
import shutil
import signal
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist
from torch.distributed.fsdp import fully_shard

import ckptlib
from benchmarks import limits, peers
from benchmarks.common import Line, tell, told
from benchmarks.figures import Figures, Options, rotated, run

MEMORY = Path("/dev/shm")
OWN, REPLICA, STORE = "own slots", "a peer's replica", "local store, cold"
DEATH = "from SIGKILL to the next step"
WAIT_S = 60.0


def main(arguments: list[str]) -> None:
    run(arguments, "recover", measure, gb=0.5, rounds=5)


def measure(options: Options, directory: Path, figures: Figures) -> None:
    nbytes = int((0.004 if options.toy else options.gb) * 1e9)
    rounds = range(1 if options.toy else options.rounds)
    writers: list[int] = []

    def ask(case: str, doing: str, job: str, restarts: int = 0) -> list[Line]:
        order = {"nbytes": nbytes, "directory": str(directory / job), "memory": memory, "doing": doing}
        lines = figures.attempt(case, "ckptlib", __name__, 2, order, options.timeout_s, restarts)
        writers.extend(line["writer"] for line in lines if "writer" in line)
        return [line for line in lines if "writer" not in line]

    with tempfile.TemporaryDirectory(prefix="ckptlib-recover-", dir=MEMORY) as memory:
        saved = {line["rank"]: line["digest"] for line in ask("setup", "train", "job")}
        for number in rounds:
            for case in rotated((OWN, REPLICA, STORE), number) if saved else ():
                _lose(Path(memory), case)
                limits.evict(directory)
                for line in ask(case, "restore", "job"):
                    _note(figures, case, line, saved, nbytes)
        for number in rounds:
            for line in ask(DEATH, "die", f"job-{number}", restarts=1):
                for phase, seconds in line["phases"].items() if line["rank"] == 0 else ():
                    figures.add(DEATH, "ckptlib", phase, "s", [seconds], nbytes=nbytes)
    _await_end(writers)


def _await_end(writers: Sequence[int]) -> None:
    """Writers that were left behind end when their slots are gone; until then they may write."""
    deadline = time.monotonic() + WAIT_S
    while time.monotonic() < deadline and any(Path(f"/proc/{pid}").exists() for pid in writers):
        time.sleep(0.1)


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


def _die_and_come_back(given: dict[str, object]) -> None:
    """A job of which a rank is killed, and that torchrun starts again."""
    attempt = os.environ["TORCHELASTIC_RESTART_COUNT"]
    times = [("imports", _started_at()), ("process group", time.time())]
    store, rank, size = next(iter(dist.rendezvous("env://")))
    dist.init_process_group("gloo", store=dist.PrefixStore(attempt, store), rank=rank, world_size=size)
    times.append(("model and optimizer", time.time()))
    model = torch.nn.Sequential(*[torch.nn.Linear(1024, 1024) for _ in range(max(int(given["nbytes"]) // 12 >> 20, 1))])
    for module in model:
        fully_shard(module)
    optimizer = torch.optim.AdamW(model.parameters())
    times.append(("construction", time.time()))
    checkpointer = ckptlib.Checkpointer(
        str(given["directory"]),
        {"model": model, "optimizer": optimizer},
        every=10**9,
        peers=ckptlib.Peers(copies=1, every=1, domain=f"host{rank}"),
    )
    tell(writer=checkpointer._session.writer.pid)
    times.append(("restore", time.time()))
    start = checkpointer.restore().step
    times.append(("first step", time.time()))
    killed = Path(str(given["directory"])) / "killed"
    for step in range(start, start + 1000):
        model(torch.ones(8, 1024)).pow(2).mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        if attempt == "1":
            break
        checkpointer.after_step(step + 1)
        if rank == 1 and checkpointer.coverage.step is not None:
            killed.write_text(str(time.time()))
            os.kill(os.getpid(), signal.SIGKILL)
    times.append(("", time.time()))
    phases = {"torchrun": times[0][1] - float(killed.read_text())}
    phases |= {name: after - at for (name, at), (_, after) in itertools.pairwise(times)}
    tell(phases={**phases, "all": sum(phases.values())})
    peers.barrier()
    checkpointer.close()
    os._exit(0)


def _started_at() -> float:
    """When this process was started."""
    ticks = int(Path("/proc/self/stat").read_text().rpartition(") ")[2].split()[19])
    return time.time() - time.clock_gettime(time.CLOCK_BOOTTIME) + ticks / os.sysconf("SC_CLK_TCK")


def work() -> None:
    """Trains until its snapshot is safe, or restores; and dies either way."""
    given = told()
    if given["doing"] == "die":
        _die_and_come_back(given)
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
    tell(writer=checkpointer._session.writer.pid)
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
