"""Forks children of a process that saves, in every way: forks.py <directory> <case>. Prints "ok" at its end."""

from __future__ import annotations

import atexit
import gc
import multiprocessing
import os
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch.utils.data import DataLoader, TensorDataset

import ckptlib
from ckptlib.errors import AgreementFailed, SaveFailed

WAIT_S = 150.0


def steps(url: Path) -> list[int]:
    return [info.step for info in ckptlib.checkpoints(url)]


def forked(body: Callable[[], object], leave: Callable[[], object] = lambda: sys.exit(0)) -> None:
    """Runs `body` in a child, which then leaves as it likes; it has to end well, and by itself."""
    pid = os.fork()
    if pid == 0:
        try:
            body()
        except (Exception, pytest.fail.Exception) as error:
            print("child:", type(error).__name__, error, flush=True)
            os._exit(3)
        leave()
    deadline = time.monotonic() + WAIT_S
    while (found := os.waitpid(pid, os.WNOHANG)) == (0, 0):
        if time.monotonic() > deadline:
            os.kill(pid, signal.SIGKILL)
            os.waitpid(pid, 0)
            raise AssertionError("the child hangs")
        time.sleep(0.01)
    assert found[1] == 0, found


def refused(call: Callable[[], object], kind: type[Exception] = SaveFailed) -> None:
    """With the reason."""
    with pytest.raises(kind, match=f"process {os.getpid()} was forked from"):
        call()


def nothing() -> None:
    pass


def functions(url: Path) -> None:
    weight = torch.ones(3)
    ckptlib.save(url, {"w": weight}, 1)
    pending = ckptlib.save_async(url, {"w": weight}, 2)

    def child() -> None:
        refused(lambda: ckptlib.save(url, {"w": weight}, 9))
        refused(lambda: ckptlib.Checkpointer(url, {"w": weight}, every=1))
        refused(lambda: pending.wait_committed(WAIT_S))
        assert ckptlib.load(url, {"w": torch.zeros(3)}, 1).step == 1
        ckptlib.save(url / "child", {"w": weight}, 5)  # a root of its own

    forked(child)
    forked(lambda: forked(nothing))  # and a grandchild
    pending.wait_committed(WAIT_S)
    for step in (3, 4):
        ckptlib.save(url, {"w": weight}, step)
    assert steps(url) == [1, 2, 3, 4]
    assert steps(url / "child") == [5]


def checkpointers(url: Path) -> None:
    model = torch.nn.Linear(64, 1024)
    optim = torch.optim.AdamW(model.parameters())

    def train() -> None:
        model(torch.ones(2, 64)).sum().backward()
        optim.step()

    def child() -> None:
        train()  # no copy of the parent's is waited for
        refused(lambda: ckpt.after_step(8))
        refused(lambda: ckpt.save(8))
        refused(lambda: ckpt.restore())
        refused(lambda: ckptlib.save(url, {"model": model}, 9))
        ckptlib.load(url, {"model": model}, 1, strict=False)
        ckpt.close()  # does nothing

    closed = ckptlib.Checkpointer(url, {"model": model}, every=1)
    for _ in range(2):  # the root counts as one that this process saves to all the same, by the next
        closed.close()
    made = os.getpid()
    with ckptlib.Checkpointer(url, {"model": model, "optim": optim}, every=1) as ckpt:
        for step in ckpt.loop(0, 4):
            train()
            if ckpt.pending is not None:
                ckpt.pending.wait_committed(WAIT_S)
            forked(child if step == 1 else nothing)
            if step == 2 and os.fork() == 0:
                sys.exit(0)  # unwinds all of this
        forked(nothing)
        if os.fork() == 0:
            made = 0  # leaves the block in the ordinary way
    if made == 0:
        sys.exit(0)
    for _ in range(2):
        assert os.wait()[1] == 0
    assert steps(url) == [1, 2, 3, 4], steps(url)


def workers(url: Path) -> None:
    """Of DataLoaders, of pools, and processes; the first SIGTERM ends one."""
    context = multiprocessing.get_context("fork")
    data = TensorDataset(torch.arange(8.0))
    with ckptlib.Checkpointer(url, {"w": torch.ones(3)}, every=1) as ckpt:
        for step in ckpt.loop(0, 2):
            loader = DataLoader(data, num_workers=2, multiprocessing_context="fork", persistent_workers=step == 0)
            assert sum(float(x.sum()) for (x,) in loader) == 28
            with context.Pool(2) as pool:  # terminates them
                assert pool.map(abs, range(-2, 2)) == [2, 1, 0, 1]
            process = context.Process(target=time.sleep, args=(100 * WAIT_S,))
            process.start()
            process.terminate()
            process.join(WAIT_S)
            assert process.exitcode == -signal.SIGTERM, process.exitcode
            process = context.Process(target=sys.exit)
            process.start()
            process.join(WAIT_S)
            assert process.exitcode == 0
            if ckpt.pending is not None:
                ckpt.pending.wait_committed(WAIT_S)
        assert signal.getsignal(signal.SIGTERM) != signal.SIG_DFL  # the trainer still notes it
    assert steps(url) == [1, 2]


def ranks(url: Path) -> None:
    dist.init_process_group("gloo")
    weight = torch.ones(3)

    def child() -> None:
        refused(lambda: ckptlib.save(url, {"w": weight}, 9), AgreementFailed)
        refused(lambda: ckptlib.load(url, {"w": weight}), AgreementFailed)

    def leave() -> None:
        """But for what C++ does at the end of an interpreter: torch's own gloo group may hang there in a child."""
        atexit._run_exitfuncs()
        os._exit(0)

    ckptlib.save(url, {"w": weight}, 1)
    forked(child, leave)
    ckptlib.save(url, {"w": weight}, 2)
    gc.disable()
    with ckptlib.Checkpointer(url / "other", {"w": weight}, every=1) as ckpt:
        ckpt.save(1).wait_committed(WAIT_S)
        forked(ckpt.close, leave)
        ckpt.save(2).wait_committed(WAIT_S)
    del ckpt  # garbage, whose connections are closed; the child collects it
    forked(gc.collect, leave)
    gc.enable()
    ckptlib.save(url, {"w": weight}, 3)
    assert (steps(url), steps(url / "other")) == ([1, 2, 3], [1, 2])


def main() -> None:
    case = globals()[sys.argv[2]]
    case(Path(sys.argv[1]))
    print("ok\n", end="", flush=True)  # one write: ranks share the pipe


if __name__ == "__main__":
    main()
