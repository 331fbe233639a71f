"""What does a local tier gain on a slow store? Seconds until the slot is free, and until the step is committed.

One rank saves to a store of 0.05 GB/s and 30 ms per request, straight and through a local disk, in turns of the same
process; the bare flushed write of as many bytes comes with each turn.
"""

from __future__ import annotations

import os
import time
from pathlib import Path

import torch
import torch.distributed as dist

import ckptlib
from benchmarks import limits
from benchmarks.common import tell, told
from benchmarks.figures import Figures, Options, run

BANDWIDTH, LATENCY_S = 5e7, 0.03
CASE = "0.05 GB/s, 30 ms"
KINDS = ("straight", "local tier")


def main(arguments: list[str]) -> None:
    run(arguments, "tier", measure, gb=0.25, rounds=5)


def measure(options: Options, directory: Path, figures: Figures) -> None:
    nbytes = 8_000_000 if options.toy else int(options.gb * 1e9)
    given = {"nbytes": nbytes, "turns": 1 if options.toy else options.rounds, "directory": str(directory)}
    for line in figures.attempt(CASE, "ckptlib", __name__, 1, given, options.timeout_s):
        figures.add(CASE, line["peer"], line["what"], "s", [line["value"]], cores=os.cpu_count(), nbytes=nbytes)


def work() -> None:
    given = told()
    dist.init_process_group("gloo")
    directory, state = Path(given["directory"]), {"w": torch.empty(given["nbytes"] // 4)}
    savers = {kind: _saver(directory, kind, state) for kind in KINDS}
    for turn in range(given["turns"] + 1):  # the first makes slots, and knows nothing of the store
        for kind in KINDS if turn % 2 else KINDS[::-1]:
            state["w"].normal_()
            began = time.perf_counter()
            pending = savers[kind].save(turn + 1)
            pending.wait_staged()
            staged = time.perf_counter() - began
            pending.wait_released()
            released = time.perf_counter() - began
            pending.wait_committed()
            committed = time.perf_counter() - began
            if turn:
                for what, value in (("staged", staged), ("slot is free", released), ("committed", committed)):
                    tell(peer=f"ckptlib, {kind}", what=what, value=value)
        if turn:
            write_s = limits.disk_seconds(directory, given["nbytes"]).write
            tell(peer="bare direct write", what="durable", value=write_s)
    for saver in savers.values():
        saver.close()
    dist.destroy_process_group()


def _saver(directory: Path, kind: str, state: dict[str, object]) -> ckptlib.Checkpointer:
    url = f"latency+file://{directory / kind.replace(' ', '-')}?latency={LATENCY_S}&bandwidth={BANDWIDTH}"
    local = directory / "disk" if kind == "local tier" else None
    return ckptlib.Checkpointer(url, state, every=10**9, codec="raw", local=local)


if __name__ == "__main__":
    work()
