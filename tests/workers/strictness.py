"""Two ranks with states of their own: what either lacks is refused on both, or told by rank 0."""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent.parent))

import pytest
import torch
from workers.rank_cases import checkpointer, rank, run_cases, warnings_of_ckptlib

import ckptlib


def test_what_one_rank_lacks(directory: Path) -> None:
    ckptlib.save(directory, {"w": torch.ones(3)}, 1)
    own = {"only-on-rank-1": 5} if rank() == 1 else {}
    with warnings_of_ckptlib() as told:
        report = ckptlib.load(directory, {"w": torch.zeros(3), **own})
    assert report.missing == tuple(own)
    assert told == ([] if rank() else ["step 1: not in the checkpoint, and left as it was: only-on-rank-1"])

    tensor = {"t": torch.ones(1)} if rank() == 1 else {}
    target = torch.zeros(3)
    with pytest.raises(ckptlib.StateMismatch, match="t: not in the checkpoint"):
        ckptlib.load(directory, {"w": target, **tensor})
    assert not target.any()
    ckptlib.load(directory, {"w": target, **tensor}, optional="t")
    assert target.all()


def test_only_on_some_ranks(directory: Path) -> None:
    for other in (None, ckptlib.Peers(copies=0), ckptlib.Peers(link="optimizer")):
        with pytest.raises(ValueError, match=r"peers=, .* not the same on all ranks"):
            checkpointer(directory, {"w": torch.ones(3)}, peers=other if rank() else ckptlib.Peers())
    with checkpointer(directory, {"w": torch.ones(3)}) as ckpt:
        with pytest.raises(ValueError, match="given on some ranks only"):
            ckpt.restore(only="w" if rank() else None)
        with pytest.raises(ValueError, match="not all ranks named this step"):
            ckpt.restore(step=rank() or None)
        ckpt.save(1)


if __name__ == "__main__":
    run_cases([test_what_one_rank_lacks, test_only_on_some_ranks])
