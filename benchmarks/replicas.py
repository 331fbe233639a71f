"""What does it cost to prove replicas alike at each save? DDP on two gloo ranks, a checkpoint at every fourth step.

Four trainings: BatchNorm, whose running statistics are digested whole; an EMA of all weights, the same; LoRA on a
frozen base; and thousands of small tensors. A stall is all of after_step and of the wait at the fence, of the slowest
rank, for each checkpoint. "Proof" is what of it goes into the digests, and beside it the time for each byte that is
digested inline. DCP's asynchronous save of the same state, which proves nothing, takes turns with it in the same run.
"""

from __future__ import annotations

import copy
import os
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import ckptlib
from benchmarks import peers, states
from benchmarks.common import tell, told
from benchmarks.figures import Figures, Options, run
from benchmarks.peers import PEERS, why_not
from ckptlib.staging.replica_digests import ReplicaDigests

CASES = ("BatchNorm", "EMA", "LoRA on a frozen base", "small tensors")
EVERY = 4
CHECKPOINTS = 5
PEER = "DCP async thread"


def main(arguments: list[str]) -> None:
    run(arguments, "replicas", measure, gb=0.25)


def measure(options: Options, directory: Path, figures: Figures) -> None:
    for case in CASES:
        given: dict[str, Any] = {
            "case": case,
            "directory": str(directory / case.replace(" ", "-")),
            "nbytes": int((0.002 if options.toy else options.gb) * 1e9),
            "tensors": 200 if options.toy else 100_000,
            "width": 64 if options.toy else 1024,
            "rounds": 1 if options.toy else options.rounds,
            "peer": why_not(PEERS[PEER], 2) is None,
        }
        for line in figures.attempt(case, "all", __name__, 2, given, options.timeout_s):
            figures.add(case, line.pop("subject"), line.pop("what"), line.pop("unit"), line.pop("samples"), **line)


# In the ranks


class Training:
    """Of one case; `state` is what is saved."""

    def __init__(self, case: str, nbytes: int, width: int, num_small: int) -> None:
        torch.manual_seed(0)
        small = case == "small tensors"
        weights = [] if small else [width] * max(1, nbytes // (12 * width * width))
        layers: list[nn.Module] = [nn.Linear(size, size, bias=False) for size in weights]
        if case == "BatchNorm":
            layers = [layer for linear in layers for layer in (linear, nn.BatchNorm1d(width))]
        if small:
            layers = [nn.Linear(64, 64, bias=False)]
        model = nn.Sequential(*layers)
        if case.startswith("LoRA"):
            for layer in list(model):
                layer.requires_grad_(False)
            model.append(nn.Linear(width, width, bias=False))
        self.width = 64 if small else width
        self.model = DistributedDataParallel(model)
        params = [p for p in self.model.parameters() if p.requires_grad]
        self.optim = torch.optim.AdamW(params, lr=1e-5)
        self.state: dict[str, Any] = {"model": self.model, "optim": self.optim}
        self.ema = copy.deepcopy(model) if case == "EMA" else None
        if self.ema is not None:
            self.state["ema"] = self.ema
        if small:
            self.state["small"] = {f"expert{i}/scale": torch.full((64,), float(i)) for i in range(num_small)}
        self.iterate()

    def iterate(self) -> None:
        self.model(torch.randn(64, self.width)).pow(2).mean().backward()
        self.optim.step()
        self.optim.zero_grad()
        if self.ema is not None:
            with torch.no_grad():
                pairs = zip(self.ema.parameters(), self.model.module.parameters(), strict=True)
                for average, weight in pairs:
                    average.lerp_(weight, 0.01)

    def flat(self) -> states.State:
        found = {f"model.{name}": t.detach() for name, t in self.model.module.state_dict().items()}
        for i, entry in enumerate(self.optim.state.values()):
            found |= {f"optim.{i}.{key}": value for key, value in entry.items()}
        if self.ema is not None:
            found |= {f"ema.{name}": t.detach() for name, t in self.ema.state_dict().items()}
        return found | self.state.get("small", {})


class Proof:
    """Times what is read inline, by standing before it."""

    def __init__(self) -> None:
        self.seconds: list[float] = []
        self.nbytes = 0
        real = ReplicaDigests.begin

        def begin(digests: ReplicaDigests, number: int, whole: bool) -> Any:
            began = time.perf_counter()
            try:
                return real(digests, number, whole)
            finally:
                self.seconds.append(time.perf_counter() - began)
                self.nbytes = digests.nbytes_inline(whole)

        ReplicaDigests.begin = begin  # type: ignore[method-assign]


def work() -> None:
    given = told()
    peers.start()
    training = Training(given["case"], given["nbytes"], given["width"], given["tensors"])
    directory = Path(given["directory"])
    tensors = training.flat()
    about = {"tensors": len(tensors), "nbytes": sum(t.nbytes for t in tensors.values())}

    def say(subject: str, what: str, unit: str, samples: list[float]) -> None:
        if dist.get_rank() == 0:
            tell(subject=subject, what=what, unit=unit, samples=samples, **about)

    proof = Proof()
    with ckptlib.Checkpointer(directory / "ckptlib", training.state, every=EVERY) as ckpt:
        step = _turns(training, ckpt, 0, 1)[0]  # the first one compares whole, and draws up plans
        proof.seconds.clear()
        for _ in range(given["rounds"]):
            step, stalls = _turns(training, ckpt, step, CHECKPOINTS)
            say("ckptlib", "stall per checkpoint", "s", stalls)
            if given["peer"]:
                say(PEER, "stall per checkpoint", "s", _peer_turns(training, directory / "peer", step))
        digests = _slowest(proof.seconds)
    say("ckptlib", "of it the proof", "s", digests)
    say("ckptlib", "digested inline", "MB", [proof.nbytes / 1e6])
    if proof.nbytes > 1e6:
        say("ckptlib", "proof per byte", "ns", [1e9 * s / proof.nbytes for s in digests])
    dist.barrier()
    os._exit(0)  # DDP's destructor may hang behind the end of its group (torch 2.13, gloo)


def _turns(training: Training, ckpt: ckptlib.Checkpointer, step: int, checkpoints: int) -> tuple[int, list[float]]:
    """The step it ends with, and the seconds that each checkpoint took from the training."""
    stalls = []
    for _ in range(checkpoints):
        stalled = 0.0
        for _ in range(EVERY):
            before = ckpt.fence_waited_s
            training.iterate()
            began = time.perf_counter()
            step += 1
            ckpt.after_step(step)
            stalled += time.perf_counter() - began + ckpt.fence_waited_s - before
        stalls.append(stalled)
        if ckpt.pending is not None:
            ckpt.pending.wait_committed()
        dist.barrier()
    return step, _slowest(stalls)


def _peer_turns(training: Training, directory: Path, step: int) -> list[float]:
    peer, state, stalls = PEERS[PEER](), training.flat(), []
    peer.begin(state, directory, step)()  # the first one apart, as ours
    for number in range(CHECKPOINTS):
        training.iterate()
        began = time.perf_counter()
        wait = peer.begin(state, directory, step + 1 + number)
        stalled = time.perf_counter() - began
        for _ in range(EVERY):
            training.iterate()
        began = time.perf_counter()
        peer.wait_staged()
        stalls.append(stalled + time.perf_counter() - began)
        wait()
        dist.barrier()
    peer.close()
    return _slowest(stalls)


def _slowest(seconds: list[float]) -> list[float]:
    found = torch.tensor(seconds, dtype=torch.float64)
    dist.all_reduce(found, dist.ReduceOp.MAX)
    values: list[float] = found.tolist()
    return values


if __name__ == "__main__":
    work()
