"""Do checkpoints take what `ckptlib plan` says? The plan before a run, the run, and the plan of what it left.

One rank trains a model with AdamW in fp32, one step after the other, and saves now and then. The plan before the run
knows the number of parameters and probes the disk; the plan after it knows the root, too. The run's time to persist is
from the end of the call that began the save until the manifest's file was written.
"""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

import ckptlib
from benchmarks.common import ROOT, tell, told
from benchmarks.figures import Figures, Options, run
from benchmarks.slowdown import Training

STEP_S = 0.1
EVERY, SAVES = 6, 9
"""Steps; the first save counts for its bytes alone, since it makes the slots."""
BEFORE, AFTER, RUN = "plan from --params", "plan from the root", "run"


def main(arguments: list[str]) -> None:
    run(arguments, "plan", measure, gb=0.5)


def measure(options: Options, directory: Path, figures: Figures) -> None:
    nbytes = 1_000_000 if options.toy else int(options.gb * 1e9)
    case = f"{nbytes / 1e9:g} GB on one rank"
    for number in range(1 if options.toy else options.rounds):
        root = directory / f"run-{number}"
        order = {"nbytes": nbytes, "step_s": 0.0 if options.toy else STEP_S, "root": str(root)}
        [line] = figures.attempt(case, RUN, __name__, 1, order, options.timeout_s) or [None]
        if line is None:
            return
        asked = ["--params", str(line["params"]), "--precision", "fp32", "--ranks", "1", "--keep", str(SAVES)]
        before, after = _plan(str(directory / "disk"), *asked), _plan(str(root))
        figures.add(case, RUN, "bytes", "B", line["nbytes"])
        figures.add(case, RUN, "persist", "s", line["persist"])
        figures.add(case, RUN, "stall", "s", line["stall"])
        for subject, plan in ((BEFORE, before), (AFTER, after)):
            figures.add(case, subject, "bytes", "B", [plan["checkpoint_bytes"]])
            figures.add(case, subject, "persist", "s", [plan["persist_s"]])
            figures.add(case, subject, "stall", "s", [plan["stall_s"]])
            share = plan["persist_s"] / statistics.median(line["persist"])
            figures.add(case, subject, "persist, over the run's", "", [share])


def _plan(*arguments: str) -> dict[str, Any]:
    os.sync()  # what was deleted before is discarded by now, not beside the measurement
    command = [sys.executable, "-m", "ckptlib.cli", "plan", *arguments, "--json"]
    done = subprocess.run(command, cwd=ROOT, check=True, capture_output=True, timeout=300)
    found: dict[str, Any] = json.loads(done.stdout)
    return found


# In the rank


def work() -> None:
    """Trains and saves, and tells sizes of files, times until commits, and by how much steps with a save are longer."""
    given = told()
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    training = Training(given["nbytes"], given["step_s"], 128)
    taken: dict[int, float] = {}
    state = {"model": training.model, "optim": training.optimizer}
    steps: list[float] = []
    with ckptlib.Checkpointer(given["root"], state, every=EVERY, keep=ckptlib.Keep(last=SAVES)) as saver:
        for step in range(1, EVERY * SAVES + 1):
            began = time.perf_counter()
            training.step()
            saver.after_step(step)
            steps.append(time.perf_counter() - began)
            if saver.pending is not None:
                taken.setdefault(saver.pending.step, time.time())
            if saver.stopping:
                raise SystemExit("told to stop")
            if step % EVERY == EVERY - 1 and saver.pending is not None:
                saver.pending.wait_committed()
    files = {path.parent.name: path.stat().st_size for path in Path(given["root"], "packs").glob("*/*")}
    manifests = [path for path in Path(given["root"], "steps").rglob("*") if path.is_file()]
    put = {int(str(path.relative_to(given["root"])).split("/")[1][:12]): path.stat().st_mtime for path in manifests}
    persists = [put[step] - taken[step] for step in sorted(taken)]  # as files tell, not ckptlib
    usual = statistics.median(steps)
    stalls = [sum(steps[at - 1 : at + 1]) - 2 * usual for at in range(2 * EVERY, EVERY * SAVES, EVERY)]
    params = sum(param.numel() for param in training.model.parameters())
    tell(params=params, nbytes=[*files.values()], persist=persists[1:], stall=stalls)


if __name__ == "__main__":
    work()
