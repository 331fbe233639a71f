"""Save, kill, resume, with the torch that runs this: smoke.py <directory>. Needs ckptlib and torch, and nothing else.

Two ranks under torchrun train a model, and shard an average of its weights; they are killed and go on from the last
step. What one process loads at the end is what a run that nobody killed ends with. (No FSDP2: torch 2.6 has it for
devices only.)
"""

from __future__ import annotations

import hashlib
import itertools
import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor, zeros
from torch.nn.parallel import DistributedDataParallel

import ckptlib

TOTAL, KILLED_AT = 6, 4


def make() -> nn.Module:
    torch.manual_seed(1)
    return nn.Sequential(nn.Linear(16, 33), nn.GELU(), nn.Linear(33, 7))


def train(url: str, kill: bool) -> None:
    model = DistributedDataParallel(make())
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    average = zeros((33, 16), device_mesh=mesh, placements=[Shard(0)])
    optim = torch.optim.AdamW(model.parameters(), lr=0.01)
    scheduler = torch.optim.lr_scheduler.StepLR(optim, 2)
    with ckptlib.Checkpointer(
        url, {"model": model.module, "optim": optim, "scheduler": scheduler, "average": average}, every=1
    ) as ckpt:
        start = ckpt.restore().step
        # one write, since ranks share the pipe
        print(f"rank {dist.get_rank()} starts {url} at {start}\n", end="", flush=True)
        for step in ckpt.loop(start, TOTAL):
            model(torch.rand(3, 16)).square().sum().backward()
            optim.step()
            optim.zero_grad()
            scheduler.step()
            with torch.no_grad():
                average.add_(distribute_tensor(model.module[0].weight.detach(), mesh, [Shard(0)]))
            if ckpt.pending is not None:
                ckpt.pending.wait_committed(120)
            if kill and step == KILLED_AT:
                os.kill(os.getpid(), signal.SIGKILL)


def digest(url: str) -> str:
    """Of the newest step, loaded into one process."""
    model = make()
    optim = torch.optim.AdamW(model.parameters())
    average = torch.zeros(33, 16)
    assert ckptlib.load(url, {"model": model, "optim": optim, "average": average}, strict=False).step == TOTAL
    assert average.abs().sum() > 0
    content = [average] + [t for p in model.parameters() for t in (p.detach(), *optim.state[p].values())]
    return hashlib.sha256(b"".join(tensor.numpy().tobytes() for tensor in content)).hexdigest()


def launch(urls: list[str], kill: bool) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", __file__]
    return subprocess.run(
        [*command, *urls, str(int(kill))],
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=400,
        check=False,
    )


def drive(directory: Path) -> None:
    shutil.rmtree(directory, ignore_errors=True)
    whole, broken = str(directory / "whole"), str(directory / "broken")
    for starts, kill in (({whole: 0, broken: 0}, True), ({broken: KILLED_AT}, False)):
        done = launch([*starts], kill)
        assert (done.returncode != 0) == kill, done.stdout + done.stderr
        for rank, (url, start) in itertools.product((0, 1), starts.items()):
            assert f"rank {rank} starts {url} at {start}\n" in done.stdout, done.stdout + done.stderr
    assert digest(whole) == digest(broken)
    print(f"torch {torch.__version__}: saved, killed, resumed; what came back is the same", flush=True)


if __name__ == "__main__":
    torch.set_num_threads(1)
    if len(sys.argv) == 2:
        drive(Path(sys.argv[1]))
    else:
        *others, last, kill = sys.argv[1:]
        dist.init_process_group("gloo")
        for url in others:
            train(url, False)
        train(last, kill == "1")
        dist.destroy_process_group()
