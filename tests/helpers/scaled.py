"""A tensor subclass as quantized optimizers have, and such an optimizer."""

from __future__ import annotations

from collections.abc import Sequence
from enum import Enum
from typing import Any, NamedTuple

import torch
from onerank import bits
from torch import nn
from torch.distributed.tensor import DTensor
from torch.utils._pytree import tree_map
from typing_extensions import Self, override

Inner = dict[str, torch.Tensor]


class Mode(Enum):
    ROWS = 1
    ALL = 2


class Config(NamedTuple):
    mode: Mode
    fast: bool | int


class Scaled(torch.Tensor):
    """codes * scale, as quantized optimizer state has it."""

    codes: torch.Tensor
    scale: torch.Tensor
    context: object

    @staticmethod
    def __new__(cls, codes: torch.Tensor, scale: torch.Tensor, context: object = True) -> Self:
        made: Self = torch.Tensor._make_wrapper_subclass(cls, codes.shape, dtype=torch.float32, device=codes.device)  # type: ignore[attr-defined]
        return made

    def __init__(self, codes: torch.Tensor, scale: torch.Tensor, context: object = True) -> None:
        self.codes, self.scale, self.context = codes, scale, context

    def __tensor_flatten__(self) -> tuple[list[str], object]:
        return ["codes", "scale"], self.context

    @classmethod
    def __tensor_unflatten__(cls, inner: Inner, context: object, size: Sequence[int], stride: Sequence[int]) -> Self:
        return cls(inner["codes"], inner["scale"], context)

    def value(self) -> torch.Tensor:
        return self.codes.to(torch.float32) * self.scale

    @classmethod
    @override
    def __torch_dispatch__(
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if func in (torch.ops.aten.detach.default, torch.ops.aten.alias.default, torch.ops.aten.view.default):
            return cls(args[0].codes, args[0].scale, args[0].context)
        if func is torch.ops.aten.copy_.default and isinstance(args[0], cls):
            source = args[1].value() if isinstance(args[1], Scaled) else args[1]
            args[0].scale.fill_(max(float(source.abs().max()), 1e-30) / 127)
            args[0].codes.copy_((source / args[0].scale).round())
            return args[0]
        plain = tree_map(lambda x: x.value() if isinstance(x, Scaled) else x, (args, kwargs or {}))
        return func(*plain[0], **plain[1])


class Other(Scaled):
    """Of the same tensors; another class."""


class Around(Scaled):
    """One whose codes are a subclass, too."""

    @override
    def value(self) -> torch.Tensor:
        return torch.zeros(self.shape)


def scaled(seed: int, n: int = 6, context: object = True, cls: type[Scaled] = Scaled) -> Scaled:
    generator = torch.Generator().manual_seed(seed)
    codes = torch.randint(-127, 127, (n, 3), generator=generator, dtype=torch.int8)
    return cls(codes, torch.rand((), generator=generator), context)


def around(seed: int, context: object = True) -> Scaled:
    return Around(scaled(seed, context=context), torch.rand(2, generator=torch.Generator().manual_seed(seed)))


def parts(tensor: torch.Tensor) -> list[bytes]:
    """Bits of what it is made of."""
    if isinstance(tensor, DTensor):
        return parts(tensor.to_local())
    return [*parts(tensor.codes), *parts(tensor.scale)] if isinstance(tensor, Scaled) else [bits(tensor)]


class Quantized(torch.optim.Optimizer):
    """Momentum in 8 bits."""

    def __init__(self, params: Any) -> None:
        super().__init__(params, {"lr": 0.5})

    @torch.no_grad()
    @override
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for param in group["params"]:
                if param.grad is not None:
                    state = self.state[param]
                    if not state:
                        state["step"] = torch.zeros(())
                        state["momentum"] = Scaled(torch.zeros_like(param, dtype=torch.int8), torch.zeros(()))
                    state["step"] += 1
                    state["momentum"].copy_(state["momentum"].value() * 0.9 + param.grad)
                    param -= group["lr"] * state["momentum"].value()


def trained(seed: int, steps: int) -> tuple[nn.Module, Quantized]:
    torch.manual_seed(seed)
    model = nn.Linear(3, 4)
    optimizer = Quantized(model.parameters())
    for _ in range(steps):
        train(model, optimizer)
    return model, optimizer


def train(model: nn.Module, optimizer: torch.optim.Optimizer, features: int = 3) -> None:
    model(torch.rand(5, features)).square().sum().backward()
    optimizer.step()
    optimizer.zero_grad()
