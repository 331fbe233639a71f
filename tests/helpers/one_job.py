"""A small job of one process with a Checkpointer, and what lies in its root."""

from __future__ import annotations

import contextlib
import json
import random
from collections.abc import Mapping
from pathlib import Path
from urllib.parse import quote

import numpy as np
import torch
from workers.torn import raw

import ckptlib
from ckptlib.catalog.catalog import Catalog
from ckptlib.errors import SaveFailed
from ckptlib.stores.local import LocalStore
from ckptlib.stores.testing import flip_bit

WAIT_S = 150.0


class Job:
    """A small training that draws from every generator, and what it saves."""

    def __init__(self, root: Path, seed: int = 0) -> None:
        self.root = root
        torch.manual_seed(seed)
        random.seed(seed)
        np.random.seed(seed)
        self.model = torch.nn.Sequential(torch.nn.Linear(150, 150), torch.nn.Dropout(0.2), torch.nn.BatchNorm1d(150))
        self.optimizer = torch.optim.AdamW(self.model.parameters())
        self.scheduler = torch.optim.lr_scheduler.LambdaLR(self.optimizer, lambda s: 1 / (s + 1))
        self.state: dict[str, object] = {"model": self.model, "optim": self.optimizer, "sched": self.scheduler}
        self.losses: list[str] = []

    def body(self) -> None:
        scale = random.random() + np.random.rand()
        loss = self.model(torch.randn(8, 150)).pow(2).mean() * scale
        loss.backward()
        self.optimizer.step()
        self.optimizer.zero_grad()
        self.scheduler.step()
        self.losses.append(loss.item().hex())

    def checkpointer(self, **options: object) -> ckptlib.Checkpointer:
        return ckptlib.Checkpointer(self.root, self.state, **{"every": 4, "arena": self.root.parent, **options})

    def bits(self) -> list[bytes]:
        moments = [entries[name] for entries in self.optimizer.state.values() for name in sorted(entries)]
        return [raw(t) for t in [*self.model.state_dict().values(), *moments]]


def catalog(root: Path) -> Catalog:
    return Catalog(LocalStore(str(root)))


def steps(root: Path) -> list[int]:
    return [info.step for info in ckptlib.checkpoints(root)]


def slots(directory: Path) -> list[Path]:
    return [*directory.glob("*.slot")]


def step_once(ckpt: ckptlib.Checkpointer, step: int, wait: bool = True) -> None:
    """One step, and whatever it saves is committed."""
    ckpt.after_step(step)
    if wait and ckpt.pending is not None:
        ckpt.pending.wait_committed(WAIT_S)


def damage(root: Path, prefix: str) -> None:
    """Flips a bit in the middle of the largest object."""
    path = max((p for p in root.rglob("*") if p.is_file() and prefix in str(p)), key=lambda p: p.stat().st_size)
    flip_bit(path, path.stat().st_size // 2)


def faulty(job: Job, plan: list[Mapping[str, object]]) -> str:
    path = job.root.parent / "plan.json"
    path.with_suffix(".new").write_text(json.dumps(plan))
    path.with_suffix(".new").rename(path)  # a process may be reading it
    return f"fault+file://{job.root}?plan={quote(str(path))}"


def wait_settled(ckpt: ckptlib.Checkpointer) -> None:
    """Whatever becomes of the newest save is known."""
    if ckpt.pending is not None:
        with contextlib.suppress(SaveFailed):
            ckpt.pending.wait_committed(WAIT_S)
