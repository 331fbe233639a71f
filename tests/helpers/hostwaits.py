"""Waits of the host for a simulated device: refused within a stretch of the training's thread, put off in all others.

Nothing of the device gets done meanwhile, so whoever waits for another thread that waits for the device is found, too.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from helpers.streams import DEVICE, Simulation
from torch.overrides import TorchFunctionMode

PATIENCE_S = 150.0
"""Whoever waits as long has found a bug."""

_DEVICE_OF = torch.Tensor.device.__get__  # type: ignore[attr-defined]
_READ = (torch.Tensor.numpy, torch.Tensor.tolist, torch.Tensor.__array__)


class HostWait(AssertionError):
    """The host was about to wait for the device."""


class HostWaits(TorchFunctionMode):
    """Within it, tensors of the simulated device say so: else torch would read them where they really are, unseen."""

    def __init__(self, simulation: Simulation) -> None:
        super().__init__()
        self._simulation = simulation
        self._thread: int | None = None
        """That may not wait now."""
        self._over = threading.Event()
        self._over.set()
        self._found: list[str] = []
        simulation.on_wait = self._meet

    @contextmanager
    def refused(self) -> Iterator[None]:
        """This thread may not wait for the device in the body. Raises HostWait, also of one that somebody swallowed."""
        self._thread = threading.get_ident()
        self._over.clear()
        try:
            yield
        finally:
            self._thread = None
            self._over.set()
            found, self._found = self._found, []
        if found:
            raise HostWait(found[0])

    def _meet(self, what: str) -> None:
        if threading.get_ident() == self._thread:
            self._found.append(what)
            raise HostWait(what)
        if not self._over.wait(PATIENCE_S):
            raise TimeoutError(f"{what}: the training's thread did not come to the end of its stretch")

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        plain = bool(args) and type(args[0]) in (torch.Tensor, torch.nn.Parameter)
        if not plain or not self._simulation.holds(args[0]):
            return func(*args, **kwargs)
        if func == _DEVICE_OF:
            return DEVICE
        to_host = func is torch.Tensor.to and self._names_the_host([*args[1:], *kwargs.values()])
        if func is torch.Tensor.cpu or to_host:
            return self._on_host(args[0])
        if func in _READ:
            return func(self._on_host(args[0]), *args[1:], **kwargs)
        return func(*args, **kwargs)

    def _names_the_host(self, given: list[Any]) -> bool:
        """Whether it is said by name, or as the place of another tensor."""
        named = [torch.device(value) for value in given if isinstance(value, (str, torch.device))]
        beside = [value for value in given if isinstance(value, torch.Tensor)]
        return any(device != DEVICE for device in named) or any(not self._simulation.holds(t) for t in beside)

    def _on_host(self, tensor: torch.Tensor) -> torch.Tensor:
        return torch.ops.aten._to_copy.default(tensor, device=torch.device("cpu"))
