"""Decides which steps stay in the store, and how long the bytes of the others do; `catalog/retention` deletes."""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, Protocol, TypeVar

from ckptlib.policy.best import Best
from ckptlib.policy.whole import check_whole

log = logging.getLogger(__name__)

GRACE = timedelta(hours=24)
"""Longer than any load takes, and long enough for somebody to notice in the morning."""

EARLY_S = 300.0
"""The bytes of a dropped step stay at least this long, even if the store is full and the grace period is longer."""


class _Save(Protocol):
    """A save; saves sort by step."""

    @property
    def step(self) -> int: ...

    def __lt__(self, other: Any, /) -> bool: ...


class Facts(Protocol):
    """The properties of a step in its manifest."""

    @property
    def created(self) -> float:
        """When its snapshot was taken; seconds since the epoch."""

    @property
    def metrics(self) -> Mapping[str, float]:
        """Metrics that are numbers."""


S = TypeVar("S", bound=_Save)


@dataclass(frozen=True, slots=True)
class Keep:
    """Which steps stay: each that any of these rules names, and each that is pinned.

    A step that stays is whole: packs of dropped steps that it uses stay as well. Saves of one number, as by a
    restart that saves again what it went on from, are one step, of which the latest counts.
    """

    last: int = 3
    """Number of the newest steps that stay; at least 1."""
    every: int | None = None
    """The first save from each multiple of this on stays: the multiple itself, if it was saved. A save that was taken a
    few steps after it was due stays as well, and so does one in each `every` steps if a time says when to save. Of
    saves before the first multiple, only step 0 stays."""
    grace: timedelta = GRACE
    """How long the bytes of a dropped step stay; at least twice the save deadline of the root. A job looks 24 times in
    this period for bytes whose time has come. If the store is full, they are deleted after five minutes."""
    within: timedelta | None = None
    """Steps taken no longer than this before the newest one stay, as do those committed no longer than this before it
    by the store's clock. A job that pauses for a week loses nothing by it."""
    best: str | None = None
    """The steps with the best values of this metric stay, as rank 0 told `after_step` or `log`. NaN is never best."""
    mode: str | None = None
    """Which values are best: "min" or "max"."""
    num_best: int = 1
    """Number of the best steps that stay; among equals, the later ones."""
    exempt: Callable[[int], bool] | None = None
    """Called with each step as it is saved. A step for which it returns True is recorded as exempt and stays for good,
    whatever later jobs ask for; only `ckptlib gc --exempt` drops it."""

    def __post_init__(self) -> None:
        check_whole(f"Keep(last={self.last!r})", self.last)
        check_whole(f"Keep(every={self.every!r})", 1 if self.every is None else self.every)
        check_whole(f"Keep(num_best={self.num_best!r})", self.num_best)
        if not isinstance(self.grace, timedelta):
            raise TypeError(f"Keep(grace={self.grace!r}): expected a timedelta, such as timedelta(hours=24)")
        if self.last < 1:
            raise ValueError(f"Keep(last={self.last}): the newest step is never dropped; expected last >= 1")
        if self.every is not None and self.every < 1:
            raise ValueError(f"Keep(every={self.every}): expected a number of steps >= 1, or None")
        if self.within is not None and not isinstance(self.within, timedelta):
            raise TypeError(f"Keep(within={self.within!r}): expected a timedelta, such as timedelta(hours=24)")
        if self.within is not None and self.within <= timedelta():
            raise ValueError(f"Keep(within={self.within!r}): expected a time above 0, such as timedelta(hours=24)")
        if self.best is None and (self.mode, self.num_best) != (None, 1):
            raise ValueError(
                f"Keep(mode={self.mode!r}, num_best={self.num_best}): these need best=, the name of a metric"
            )
        if self.num_best < 1:
            raise ValueError(f"Keep(num_best={self.num_best}): expected a number of steps >= 1")
        if self.exempt is not None and not callable(self.exempt):
            raise TypeError(
                f"Keep(exempt={self.exempt!r}): expected a function of the step, such as "
                "lambda step: step in (1000, 5000)"
            )
        _ = self.rule  # raises for a wrong best= or mode=

    @property
    def rule(self) -> Best | None:
        """The rule for the best steps; None if `best` is not given."""
        return None if self.best is None else Best(self.best, self.mode or "")

    def to_json(self) -> dict[str, object]:
        """Returns JSON for the writer process, which `from_json` decodes. `exempt` travels with each snapshot."""
        return {
            "last": self.last,
            "every": self.every,
            "grace_s": self.grace.total_seconds(),
            "within_s": None if self.within is None else self.within.total_seconds(),
            "best": self.best,
            "mode": self.mode,
            "num_best": self.num_best,
        }

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> Keep:
        within_s = data["within_s"]
        return cls(
            last=data["last"],
            every=data["every"],
            grace=_time(data["grace_s"]),
            within=None if within_s is None else _time(within_s),
            best=data["best"],
            mode=data["mode"],
            num_best=data["num_best"],
        )

    def is_exempt(self, step: int) -> bool:
        """Returns whether `exempt` says that the step stays for good. If it raises, the step stays, too."""
        if self.exempt is None:
            return False
        try:
            return bool(self.exempt(step))
        except Exception as error:  # the user's function may raise anything: no reason to lose the save, nor to drop it
            log.error("Keep(exempt=...) failed for step %d, which is kept for good: %r", step, error)
            return True

    def choose(self, saves: Iterable[S], facts: Mapping[S, Facts], put: Mapping[S, float]) -> list[S]:
        """Returns the visible saves to drop, ascending. Pure.

        `facts`: of saves whose manifest can be read. `put`: when each was put, by the store's clock. A save that
        another of the same step has replaced does not count.
        """
        found = sorted(saves)
        latest = {save.step: save for save in found if save in facts}
        counted = [save for save in found if not save < latest.get(save.step, save)]
        steps = sorted({save.step for save in counted})
        stay = {*steps[-self.last :], *self._milestones(steps)}
        kept = {save for save in counted if save.step in stay}
        kept.update(self._recent({save: facts[save] for save in counted if save in facts}, put))
        kept.update(self._best({save: facts[save] for save in found if save in facts}))
        return [save for save in found if save not in kept]

    def _milestones(self, steps: Iterable[int]) -> list[int]:
        """Returns the first step from each multiple on. It stays the first whatever is dropped or saved behind it, so
        every sweep chooses alike. Steps below the first multiple are none, except step 0. `steps`: ascending."""
        if self.every is None:
            return []
        firsts: dict[int, int] = {}
        for step in steps:
            firsts.setdefault(step // self.every, step)
        return [step for times, step in firsts.items() if times or not step]

    def _recent(self, known: Mapping[S, Facts], put: Mapping[S, float]) -> list[S]:
        """Returns the saves that are within the period by either clock: a job may have moved to a host whose clock is
        hours ahead, and a root that was copied may have been put as a whole. `known`: ascending."""
        if self.within is None or not known:
            return []
        newest, within_s = [*known][-1], self.within.total_seconds()
        oldest, oldest_put = known[newest].created - within_s, put.get(newest, -math.inf) - within_s
        return [
            save for save, facts in known.items() if facts.created >= oldest or put.get(save, -math.inf) >= oldest_put
        ]

    def _best(self, known: Mapping[S, Facts]) -> list[S]:
        """Returns the best saves; of each step, the latest save that has the metric counts. `known`: ascending."""
        if self.rule is None:
            return []
        metric = self.rule.metric
        latest = {save.step: save for save, facts in known.items() if metric in facts.metrics}
        values = {save: known[save].metrics[metric] for save in latest.values()}
        return self.rule.choose(values, self.num_best)

    def check(self, save_deadline_s: float) -> None:
        """Raises ValueError if a save may live longer than half the grace period."""
        if self.grace.total_seconds() < 2 * save_deadline_s:
            raise ValueError(
                f"Keep(grace={self.grace}): what a save has put so far could be deleted before it commits; expected "
                f"at least {timedelta(seconds=2 * save_deadline_s)}, twice the save deadline of the root"
            )


def _time(seconds: float) -> timedelta:
    """Returns a time of so many seconds: of timedelta.max, a float has more than a timedelta holds."""
    return timedelta(seconds=min(seconds, timedelta.max.days * 86400.0))
