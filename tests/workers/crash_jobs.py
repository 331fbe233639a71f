"""Trainers that are to be killed: real processes, forked from a server that has imported torch once.

A job is a function of this file; it runs in a process of its own and tells what it did through a file of JSON lines.
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import logging
import os
import signal
import subprocess
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from helpers.forked_writers import fork_writers_from_here
from helpers.forkserver import context, start_server
from helpers.inside import save_now, writer_of
from helpers.registry import close_sessions
from workers import crash_oracle

import ckptlib
from ckptlib.recovery import leftovers

WAIT_S = 150.0
POLL_S = 0.01
"""Whoever looks more often takes the core from those that it waits for."""

NUMEL = 20_000
"""Of each of the four weights: 80 kB, so that they are copied behind the fence."""


_started: list[Job] = []


class Job:
    """One rank of a job."""

    def __init__(
        self, function: Callable[..., None], report: Path, rank: int, size: int, kwargs: dict[str, Any]
    ) -> None:
        self._report = report
        target = (function, str(report), rank, size, f"{report.parent / report.stem}.init", kwargs)
        self.process: BaseProcess = context.Process(target=_run, args=target)
        self.process.start()
        _started.append(self)
        assert self.process.pid is not None
        self.pid: int = self.process.pid

    def log(self) -> str:
        """What ckptlib has logged in the trainer."""
        return self._report.with_suffix(".log").read_text()

    def told(self) -> list[dict[str, Any]]:
        """What the job has said so far."""
        if not self._report.exists():
            return []
        *lines, _ = self._report.read_text().split("\n")
        return [json.loads(line) for line in lines]

    def wait_for(self, what: str, count: int = 1) -> dict[str, Any]:
        """The `count`th line that tells `what`."""
        deadline = time.monotonic() + WAIT_S
        while True:
            alive = self.process.is_alive()  # asked before reading, so that its last words are read
            found = [line for line in self.told() if line["what"] == what]
            if len(found) >= count:
                return found[count - 1]
            assert alive, f"died before it told {what}: {self.told()}"
            assert time.monotonic() < deadline, f"{what} did not come: {self.told()}"
            time.sleep(POLL_S)

    def kill(self) -> None:
        """One that has ended since another rank was killed is gone as well."""
        with contextlib.suppress(ProcessLookupError):
            os.kill(self.pid, signal.SIGKILL)

    def kill_writers(self) -> list[int]:
        """SIGKILL to those that it started. Returns their pids; one that ends by itself meanwhile is gone as well."""
        found = crash_oracle.writers_of(self.pid)
        for pid in found:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        return found

    def join(self) -> int:
        """The exit status; -9 when it was killed."""
        self.process.join(WAIT_S)
        assert self.process.exitcode is not None, f"pid {self.pid} hangs: {self.told()}"
        return self.process.exitcode

    def join_writers(self) -> None:
        """Returns when the writers that it started are gone."""
        deadline = time.monotonic() + WAIT_S
        while writers := crash_oracle.writers_of(self.pid):
            assert time.monotonic() < deadline, f"writers {writers} stay"
            time.sleep(0.005)


def end_all(root: Path) -> None:
    """Kills what a failed test has left, and unlinks its slots."""
    for job in _started:
        job.process.kill()
        job.process.join()
        job.kill_writers()  # also those that are stopped
    _started.clear()
    if (root / "ckptlib.json").exists():
        for path in crash_oracle.slots_of(root):
            path.unlink(missing_ok=True)


_numbers = iter(range(10**6))


def start(function: Callable[..., None], directory: Path, size: int = 1, **kwargs: Any) -> list[Job]:
    """All ranks of a job."""
    start_server()
    number = next(_numbers)
    name = f"{number}-{function.__name__}"
    return [Job(function, directory / f"{name}.rank{rank}.jsonl", rank, size, kwargs) for rank in range(size)]


def run(function: Callable[..., None], directory: Path, size: int = 1, **kwargs: Any) -> list[list[dict[str, Any]]]:
    """What each rank of a job told; the job must end well, and so must its writers."""
    jobs = start(function, directory, size, **kwargs)
    assert [job.join() for job in jobs] == [0] * size, [job.told() for job in jobs]
    for job in jobs:
        job.join_writers()
    return [job.told() for job in jobs]


# Inside of the process


class Teller:
    """Tells the test what happened; a line that was told is there, whatever comes next."""

    def __init__(self, path: str) -> None:
        self._fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)

    def __call__(self, what: str, **more: object) -> None:
        os.write(self._fd, (json.dumps({"what": what, "at": time.monotonic(), **more}) + "\n").encode())


def _run(function: Callable[..., None], report: str, rank: int, size: int, init: str, kwargs: dict[str, Any]) -> None:
    fork_writers_from_here()
    torch.set_num_threads(1)
    tell = Teller(report)
    logging.basicConfig(filename=Path(report).with_suffix(".log"))
    if size > 1:
        init = f"file://{init.replace(f'.rank{rank}', '')}"
        dist.init_process_group("gloo", init_method=init, rank=rank, world_size=size, timeout=timedelta(seconds=30))
    try:
        function(tell, rank, **kwargs)
    except Exception as error:
        tell("error", kind=type(error).__name__, text=str(error))
        raise


def pattern(step: int, numel: int) -> torch.Tensor:
    """What tells one step from every other, in every element; exact, whether it is computed or added up."""
    assert 1000 * (step + 1) + numel < 2**24, "more than float32 counts to: let steps take longer"
    return torch.arange(numel, dtype=torch.float32) + 1000.0 * step


class Diary:
    """An object whose state grows, so that every step has a layout of its own."""

    def __init__(self) -> None:
        self.step = 0

    def state_dict(self) -> dict[str, object]:
        return {"step": self.step, "row": torch.full((self.step + 1,), self.step)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.step = state["step"]
        assert state["row"].tolist() == [self.step] * (self.step + 1)


class State:
    """A model of a few tensors that are owned by an optimizer, and values that go with them."""

    def __init__(self, numel: int) -> None:
        self.weights = [torch.nn.Parameter(pattern(0, numel) + i) for i in range(4)]
        self.optimizer = torch.optim.SGD(self.weights, lr=1.0)
        self.half = torch.zeros(300, dtype=torch.bfloat16)
        self.diary = Diary()
        self.mapping: dict[str, object] = {f"w{i}": w for i, w in enumerate(self.weights)}
        self.mapping.update(optim=self.optimizer, step=0, half=self.half, diary=self.diary)
        for weight in self.weights:
            weight.grad = torch.full_like(weight, -1000.0)

    def advance(self) -> None:
        """One step of training: every weight goes from pattern(n) to pattern(n + 1), through the optimizer's fence."""
        self.optimizer.step()
        self.diary.step += 1
        self.mapping["step"] = self.diary.step
        self.half.fill_(self.diary.step)

    def check(self, step: int) -> None:
        """Whether all of it is as after `step` steps."""
        assert (self.mapping["step"], self.diary.step) == (step, step)
        for i, weight in enumerate(self.weights):
            assert torch.equal(weight.detach(), pattern(step, weight.numel()) + i), (i, step)
        assert torch.equal(self.half, torch.full_like(self.half, step))


def holds(step: crash_oracle.Step, numel: int) -> bool:
    """Whether what the oracle read is all of the state after that step."""
    found = step.tensors
    expected = {f"w{i}": (pattern(step.number, numel) + i).numpy() for i in range(4)}
    expected["half"] = torch.full((300,), float(step.number)).to(torch.bfloat16).view(torch.uint16).numpy()
    expected["diary/row"] = np.full(step.number + 1, step.number)
    return {name for name in found if not name.startswith("@")} == expected.keys() and all(
        np.array_equal(found[name], value) for name, value in expected.items()
    )


@contextmanager
def checkpointer(
    url: str, state: State, orphans_timeout_s: float = WAIT_S, **kwargs: Any
) -> Iterator[ckptlib.Checkpointer]:
    leftovers.ORPHANS_TIMEOUT_S = orphans_timeout_s
    if "local" in kwargs and dist.is_initialized():  # a host of its own for each rank
        kwargs["local"] = kwargs["local"].replace("{rank}", str(dist.get_rank()))
    seconds = {
        name: timedelta(seconds=kwargs.pop(name))
        for name in ("timeout", "save_deadline", "max_outage")
        if name in kwargs
    }
    with ckptlib.Checkpointer(url, state.mapping, **{"every": 1, **kwargs}, **seconds) as ckpt:
        yield ckpt


def take(ckpt: ckptlib.Checkpointer, state: State, step: int) -> ckptlib.Pending:
    """A save of this very step; when the loop would take it is not the matter here."""
    return save_now(ckpt, state.mapping, step)


def settle(tell: Teller, pending: ckptlib.Pending, timeout_s: float = WAIT_S) -> None:
    """Tells what became of a save."""
    try:
        pending.wait_committed(timeout_s)
    except ckptlib.CkptError as error:
        tell("failed", step=pending.step, kind=type(error).__name__, text=str(error))
    else:
        tell("committed", step=pending.step)


def train(tell: Teller, rank: int, *, url: str, numel: int = NUMEL, steps: int = 2, **kwargs: Any) -> None:
    """Restores, tells from where, and takes and saves so many steps more."""
    state = State(numel)
    with checkpointer(url, state, **kwargs) as ckpt:
        report = ckpt.restore()
        state.check(report.step)
        tell("restored", step=report.step, skipped=report.skipped)
        for step in range(report.step + 1, report.step + steps + 1):
            state.advance()
            tell("saving", step=step)
            settle(tell, take(ckpt, state, step))
    tell("closed")


def train_when_told(tell: Teller, rank: int, *, url: str, gates: str, numel: int = NUMEL, **kwargs: Any) -> None:
    """As train, but waits before each step for a file that is named after it.

    It says what to do behind the snapshot: "settle", "die" (SIGKILL), "sleep" or "go on"; or "end" before it.
    """
    state = State(numel)
    with checkpointer(url, state, **kwargs) as ckpt:
        report = ckpt.restore()
        state.check(report.step)
        tell("restored", step=report.step, skipped=report.skipped)
        step = report.step + 1
        while (then := read_gate(tell, gates, step, ckpt)) != "end":
            state.advance()
            pending = take(ckpt, state, step)
            pending.wait_staged(WAIT_S)
            if then == "die":
                os.kill(os.getpid(), signal.SIGKILL)
            tell("staged", step=step)
            if then == "sleep":
                time.sleep(WAIT_S)
            if then != "go on":
                settle(tell, pending)
            step += 1
    tell("closed")


def read_gate(tell: Teller, gates: str, step: int, ckpt: ckptlib.Checkpointer) -> str:
    tell("waiting", step=step, writer=writer_of(ckpt).pid, log=str(writer_of(ckpt).log_path))
    path = Path(gates) / str(step)
    deadline = time.monotonic() + WAIT_S
    while not path.exists() or not (then := path.read_text()):  # it may be there before its text
        assert time.monotonic() < deadline
        time.sleep(POLL_S)
    return then


def train_for_ever(tell: Teller, rank: int, *, url: str, numel: int, **kwargs: Any) -> None:
    """Steps in a few milliseconds, and saves whenever there is room, until it is killed."""
    state = State(numel)
    with checkpointer(url, state, **kwargs) as ckpt:
        step = ckpt.restore().step
        state.check(step)
        tell("restored", step=step)
        while True:
            time.sleep(0.005)  # two hundred starts would take more steps than `pattern` can tell apart
            state.advance()
            step += 1
            ckpt.after_step(step)
            if ckpt.pending is not None and ckpt.pending.step == step:
                tell("saving", step=step)


def train_without_memory(tell: Teller, rank: int, **kwargs: Any) -> None:
    """As train, where /dev/shm has room for nothing: in a mount namespace of its own."""
    assert ctypes.CDLL(None, use_errno=True).unshare(0x00020000) == 0, os.strerror(ctypes.get_errno())  # CLONE_NEWNS
    subprocess.run(["mount", "--make-rprivate", "/"], check=True)
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=64k", "tmpfs", "/dev/shm"], check=True)
    train(tell, rank, **kwargs)


def come_alone(tell: Teller, rank: int, *, url: str, how: str, gate: str) -> None:
    """Rank 0 comes, the others do not; all stay until the gate is open."""
    state = State(NUMEL)
    began = time.monotonic()
    try:
        if rank == 0 and how == "Checkpointer":
            ckptlib.Checkpointer(url, state.mapping, every=1, timeout=timedelta(seconds=2))
        elif rank == 0:
            ckptlib.save(url, state.mapping, step=1, timeout=timedelta(seconds=2))
    except ckptlib.AgreementFailed as error:
        tell("refused", text=str(error), seconds=time.monotonic() - began)
        Path(gate).touch()
    while not Path(gate).exists():
        time.sleep(0.01)


def try_roots(tell: Teller, rank: int, *, roots: list[str], step: int) -> None:
    """Of each root: loads one step by its number, then restores what there is."""
    for url in roots:
        name = Path(url).name
        state = State(NUMEL)
        try:
            state_step = ckptlib.load(url, state.mapping, step=step).step
        except ckptlib.CkptError as error:
            tell("load", root=name, kind=type(error).__name__, text=str(error))
        else:
            state.check(state_step)
            tell("load", root=name, kind="", step=state_step)
        close_sessions()  # else each root keeps a writer until the process ends
        try_restore(tell, rank, url=url)


def try_restore(tell: Teller, rank: int, *, url: str) -> None:
    """Restores what there is. `url`: of every rank its own where it names the rank."""
    state, name = State(NUMEL), Path(url).name
    try:
        with checkpointer(url.replace("{rank}", str(rank)), state) as ckpt:
            report = ckpt.restore()
            state.check(report.step)
    except ckptlib.CkptError as error:
        tell("restore", root=name, kind=type(error).__name__, text=str(error))
    else:
        tell("restore", root=name, kind="", step=report.step, skipped=report.skipped)
