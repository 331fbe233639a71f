"""How long does training stand still for a checkpoint? FSDP2 with AdamW on gloo ranks, a checkpoint every k steps.

All subjects share one training in one run and take turns, with turns without checkpoints in between. A stall is what a
checkpoint costs the main thread: for ckptlib all of after_step and the wait at the fence, of every iteration; for the
others the call that saves, the wait for the save before it and, where it asks for one, the wait for its copy before an
update. What a checkpoint costs beside (cores, memory bandwidth) shows in the length of a turn against that of the turn
without, next to it. The slowest rank counts.

The others are given a flat dict of tensors that is made once; making it, which they need at every save, is not counted.
ckptlib walks model and optimizer at every save, and that is.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Collection
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard
from typing_extensions import override

import ckptlib
from benchmarks import peers, states
from benchmarks.common import resident_bytes, tell, told
from benchmarks.figures import Figures, Options, run
from benchmarks.peers import PEERS, CkptlibDcp, TorchCheckpointingUnflushed, Wait, why_not
from benchmarks.states import State

CHECKPOINTS = 2
"""In one turn; each has the iterations up to the next to finish in the background."""

ITERATION_S = 1.2
WIDTH = 1024
DROP_IN, OVERLAPPED = "ckptlib.dcp", "ckptlib.dcp, overlap="
OTHERS = {
    name: {"torch_checkpointing": TorchCheckpointingUnflushed, DROP_IN: CkptlibDcp, OVERLAPPED: CkptlibDcp}.get(name)
    or PEERS[name]
    for name in (DROP_IN, OVERLAPPED, "torch_checkpointing", "DCP async thread", "DCP", "torch.save+fsync")
}
"""Peers as they take part here: what is written in the background is not flushed."""

WITHOUT = "no checkpoints"


class Case(NamedTuple):
    """Of ranks that train together."""

    name: str
    num_ranks: int
    every: int
    """Iterations from one checkpoint to the next."""
    rounds: int | None
    """None: as many as were asked for."""
    others: Collection[str]


CASES = (
    Case("two ranks", 2, 4, None, OTHERS),
    # gloo takes 22 s for an iteration on two cores: all that is written is written within one
    Case("four ranks", 4, 1, 1, ("torch_checkpointing", "DCP async thread")),
)


def main(arguments: list[str]) -> None:
    run(arguments, "stall", measure, gb=0.5)


def measure(options: Options, directory: Path, figures: Figures) -> None:
    for case in CASES:
        rounds = 1 if options.toy else case.rounds or options.rounds
        given: dict[str, Any] = {
            "directory": str(directory),
            "gb": 0.002 if options.toy else options.gb,
            "every": case.every,
            "rounds": rounds,
            "iteration_s": 0.02 if options.toy else ITERATION_S,
            "width": 256 if options.toy else WIDTH,
            "others": [],
        }
        for name in case.others:
            why = why_not(OTHERS[name], case.num_ranks)
            if why is None:
                given["others"].append(name)
            elif not options.toy:
                figures.failed(case.name, name, why)
        lines = figures.attempt(case.name, "all", __name__, case.num_ranks, given, options.timeout_s * rounds)
        for line in lines:
            figures.add(case.name, line.pop("subject"), line.pop("what"), line.pop("unit"), line.pop("samples"), **line)


# In the ranks


def work() -> None:
    """Turns of every subject, and of none."""
    given = told()
    torch.manual_seed(0)
    peers.start()
    training = Training(int(given["gb"] * 1e9), given["width"])
    training.calibrate(given["iteration_s"])
    directory, every = Path(given["directory"]), given["every"]
    others = (PeerTaker(training, directory, name, every) for name in given["others"])
    takers = [CkptlibTaker(training, directory, every), *others]
    for taker in takers:
        turn(training, taker, every)  # first saves are apart: plans are drawn up, helpers started
    for number in range(given["rounds"]):
        for taker in takers[number % len(takers) :] + takers[: number % len(takers)]:
            without = turn(training, None, every)
            with_it = turn(training, taker, every)
            _tell(training, taker, every, without, with_it)
    for taker in takers:
        taker.close()
    dist.destroy_process_group()


def _nothing() -> None:
    pass


class Training:
    """A model of one width, and the state that its optimizer makes."""

    def __init__(self, nbytes_local: int, width: int, device: str = "cpu") -> None:
        self.device = device
        self.model = nn.Sequential()
        for i in range(max(1, nbytes_local * dist.get_world_size() // (12 * width * (width + 1)))):
            self.model.add_module(str(i), nn.Linear(width, width, device=device))
        for layer in self.model:
            fully_shard(layer)
        fully_shard(self.model)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-5)
        self.width = width
        self.micro_steps = 1
        self.before_update: Callable[[], None] = _nothing
        self.iterate()

    def iterate(self) -> None:
        for _ in range(self.micro_steps):
            self.model(torch.randn(32, self.width, device=self.device)).pow(2).mean().backward()
        self.before_update()
        self.optimizer.step()
        self.optimizer.zero_grad()

    def calibrate(self, seconds: float) -> None:
        """As many micro-steps as make an iteration last that long, on all ranks alike."""
        began = time.perf_counter()
        for _ in range(3):
            self.iterate()
        self.finish()
        took = torch.tensor((time.perf_counter() - began) / 3)
        dist.all_reduce(took, dist.ReduceOp.MAX)
        self.micro_steps = max(1, round(seconds / float(took)))

    def finish(self) -> None:
        """Returns when a device has done what it was told."""
        if self.device == "cuda":
            torch.cuda.synchronize()

    def flat(self) -> State:
        """Weights and moments by name."""
        found: State = {name: p.detach() for name, p in self.model.named_parameters()}
        for name, p in self.model.named_parameters():
            found |= {f"{name}.{key}": value for key, value in self.optimizer.state[p].items()}
        return found


class Taker:
    """Somebody who takes checkpoints of a training."""

    name: str

    def after_iteration(self, number: int) -> None:
        """`number` counts from 0 in each turn, and a checkpoint is due after 0."""
        raise NotImplementedError

    def before_update(self) -> None:
        """Returns when the state may be written to."""

    def drain(self) -> None:
        """Returns when nothing is under way."""

    def stalled_s(self) -> float:
        """Seconds that it waited inside of iterations, all in all."""
        return 0.0

    def waited_s(self) -> float:
        """Seconds that it waited for saves before the next one, all in all."""
        return 0.0

    def close(self) -> None:
        """Lets go, and leaves no files."""


class CkptlibTaker(Taker):
    name = "ckptlib"

    def __init__(self, training: Training, directory: Path, every: int) -> None:
        state = {"model": training.model, "optim": training.optimizer}
        self._root = directory / "ckptlib"
        self.checkpointer = ckptlib.Checkpointer(self._root, state, every=every)
        self._step = every - 1
        self.checkpointer.after_step(self._step)

    def after_iteration(self, number: int) -> None:
        self._step += 1
        self.checkpointer.after_step(self._step)

    def drain(self) -> None:
        assert self.checkpointer.pending is not None
        self.checkpointer.pending.wait_committed()

    def stalled_s(self) -> float:
        return self.checkpointer.fence_waited_s

    def close(self) -> None:
        self.checkpointer.close()
        remove(self._root)


class PeerTaker(Taker):
    def __init__(self, training: Training, directory: Path, name: str, every: int) -> None:
        self.name = name
        self._every = every
        self._peer = OTHERS[name]()
        if name == OVERLAPPED and isinstance(self._peer, CkptlibDcp):
            self._peer.overlap = training.optimizer
        self._state = training.flat()
        self._directory = directory / "".join(c if c.isalnum() else "-" for c in name)
        self._wait: Wait = peers.done
        self._saved = 0
        self._stalled_s = self._waited_s = 0.0

    def after_iteration(self, number: int) -> None:
        if number % self._every == 0:
            began = time.perf_counter()
            self._wait()
            self._waited_s += time.perf_counter() - began
            self._wait = self._peer.begin(self._state, self._directory, self._saved)
            self._saved += 1

    @override
    def before_update(self) -> None:
        began = time.perf_counter()
        self._peer.wait_staged()
        self._stalled_s += time.perf_counter() - began

    @override
    def stalled_s(self) -> float:
        return self._stalled_s

    @override
    def waited_s(self) -> float:
        return self._waited_s

    def drain(self) -> None:
        self._wait()
        self._wait = peers.done
        if self.name not in (DROP_IN, OVERLAPPED):  # whose next save goes to the same root
            remove(self._directory)

    def close(self) -> None:
        self._peer.close()
        remove(self._directory)


def remove(directory: Path) -> None:
    """By one rank; collective."""
    dist.barrier()
    if dist.get_rank() == 0:
        peers.remove(directory)
    dist.barrier()


def turn(training: Training, taker: Taker | None, every: int) -> dict[str, list[float]]:
    """So many iterations for each of CHECKPOINTS; seconds of all of them, and per checkpoint of what it stalled."""
    training.finish()
    dist.barrier()
    calls = [0.0] * CHECKPOINTS
    longest = [0.0] * CHECKPOINTS
    waits = [0.0] * CHECKPOINTS
    training.before_update = taker.before_update if taker else _nothing
    began = time.perf_counter()
    for number in range(every * CHECKPOINTS):
        before, waited = (taker.stalled_s(), taker.waited_s()) if taker else (0.0, 0.0)
        training.iterate()
        at = time.perf_counter()
        if taker is not None:
            taker.after_iteration(number)
            call = time.perf_counter() - at
            # a fence is met in the iteration behind its checkpoint
            calls[number // every] += call + taker.stalled_s() - before
            longest[number // every] = max(longest[number // every], call)
            waits[number // every] += taker.waited_s() - waited
    training.finish()
    dist.barrier()
    total = time.perf_counter() - began
    if taker is not None:
        taker.drain()
    return {"total": _slowest([total]), "stall": _slowest(calls), "call": _slowest(longest), "wait": _slowest(waits)}


def _slowest(seconds: list[float]) -> list[float]:
    found = torch.tensor(seconds, dtype=torch.float64)
    dist.all_reduce(found, dist.ReduceOp.MAX)
    values: list[float] = found.tolist()
    return values


def _tell(
    training: Training, taker: Taker, every: int, without: dict[str, list[float]], with_it: dict[str, list[float]]
) -> None:
    if dist.get_rank() != 0:
        return
    num_tensors = len(training.flat())
    state = {
        "tensors": num_tensors,
        "nbytes_local": states.nbytes_local(training.flat()),
        "micro_steps": training.micro_steps,
        "every": every,
    }

    def say(what: str, unit: str, samples: list[float]) -> None:
        tell(subject=taker.name, what=what, unit=unit, samples=samples, **state)

    say("stall per checkpoint", "s", with_it["stall"])
    say("longest call", "s", with_it["call"])
    say("of it, waiting for the save before", "s", with_it["wait"])
    beside = (with_it["total"][0] - without["total"][0]) / CHECKPOINTS
    say("longer per checkpoint, whole turn", "s", [beside])
    say("turn with / without", "1", [with_it["total"][0] / without["total"][0]])
    tell(subject=WITHOUT, what="iteration", unit="s", samples=[without["total"][0] / (every * CHECKPOINTS)], **state)
    if isinstance(taker, CkptlibTaker):
        say("target (1 ms + 10 us per tensor)", "s", [0.001 + 1e-5 * num_tensors])
        private, _ = resident_bytes(taker.checkpointer._session.writer.pid)
        say("writer's own memory", "MB", [private / 1e6])


if __name__ == "__main__":
    work()
