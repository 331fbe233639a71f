"""How soon does a replica stand behind a slow link? Peers(link="optimizer") beside link="raw", a snapshot at each step.

Two gloo ranks, each a host of its own. Messages between them arrive as late as a link of some speed would have them.
"One way": rank 0 alone has a state that counts, so that its core encodes and the other one decodes; "both ways": each
core does both. Gradients are noise with a scale for each row and column. Seconds are from the call of `after_step`
until the slower rank's snapshot has its replica, checked against its digests; CPU is that of the busier rank meanwhile.
"""

from __future__ import annotations

import tempfile
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn

import ckptlib
from benchmarks.common import Line, tell, told
from benchmarks.figures import Figures, Options, rotated, run
from ckptlib.policy.peers import OPTIMIZER, RAW
from ckptlib.ranks.link import Link

CASES = {"one way": 1, "both ways": 2}
"""Ranks with a state that counts."""
GB_PER_S = (0.1, 0.3)
SNAPSHOTS = 4
WARM_UP = 3
"""Snapshots into slots that are new."""


def main(arguments: list[str]) -> None:
    run(arguments, "link", measure, gb=0.3)


def measure(options: Options, directory: Path, figures: Figures) -> None:
    for number in range(1 if options.toy else options.rounds):
        for case, num_senders in list(CASES.items())[: 1 if options.toy else None]:
            for link in rotated((RAW, OPTIMIZER), number):
                with tempfile.TemporaryDirectory(prefix="ckptlib-link-", dir="/dev/shm") as memory:
                    given = {
                        "directory": str(directory / f"{case.replace(' ', '-')}-{link}-{number}"),
                        "memory": memory,
                        "nbytes": int((0.002 if options.toy else options.gb) * 1e9),
                        "num_senders": num_senders,
                        "link": link,
                    }
                    _note(figures, case, link, figures.attempt(case, link, __name__, 2, given, options.timeout_s))


def _note(figures: Figures, case: str, link: str, lines: list[Line]) -> None:
    for speed in GB_PER_S:
        some = [line for line in lines if line["speed"] == speed]
        for what in ("replica stands", "CPU"):
            samples = [max(both) for both in zip(*(line[what] for line in some), strict=True)]
            share = max((line["coded"] for line in some), default=0.0)
            figures.add(f"{case}, {speed} GB/s", link, what, "s", samples, coded=share)


# In the ranks


class Carrier:
    """Delivers this rank's messages as late as a link of some speed would."""

    def __init__(self) -> None:
        self.speed = 1e9
        """Bytes/s."""
        self._free = 0.0
        executor, begin = ThreadPoolExecutor(1, "carrier"), Link._begin_send

        def begin_send(link: Link, to: int, data: torch.Tensor, tag: int) -> Callable[[], None]:
            self._free = max(time.monotonic(), self._free) + data.numel() / self.speed
            sent = executor.submit(later, self._free, link, to, data, tag)
            return lambda: sent.result()()

        def later(when: float, link: Link, to: int, data: torch.Tensor, tag: int) -> Callable[[], None]:
            time.sleep(max(0.0, when - time.monotonic()))
            return begin(link, to, data, tag)

        Link._begin_send = begin_send  # type: ignore[method-assign]


def work() -> None:
    """Snapshots of one training."""
    given = told()
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    rank, carrier = dist.get_rank(), Carrier()
    nbytes = int(given["nbytes"]) if rank < given["num_senders"] else 0
    width = 1024 if nbytes > 12 * 1024 * 1024 else 256 if nbytes else 64
    layers = nn.ModuleList(nn.Linear(width, width, bias=False) for _ in range(max(1, nbytes // (12 * width * width))))
    optimizer = torch.optim.AdamW(layers.parameters(), lr=1e-4, betas=(0.9, 0.95))
    state = {f"model{rank}": layers, f"optim{rank}": optimizer}
    peers = ckptlib.Peers(domain=f"host{rank}", link=given["link"])
    arena = Path(given["memory"]) / f"host{rank}"
    arena.mkdir()
    with ckptlib.Checkpointer(given["directory"], state, every=10**9, peers=peers, arena=arena) as saver:

        def snapshot(step: int) -> tuple[float, float]:
            """Seconds, and those of this rank's CPU."""
            for weight in layers.parameters():
                rows, columns = torch.rand(weight.shape[0], 1), torch.rand(weight.shape[1])
                weight.grad = torch.randn_like(weight) * rows * columns * 1e-3
            optimizer.step()
            dist.barrier()
            began, began_cpu = time.perf_counter(), time.process_time()
            saver.after_step(step)
            while saver._session.snapshots.settling:
                saver._session.outcomes.poll(0.002)
            found = time.perf_counter() - began, time.process_time() - began_cpu
            dist.barrier()
            return found

        for step in range(1, WARM_UP + 1):
            snapshot(step)
        for number, speed in enumerate(GB_PER_S):
            carrier.speed = speed * 1e9
            first = WARM_UP + 1 + number * SNAPSHOTS
            seconds, cpu = zip(*map(snapshot, range(first, first + SNAPSHOTS)), strict=True)
            told_of = saver.coverage
            coded = 0.0 if told_of is None else told_of.coded / max(1, told_of.coded + sum(told_of.uncoded.values()))
            tell(speed=speed, coded=coded, **{"replica stands": seconds, "CPU": cpu})
    dist.destroy_process_group()


if __name__ == "__main__":
    work()
