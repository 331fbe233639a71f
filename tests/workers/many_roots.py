"""Two ranks that save to one root after the other, and ask behind that what became of the first: many_roots.py <dir>"""

from __future__ import annotations

import sys
from functools import partial
from pathlib import Path

import torch
import torch.distributed as dist

import ckptlib
from ckptlib.saving.registry import MAX_OPEN, registry


def is_exempt(rank: int, step: int) -> bool:
    return step > rank


def main(directory: Path) -> None:
    dist.init_process_group("gloo")
    state = {"w": torch.arange(4.0)}
    first = ckptlib.save_async(directory / "first", state, 1)
    for n in range(MAX_OPEN):
        ckptlib.save(directory / str(n), state, 1)
    first.wait_committed()
    assert first.committed
    del first
    exempt = partial(is_exempt, dist.get_rank())  # another function on each rank, as lambdas are
    ckptlib.save(directory / "last", state, 1, keep=ckptlib.Keep(exempt=exempt))
    assert len(registry.sessions) == MAX_OPEN
    dist.barrier()
    dist.destroy_process_group()
    print("all told", flush=True)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
