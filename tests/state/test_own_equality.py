"""Optimizers with an `==` of their own, and so without a hash, are told by identity."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from helpers.runs import model_of, params, train
from onerank import opened, same
from torch import nn, optim
from typing_extensions import override

import ckptlib


class Alike(optim.AdamW):
    """Equal to each other one with its options."""

    @override
    def __eq__(self, other: object) -> bool:
        return isinstance(other, Alike) and self.defaults == other.defaults


class Telling(Alike):
    """`state_dict()` is its own, so that it is compared with the state."""

    @override
    def state_dict(self) -> dict[str, Any]:
        return super().state_dict()


@pytest.mark.parametrize("kind", [Alike, Telling])
def test_a_resumed_run_equals_one_that_was_not(tmp_path: Path, kind: type[optim.AdamW]) -> None:
    """Two of them, which are equal; that of another model is named by position."""
    with pytest.raises(TypeError, match="unhashable"):
        hash(kind([nn.Parameter(torch.ones(1))]))

    def job(seed: int) -> tuple[dict[str, Any], list[nn.Module]]:
        models = [model_of(seed=seed), model_of(seed=seed + 1)]
        optimizers = [kind(model.parameters(), lr=0.1) for model in models]
        return {"m": models[0], "o": optimizers, "weights": [*models[1].parameters()]}, models

    def go(state: dict[str, Any], models: list[nn.Module], step: int) -> None:
        for model, optimizer in zip(models, state["o"], strict=True):
            train(model, optimizer, step, step + 1)

    mine, models = job(0)
    with ckptlib.Checkpointer(tmp_path / "root", mine, every=1, arena=tmp_path) as ckpt:
        for step in ckpt.loop(0, 3):
            go(mine, models, step)
    theirs, others = job(5)
    with opened(tmp_path / "root") as root:
        root.step = 3
        root.load(theirs)
    go(mine, models, 3)
    go(theirs, others, 3)
    assert same([params(model) for model in others], [params(model) for model in models])
