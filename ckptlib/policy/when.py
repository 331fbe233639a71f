"""When to save. A policy may answer differently on every rank; what counts is what all agree upon."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol


class Policy(Protocol):
    """Decides for one rank; the decision is agreed upon before it is acted upon."""

    def due(self, step: int) -> bool:
        """Whether the state after `step` steps should be saved."""


@dataclass(frozen=True, slots=True)
class Steps:
    """Every n steps: `Steps(500)` saves after step 500, 1000, ..."""

    n: int

    def __post_init__(self) -> None:
        if self.n < 1:
            raise ValueError(f"Steps(n) needs n >= 1, got {self.n}")

    def due(self, step: int) -> bool:
        return step % self.n == 0
