"""The example of Ray Train on some workers: `ray_jobs.py <directory> <workers>`.

Three jobs: "whole", "failed", in which all raise an error behind step 9, and "killed", in which the last worker is
killed there by SIGKILL. Both wait for a committed step before: Ray may end the process that writes, too.
"""

from __future__ import annotations

import os
import signal
import sys
import time
from pathlib import Path
from typing import Any

import ray
import ray.train
import ray_train
import torch

import ckptlib

STEPS, AT = 12, 9
WAIT_S = 300.0

example = ray_train.train


def train(given: dict[str, Any]) -> None:
    """In a worker. Behind the last step it writes how many this worker has made since it was started."""
    context, out = ray.train.get_context(), Path(given["out"])
    rank, step, made = context.get_world_rank(), torch.optim.AdamW.step, 0

    def held(self: torch.optim.AdamW, *args: Any, **kwargs: Any) -> Any:
        nonlocal made
        made += 1
        found = step(self, *args, **kwargs)
        if made == AT and out.name != "whole":
            end = time.monotonic() + WAIT_S
            while not [*ckptlib.checkpoints(out / "ckptlib")]:
                assert time.monotonic() < end, f"{out} has no step"
                time.sleep(0.01)
            if out.name == "killed" and rank == context.get_world_size() - 1:
                os.kill(os.getpid(), signal.SIGKILL)
        return found

    torch.optim.AdamW.step = held  # type: ignore[method-assign]
    try:
        example(given)
    finally:
        torch.optim.AdamW.step = step  # type: ignore[method-assign]
    (out / f"made-{rank}").write_text(str(made))


def main(directory: str, workers: int) -> None:
    variables = {"PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    ray.init(num_cpus=workers, include_dashboard=False, runtime_env={"env_vars": variables})
    ray_train.train = train
    for name, more in (("whole", {}), ("failed", {"fails_at": AT - 1}), ("killed", {})):
        Path(directory, name).mkdir()
        result = ray_train.main(f"{directory}/{name}", STEPS, workers, **more)
        print("reported", Path(result.checkpoint.path, "ckptlib.txt").read_text(), flush=True)


if __name__ == "__main__":
    import ray_jobs  # as the workers know it, not as __main__

    ray_jobs.main(sys.argv[1], int(sys.argv[2]))
