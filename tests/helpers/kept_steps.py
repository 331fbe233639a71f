"""What retention promises, as a plain model: dicts and loops, nothing of ckptlib."""

from __future__ import annotations

import math
from dataclasses import dataclass, field

Step = tuple[int, int]
"""Generation and step."""


@dataclass
class Saved:
    created: float
    loss: float | None
    exempt: bool
    put: float = 0.0
    """When it was committed, by the store's clock."""
    pinned: bool = False


@dataclass
class Promise:
    """What a sweep is asked for."""

    last: int
    every: int | None
    within_s: float | None
    best: str | None
    """min or max."""
    num_best: int
    abandoned: bool = False
    drops_exempt: bool = False


@dataclass
class KeptSteps:
    """A root's steps, as its user sees them."""

    origins: dict[int, Step | None] = field(default_factory=dict)
    """By generation: what it went on from."""
    steps: dict[Step, Saved] = field(default_factory=dict)

    def visible(self) -> list[Step]:
        """Ascending by step."""
        found: list[Step] = []
        generation = max((g for g, _ in self.steps), default=None)
        below = math.inf
        while generation is not None:
            found += [(g, step) for g, step in self.steps if g == generation and step <= below]
            origin = self.origins[generation]
            if origin is None:
                break
            generation, below = origin[0], min(below, origin[1])
        return sorted(found, key=lambda at: (at[1], at[0]))

    def age(self, seconds: float) -> None:
        for saved in self.steps.values():
            saved.put -= seconds

    def sweep(self, promise: Promise) -> None:
        """Drops what is promised to nobody."""
        visible = self.visible()
        numbers: list[int] = []
        stays: set[Step] = set()
        for at in reversed(visible):
            if at[1] in numbers:  # saved again by a later generation
                continue
            numbers.append(at[1])
            if len(numbers) <= promise.last:
                stays.add(at)
            if promise.every:
                below = {other // promise.every for _, other in visible if other < at[1]}
                if at[1] == 0 or (at[1] >= promise.every and at[1] // promise.every not in below):
                    stays.add(at)
            if promise.within_s is not None:
                newest, this = self.steps[visible[-1]], self.steps[at]
                if min(newest.created - this.created, newest.put - this.put) <= promise.within_s:
                    stays.add(at)
        if promise.best:
            losses: dict[int, tuple[float, Step]] = {}
            for at in visible:
                loss = self.steps[at].loss
                if loss is not None:
                    losses[at[1]] = loss, at
            numbered = [(loss, at) for loss, at in losses.values() if loss == loss]
            ranked = sorted((loss if promise.best == "min" else -loss, -at[1], at) for loss, at in numbered)
            stays |= {at for _, _, at in ranked[: promise.num_best]}
        if not promise.abandoned:
            stays |= self.steps.keys() - {*visible}
        newest_generation = max(self.origins)
        if all(generation != newest_generation for generation, _ in self.steps):
            origin = self.origins[newest_generation]
            if origin is not None:
                stays.add(origin)
        for at, saved in self.steps.items():
            if saved.pinned or (saved.exempt and not promise.drops_exempt):
                stays.add(at)
        self.steps = {at: saved for at, saved in self.steps.items() if at in stays}
