"""What each save took, from the accounts that manifests carry and from when they were put. Pure; seconds.

An account has the latest few snapshots of its start: those of all manifests together have all of them.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field

from ckptlib.format.account import Account, Mark
from ckptlib.format.keys import GenerationId, SaveId
from ckptlib.format.manifest import Manifest
from ckptlib.reporting.records import Times

CLOCKS_S = 5.0
"""By which the clocks of a rank and of a store may differ."""


@dataclass(slots=True)
class Marks:
    """How far the time had come at the snapshots of each start."""

    _of: dict[GenerationId, set[Mark]] = field(default_factory=dict)

    def add(self, generation: GenerationId, account: Account | None) -> None:
        """Takes in what an account of this start tells."""
        if account is not None:
            self._of.setdefault(generation, set()).update(account.marks)

    def of(self, generation: GenerationId) -> tuple[Mark, ...]:
        """Ascending. Of one step there may be two: before its save and, where it was the last one, after it."""
        return tuple(sorted(self._of.get(generation, ())))


def times_of(
    manifests: Collection[Manifest], put_at: Mapping[SaveId, float], marks: Marks, deadline_s: float
) -> dict[SaveId, Times]:
    """Of each save. `put_at`: when its manifest was put, by the store's clock. `deadline_s`: the root's for a save."""
    by_generation: dict[GenerationId, list[Manifest]] = {}
    for manifest in manifests:
        by_generation.setdefault(manifest.save.generation, []).append(manifest)
    found: dict[SaveId, Times] = {}
    for generation, saves in by_generation.items():
        of = marks.of(generation)
        first_at = {mark.step: n for n, mark in reversed([*enumerate(of)])}
        before: Mark | None = of[0] if of else None
        for manifest in sorted(saves, key=lambda manifest: manifest.save):
            save = manifest.save
            n = first_at.get(save.step)
            here = None if n is None else of[n]
            since = None if here is None or before is None or here.step <= before.step else (before, here)
            found[save] = Times(
                persist_s=_persist(put_at[save] - manifest.created, deadline_s),
                stall_s=None if n is None or n + 1 >= len(of) else max(of[n + 1].stalled_s - of[n].stalled_s, 0.0),
                since_s=None if since is None else _seconds(since[1]) - _seconds(since[0]),
                since_steps=None if since is None else since[1].step - since[0].step,
            )
            before = here or before
    return found


def _seconds(mark: Mark) -> float:
    return mark.trained_s + mark.stalled_s


def _persist(seconds: float, deadline_s: float) -> float | None:
    """None for times that no commit can have: the root was copied, or clocks differ."""
    return max(seconds, 0.0) if -CLOCKS_S <= seconds <= deadline_s + CLOCKS_S else None


def are_copied(times: Iterable[Times]) -> bool:
    """Whether no save has a time until its commit."""
    return all(found.persist_s is None for found in times)
