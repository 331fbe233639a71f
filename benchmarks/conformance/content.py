"""What is saved, and the oracle: SHA-256 of bytes that no checkpointing library has touched.

The bytes of each tensor follow from its name, the step and the rank, by SHAKE-128 of hashlib. What a library loads is
compared by its digest with that of each step, tensor by tensor.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    import torch

NEVER_SAVED = 0
"""The step whose bytes targets hold before a load: no save has them."""
_TOP_EXPONENT_BIT = {"float32": 3, "bfloat16": 1}
"""In which byte of an element it is; cleared, so that all numbers are finite."""
_ITEM_SIZE = {"float32": 4, "bfloat16": 2, "int64": 8, "uint8": 1}


@dataclass(frozen=True)
class Content:
    """A state by rank and step."""

    rows: int
    """Of each weight, on each rank; a row has 4 KiB in float32."""

    def shapes(self) -> dict[str, tuple[str, tuple[int, ...]]]:
        """dtype and local shape by name. Dots in names, as modules have them."""
        found: dict[str, tuple[str, tuple[int, ...]]] = {"embedding": ("bfloat16", (self.rows, 1024))}
        for i in range(3):
            found[f"layers.{i}.weight"] = ("float32", (self.rows, 1024))
            found[f"layers.{i}.bias"] = ("float32", (1000,))
        return found | {"counts": ("int64", (777,)), "mask": ("uint8", (4099,))}

    def raw(self, name: str, step: int, rank: int) -> bytes:
        """One tensor's bytes."""
        dtype, shape = self.shapes()[name]
        nbytes = _ITEM_SIZE[dtype] * int(np.prod(shape))
        drawn = np.frombuffer(hashlib.shake_128(f"{name} {step} {rank}".encode()).digest(nbytes), np.uint8).copy()
        if dtype in _TOP_EXPONENT_BIT:
            drawn[_TOP_EXPONENT_BIT[dtype] :: _ITEM_SIZE[dtype]] &= 0xBF
        return drawn.tobytes()

    def tensors(self, step: int, rank: int) -> dict[str, torch.Tensor]:
        """A rank's tensors at a step."""
        import torch

        return {
            name: torch.frombuffer(bytearray(self.raw(name, step, rank)), dtype=getattr(torch, dtype)).reshape(shape)
            for name, (dtype, shape) in self.shapes().items()
        }

    def judge(self, loaded: Mapping[str, torch.Tensor], rank: int, steps: range) -> Judgement:
        """Which step's tensors these are."""
        found = {name: self._step_of(name, tensor, rank, steps) for name, tensor in loaded.items()}
        ones = set(found.values())
        if len(ones) == 1 and None not in ones and found.keys() == self.shapes().keys():
            return Judgement(ones.pop())
        by_step: dict[str, list[str]] = {}
        for name, step in found.items():
            by_step.setdefault(_said(step), []).append(name)
        return Judgement(None, "; ".join(f"{step}: {', '.join(names)}" for step, names in by_step.items()))

    def _step_of(self, name: str, tensor: torch.Tensor, rank: int, steps: range) -> int | None:
        got = _digest(tensor)
        return next((s for s in (*steps[::-1], NEVER_SAVED) if got == _sha(self.raw(name, s, rank))), None)


@dataclass(frozen=True)
class Judgement:
    """What a load gave on one rank."""

    step: int | None
    """Whose tensors all of them are; None: of more than one, or of none."""
    detail: str = ""


def _said(step: int | None) -> str:
    return "no step" if step is None else "before the load" if step == NEVER_SAVED else f"step {step}"


def _sha(raw: bytes) -> str:
    return hashlib.sha256(raw).hexdigest()


def _digest(tensor: torch.Tensor) -> str:
    """Of its elements in order, whatever its strides."""
    import torch

    return _sha(tensor.detach().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes())
