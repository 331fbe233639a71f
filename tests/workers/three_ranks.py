"""Cases that three ranks go through together, each rank a process of its own: script.py <rank> <directory> <seconds>.

torchrun would end all of them with the one that is killed. Every rank writes to <directory>/<case>.rank<n> "ok", or
what was wrong; `helpers.verdicts` starts them, and reads it.
"""

from __future__ import annotations

import contextlib
import faulthandler
import os
import sys
import traceback
import warnings
from collections.abc import Callable, Iterator, Sequence
from datetime import timedelta
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from ckptlib.ranks.link import Link

NUM_RANKS = 3

PATIENCE = timedelta(seconds=60)
"""Long enough for a busy machine; whoever waits for it has found a bug."""


Case = Callable[[Path], None]
"""Given a directory of its own, the same on all ranks."""


def run_cases(cases: Sequence[Case]) -> None:
    """Ends the process. Ranks may be killed in the last of the cases only."""
    torch.set_num_threads(1)
    directory = Path(sys.argv[2])
    faulthandler.dump_traceback_later(float(sys.argv[3]), exit=True)
    dist.init_process_group(
        "gloo", init_method=f"file://{directory}/store", rank=int(sys.argv[1]), world_size=NUM_RANKS, timeout=PATIENCE
    )
    warnings.simplefilter("error")
    for case in cases:
        here = directory / case.__name__
        here.mkdir(exist_ok=True)
        verdict = directory / f"{case.__name__}.rank{rank()}"
        try:
            case(here)
            verdict.write_text("ok")
        except (Exception, pytest.fail.Exception) as error:
            verdict.write_text("".join(traceback.format_exception(error)))
            os._exit(1)
        if case is not cases[-1]:
            dist.barrier()
    os._exit(0)  # gloo's threads may abort an interpreter that ends in the ordinary way (torch 2.13)


def rank() -> int:
    return dist.get_rank()


def world() -> dist.ProcessGroup:
    assert dist.group.WORLD is not None
    return dist.group.WORLD


@contextlib.contextmanager
def linked(cls: type[Link] = Link, timeout: timedelta = PATIENCE) -> Iterator[Link]:
    """Made by all ranks together. Whatever they do with it ends before any of them closes it."""
    link = cls(world(), timeout)
    yield link
    dist.barrier()
    link.close()
