"""A small model and its training: the same batches at the same steps, whichever run takes them."""

from __future__ import annotations

import torch
from torch import nn, optim


def model_of(dtype: torch.dtype = torch.float32, seed: int = 0) -> nn.Module:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(5, 7), nn.Tanh(), nn.Linear(7, 1)).to(dtype)


def train(model: nn.Module, optimizer: optim.Optimizer, first: int, last: int) -> None:
    """Steps [first, last) of one and the same run."""
    dtype = next(model.parameters()).dtype
    for step in range(first, last):
        batch = torch.randn(8, 5, generator=torch.Generator().manual_seed(step)).to(dtype)

        def closure(batch: torch.Tensor = batch) -> torch.Tensor:
            optimizer.zero_grad()
            loss: torch.Tensor = model(batch).square().mean()
            loss.backward()
            return loss

        optimizer.step(closure)  # type: ignore[arg-type]


def params(model: nn.Module) -> list[torch.Tensor]:
    return [p.detach().clone() for p in model.parameters()]


def state_of(optimizer: optim.Optimizer) -> list[object]:
    """By parameter, in the order of groups."""
    return [dict(optimizer.state.get(p, {})) for group in optimizer.param_groups for p in group["params"]]


def options_of(optimizer: optim.Optimizer) -> list[dict[str, object]]:
    return [{k: v for k, v in group.items() if k != "params"} for group in optimizer.param_groups]
