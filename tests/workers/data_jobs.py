"""A training job that tells which items it trained on: data_jobs.py <JSON of Options>, and may be killed in any step.

Each rank appends a line of JSON per step to a file of its own. It tells what the data set gave, nothing of ckptlib's.
"""

from __future__ import annotations

import json
import os
import random
import signal
import sys
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch.utils.data import DataLoader, Dataset, IterableDataset, get_worker_info
from typing_extensions import override

import ckptlib
from ckptlib.data import ResumableSampler, resumable


@dataclass(frozen=True)
class Options:
    """What one incarnation of the job is told."""

    directory: str
    session: int = 0
    length: int = 38
    global_batch: int = 12
    total: int = 10
    every: int = 2
    num_workers: int = 0
    kill_at: int | None = None
    """The step in whose body one rank dies."""
    kill_rank: int = 0
    trained: bool = False
    """It dies behind optimizer.step(), not before."""
    stream: bool = False
    """The data set is iterable."""
    by_epoch: bool = False
    """Two loops, over epochs and over batches, and after_step called by hand."""

    def argument(self) -> str:
        return json.dumps(asdict(self))


class Numbers(Dataset[list[float]]):
    """Each item: its number, and a draw from each of the three generators."""

    def __init__(self, length: int) -> None:
        self.length = length

    def __len__(self) -> int:
        return self.length

    @override
    def __getitem__(self, item: int) -> list[float]:
        return [item, random.random(), np.random.random(), torch.rand(()).item()]


class Stream(IterableDataset[list[float]]):
    """Each rank and worker has numbers of its own."""

    def __init__(self, length: int, rank: int, world_size: int) -> None:
        self.length, self.rank, self.world_size = length, rank, world_size

    @override
    def __iter__(self) -> Iterator[list[float]]:
        info = get_worker_info()
        worker, num_workers = (0, 1) if info is None else (info.id, info.num_workers)
        numbers = Numbers(self.length)
        for item in range(worker * self.world_size + self.rank, self.length, num_workers * self.world_size):
            yield numbers[item]


class Job:
    def __init__(self, options: Options) -> None:
        self.options, self.rank = options, dist.get_rank()
        self.model = torch.nn.Linear(4, 1)
        torch.nn.init.zeros_(self.model.weight)
        torch.nn.init.zeros_(self.model.bias)
        self.optim = torch.optim.SGD(self.model.parameters(), lr=1e-4, momentum=0.9)
        seed = 1 + self.rank
        random.seed(seed)
        np.random.seed(seed)
        torch.manual_seed(seed)
        workers: dict[str, Any] = {"num_workers": options.num_workers, "collate_fn": list}
        if options.num_workers:
            workers |= {"prefetch_factor": 3, "multiprocessing_context": "fork"}
        if options.stream:
            stream = Stream(options.length, self.rank, dist.get_world_size())
            per_rank = options.global_batch // dist.get_world_size()
            self.loader = resumable(DataLoader(stream, batch_size=per_rank, **workers))
        else:
            sampler = ResumableSampler(options.length, options.global_batch, seed=5)
            workers["persistent_workers"] = options.num_workers > 0
            self.loader = resumable(DataLoader(Numbers(options.length), batch_sampler=sampler, **workers))
        self.file = (Path(options.directory) / f"told-{options.session}-{self.rank}").open("a")

    def run(self) -> None:
        state = {"model": self.model, "optim": self.optim, "data": self.loader}
        with ckptlib.Checkpointer(Path(self.options.directory) / "root", state, every=self.options.every) as ckpt:
            self.ckpt = ckpt
            start = ckpt.restore().step
            self.tell(restored=start)
            if self.options.by_epoch:
                self.train_by_epoch(ckpt, start)
            else:
                for step, batch in zip(ckpt.loop(start, self.options.total), self.loader.endless(), strict=False):
                    self.train(step, batch)
        weights = [x.item().hex() for p in self.model.parameters() for x in p.flatten()]
        self.tell(weights=weights)

    def train_by_epoch(self, ckpt: ckptlib.Checkpointer, step: int) -> None:
        while self.loader.epoch < 3:
            for batch in self.loader:
                self.train(step, batch)
                step += 1
                ckpt.after_step(step)
        ckpt.save(step)

    def train(self, step: int, batch: list[list[float]]) -> None:
        dies = step == self.options.kill_at and self.rank == self.options.kill_rank
        if dies and self.ckpt.pending is not None:
            self.ckpt.pending.wait_committed(60)  # else a fast job leaves nothing to resume from
        if dies and not self.options.trained:
            os.kill(os.getpid(), signal.SIGKILL)
        self.model(torch.tensor(batch)).square().mean().backward()
        for p in self.model.parameters():
            dist.all_reduce(p.grad)
        self.optim.step()
        self.optim.zero_grad()
        self.tell(step=step, items=batch)
        if dies:
            os.kill(os.getpid(), signal.SIGKILL)

    def tell(self, **what: object) -> None:
        print(json.dumps(what), file=self.file, flush=True)


def told(directory: Path, session: int, rank: int) -> Iterator[dict[str, Any]]:
    """What a rank of a session said. Its last line may be torn."""
    for line in (directory / f"told-{session}-{rank}").read_text().split("\n")[:-1]:
        yield json.loads(line)


def main() -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    Job(Options(**json.loads(sys.argv[1]))).run()
    sys.stdout.flush()
    os._exit(0)  # gloo's threads may hang a script that ends behind a collective


if __name__ == "__main__":
    main()
