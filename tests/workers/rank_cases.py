"""What the cases of several ranks share: patience, a Checkpointer, what is committed, and how they are run."""

from __future__ import annotations

import faulthandler
import logging
import os
import sys
import time
import traceback
from collections.abc import Callable, Sequence
from contextlib import contextmanager, suppress
from datetime import timedelta
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor

import ckptlib
from ckptlib.errors import SaveFailed

PATIENCE = timedelta(seconds=30)
"""Long enough for a busy machine; whoever waits for it has found a bug."""

PATIENCE_S = PATIENCE.total_seconds()

EVERY = 3
"""A step is saved, one passes until its snapshot is known to be ready everywhere, another until the slots are free."""


def rank() -> int:
    return dist.get_rank()


def everywhere(value: object) -> list[object]:
    """What every rank has."""
    found: list[object] = [None] * dist.get_world_size()
    dist.all_gather_object(found, value)
    return found


def checkpointer(
    url: object, state: dict[str, object], every: object = EVERY, **options: object
) -> ckptlib.Checkpointer:
    return ckptlib.Checkpointer(url, state, every=every, timeout=PATIENCE, **options)


def save_after(ckpt: ckptlib.Checkpointer, number: int) -> int:
    """Says that EVERY steps are done, so that the last is saved, and none found the slots taken; returns it."""
    for step in range(number * EVERY - EVERY + 1, number * EVERY + 1):
        if ckpt.pending is not None:
            with suppress(SaveFailed):
                ckpt.pending.wait_committed(PATIENCE_S)
        ckpt.after_step(step)
    return step


def committed(url: object) -> list[int]:
    return [info.step for info in ckptlib.checkpoints(url)]


@contextmanager
def warnings_of_ckptlib():
    found: list[str] = []
    handler = logging.Handler(logging.WARNING)
    handler.emit = lambda record: found.append(record.getMessage())
    logging.getLogger("ckptlib").addHandler(handler)
    try:
        yield found
    finally:
        logging.getLogger("ckptlib").removeHandler(handler)


def plain(tensor: torch.Tensor) -> torch.Tensor:
    local = tensor.to_local() if isinstance(tensor, DTensor) else tensor
    return local.detach().clone()


def content(model: nn.Module, optim: torch.optim.Optimizer) -> dict[str, torch.Tensor]:
    """Everything that this rank holds."""
    found = {name: plain(t) for name, t in model.state_dict().items()}
    for name, param in model.named_parameters():
        found.update({f"{name}/{key}": plain(value) for key, value in optim.state.get(param, {}).items()})
    return found


def equal(left: dict[str, torch.Tensor], right: dict[str, torch.Tensor]) -> bool:
    return left.keys() == right.keys() and all(torch.equal(left[name], right[name]) for name in left)


def await_others_out() -> None:
    """Returns when every rank has come here. One that exits right behind a collective may reset a connection whose last
    bytes another has yet to read (seen with torch 2.6)."""
    store = dist.distributed_c10d._get_default_store()
    store.add("out", 1)
    while store.add("out", 0) < dist.get_world_size():
        time.sleep(0.01)


def run_cases(cases: Sequence[Callable[[Path], None]]) -> None:
    """Those that the command line names, or all; a verdict of each rank for each."""
    torch.set_num_threads(1)
    directory, names = Path(sys.argv[1]), sys.argv[3:]
    faulthandler.dump_traceback_later(float(sys.argv[2]), exit=True)
    dist.init_process_group("gloo")
    for case in cases:
        if names and case.__name__ not in names:
            continue
        verdict = directory / f"{case.__name__}.rank{rank()}"
        try:
            case(directory / case.__name__)
            verdict.write_text("ok")
        except (Exception, pytest.fail.Exception) as error:
            verdict.write_text("".join(traceback.format_exception(error)))
        dist.barrier()
    await_others_out()
    sys.stdout.flush()
    os._exit(0)  # gloo's threads may abort an interpreter that ends in the ordinary way (torch 2.13)
