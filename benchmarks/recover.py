"""How soon is a killed job back? Restores from this host's memory, from a peer's, from the local store and from S3.

Two ranks, each a host of its own: with a directory in /dev/shm that the other does not look into. A job trains until
both hold a snapshot and its replica, and dies; the next one restores, in fresh processes, into memory that was touched.
Before that the same ranks measure the bare speeds, also in memory that was touched: on both at once, a warm copy and
what the kernel copies out of a file in /dev/shm; and a gloo transfer from one to the other, alone and while the first
reads its own share as it does in a restore. A host is lost by removing its directory. What was restored is compared
with what was saved. NVRx, where it is installed, restores from the same memories in the same way. S3 is a real server
(moto's, if it is installed) on the same machine, which costs the CPU of that. Last, the whole way of a torchrun job
from the SIGKILL of a rank to the end of the first step after it, by phase.
"""

from __future__ import annotations

import ctypes
import importlib.util
import itertools
import mmap
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import NoReturn

import numpy as np
import torch
import torch.distributed as dist
import xxhash
from torch.distributed.fsdp import fully_shard

import ckptlib
from benchmarks import limits, peers, states
from benchmarks.common import Line, tell, told
from benchmarks.figures import Figures, Options, rotated, run
from ckptlib.saving.standing import await_room

MEMORY = Path("/dev/shm")
OWN, REPLICA, STORE, S3 = "own slots", "a peer's replica", "local store, cold", "S3 on this machine"
LOST = {OWN: (), REPLICA: (1,), STORE: (0, 1), S3: (0, 1)}
"""Hosts."""
DEATH = "from SIGKILL to the next step"
CKPTLIB, NVRX = "ckptlib", "NVRx"
WAIT_S = 60.0
CHECKED_BYTES = 4 << 20
"""Read at once, and still in the caches when they are digested."""
KEYS = {"key": "testing", "secret": "testing"}


def main(arguments: list[str]) -> None:
    run(arguments, "recover", measure, gb=0.5, rounds=5)


def measure(options: Options, directory: Path, figures: Figures) -> None:
    nbytes = int((0.004 if options.toy else options.gb) * 1e9)
    rounds = range(1 if options.toy else options.rounds)
    writers: list[int] = []

    def ask(
        subject: str, case: str, doing: str, url: str, memory: str, restarts: int = 0, **more: object
    ) -> list[Line]:
        order = {"subject": subject, "nbytes": nbytes, "url": url, "memory": memory, "doing": doing, "options": {}}
        lines = figures.attempt(case, subject, __name__, 2, {**order, **more}, options.timeout_s, restarts)
        writers.extend(line["writer"] for line in lines if "writer" in line)
        return [line for line in lines if "writer" not in line]

    def restores(subject: str, url: str, cases: Sequence[str], **more: object) -> None:
        with tempfile.TemporaryDirectory(prefix="ckptlib-recover-", dir=MEMORY) as memory:
            setup = f"setup, {cases[0]}"
            saved = {line["rank"]: line["digest"] for line in ask(subject, setup, "train", url, memory, **more)}
            for number in rounds:
                for case in rotated(cases, number) if saved else ():
                    for host in LOST[case]:
                        shutil.rmtree(Path(memory) / f"host{host}")
                    limits.evict(directory)
                    for line in ask(subject, case, "restore", url, memory, **more):
                        _note(figures, subject, case, line, saved, nbytes)

    restores(CKPTLIB, str(directory / "job"), (OWN, REPLICA, STORE))
    if importlib.util.find_spec("nvidia_resiliency_ext") is not None and not options.toy:
        restores(NVRX, "", (OWN, REPLICA))
    elif not options.toy:
        figures.failed(OWN, NVRX, "nvidia-resiliency-ext is not installed; it is in the extra called bench")
    if missing := [name for name in ("s3fs", "moto") if importlib.util.find_spec(name) is None]:
        figures.failed(S3, "ckptlib", f"not installed: {', '.join(missing)}; they are in the extra called dev")
    else:
        with _s3_server() as endpoint:
            restores(CKPTLIB, "s3://bucket/job", (S3,), options={**KEYS, "endpoint_url": endpoint})
    for number in rounds:
        for line in ask(CKPTLIB, DEATH, "die", str(directory / f"job-{number}"), "", restarts=1):
            for phase, seconds in line["phases"].items() if line["rank"] == 0 else ():
                figures.add(DEATH, "ckptlib", phase, "s", [seconds], nbytes=nbytes)
    _await_end(writers)


@contextmanager
def _s3_server() -> Iterator[str]:
    """Its URL. It has one bucket."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    command = [sys.executable, "-m", "moto.server", "-H", "127.0.0.1", "-p", str(port)]
    server = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        deadline = time.monotonic() + WAIT_S
        while not _answers(port):
            assert server.poll() is None, "moto's server ended"
            assert time.monotonic() < deadline, "moto's server did not start"
            time.sleep(0.05)
        import s3fs

        endpoint = f"http://127.0.0.1:{port}"
        s3fs.S3FileSystem(**KEYS, endpoint_url=endpoint).mkdir("bucket")
        yield endpoint
    finally:
        server.terminate()
        server.wait(WAIT_S)


def _answers(port: int) -> bool:
    with socket.socket() as probe:
        return probe.connect_ex(("127.0.0.1", port)) == 0


def _await_end(writers: Sequence[int]) -> None:
    """Writers that were left behind end when their slots are gone; until then they may write."""
    deadline = time.monotonic() + WAIT_S
    while time.monotonic() < deadline and any(Path(f"/proc/{pid}").exists() for pid in writers):
        time.sleep(0.1)


def _note(
    figures: Figures, subject: str, case: str, line: dict[str, object], saved: dict[int, str], nbytes: int
) -> None:
    if line["digest"] != saved[line["rank"]]:
        figures.failed(case, subject, "restored other bytes than were saved")
        return
    if line["in_memory"] != (case in (OWN, REPLICA)):
        figures.failed(case, subject, "restored from elsewhere")
        return
    if line["rank"] != 1:  # the one that needs a peer
        return
    phases = line["phases"]
    figures.add(case, subject, "restore", "s", [sum(phases.values())], nbytes=nbytes)
    if subject == NVRX:
        return
    for phase, seconds in phases.items():
        figures.add(case, subject, phase, "s", [seconds])
    bare = line["bare"]
    if case == OWN:
        figures.add(case, "bare copy", "read", "s", [bare["copy"]], nbytes=nbytes)
        figures.add(case, "bare read of /dev/shm", "read", "s", [bare["read"]], nbytes=nbytes)
        figures.add(case, "bare read and digest", "read", "s", [bare["digested"]], nbytes=nbytes)
    if case == REPLICA:
        figures.add(case, subject, "bring and read", "s", [phases["bring"] + phases["read"]], nbytes=nbytes)
        figures.add(case, "bare gloo", "bring and read", "s", [bare["gloo"]], nbytes=nbytes)
        figures.add(case, "bare gloo beside a read", "bring and read", "s", [bare["both"]], nbytes=nbytes)


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
        str(given["url"]),
        {"model": model, "optimizer": optimizer},
        every=10**9,
        peers=ckptlib.Peers(copies=1, every=1, domain=f"host{rank}"),
    )
    tell(writer=checkpointer._session.writer.pid)
    times.append(("restore", time.time()))
    start = checkpointer.restore().step
    times.append(("first step", time.time()))
    killed = Path(str(given["url"])) / "killed"
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
    state = states.make_state(given["nbytes"], 150)
    if given["doing"] == "restore":
        states.clear(state)
    arena = Path(given["memory"]) / f"host{rank}"
    arena.mkdir(exist_ok=True)
    if given["subject"] == NVRX:
        _with_nvrx(state, arena, given["doing"])
    bare = {} if given["doing"] == "train" else _bare(given["nbytes"])
    checkpointer = ckptlib.Checkpointer(
        given["url"],
        {"state": state},
        storage_options=given["options"],
        every=10**9,
        peers=ckptlib.Peers(copies=1, every=1, domain=f"host{rank}"),
        arena=arena,
    )
    tell(writer=checkpointer._session.writer.pid)
    if given["doing"] == "train":
        checkpointer.save(1).wait_committed()
        tell(digest=states.digest(state))
        step = 1
    else:
        peers.barrier()
        report = checkpointer.restore()
        tell(digest=states.digest(state), in_memory=report.in_memory, phases=report.phases, bare=bare)
        step = report.step
    _until_held(checkpointer, step)
    peers.barrier()
    os._exit(0)  # as good as killed: nothing is closed


def _with_nvrx(state: states.State, directory: Path, doing: str) -> NoReturn:
    """Snapshots and restores; nothing that it says is shown."""
    from benchmarks.nvrx import Nvrx

    keeper = Nvrx(directory)
    if doing == "train":
        keeper.save(state, 1)
        tell(digest=states.digest(state))
    else:
        peers.barrier()
        began = time.perf_counter()
        step = keeper.load(state)
        seconds = time.perf_counter() - began
        tell(digest=states.digest(state), in_memory=True, phases={"restore": seconds})
        keeper.save(state, step + 1)  # it makes no new replica of what it restored
    peers.barrier()
    os._exit(0)


def _until_held(checkpointer: ckptlib.Checkpointer, step: int) -> None:
    deadline = time.monotonic() + WAIT_S
    while checkpointer.coverage.step is None or checkpointer.coverage.step < step:
        assert time.monotonic() < deadline, "no snapshot was held by both"
        time.sleep(0.02)
        await_room(checkpointer._session)  # no step is done, so what is restored next is what was saved


def _bare(nbytes: int) -> dict[str, float]:
    """Seconds of what both ranks do at once; each the second time, when all memory and connections are warm.

    In memory that begins on a page: numpy's own begins 16 bytes behind one, and the kernel copies there a fifth slower.
    """
    source, target = (np.frombuffer(mmap.mmap(-1, nbytes), dtype=np.uint8) for _ in range(2))
    source[:], target[:] = 1, 2
    with tempfile.TemporaryFile(dir=MEMORY) as file:
        file.write(source.data)
        file.flush()

        def copy() -> None:
            ctypes.memmove(target.ctypes.data, source.ctypes.data, nbytes)

        def read() -> None:
            for at in range(0, nbytes, limits.BLOCK_BYTES):
                os.preadv(file.fileno(), [target.data[at : at + limits.BLOCK_BYTES]], at)

        def digested() -> None:
            for at in range(0, nbytes, CHECKED_BYTES):
                piece = target.data[at : at + CHECKED_BYTES]
                os.preadv(file.fileno(), [piece], at)
                xxhash.xxh3_128_hexdigest(piece)

        def gloo() -> None:
            for at in range(0, nbytes, 64 << 20):
                piece = torch.from_numpy(source[at : at + (64 << 20)])
                if dist.get_rank() == 0:
                    dist.send(piece, 1)
                else:
                    dist.recv(piece, 0)

        def both() -> None:
            reading = threading.Thread(target=read)
            if dist.get_rank() == 0:
                reading.start()
            gloo()
            if dist.get_rank() == 0:
                reading.join()

        return {call.__name__: _seconds(call) for call in (copy, read, digested, gloo, both)}


def _seconds(call: Callable[[], None]) -> float:
    for _ in range(2):
        peers.barrier()
        began = time.perf_counter()
        call()
        seconds = time.perf_counter() - began
    return seconds


if __name__ == "__main__":
    work()
