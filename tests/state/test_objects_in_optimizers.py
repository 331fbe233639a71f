"""Optimizers that keep objects for a parameter, as GaLore its projector: refused, with a way that works."""

from __future__ import annotations

from collections import deque
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers.runs import model_of, params, train
from onerank import opened, same
from torch import nn, optim
from typing_extensions import override

import ckptlib
from ckptlib import UnsupportedState


class Projector:
    """As GaLore's: made in a step, of the gradient, and anew from time to time."""

    def __init__(self, rank: int) -> None:
        self.rank = rank
        self.basis: torch.Tensor | None = None


class Projected(optim.Optimizer):
    """Momentum in a subspace, and a mean of the last updates."""

    def __init__(self, params: Any, lr: float = 0.05) -> None:
        super().__init__(params, {"lr": lr})

    @override
    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        with torch.enable_grad():
            loss = closure()
        for group in self.param_groups:
            for param in group["params"]:
                self._update(param, self.state[param], group["lr"])
        return loss

    def _update(self, param: torch.Tensor, state: dict[str, Any], lr: float) -> None:
        if param.ndim == 2:
            count = state["step"] = state.get("step", 0) + 1
            projector = state.setdefault("projector", Projector(1))
            if projector.basis is None or count % 3 == 0:
                projector.basis = torch.linalg.svd(param.grad, full_matrices=False).U[:, : projector.rank]
            basis = projector.basis
            update = basis @ (basis.T @ param.grad)
        else:
            last = state.setdefault("last", deque(maxlen=2))
            last.append(param.grad.clone())
            update = torch.stack([*last]).mean(0)
        param.sub_(update, alpha=lr)


class Saved:
    """What the message tells."""

    def __init__(self, optimizer: Projected) -> None:
        self.optimizer = optimizer

    def state_dict(self) -> dict[str, Any]:
        given = self.optimizer.state_dict()
        return {**given, "state": {i: {k: plain(v) for k, v in entry.items()} for i, entry in given["state"].items()}}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.optimizer.load_state_dict(state)
        for entry in self.optimizer.state.values():  # behind that: torch makes a deque without maxlen of one
            entry.update({key: made(key, value) for key, value in entry.items()})


def plain(value: Any) -> Any:
    if isinstance(value, Projector):
        return vars(value)
    return list(value) if isinstance(value, deque) else value


def made(key: str, value: Any) -> Any:
    if key == "projector":
        projector = Projector(value["rank"])
        projector.basis = value["basis"]
        return projector
    return deque(value, maxlen=2) if key == "last" else value


def trained(steps: int, seed: int = 0) -> tuple[nn.Module, Projected]:
    model = model_of(seed=seed)
    optimizer = Projected(model.parameters())
    train(model, optimizer, 0, steps)
    return model, optimizer


@pytest.mark.parametrize(("attribute", "kind"), [("0.weight/projector", "Projector"), ("0.bias/last", r"\.deque")])
def test_refused_with_a_way_out(tmp_path: Path, attribute: str, kind: str) -> None:
    model, optimizer = trained(1)
    frozen = [param for name, param in model.named_parameters() if not attribute.startswith(name)]
    for param in frozen:
        del optimizer.state[param]
    with pytest.raises(UnsupportedState, match=rf"^o/m/{attribute}: cannot save a .*{kind}, .*Put in the optim"):
        ckptlib.save(tmp_path, {"m": model, "o": optimizer}, 1)


def test_the_way_out_resumes_bit_for_bit(tmp_path: Path) -> None:
    model, optimizer = trained(4)
    other, resumed = trained(0, seed=1)
    with opened(tmp_path) as root:
        root.move({"m": model, "o": Saved(optimizer)}, {"m": other, "o": Saved(resumed)})
    train(model, optimizer, 4, 8)
    train(other, resumed, 4, 8)
    assert same(params(other), params(model))
