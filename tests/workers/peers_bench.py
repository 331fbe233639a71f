"""Hosts with memory of their own, simulated on this one, and the jobs that run on them one after the other."""

from __future__ import annotations

import fcntl
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path
from typing import Any, BinaryIO

from helpers.writers import alive
from workers import crash_jobs, crash_oracle, peer_trainings, peers
from workers.crash_jobs import Job, run, start

TOTAL = 12

PAGE_BYTES = 4096

MEMORY, STORE = True, False
"""Where a step is restored from."""

_gold: dict[tuple[str, int, bool], list[list[str]]] = {}


def gold(directory: Path, kind: str, size: int, own_data: bool, step: int) -> list[str]:
    """By rank: the digest of a training in which nothing goes wrong, and ckptlib has no part."""
    alike = not own_data and size in (1, 2, 4)
    key = (kind, 1 if alike else size, own_data)
    if key not in _gold or len(_gold[key][0]) <= step:
        told = run(peer_trainings.practise, directory, key[1], kind=kind, own_data=own_data, total=max(step, TOTAL))
        _gold[key] = [["", *(line["digest"] for line in lines)] for lines in told]
    return [by_step[step] for by_step in _gold[key]] * (size if alike else 1)


class Cluster:
    """A root, and hosts that are lost and replaced."""

    def __init__(self, directory: Path, kind: str = "fsdp", own_data: bool = True, **options: Any) -> None:
        self.directory = directory
        self.root = directory / "root"
        self.kind = kind
        self.own_data = own_data
        self.options = options
        self.memory = Path(tempfile.mkdtemp(prefix="ckptlib-test-", dir="/dev/shm"))
        self.jobs: list[Job] = []
        """Of the last start, by rank."""
        self.hosts: list[str] = []
        self._all: list[Job] = []
        self._host_of: dict[int, str] = {}
        """By pid of a trainer."""
        self._num_starts = 0

    def arena(self, host: str) -> Path:
        path = self.memory / host
        path.mkdir(exist_ok=True)
        return path

    def start(self, hosts: Sequence[str], total: int = TOTAL, patient: bool = True, **options: Any) -> None:
        """One rank for each name."""
        if patient:
            self._await_orphans()
        self._num_starts += 1
        gates = self.directory / f"gates{self._num_starts}"
        gates.mkdir()
        self.hosts = list(hosts)
        self.jobs = start(
            peers.train,
            self.directory,
            len(hosts),
            **{
                "url": str(self.root),
                "hosts": self.hosts,
                "arenas": {host: str(self.arena(host)) for host in hosts},
                "total": total,
                "kind": self.kind,
                "own_data": self.own_data,
                "gates": str(gates),
                **self.options,
                **options,
            },
        )
        self._gates = gates
        self._all += self.jobs
        self._host_of.update({job.pid: host for job, host in zip(self.jobs, hosts, strict=True)})

    def _await_orphans(self) -> None:
        """Returns when the writers that were left behind only wait for a successor.

        How long they take to notice is not the matter of these tests.
        """
        self.await_let_go(path for path in self.slots() if not path.is_symlink())

    def in_use(self) -> set[Path]:
        """Slots that a process counts as having open."""
        found = set()
        for path in self.slots():
            with path.open("r+b") as slot:
                if not is_let_go(slot):
                    found.add(path)
        return found

    def await_let_go(self, slots: Iterable[Path]) -> None:
        for path in slots:
            with path.open("r+b") as slot:
                while not is_let_go(slot):
                    time.sleep(0.005)

    def wait_until_committed(self, step: int) -> None:
        def committed() -> bool:
            return any(path.name.startswith(f"{step:012d}-") for path in self.root.glob("steps/*"))

        wait_until(committed, f"step {step} is not committed")

    def newest_committed(self) -> int:
        """Its step; 0 where there is none."""
        return max((int(path.name[:12]) for path in self.root.glob("steps/*")), default=0)

    def wait_for(self, what: str, count: int = 1) -> list[dict[str, Any]]:
        """What each rank told."""
        return [job.wait_for(what, count) for job in self.jobs]

    def until_paused(self, step: int) -> None:
        """All ranks hold the snapshot of this step, with all of its replicas."""
        told = self.wait_for("paused")
        assert [(line["step"], line["held"]) for line in told] == [(step, step)] * len(self.jobs), self.story()

    def say(self, step: int, words: dict[int, str] | None = None) -> None:
        """Lets the ranks go on behind a pause, with a word for some of them."""
        temporary = self._gates / f"{step}.new"
        temporary.write_text(json.dumps(words or {}))
        temporary.rename(self._gates / str(step))

    def restored(self) -> set[tuple[int, bool]]:
        """(step, whether from memory) of all ranks; there is but one."""
        return {(line["step"], line["in_memory"]) for line in self.wait_for("restored")}

    def received(self) -> int:
        """Slots that were sent between hosts for the last restore."""
        return sum(line["received"] for line in self.wait_for("restored"))

    # Faults

    def kill(self, jobs: Collection[Job] | None = None) -> None:
        """SIGKILL to trainers; their writers live on."""
        for job in self.jobs if jobs is None else jobs:
            job.kill()
        for job in self.jobs if jobs is None else jobs:
            assert job.join() == -signal.SIGKILL

    def kill_writers(self, hosts: Collection[str] | None = None) -> None:
        for job in self._all:
            if hosts is None or self._host_of[job.pid] in hosts:
                for pid in job.kill_writers():
                    wait_until(partial(_is_gone, pid), f"writer {pid} stays")
                if not job.process.is_alive():  # else it starts another one
                    job.join_writers()

    def lose(self, *hosts: str) -> None:
        """All of the job's trainers die, and on these hosts all else, memory included."""
        for job in self.jobs:
            job.process.kill()
            job.join()
        self.kill_writers(hosts)
        for host in hosts:
            shutil.rmtree(self.memory / host)

    def slots_of(self, rank: int, step: int) -> dict[str, Path]:
        """By host: the slot of the newest generation with the snapshot of a rank; its own, and its replicas."""
        found = {}
        for path in sorted(self.slots(), key=lambda path: path.name):
            if not path.is_symlink() and path.stat().st_size >= PAGE_BYTES:
                with path.open("rb") as file:
                    page = file.read(PAGE_BYTES).rstrip(b"\0")
                header = json.loads(page)["body"] if page.endswith(b"}\n") else {}
                what = (rank, step, 0)
                if header and what == (header["rank"], int(header["save"][:12]), header["sequence"] % 2):
                    found[path.parent.name] = path
        return found

    def writers(self) -> list[int]:
        """Of the last job."""
        return [pid for job in self.jobs for pid in crash_oracle.writers_of(job.pid)]

    def stop_writers(self) -> list[int]:
        """As busy as can be, until they are told to go on. Returns their pids."""
        found = self.writers()
        for pid in found:
            os.kill(pid, signal.SIGSTOP)
        return found

    def slots(self, host: str | None = None) -> list[Path]:
        pattern = "*/*.slot" if host is None else f"{host}/*.slot"
        return sorted(self.memory.glob(pattern))

    @contextmanager
    def small_memory(self, host: str, nbytes: int) -> Iterator[Callable[[], None]]:
        """A host with so little of it; gives what makes it ample."""
        path = str(self.arena(host))
        subprocess.run(["mount", "-t", "tmpfs", "-o", f"size={nbytes}", "tmpfs", path], check=True)
        try:
            yield lambda: subprocess.run(["mount", "-o", "remount,size=64m", path], check=True)
        finally:
            for job in self.jobs:
                job.process.kill()
                job.join()
            self.kill_writers()
            subprocess.run(["umount", "-l", path], check=True)

    # The end

    def finish(self) -> None:
        """The job ends by itself, with the very bits of one without faults, and leaves nothing behind."""
        statuses = [job.join() for job in self.jobs]
        assert statuses == [0] * len(self.jobs), self.story()
        done = self.wait_for("done")
        expected = gold(self.directory, self.kind, len(self.jobs), self.own_data, done[0]["step"])
        found = [line["digest"] for line in done]
        assert found == expected, f"{found}, expected {expected}\n{self.story()}"
        self.assert_nothing_left()

    def assert_nothing_left(self) -> None:
        for job in self._all:
            job.join_writers()
        assert self.slots() == [], self.story()
        if (self.root / "ckptlib.json").exists():
            assert crash_oracle.slots_of(self.root) == []

    def story(self) -> str:
        """What the last job did, for people."""
        lines = []
        for rank, job in enumerate(self.jobs):
            lines.append(f"-- rank {rank} on {self.hosts[rank]}: {job.process.exitcode}")
            lines += [json.dumps(line) for line in job.told()[-12:]]
            lines.append(job.log()[-3000:])
        return "\n".join(lines)

    def close(self) -> None:
        """Ends what a failed test has left."""
        crash_jobs.end_all(self.root)
        shutil.rmtree(self.memory)


class Node:
    """A machine of its own, as far as memory goes: an agent of torchrun with a /dev/shm that nobody else sees."""

    def __init__(self, directory: Path, name: str, num_ranks: int, options: Sequence[str], **arguments: Any) -> None:
        self.directory = directory / name
        self.directory.mkdir()
        agent = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", str(num_ranks), *options]
        worker = [peers.__file__, str(self.directory), json.dumps(arguments)]
        script = 'mount -t tmpfs tmpfs /dev/shm && { "$@"; status=$?; ls /dev/shm >"$LEFT"; exit $status; }'
        with (self.directory / "output").open("w") as output:
            self._process = subprocess.Popen(
                ["unshare", "-m", "sh", "-c", script, "sh", *agent, *worker],
                env={
                    **os.environ,
                    "OMP_NUM_THREADS": "1",
                    "LEFT": str(self.directory / "left"),
                    "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1",  # else no other agent can take a lost one's place
                },
                stdout=output,
                stderr=output,
            )

        wait_until(lambda: _namespace_of(self._process.pid) not in ("", _namespace_of(os.getpid())), "no namespace")
        self._namespace = _namespace_of(self._process.pid)

    def told(self, what: str) -> list[dict[str, Any]]:
        """By all ranks that were here, in order."""
        reports = sorted(self.directory.glob("*.jsonl"))
        lines = [line for path in reports for line in path.read_text().split("\n")[:-1]]
        return sorted((line for line in map(json.loads, lines) if line["what"] == what), key=lambda line: line["at"])

    def wait_for(self, what: str, count: int = 1) -> list[dict[str, Any]]:
        wait_until(lambda: len(self.told(what)) >= count, f"{what} did not come on {self.directory.name}")
        return self.told(what)

    def lose(self) -> None:
        """SIGKILL to all that runs on it; its memory goes with the last of them."""
        while found := self._processes():
            for pid in found:
                with suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            self._process.poll()
            time.sleep(0.005)

    def _processes(self) -> list[int]:
        here = self._namespace
        found = [int(path.name) for path in Path("/proc").iterdir() if path.name.isdigit()]
        return [pid for pid in found if _namespace_of(pid) == here]

    def finish(self) -> None:
        """It ends well, and nothing stays on it."""
        assert self._process.wait(crash_jobs.WAIT_S) == 0, (self.directory / "output").read_text()[-5000:]
        wait_until(lambda: not self._processes(), "processes stay")
        assert (self.directory / "left").read_text() == ""


def _namespace_of(pid: int) -> str:
    """Of mounts; "" for one that has ended, or is another user's."""
    try:
        return os.readlink(f"/proc/{pid}/ns/mnt")
    except (FileNotFoundError, ProcessLookupError, PermissionError):
        return ""


def flip(path: Path, at: int) -> None:
    """One bit of a byte."""
    with path.open("r+b") as file:
        file.seek(at)
        byte = file.read(1)[0]
        file.seek(at)
        file.write(bytes([byte ^ 1]))


def num_open(pid: int) -> int:
    """Slots that a process has open."""
    links = set()
    for path in Path(f"/proc/{pid}/fd").iterdir():
        with suppress(FileNotFoundError):  # closed meanwhile
            links.add(os.readlink(path))
    return len({link for link in links if link.endswith(".slot")})


def is_let_go(slot: BinaryIO) -> bool:
    """Whether no process counts as having it open: the lock on byte 1."""
    try:
        fcntl.lockf(slot, fcntl.LOCK_EX | fcntl.LOCK_NB, 1, 1)
    except BlockingIOError:
        return False
    fcntl.lockf(slot, fcntl.LOCK_UN, 1, 1)
    return True


def _is_gone(pid: int) -> bool:
    return not alive(pid)


def wait_until(condition: Callable[[], bool], what: str) -> None:
    deadline = time.monotonic() + crash_jobs.WAIT_S
    while not condition():
        assert time.monotonic() < deadline, what
        time.sleep(crash_jobs.POLL_S)
