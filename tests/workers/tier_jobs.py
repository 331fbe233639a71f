"""Jobs with a local tier; see `crash_jobs`."""

from __future__ import annotations

import os
import signal
from contextlib import suppress
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from helpers.inside import writer_of
from helpers.writers import stop
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate
from workers.crash_jobs import State, Teller

import ckptlib
from ckptlib.errors import SaveFailed
from ckptlib.stores.testing import write_plan

WAIT_S = 150.0


def train_with_a_slow_rank(tell: Teller, rank: int, *, url: str, disk: str, plan: str, arena: str) -> None:
    """The bucket refuses what rank 1 puts for a while."""
    state = State(20_000)
    options: dict[str, Any] = {"local": f"{disk}-{rank}", "arena": arena, "timeout": timedelta(seconds=WAIT_S)}
    with ckptlib.Checkpointer(url, state.mapping, every=1, drain=ckptlib.Steps(2), **options) as ckpt:
        ckpt.restore()
        drained, step = [], 0

        def one_step() -> None:
            nonlocal step
            state.advance()
            step += 1
            ckpt.after_step(step)
            pending = ckpt.pending
            if pending is not None and pending.step == step:
                pending.wait_local(WAIT_S)
                if pending.drains:
                    drained.append(step)

        if rank == 0:
            write_plan(plan, [{"op": "put", "key": "^parts/.*/000001-", "action": "error"}])
        for _ in range(20):
            one_step()
        tell("away", drained=list(drained), committed=ckpt.pending is not None and ckpt.pending.committed)
        if rank == 0:
            Path(plan).unlink()
        state.advance()
        ckpt.save(step + 1).wait_committed(WAIT_S)
        tell("back", drained=drained, step=step + 1)


def come_without(tell: Teller, rank: int, *, url: str, disk: str) -> None:
    try:
        ckptlib.Checkpointer(url, State(20_000).mapping, every=1, local=disk if rank == 0 else None)
    except ValueError as error:
        tell("refused", text=str(error))


def come_back_to_pieces(tell: Teller, rank: int, *, url: str, disk: str) -> None:
    """A step more on a disk of each rank's own: of a tensor that is cut by hand into uneven pieces, of one that all
    ranks have a piece of in common, and of DTensors that are replicas."""
    size = dist.get_world_size()
    mesh, cuts = init_device_mesh("cpu", (size,)), {2: (0, 5, 12), 3: (0, 1, 7, 12)}[size]
    first, end = cuts[rank], cuts[rank + 1]
    cut, common = torch.zeros(end - first), torch.zeros(4)
    replicas = [torch.zeros(100 + i) for i in range(3)]
    state = {
        "cut": ckptlib.Sharded(cut, (first,), (12,)),
        "common": ckptlib.Sharded(common, (0,), (4,)),
        "replicas": [DTensor.from_local(tensor, mesh, [Replicate()], run_check=False) for tensor in replicas],
    }

    def expected(step: int) -> list[torch.Tensor]:
        whole = torch.arange(12.0) + 100 * step
        return [whole[first:end], whole[:4] + 7, *(torch.full((100 + i,), 10.0 * step + i) for i in range(3))]

    with ckptlib.Checkpointer(url, state, every=1, local=f"{disk}-{rank}", drain=ckptlib.Steps(1000)) as ckpt:
        report = ckpt.restore()
        here = [cut, common, *replicas]
        right = not report.step or all(map(torch.equal, here, expected(report.step)))
        tell("restored", step=report.step, tier=report.tier, skipped=report.skipped, right=right)
        for tensor, value in zip(here, expected(report.step + 1), strict=True):
            tensor.copy_(value)
        ckpt.after_step(report.step + 1)
        assert ckpt.pending is not None
        ckpt.pending.wait_local(WAIT_S)


def save_what_is_local(tell: Teller, rank: int, *, url: str, disk: str, arena: str) -> None:
    """Steps that stay on local disks, until `save` is asked for them; the disk of rank 1 takes nothing at first."""
    state, path = State(20_000), Path(f"{disk}-{rank}")
    path.mkdir()
    packs = path / "packs"
    if rank == 1:
        packs.write_text("in the way")
    options: dict[str, Any] = {"local": path, "arena": arena, "timeout": timedelta(seconds=WAIT_S)}
    with ckptlib.Checkpointer(url, state.mapping, every=1, drain=ckptlib.Steps(1000), **options) as ckpt:
        step, drained_late = 0, 0
        while drained_late < 2:  # all ranks count alike
            step += 1
            state.advance()
            ckpt.after_step(step)
            pending = ckpt.pending
            assert pending is not None
            was_local = pending.step == step and not pending.drains
            try:
                ckpt.save(step).wait_committed(WAIT_S)
            except SaveFailed as error:
                tell("failed", step=step, was_local=was_local, text=str(error))
            else:
                drained_late += was_local
                tell("committed", step=step)
            if rank == 1:
                with suppress(OSError):  # its own directory, later
                    packs.unlink()


def fail_in_the_bucket_first(tell: Teller, rank: int, *, url: str, disk: str, plan: str, arena: str) -> None:
    """The bucket is full for rank 0's share of step 2, which is told before rank 1's is on its disk; later steps are
    taken there."""
    state, path = State(20_000), Path(f"{disk}-{rank}")
    options: dict[str, Any] = {"local": path, "arena": arena, "timeout": timedelta(seconds=WAIT_S)}
    with ckptlib.Checkpointer(url, state.mapping, every=10**9, **options) as ckpt:
        state.advance()
        ckpt.after_step(1)
        ckpt.save(1).wait_committed(WAIT_S)
        if rank == 0:
            write_plan(plan, [{"op": "commit", "key": "^packs/.*/000000-", "action": "full"}])
        else:
            stop(writer_of(ckpt).pid)
        dist.barrier()
        state.advance()
        ckpt.after_step(2)
        failed = ckpt.save(2)
        with pytest.raises(SaveFailed):
            failed.wait_committed(WAIT_S)
        dist.barrier()
        if rank == 0:
            Path(plan).unlink()
        else:
            os.kill(writer_of(ckpt).pid, signal.SIGCONT)
        failed.wait_released(WAIT_S)
        for step in (3, 4, 5):  # said in one, agreed in the next
            state.advance()
            ckpt.after_step(step)
        ckpt.save(5).wait_local(WAIT_S)
        tell("saved", on_disk=sorted(int(part.name.split("-")[0]) for part in path.glob("parts/*")))
