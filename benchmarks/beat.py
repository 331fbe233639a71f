"""What does a step cost when nothing is saved? Seconds on the main thread in after_step, on 2, 4 and 8 ranks.

The ranks sleep between steps, as if they trained on a device, so that the agreement of one step is long over at the
next. `first`: making the Checkpointer, and its writer's first word.
"""

from __future__ import annotations

import time
from pathlib import Path

import torch
import torch.distributed as dist

import ckptlib
from benchmarks.common import tell, told
from benchmarks.figures import Figures, Options, run

STEP_S = 0.02
NEVER = 10**9


def main(arguments: list[str]) -> None:
    run(arguments, "beat", measure, gb=0.0, rounds=1)


def measure(options: Options, directory: Path, figures: Figures) -> None:
    for num_ranks in (1,) if options.toy else (1, 2, 4, 8):
        case = f"{num_ranks} ranks"
        for turn in range(options.rounds):
            given = {"directory": str(directory / f"{num_ranks}-{turn}"), "steps": 10 if options.toy else 200}
            for line in figures.attempt(case, "ckptlib", __name__, num_ranks, given, options.timeout_s):
                figures.add(case, "ckptlib", "construction", "s", [line["construction"]], ranks=num_ranks)
                figures.add(case, "ckptlib", "writer ready", "s", [line["ready"]], ranks=num_ranks)
                figures.add(case, "ckptlib", "after_step", "s", line["steps"], ranks=num_ranks)


def work() -> None:
    """Steps that do nothing."""
    given = told()
    dist.init_process_group("gloo")
    ckptlib.save(given["directory"], {"x": torch.zeros(1)}, 1)  # imports, and the root
    dist.barrier()
    model = torch.nn.Linear(64, 64)
    optimizer = torch.optim.AdamW(model.parameters())
    began = time.perf_counter()
    with ckptlib.Checkpointer(given["directory"] + "-2", {"model": model, "optim": optimizer}, every=NEVER) as saver:
        construction = time.perf_counter() - began
        while not saver._session.writer.poll(0.01):
            pass
        ready = time.perf_counter() - began
        seconds = []
        for step in range(1, given["steps"] + 1):
            time.sleep(STEP_S)
            began = time.perf_counter()
            saver.after_step(step)
            seconds.append(time.perf_counter() - began)
    tell(construction=construction, ready=ready, steps=seconds[2:])
    dist.destroy_process_group()


if __name__ == "__main__":
    work()
