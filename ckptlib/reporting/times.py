"""Works out what each save took, from the accounts that manifests carry and from when these were put. Pure; seconds.

An account has the latest few snapshots of its start. So two successive marks of it have no snapshot in between, unless
the first of them is the start itself and there were more snapshots than the account has. Steps that retention has
dropped are in the accounts of those that stayed.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field
from itertools import pairwise

from ckptlib.format.account import Account, Mark, decode_account
from ckptlib.format.keys import GenerationId, SaveId
from ckptlib.format.manifest import Manifest
from ckptlib.reporting.records import Times

CLOCKS_S = 5.0
"""How much the clocks of a rank and of a store may differ."""


@dataclass(slots=True)
class Course:
    """The known marks of one start: how its time was spent up to them."""

    marks: set[Mark] = field(default_factory=set)
    snapshots: dict[int, Mark] = field(default_factory=dict)
    """The mark at which each step's snapshot began, by step; if there are several, the latest."""
    before: dict[Mark, Mark] = field(default_factory=dict)
    """The mark right before each mark, if that is known."""
    after: dict[Mark, Mark] = field(default_factory=dict)
    """The mark right after each mark, if that is known."""

    def add(self, account: Account) -> None:
        """Adds the marks of an account."""
        self.marks.update(account.marks)
        inner = account.marks[1:-1]
        for mark in inner:
            self.snapshots[mark.step] = max(mark, self.snapshots.get(mark.step, mark))
        known = account.marks if account.num_saves <= len(inner) else account.marks[1:]
        for earlier, later in pairwise(dict.fromkeys(known)):
            self.before[later] = max(earlier, self.before.get(later, earlier))
            self.after[earlier] = min(later, self.after.get(earlier, later))


@dataclass(slots=True)
class Marks:
    """The known marks of all starts."""

    _of: dict[GenerationId, Course] = field(default_factory=dict)

    def add(self, generation: GenerationId, account: Account | None) -> None:
        """Adds the marks of an account of this start."""
        if account is not None:
            self._of.setdefault(generation, Course()).add(account)

    def course(self, generation: GenerationId) -> Course:
        return self._of.get(generation, Course())

    def of(self, generation: GenerationId) -> tuple[Mark, ...]:
        """Returns all known marks of this start, ascending."""
        return tuple(sorted(self.course(generation).marks))


def marks_of(accounts: Mapping[GenerationId, Account], manifests: Iterable[Manifest]) -> Marks:
    """Returns the marks of all starts, from these accounts and from those in manifests."""
    marks = Marks()
    for generation, account in accounts.items():
        marks.add(generation, account)
    for manifest in manifests:
        marks.add(manifest.save.generation, decode_account(manifest.account, manifest.save.manifest_key))
    return marks


def times_of(
    manifests: Collection[Manifest],
    put_at: Mapping[SaveId, float],
    marks: Marks,
    deadline_s: float,
    in_memory: Collection[GenerationId] = (),
) -> dict[SaveId, Times]:
    """Returns the times of each save. `put_at`: when its manifest was put, by the store's clock. `deadline_s`: the
    root's deadline for a save.

    `in_memory`: starts with snapshots in memory. These leave marks as well, so the manifests tell which were saves.
    """
    found: dict[SaveId, Times] = {}
    last: dict[GenerationId, Mark] = {}
    for manifest in sorted(manifests, key=lambda manifest: manifest.save):
        save, course = manifest.save, marks.course(manifest.save.generation)
        here = course.snapshots.get(save.step)
        persist_s = persisted(put_at[save] - manifest.created, deadline_s)
        if here is None:
            found[save] = Times(persist_s)
            continue
        before = last.get(save.generation) if save.generation in in_memory else course.before.get(here)
        after = course.after.get(here)
        last[save.generation] = here
        found[save] = Times(
            persist_s=persist_s,
            stall_s=None if after is None else max(after.stalled_s - here.stalled_s, 0.0),
            since_s=None if before is None or before.step >= here.step else _seconds(here) - _seconds(before),
            since_steps=None if before is None or before.step >= here.step else here.step - before.step,
        )
    return found


def _seconds(mark: Mark) -> float:
    return mark.trained_s + mark.stalled_s


def persisted(seconds: float, deadline_s: float) -> float | None:
    """Returns the time from a snapshot until its manifest was put; None if no commit can take that long: the root was
    copied, or clocks differ."""
    return max(seconds, 0.0) if -CLOCKS_S <= seconds <= deadline_s + CLOCKS_S else None
