"""torch counts what a load writes, as it counts what `load_state_dict()` does."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import nn

import ckptlib


def test_a_backward_does_not_take_loaded_weights_for_those_of_its_forward(tmp_path: Path) -> None:
    """Its gradients would be wrong, and nobody would know."""

    def model() -> nn.Module:
        return nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))

    ckptlib.save(tmp_path / "root", {"model": model()}, step=1)
    trained = model()
    loss = trained(torch.randn(2, 4)).sum()
    ckptlib.load(tmp_path / "root", {"model": trained})
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()
