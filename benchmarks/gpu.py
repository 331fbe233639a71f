"""What does a snapshot at every iteration cost on a GPU? Iterations with and without; the copy's share of the link.

One GPU trains a model of 1.3 billion parameters with AdamW under FSDP2. Taking turns: snapshots at every iteration, to
the host and by way of the GPU's own memory; and saves every few iterations by ckptlib and by others, with pinned
staging. A stall is what the host's thread waits; what the device waits shows in the length of a turn against that of
one without, next to it. The bare copy over the link is measured in the same process.
"""

from __future__ import annotations

import time
from pathlib import Path

import torch
import torch.distributed as dist
from typing_extensions import override

import ckptlib
from benchmarks import states
from benchmarks.common import tell, told
from benchmarks.figures import Figures, Options, run
from benchmarks.peers import why_not
from benchmarks.stall import (
    CHECKPOINTS,
    OTHERS,
    WITHOUT,
    CkptlibTaker,
    PeerTaker,
    Taker,
    Training,
    remove,
    turn,
)

CASE = "one GPU"
HOST, DEVICE, CKPTLIB = "host", "device", "ckptlib"
EVERY = 4
"""Iterations from one save to the next."""

ITERATION_S = 0.5
WIDTH = 4096
BARE_BYTES = 1 << 30


def main(arguments: list[str]) -> None:
    run(arguments, "gpu", measure, gb=15.6)


def measure(options: Options, directory: Path, figures: Figures) -> None:
    if not options.toy and not torch.cuda.is_available():
        figures.failed(CASE, "all", "this machine has no CUDA device; --toy runs on the host")
        return
    others = ("DCP async thread",) if options.toy else ("DCP async thread", "torch_checkpointing")
    given = {
        "directory": str(directory),
        "device": "cpu" if options.toy else "cuda",
        "nbytes": 2_000_000 if options.toy else int(options.gb * 1e9),
        "rounds": 1 if options.toy else options.rounds,
        "iteration_s": 0.02 if options.toy else ITERATION_S,
        "width": 256 if options.toy else WIDTH,
        "others": [name for name in others if why_not(OTHERS[name], 1) is None],
    }
    for line in figures.attempt(CASE, "all", __name__, 1, given, options.timeout_s * options.rounds):
        figures.add(CASE, line.pop("subject"), line.pop("what"), line.pop("unit"), line.pop("samples"), **line)


class SnapshotTaker(Taker):
    """ckptlib with a snapshot at every iteration, none of which goes to the store."""

    def __init__(self, training: Training, directory: Path, memory: str) -> None:
        self.name = f"ckptlib, every iteration, memory={memory!r}"
        state = {"model": training.model, "optim": training.optimizer}
        in_memory = ckptlib.Peers(copies=0, every=1, memory=memory)
        self._root = directory / f"ckptlib-{memory}"
        self.checkpointer = ckptlib.Checkpointer(self._root, state, every=10**9, peers=in_memory)
        self._session = self.checkpointer._session
        self._step = 0

    @override
    def after_iteration(self, number: int) -> None:
        self._step += 1
        self.checkpointer.after_step(self._step)

    @override
    def stalled_s(self) -> float:
        return self.checkpointer.fence_waited_s

    def copy_seconds(self, training: Training) -> float:
        """Of one snapshot while nothing else runs; until the device has read all out."""
        self.drain()
        training.finish()
        began = time.perf_counter()
        while not self._session.snapshots.settling:  # what is due is agreed upon one step before
            began = time.perf_counter()
            self.after_iteration(0)
        training.finish()
        return time.perf_counter() - began

    @override
    def drain(self) -> None:
        while self._session.snapshots.settling:
            self._session.outcomes.poll(0.001)

    @override
    def close(self) -> None:
        self.checkpointer.close()
        remove(self._root)


# In the rank


def work() -> None:
    """Turns of every subject, and of none."""
    given = told()
    torch.manual_seed(0)
    device, directory = given["device"], Path(given["directory"])
    dist.init_process_group("cpu:gloo,cuda:nccl" if device == "cuda" else "gloo")
    training = Training(given["nbytes"], given["width"], device)
    training.calibrate(given["iteration_s"])
    state = {
        "tensors": len(training.flat()),
        "nbytes_local": states.nbytes_local(training.flat()),
        "device": torch.cuda.get_device_name() if device == "cuda" else device,
    }

    def say(subject: str, what: str, unit: str, samples: list[float]) -> None:
        tell(subject=subject, what=what, unit=unit, samples=samples, **state)

    if device == "cuda":
        say("bare pinned copy", "copy to the host", "GB/s", [BARE_BYTES / s / 1e9 for s in _pinned_seconds()])
    for _ in range(given["rounds"]):
        for name in (HOST, DEVICE, CKPTLIB, *given["others"]):
            taker = _taker(name, training, directory)  # each alone: together they would not fit
            turn(training, taker, EVERY)  # slots are made, plans drawn up, helpers started
            without, with_it = turn(training, None, EVERY), turn(training, taker, EVERY)
            each = EVERY if isinstance(taker, SnapshotTaker) else 1
            say(taker.name, "stall per checkpoint", "s", [seconds / each for seconds in with_it["stall"]])
            say(taker.name, "turn with / without", "1", [with_it["total"][0] / without["total"][0]])
            say(WITHOUT, "iteration", "s", [without["total"][0] / (EVERY * CHECKPOINTS)])
            if isinstance(taker, SnapshotTaker):
                rate = state["nbytes_local"] / taker.copy_seconds(training) / 1e9
                say(taker.name, "copy to the host", "GB/s", [rate])
            taker.close()
    dist.destroy_process_group()


def _taker(name: str, training: Training, directory: Path) -> Taker:
    if name in (HOST, DEVICE):
        return SnapshotTaker(training, directory, name)
    if name == CKPTLIB:
        return CkptlibTaker(training, directory, EVERY)
    return PeerTaker(training, directory, name, EVERY)


def _pinned_seconds() -> list[float]:
    source = torch.zeros(BARE_BYTES, dtype=torch.uint8, device="cuda")
    target = torch.zeros(BARE_BYTES, dtype=torch.uint8).pin_memory()
    found = []
    for _ in range(5):
        torch.cuda.synchronize()
        began = time.perf_counter()
        target.copy_(source, non_blocking=True)
        torch.cuda.synchronize()
        found.append(time.perf_counter() - began)
    return found


if __name__ == "__main__":
    work()
