"""What else belongs to a training than weights and an optimizer resumes bit for bit: torch's own objects, and yours.

The oracle is the same training without a break.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping
from pathlib import Path

import pytest
import torch
from helpers.old_torch import plain_swalr
from torch import nn, optim
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.optim import lr_scheduler
from torch.optim.swa_utils import SWALR, AveragedModel, get_ema_multi_avg_fn
from typing_extensions import override

import ckptlib

STEPS = 24


class Counter:
    """A user's object: plain values of several kinds, and a tensor."""

    def __init__(self) -> None:
        self.seen: dict[str, object] = {"tokens": 0, "by_kind": {1: 0, "b": 0.5}, "last": None}
        self.sum = torch.zeros(3)

    def count(self, step: int) -> None:
        self.seen = {"tokens": step * 7, "by_kind": {1: step, "b": 0.1 * step}, "last": [step, (step, "x")]}
        self.sum += step

    def state_dict(self) -> dict[str, object]:
        return {"seen": self.seen, "sum": self.sum}

    def load_state_dict(self, state: Mapping[str, object]) -> None:
        self.seen, self.sum = state["seen"], state["sum"]  # type: ignore[assignment]


class Gradients:
    """Gradients that are being accumulated, where a save may come in mid-window."""

    def __init__(self, model: nn.Module) -> None:
        self.model = model

    def state_dict(self) -> dict[str, torch.Tensor]:
        return {n: torch.zeros_like(p) if p.grad is None else p.grad for n, p in self.model.named_parameters()}

    def load_state_dict(self, state: Mapping[str, torch.Tensor]) -> None:
        for name, parameter in self.model.named_parameters():
            parameter.grad = state[name].clone()


class App:
    """As PyTorch's tutorial of DCP wraps both. A look at it steps an optimizer that has no state."""

    def __init__(self, model: nn.Module, optimizer: optim.Optimizer) -> None:
        self.model, self.optimizer = model, optimizer

    def state_dict(self) -> dict[str, object]:
        model, optimizer = get_state_dict(self.model, self.optimizer)
        return {"model": model, "optim": optimizer}

    def load_state_dict(self, state: Mapping[str, object]) -> None:
        model, optimizer = state["model"], state["optim"]
        set_state_dict(self.model, self.optimizer, model_state_dict=model, optim_state_dict=optimizer)  # type: ignore[arg-type]


class Training:
    """Objects, and a step. A subclass says what is beside the model and its optimizer."""

    window = 1
    """Micro-batches of one optimizer step; a step is one of them."""

    def __init__(self) -> None:
        torch.manual_seed(0)
        self.model = nn.Sequential(nn.Linear(5, 8), nn.BatchNorm1d(8), nn.Dropout(0.1), nn.Linear(8, 1))
        self.optim = optim.AdamW(self.model.parameters(), lr=0.01)
        self.more: dict[str, object] = {}
        self.make()

    def make(self) -> None: ...

    @property
    def state(self) -> dict[str, object]:
        return {"model": self.model, "optim": self.optim, **self.more}

    def loss(self) -> torch.Tensor:
        return self.model(torch.randn(6, 5)).square().mean()

    def step(self, step: int) -> None:
        self.loss().backward()
        self.optim.step()
        self.optim.zero_grad()
        self.after(step)

    def after(self, step: int) -> None: ...


class Scaled(Training):
    def make(self) -> None:
        self.scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10, growth_interval=3)
        self.more = {"scaler": self.scaler}

    def step(self, step: int) -> None:
        loss = self.loss() * (float("inf") if step in (4, 13) else 1.0)  # these steps are skipped, and the scale halved
        self.scaler.scale(loss).backward()
        self.scaler.step(self.optim)
        self.scaler.update()
        self.optim.zero_grad()


class Scheduled(Training):
    schedulers: tuple[Callable[[optim.Optimizer], lr_scheduler.LRScheduler], ...] = (
        lambda o: lr_scheduler.OneCycleLR(o, max_lr=0.1, total_steps=STEPS + 1),
        lambda o: lr_scheduler.CosineAnnealingWarmRestarts(o, T_0=5, T_mult=2),
        lambda o: lr_scheduler.SequentialLR(
            o, [lr_scheduler.LinearLR(o, 0.1, total_iters=4), lr_scheduler.ExponentialLR(o, 0.9)], [4]
        ),
        lambda o: lr_scheduler.ChainedScheduler([lr_scheduler.ConstantLR(o, 0.5, 3), lr_scheduler.StepLR(o, 5, 0.7)]),
        lambda o: lr_scheduler.LambdaLR(o, lambda step: 1 / (1 + step)),
        lambda o: lr_scheduler.ReduceLROnPlateau(o, patience=2),
        lambda o: lr_scheduler.CyclicLR(o, 0.001, 0.1, step_size_up=4, cycle_momentum=False),
    )
    number = 0

    def make(self) -> None:
        self.scheduler = self.schedulers[self.number](self.optim)
        self.more = {"scheduler": self.scheduler}

    def after(self, step: int) -> None:
        if isinstance(self.scheduler, lr_scheduler.ReduceLROnPlateau):
            self.scheduler.step(1.0 + step % 5)
        else:
            self.scheduler.step()


class Averaged(Training):
    def make(self) -> None:
        self.ema = AveragedModel(self.model, multi_avg_fn=get_ema_multi_avg_fn(0.9), use_buffers=True)
        self.swa = AveragedModel(self.model)
        self.swalr = SWALR(self.optim, swa_lr=0.05, anneal_epochs=5)
        self.more = {"ema": self.ema, "swa": self.swa, "swalr": self.swalr}

    def after(self, step: int) -> None:
        self.ema.update_parameters(self.model)
        if step % 3 == 2:
            self.swa.update_parameters(self.model)
            self.swalr.step()


class Accumulated(Training):
    window = 4

    def make(self) -> None:
        self.more = {"gradients": Gradients(self.model)}

    def step(self, step: int) -> None:
        (self.loss() / self.window).backward()
        if step % self.window == self.window - 1:
            self.optim.step()
            self.optim.zero_grad(set_to_none=False)


class Counted(Training):
    def make(self) -> None:
        self.counter = Counter()
        self.more = {"counter": self.counter, "plain": {"best": float("inf"), "epoch": 0}}

    def after(self, step: int) -> None:
        self.counter.count(step)
        plain = self.more["plain"]
        assert isinstance(plain, dict)
        plain.update(best=1 / (step + 1), epoch=step // 5)


class Wrapped(Training):
    @property
    @override
    def state(self) -> dict[str, object]:
        return {"app": App(self.model, self.optim)}


def values(training: Training) -> object:
    """Everything, as plain as it comes; what `copy.deepcopy` keeps."""
    parts = {n: o.state_dict() if hasattr(o, "state_dict") else o for n, o in training.state.items()}
    return copy.deepcopy(parts)


def assert_same(one: object, other: object, where: str = "state") -> None:
    assert type(one) is type(other), where
    if isinstance(one, torch.Tensor):
        assert isinstance(other, torch.Tensor)
        assert one.dtype == other.dtype, where
        assert torch.equal(one, other), where
    elif isinstance(one, Mapping):
        assert isinstance(other, Mapping)
        assert list(one) == list(other), where
        for key in one:
            assert_same(one[key], other[key], f"{where}.{key}")
    elif isinstance(one, list | tuple):
        assert isinstance(other, list | tuple), where
        for n, (a, b) in enumerate(zip(one, other, strict=True)):
            assert_same(a, b, f"{where}[{n}]")
    else:
        assert one == other or callable(one) or hasattr(one, "__dict__"), where


def scheduled(n: int) -> type[Scheduled]:
    return type(f"Scheduled{n}", (Scheduled,), {"number": n})


KINDS = [Scaled, Averaged, Accumulated, Counted, Wrapped, *map(scheduled, range(len(Scheduled.schedulers)))]


@pytest.mark.parametrize("kind", [pytest.param(k, marks=plain_swalr) if k is Averaged else k for k in KINDS])
def test_resumes_bit_for_bit(tmp_path: Path, kind: type[Training]) -> None:
    calm = kind()
    for step in range(STEPS):
        calm.step(step)
    (tmp_path / "arena").mkdir()
    for last in (13, STEPS):  # 13: in mid-window
        training = kind()
        with ckptlib.Checkpointer(tmp_path / "root", training.state, every=100, arena=tmp_path / "arena") as ckpt:
            for step in ckpt.loop(ckpt.restore().step, last):
                training.step(step)
    assert_same(values(calm), values(training))
