"""What a restored step that is kept again has of the random generators."""

from __future__ import annotations

import random
from datetime import timedelta
from pathlib import Path

import numpy as np
import torch

import ckptlib


class Loader:
    """Begins to iterate where it is asked for its state, as torchdata's StatefulDataLoader, and draws a seed then."""

    def state_dict(self) -> dict[str, int]:
        draws()
        return {"batch": 3}

    def load_state_dict(self, state: dict[str, int]) -> None:
        assert state == {"batch": 3}


def draws() -> tuple[float, float, float]:
    return random.random(), float(np.random.rand()), torch.rand(()).item()


def start(tmp_path: Path) -> ckptlib.Checkpointer:
    peers = ckptlib.Peers(copies=0, keep_for=timedelta(seconds=60))
    state = {"w": torch.ones(100), "data": Loader()}
    (tmp_path / "arena").mkdir(exist_ok=True)
    return ckptlib.Checkpointer(tmp_path / "root", state, every=1000, peers=peers, arena=tmp_path / "arena")


def test_a_save_before_they_are_put_back_leaves_them(tmp_path: Path) -> None:
    """It has those of the process. What is put back later is still that of the restored step."""
    with start(tmp_path) as ckpt:
        ckpt.save(3).wait_committed(60)
        drawn = draws()
    with start(tmp_path) as ckpt:
        assert ckpt.restore().step == 3
        ckpt.save(4).wait_committed(60)
        ckpt.restore_random()
        assert draws() == drawn


def test_what_a_state_dict_draws_behind_a_restore_is_not_kept(tmp_path: Path) -> None:
    """Else the next restart, where this one ends before its first save, would not go on like this one."""

    ckpt = start(tmp_path)
    ckpt.save(3).wait_committed(60)
    drawn = []
    for _ in range(2):
        ckpt.__exit__(KeyError, KeyError("the trainer's own trouble"), None)
        ckpt = start(tmp_path)
        report = ckpt.restore()
        assert (report.step, report.tier) == (3, "memory")
        ckpt.restore_random()
        drawn.append(draws())
    ckpt.close()
    assert drawn == drawn[:1] * 2


def test_a_restored_part_leaves_them(tmp_path: Path) -> None:
    """It is to begin another run, or goes beside what this one has."""
    state = {"w": torch.ones(100)}
    with ckptlib.Checkpointer(tmp_path, state, every=1000) as ckpt:
        ckpt.save(3).wait_committed(60)
    draws()
    before = torch.get_rng_state(), random.getstate()
    with ckptlib.Checkpointer(tmp_path, state, every=1000) as ckpt:
        assert ckpt.restore(only="w").step == 3
        ckpt.restore_random()
    assert torch.equal(torch.get_rng_state(), before[0])
    assert random.getstate() == before[1]
