"""What does codec="auto" cost and gain on a slow store? Training and saves on 0.2 GB/s, 'auto' and 'raw' in turns.

One rank trains with one thread; both kinds of saves are made in turns of the same processes, after 'auto' has measured
the store and the codec. A block is a save and the steps during which a raw one is put, and a few more. What counts is
the time of the whole block, and the time until the step is committed, by the store's clock. A block without a save
comes with each turn. Weights and moments are random, so what is saved in bytes means little; the speeds do.
"""

from __future__ import annotations

import os
import time
from pathlib import Path

import torch
import torch.distributed as dist

import ckptlib
from benchmarks.common import tell, told
from benchmarks.figures import Figures, Options, run
from benchmarks.slowdown import Training

BANDWIDTH = 2e8
WARM = 3
"""Saves until 'auto' knows: one raw, one sampled, one encoded; beside training, since that is what it measures."""
CODECS = ("raw", "auto")
CASE = "0.2 GB/s"


def main(arguments: list[str]) -> None:
    run(arguments, "throttled", measure, gb=0.25, rounds=5)


def measure(options: Options, directory: Path, figures: Figures) -> None:
    given = {
        "nbytes": 30_000_000 if options.toy else int(options.gb * 1e9),
        "turns": 1 if options.toy else options.rounds,
        "step_s": 0.02 if options.toy else 0.2,
        "directory": str(directory),
    }
    for line in figures.attempt(CASE, "ckptlib", __name__, 1, given, options.timeout_s):
        figures.add(CASE, "ckptlib", line["what"], line["unit"], [line["value"]], cores=os.cpu_count())


def work() -> None:
    given = told()
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    training = Training(given["nbytes"], given["step_s"])
    state = {"model": training.model, "optim": training.optimizer}
    runs = {codec: _Run(Path(given["directory"]) / codec, state, codec) for codec in CODECS}
    began = time.perf_counter()
    training.step()
    num_steps = max(2, int(1.4 * given["nbytes"] / BANDWIDTH / (time.perf_counter() - began)))
    for _ in range(WARM):
        for one in runs.values():
            pending = one.save()
            _block(training, num_steps)
            pending.wait_committed()
    for turn in range(given["turns"]):
        without = _block(training, num_steps)
        for codec in CODECS if turn % 2 == 0 else CODECS[::-1]:
            one = runs[codec]
            pending, first = one.save(), time.time()
            one.block_s = _block(training, num_steps)
            pending.wait_committed()
            one.durable_s = one.committed_at() - first
            _tell(f"{codec}: steps beside a save, over steps alone", "ratio", one.block_s / without)
            _tell(f"{codec}: until the save is committed", "s", one.durable_s)
        raw, auto = runs["raw"], runs["auto"]
        _tell("steps beside a save, auto over raw", "ratio", auto.block_s / raw.block_s)
        _tell("until a save is committed, raw over auto", "times", raw.durable_s / auto.durable_s)
        _tell("bytes of a save, auto over raw", "ratio", auto.nbytes() / raw.nbytes())
    for one in runs.values():
        one.close()
    dist.destroy_process_group()


class _Run:
    """One Checkpointer, and what its last save took."""

    def __init__(self, directory: Path, state: dict[str, object], codec: str) -> None:
        url = f"latency+file://{directory}?latency=0.005&bandwidth={BANDWIDTH}"
        self._directory, self._step = directory, 0
        self._saver = ckptlib.Checkpointer(url, state, every=10**9, codec=codec)
        self.block_s = self.durable_s = 0.0

    def save(self) -> ckptlib.Pending:
        self._step += 1
        return self._saver.save(self._step)

    def committed_at(self) -> float:
        """When the last step was."""
        [manifest] = (self._directory / "steps").glob(f"{self._step:012d}-*.json")
        return manifest.stat().st_mtime

    def nbytes(self) -> int:
        """Of the last step's packs."""
        packs = (self._directory / "packs").glob(f"{self._step:012d}-*/*")
        return sum(path.stat().st_size for path in packs)

    def close(self) -> None:
        self._saver.close()


def _block(training: Training, num_steps: int) -> float:
    began = time.perf_counter()
    for _ in range(num_steps):
        training.step()
    return time.perf_counter() - began


def _tell(what: str, unit: str, value: float) -> None:
    tell(what=what, unit=unit, value=value)


if __name__ == "__main__":
    work()
