"""How long does training stand still for a model of 60,000 tensors? 7,500 small linear layers and AdamW, one rank.

A checkpoint every second step; each is waited for before the next step, so that none waits for the one before. A stall
is all of after_step, or the call of the other library that saves, which is given a dict of tensors that was made
before. What a Checkpointer takes to be made is told beside it.
"""

from __future__ import annotations

import time
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn

import ckptlib
from benchmarks import peers, states
from benchmarks.common import tell, told
from benchmarks.figures import Figures, Options, run
from benchmarks.peers import PEERS
from benchmarks.turns import leave

SUBJECTS = ("ckptlib", "DCP async thread")
PER_LAYER = 8
"""Tensors: two parameters, each with two moments and a count of steps."""
WIDTH = 16
SAVES = 10
FIRST, STEADY = "first save", "save"


def main(arguments: list[str]) -> None:
    run(arguments, "many_tensors", measure, gb=0.06)


def measure(options: Options, directory: Path, figures: Figures) -> None:
    num_tensors = 400 if options.toy else int(options.gb * 1_000_000)
    case = f"{num_tensors:,} tensors, a model and AdamW"
    for _ in range(1 if options.toy else options.rounds):
        for subject in SUBJECTS:
            given = {"peer": subject, "tensors": num_tensors, "directory": str(directory / subject)}
            for line in figures.attempt(case, subject, __name__, 1, given, options.timeout_s):
                figures.add(case, subject, line["what"], "s", line["samples"], tensors=num_tensors)


class Training:
    def __init__(self, num_tensors: int) -> None:
        self.model = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(num_tensors // PER_LAYER))
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-5)
        for parameter in self.model.parameters():
            parameter.grad = torch.ones_like(parameter)
        self._others = torch.zeros(64 << 20, dtype=torch.uint8)
        self.step()

    def step(self) -> None:
        """As short as can be; but what it leaves behind are no warm caches."""
        self.optimizer.step()
        self._others += 1

    def flat(self) -> states.State:
        found: states.State = {name: p.detach() for name, p in self.model.named_parameters()}
        for name, p in self.model.named_parameters():
            found |= {f"{name}.{key}": value for key, value in self.optimizer.state[p].items()}
        return found


def work() -> None:
    given = told()
    torch.set_num_threads(1)
    training, directory = Training(given["tensors"]), Path(given["directory"])
    stalls = _ours(training, directory) if given["peer"] == "ckptlib" else _others(training, directory, given["peer"])
    tell(what=FIRST, samples=stalls[:1])
    tell(what=STEADY, samples=stalls[3:])  # the second one goes to a slot that was never used
    leave()


def _ours(training: Training, directory: Path) -> list[float]:
    began, stalls = time.perf_counter(), list[float]()
    state = {"model": training.model, "optim": training.optimizer}
    with ckptlib.Checkpointer(directory, state, every=2, keep=ckptlib.Keep(last=2)) as checkpointer:
        tell(what="construction", samples=[time.perf_counter() - began])
        for step in range(1, 2 * SAVES + 1):
            training.step()
            began = time.perf_counter()
            checkpointer.after_step(step)
            if step % 2 == 0:
                stalls.append(time.perf_counter() - began)
                assert checkpointer.pending is not None
                checkpointer.pending.wait_committed()
    return stalls


def _others(training: Training, directory: Path, name: str) -> list[float]:
    dist.init_process_group("gloo")  # which an asynchronous save needs
    peer, state, stalls = PEERS[name](), training.flat(), list[float]()
    for step in range(5):  # each takes it a minute
        training.step()
        began = time.perf_counter()
        wait = peer.begin(state, directory, step)
        stalls.append(time.perf_counter() - began)
        wait()
    peer.close()
    peers.remove(directory)
    return stalls


if __name__ == "__main__":
    work()
