"""How much slower are training steps while a checkpoint is written? Step times with and without, in paired blocks.

Two ranks, one thread each, a step of matrix products and AdamW of about 0.4 s. Blocks of steps without checkpoints and
with one every four steps follow one another in the same processes; quartiles are over steps, and "with / without" is of
the means of one turn; ours and the bare transfer take more turns than the others. A step counts as "while persisting"
when the checkpoint begun before it was not yet written as it began; peers cannot be asked that on all ranks alike, so
only all their steps together are told.
"""

from __future__ import annotations

import importlib.util
import statistics
import tempfile
import threading
import time
from collections.abc import Callable
from pathlib import Path

import torch
import torch.distributed as dist
from torch.distributed.fsdp import fully_shard

import ckptlib
from benchmarks import peers, states
from benchmarks.common import tell, told
from benchmarks.figures import Figures, Options, run
from benchmarks.peers import PEERS

EVERY = 4
STEPS_PER_BLOCK = 12
OTHERS_ROUNDS = 3
CALIBRATION = 7
"""Steps, and as many products, whose times tell how many products make a step as long as asked."""
WITHOUT, WITH = "step without checkpoints", "step with checkpoints"
IN_MEMORY, BARE = "ckptlib, in memory and a peer's at every step", "bare gloo, the same bytes at every step"
NVRX = "NVRx, in memory and a peer's at every step"
SUBJECTS = ("ckptlib", IN_MEMORY, BARE, NVRX, "DCP async thread", "DCP async process")


def main(arguments: list[str]) -> None:
    run(arguments, "slowdown", measure, gb=0.5, rounds=7)


def measure(options: Options, directory: Path, figures: Figures) -> None:
    given = {"nbytes": 6_000_000 if options.toy else int(options.gb * 1e9), "step_s": 0.01 if options.toy else 0.4}
    num_ranks, subjects = (1, SUBJECTS[:1]) if options.toy else (2, SUBJECTS)
    case = f"{num_ranks} ranks"
    if NVRX in subjects and importlib.util.find_spec("nvidia_resiliency_ext") is None:
        figures.failed(case, NVRX, "nvidia-resiliency-ext is not installed; it is in the extra called bench")
    for turn in range(1 if options.toy else options.rounds):
        for subject in subjects if turn < OTHERS_ROUNDS else subjects[:3]:
            order = {**given, "peer": subject, "directory": str(directory / f"{subject}-{turn}")}
            means = {}
            for line in figures.attempt(case, subject, __name__, num_ranks, order, options.timeout_s):
                if line["rank"] == 0:
                    means[line["what"]] = statistics.fmean(line["samples"])
                    figures.add(case, subject, line["what"], "s", line["samples"], nbytes=given["nbytes"] * num_ranks)
                    p95 = statistics.quantiles(line["samples"], n=20)[-1]
                    figures.add(case, subject, f"{line['what']}, p95", "s", [p95])
            if WITH in means:
                figures.add(case, subject, "with / without", "1", [means[WITH] / means[WITHOUT]])


# In the ranks


class Training:
    """A model whose AdamW state is of a given size, and steps of a given length.

    The rest of a step is products of `product_width` squared matrices; small ones stay in a core's own cache, and vary
    by half a percent where large ones vary by five.
    """

    def __init__(self, nbytes: int, step_s: float, product_width: int = 1024) -> None:
        width = 1024
        layers = max(nbytes // (12 * width * width), 1)
        self.model = torch.nn.Sequential(*[torch.nn.Linear(width, width, bias=False) for _ in range(layers)])
        for module in self.model:
            if dist.get_world_size() > 1:
                fully_shard(module)
        self.optimizer = torch.optim.AdamW(self.model.parameters())
        self._x = torch.randn(32, width)
        self._factor = torch.randn(product_width, product_width)
        self._products = 0
        num = max((1024 // product_width) ** 3, 1)
        for work in (self.step, lambda: self._multiply(num)):
            _usual_s(work)  # the first ones take longer
        longest = torch.tensor([_usual_s(self.step), _usual_s(lambda: self._multiply(num)) / num])
        dist.all_reduce(longest, dist.ReduceOp.MAX)
        bare_s, product_s = longest.tolist()
        self._products = max(int((step_s - bare_s) / product_s), 0)

    def step(self) -> None:
        self.model(self._x).pow(2).mean().backward()
        self._multiply(self._products)
        self.optimizer.step()
        self.optimizer.zero_grad()

    def _multiply(self, num: int) -> None:
        for _ in range(num):
            torch.mm(self._factor, self._factor)

    def flat(self) -> states.State:
        """Weights and moments by name."""
        found = {f"model/{name}": tensor for name, tensor in self.model.state_dict().items()}
        for i, held in enumerate(self.optimizer.state.values()):
            found |= {f"optim/{i}/{key}": value for key, value in held.items()}
        return found


def _usual_s(work: Callable[[], None]) -> float:
    """Of CALIBRATION times: the middle one."""
    times = []
    for _ in range(CALIBRATION):
        began = time.perf_counter()
        work()
        times.append(time.perf_counter() - began)
    return statistics.median(times)


def work() -> None:
    """Blocks of steps: without, with, without."""
    given = told()
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    training = Training(given["nbytes"], given["step_s"])
    without = _block(training, lambda step: None, lambda: False)[0]
    with_saves = {"ckptlib": _with_ckptlib, IN_MEMORY: _in_memory, BARE: _bare, NVRX: _with_nvrx}
    idle, busy = with_saves.get(given["peer"], _with_peer)(training, given)
    without += _block(training, lambda step: None, lambda: False)[0]
    tell(what=WITHOUT, samples=without)
    for what, samples in (("step between checkpoints", idle), ("step while persisting", busy)):
        if given["peer"] == "ckptlib" and len(samples) > 1:
            tell(what=what, samples=samples)
    tell(what=WITH, samples=idle + busy)
    dist.destroy_process_group()


def _block(
    training: Training, after: Callable[[int], None], under_way: Callable[[], bool], start: int = 0
) -> tuple[list[float], list[float]]:
    """(seconds of steps beside which nothing was written, and of those beside which something was)."""
    idle: list[float] = []
    busy: list[float] = []
    for step in range(start + 1, start + STEPS_PER_BLOCK + 1):
        times = busy if under_way() else idle
        began = time.perf_counter()
        training.step()
        after(step)
        times.append(time.perf_counter() - began)
    return idle, busy


def _with_ckptlib(training: Training, given: dict[str, str]) -> tuple[list[float], list[float]]:
    state = {"model": training.model, "optim": training.optimizer}
    with ckptlib.Checkpointer(given["directory"], state, every=EVERY) as saver:

        def under_way() -> bool:
            """Whether this rank's writer still reads a slot, or the copy is not over."""
            saver._session.outcomes.poll()
            return saver._session.snapshots.persisting

        _block(training, saver.after_step, under_way)  # slots are made, plans are drawn up
        return _block(training, saver.after_step, under_way, start=STEPS_PER_BLOCK)


def _in_memory(training: Training, given: dict[str, str]) -> tuple[list[float], list[float]]:
    """A snapshot of every step, and its replica; nothing goes to the store."""
    state = {"model": training.model, "optim": training.optimizer}
    peers_ = ckptlib.Peers(copies=1, every=1, domain=f"host{dist.get_rank()}")
    with ckptlib.Checkpointer(given["directory"], state, every=10**9, peers=peers_) as saver:
        _block(training, saver.after_step, lambda: False)
        return _block(training, saver.after_step, lambda: False, start=STEPS_PER_BLOCK)


def _bare(training: Training, given: dict[str, str]) -> tuple[list[float], list[float]]:
    """Each rank sends as much as its snapshot to the other, in chunks of 16 MiB, from a thread."""
    nbytes, peer = int(given["nbytes"]), 1 - dist.get_rank()
    group = dist.new_group(backend="gloo")
    mine, theirs = torch.zeros(nbytes, dtype=torch.uint8), torch.zeros(nbytes, dtype=torch.uint8)
    threads: list[threading.Thread] = []

    def exchange() -> None:
        for ours, other in zip(mine.split(16 << 20), theirs.split(16 << 20), strict=True):
            works = [dist.isend(ours, peer, group), dist.irecv(other, peer, group)]
            for work in works:
                work.wait()

    def after(step: int) -> None:
        while threads:
            threads.pop().join()
        threads.append(threading.Thread(target=exchange))
        threads[-1].start()

    found = _block(training, after, lambda: False)
    threads.pop().join()
    return found


def _with_nvrx(training: Training, given: dict[str, str]) -> tuple[list[float], list[float]]:
    from benchmarks.nvrx import Nvrx

    with tempfile.TemporaryDirectory(prefix="ckptlib-slowdown-", dir="/dev/shm") as directory:
        keeper = Nvrx(Path(directory))

        def after(step: int) -> None:
            keeper.save(training.flat(), step)

        _block(training, after, lambda: False)
        found = _block(training, after, lambda: False, start=STEPS_PER_BLOCK)
        dist.barrier()
        return found


def _with_peer(training: Training, given: dict[str, str]) -> tuple[list[float], list[float]]:
    peer = PEERS[given["peer"]]()
    waits: list[peers.Wait] = []

    def after(step: int) -> None:
        if step % EVERY:
            return
        while waits:
            waits.pop()()
        waits.append(peer.begin(training.flat(), Path(given["directory"]), step))

    _block(training, after, lambda: False)
    found = _block(training, after, lambda: False, start=STEPS_PER_BLOCK)
    while waits:
        waits.pop()()
    peer.close()
    return found


if __name__ == "__main__":
    work()
