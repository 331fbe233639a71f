"""Kills a training job in the middle of a checkpoint, twice, and shows that it ends with the very same bits.

    python examples/demo.py             about three minutes on two cores
    python examples/demo.py --quick     the same with a small model

Two runs of train_gpt.py, two ranks each (FSDP2), from the same seed. A is left alone. B loses rank 1's trainer while a
checkpoint is being written, and later, during another one, all of its processes; torchrun starts it again each time.
The kills come from here, from outside: the trainer does not know that it is in a demonstration. Then every loss, every
weight, all of the optimizer's state, the random generators and the place in the data are compared, bit for bit.

Needs Linux, for /proc.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib.util
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path

TRAINER = Path(__file__).with_name("train_gpt.py")
RANKS = 2
BEGAN = time.monotonic()


@dataclass(frozen=True)
class Size:
    """How much of a job it is."""

    steps: int
    every: int
    model: str

    def flags(self) -> list[str]:
        return [f"--steps={self.steps}", f"--every={self.every}", *self.model.split()]


# The state of either is tens of MB per rank, so that writing it takes long enough to be caught. Training runs ahead of
# the checkpoint that is being written, and the writers that the first kill leaves finish what they were given; so the
# second kill is some checkpoints later, in one that the restarted job saves.
FULL = Size(steps=84, every=12, model="--layers 6 --width 320 --heads 5 --batch 8 --context 128")
QUICK = Size(steps=28, every=4, model="--layers 3 --width 256 --heads 4 --batch 2 --context 32")
KILLED_IN = (2, 5)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="a small model and few steps")
    parser.add_argument("--keep", action="store_true", help="leave the files of both runs")
    args = parser.parse_args()
    work = Path(tempfile.mkdtemp(prefix="ckptlib-demo-"))
    try:
        equal = demonstrate(QUICK if args.quick else FULL, work)
    finally:
        if args.keep:
            print(f"The files are in {work}")
        else:
            shutil.rmtree(work)
    sys.exit(0 if equal else 1)


def demonstrate(size: Size, work: Path) -> bool:
    print(f"torch {metadata.version('torch')}, {os.cpu_count()} cores, {RANKS} ranks with FSDP2; files in {work}")
    print(f"{size.steps} steps, a checkpoint every {size.every}")

    title("Run A: nothing happens to it")
    with Job("A", work / "a", size) as a:
        a.finish()

    first, second = (number * size.every for number in KILLED_IN)
    title(f"Run B: killed while the checkpoint of step {first} is being written, and again in that of step {second}")
    with Job("B", work / "b", size) as b:
        kill_in_persist(b, step=first, everything=False)
        kill_in_persist(b, step=second, everything=True)
        b.finish()

    list_checkpoints(b.root)
    title("A and B, compared bit for bit")
    return compare(a, b)


class Job:
    """One job under torchrun. Its lines are printed as they come."""

    def __init__(self, name: str, directory: Path, size: Size) -> None:
        directory.mkdir()
        self.name, self.root, self.size = name, directory / "root", size
        self.losses_file, self.final_file, self.log = directory / "losses", directory / "final", directory / "log"
        torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--max-restarts=3"]
        files = [f"--root={self.root}", f"--losses={self.losses_file}", f"--final={self.final_file}"]
        self.began = time.monotonic()
        with open(self.log, "wb") as log:  # what a killed job says to stderr is long, and of use only when all fails
            self.process = subprocess.Popen(
                [*torchrun, f"--nproc-per-node={RANKS}", str(TRAINER), *files, *size.flags()],
                stdout=subprocess.PIPE,
                stderr=log,
                text=True,
                env=os.environ | {"OMP_NUM_THREADS": "1"},
            )
        self.printer = threading.Thread(target=self.print_lines)
        self.printer.start()

    def __enter__(self) -> Job:
        return self

    def __exit__(self, *error: object) -> None:
        self.process.terminate()  # of no effect on one that has ended
        self.process.wait()
        self.printer.join()

    def print_lines(self) -> None:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            print(f"  {self.name} {time.monotonic() - self.began:6.1f} s | {line.rstrip()}", flush=True)

    def finish(self) -> None:
        code = self.process.wait()
        self.printer.join()
        if code or not self.final_file.exists():
            lines = self.log.read_text(errors="replace").splitlines()
            sys.exit(
                "\n".join([*lines[-60:], f"run {self.name} failed with exit status {code}; its last words are above"])
            )

    def trainer(self, rank: int) -> int | None:
        """The pid of a rank's trainer: the child of torchrun that was told so."""
        for pid in children(self.process.pid):
            with contextlib.suppress(OSError):  # it may end while it is looked at
                if f"RANK={rank}".encode() in Path(f"/proc/{pid}/environ").read_bytes().split(b"\0"):
                    return pid
        return None

    def committed(self) -> set[int]:
        """The steps that exist: those with a manifest."""
        with contextlib.suppress(FileNotFoundError):
            return {int(name.split("-")[0]) for name in os.listdir(self.root / "steps") if name.endswith(".json")}
        return set()


# The kill


def kill_in_persist(job: Job, step: int, everything: bool) -> None:
    """Kills when bytes of the checkpoint of `step` are in the store and its manifest is not.

    What is killed is rank 1's trainer; or `everything` below torchrun, as when a container ends.
    """
    if not (trainers := wait_for_persist(job, step)):
        print(f"  >>> step {step} was not caught while it was being written; nothing was killed", flush=True)
        return
    if everything:  # the writers first: they outlive their trainers and would finish
        victims = [*(writer for trainer in trainers for writer in children(trainer)), *trainers]
    else:
        victims = trainers[1:2]
    for pid in victims:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
    exists = step in job.committed()
    what = "both trainers and their writer processes" if everything else "rank 1's trainer"
    if exists:
        outcome = "its manifest won the race by milliseconds, so it exists"
    elif everything:
        outcome = "it has no manifest, so it does not exist"
    else:
        outcome = "it has no manifest yet; the writer processes outlive the trainer and may finish it"
    print(f"  >>> SIGKILL to {what} (pid {', '.join(map(str, victims))}) while step {step} was being written:")
    print(f"  >>> {outcome}", flush=True)


def wait_for_persist(job: Job, step: int) -> list[int]:
    """The pids of all trainers, once the checkpoint of `step` is between its first bytes and its manifest.

    Empty if it was not seen so, or if a trainer was missing: torchrun was starting them again.
    """
    before = step - job.size.every
    while job.process.poll() is None:
        committed = job.committed()
        if step in committed:
            return []
        if before in committed and (has_packs(job.root, step) or has_large_file(job.root / ".tmp")):
            trainers = [pid for rank in range(RANKS) if (pid := job.trainer(rank)) is not None]
            if len(trainers) == RANKS:
                return trainers
        time.sleep(0.0005)
    return []


def has_packs(root: Path, step: int) -> bool:
    with contextlib.suppress(FileNotFoundError):
        return any(int(name.split("-")[0]) == step for name in os.listdir(root / "packs"))
    return False


def has_large_file(directory: Path) -> bool:
    """Whether a pack, and not one of the small documents, is being written under a temporary name."""
    with contextlib.suppress(FileNotFoundError):  # it may get its name while it is looked at
        return any(entry.stat().st_size > 1 << 20 for entry in os.scandir(directory))
    return False


def children(pid: int) -> list[int]:
    found = []
    for stat in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError):
            fields = stat.read_text().rpartition(")")[2].split()  # the name before it may hold anything
            if int(fields[1]) == pid:
                found.append(int(stat.parent.name))
    return found


# The comparison


def compare(a: Job, b: Job) -> bool:
    losses_a, losses_b = read_losses(a), read_losses(b)
    repeated = len(losses_b) - len({step for step, _ in losses_b})
    final_a, final_b = (json.loads(job.final_file.read_text()) for job in (a, b))
    rows = [
        Row(f"losses of {a.size.steps} steps", *disagreements(a.size.steps, losses_a, losses_b)),
        *(Row(name, len(flat(final_a[name])), differences(final_a[name], final_b[name])) for name in final_a),
    ]
    if len(set(final_a) ^ set(final_b)):
        rows.append(Row("parts of the summary", len(final_a), sorted(set(final_a) ^ set(final_b))))
    print(f"  {'':28}{'compared':>10}{'different':>11}")
    for row in rows:
        print(f"  {row.what:28}{row.compared:>10}{len(row.different):>11}")
    for row in rows:
        for line in row.different[:10]:
            print(f"  DIFFERENT in {row.what}: {line}")
    equal = not any(row.different for row in rows)
    print(f"\n  B repeated {repeated} steps after its kills. A and B are {'identical' if equal else 'NOT identical'}.")
    print(f"  {time.monotonic() - BEGAN:.0f} s in all")
    return equal


@dataclass(frozen=True)
class Row:
    """One line of the table."""

    what: str
    compared: int
    different: list[str]


def read_losses(job: Job) -> list[tuple[int, str]]:
    lines = (json.loads(line) for line in job.losses_file.read_text().splitlines())
    return [(line["step"], line["loss"]) for line in lines]


def disagreements(steps: int, a: list[tuple[int, str]], b: list[tuple[int, str]]) -> tuple[int, list[str]]:
    """How many losses were compared, and the steps that are missing in a run or have more than one loss."""
    found = []
    for step in range(steps):
        in_a, in_b = ([loss for at, loss in losses if at == step] for losses in (a, b))
        if not in_a or not in_b or len({*in_a, *in_b}) != 1:
            found.append(f"step {step}: A {in_a}, B {in_b}")
    return len(a) + len(b), found


def differences(a: object, b: object) -> list[str]:
    in_a, in_b = flat(a), flat(b)
    return [
        f"{name}: A {in_a.get(name, 'nothing')}, B {in_b.get(name, 'nothing')}"
        for name in sorted({*in_a, *in_b})
        if in_a.get(name) != in_b.get(name)
    ]


def flat(node: object, path: str = "") -> dict[str, object]:
    """The leaves of nested dicts and lists, by their path."""
    if not isinstance(node, (dict, list)):
        return {path: node}
    items = node.items() if isinstance(node, dict) else enumerate(node)
    return {name: leaf for key, value in items for name, leaf in flat(value, f"{path}/{key}").items()}


# Talk


def title(text: str) -> None:
    print(f"\n{text}\n", flush=True)


def list_checkpoints(root: Path) -> None:
    if importlib.util.find_spec("ckptlib.cli.__main__") and importlib.util.find_spec("click"):
        title("What B's root holds: python -m ckptlib.cli ls")
        subprocess.run([sys.executable, "-m", "ckptlib.cli", "ls", str(root)], check=True)


if __name__ == "__main__":
    main()
