"""Goodput: where the time of a whole run went, from the accounts of its starts. Pure.

Clocks of two hosts are compared only between two starts. A start's steps are good up to the step at which a later start
went on; those above were lost, and done again or given up.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, fields

from ckptlib.format.account import CLOSED, Account, Mark, spent_at
from ckptlib.format.keys import GenerationId


@dataclass(frozen=True, slots=True)
class Spent:
    """Seconds by what they were spent on. They add up to the whole time."""

    trained: float
    """Training steps that count, without the times below: computation, communication, data, evaluation."""
    stalled: float
    """Stalled by saves, during steps that count: in `after_step`, in `save` and at the fence."""
    lost: float
    """Training steps that a later start did again or went back behind, and the step that a failure cut short."""
    restoring: float
    """From the making of the Checkpointer until `restore` returned."""
    closing: float
    """From the last step to the end of a start that was closed: it waits for the last commit."""
    down: float
    """Between starts, until a Checkpointer is made: scheduling, launching, imports."""

    @property
    def total(self) -> float:
        return math.fsum(asdict(self).values())

    @classmethod
    def sum(cls, of: Iterable[Spent]) -> Spent:
        rows = [*of]
        return cls(*(math.fsum(getattr(row, field.name) for row in rows) for field in fields(cls)))


@dataclass(frozen=True, slots=True)
class Start:
    """One start of the job."""

    generation: GenerationId
    began: float
    """Seconds since the epoch, by its own host's clock."""
    first: int | None
    """The number of steps done when it began; None if it never trained."""
    last: int | None
    """The last step that it did."""
    steps_lost: int
    end: str | None
    """See `Account.end`."""
    spent: Spent
    """`down` is the time down before it."""
    skew: float
    """Seconds by which it began before the previous start had ended, because clocks differ, or because the writer of
    the previous start saw it die late. They count neither as time down, nor as lost by the previous start."""


@dataclass(frozen=True, slots=True)
class Goodput:
    """Where the time of a run went."""

    starts: Sequence[Start]
    spent: Spent
    trained_in_all: float
    """Seconds of training, on steps that count and on others."""
    stalled_in_all: float
    """Seconds stalled by saves, during steps that count and others."""
    num_saves: int
    failures: int
    """Starts that were not closed; the newest one does not count if its end is not known."""

    @property
    def ettr(self) -> float | None:
        """Effective training time ratio: the share of the time that was spent training steps that count. MLPerf and
        ml-goodput call it goodput."""
        return self.spent.trained / self.spent.total if self.spent.total else None

    @property
    def mtbf(self) -> float | None:
        """Mean time between failures, seconds; None without any."""
        return self.spent.total / self.failures if self.failures else None

    @property
    def interval(self) -> float | None:
        """Mean seconds of training between saves."""
        return self.trained_in_all / self.num_saves if self.num_saves else None

    @property
    def save_cost(self) -> float | None:
        """Mean seconds that training stalled for a save."""
        return self.stalled_in_all / self.num_saves if self.num_saves else None

    @property
    def restart(self) -> float | None:
        """Mean seconds from a failure until training goes on; None without a failure."""
        return (self.spent.down + self.spent.restoring) / self.failures if self.failures else None

    @property
    def predicted(self) -> float | None:
        """The ETTR by the formula (1 - (u0 + dt/2) / MTBF) / (1 + w/dt).

        dt: `interval`; w: `save_cost`; u0: `restart`. Kokolis et al., Revisiting Reliability in Large-Scale Machine
        Learning Research Clusters (HPCA 2025).
        """
        interval, cost = self.interval, self.save_cost
        if not interval or cost is None:
            return None
        failing = 0.0 if self.mtbf is None or self.restart is None else (self.restart + interval / 2) / self.mtbf
        return max(0.0, 1 - failing) / (1 + cost / interval)


def goodput(accounts: Mapping[GenerationId, Account]) -> Goodput:
    """Returns where the time of a run went, from its accounts. Starts are ordered by number; those of the same number,
    of which all but one never saved, by when they began."""
    ordered = sorted(accounts.items(), key=lambda item: (item[0].number, item[1].began))
    limits = _limits([account for _, account in ordered])
    starts: list[Start] = []
    before: Account | None = None
    nexts = [*(account.began for _, account in ordered), math.inf][1:]
    for (generation, account), limit, until in zip(ordered, limits, nexts, strict=True):
        gap = 0.0 if before is None else account.began - (before.began + before.seconds)
        starts.append(_start(generation, account, limit, gap, until))
        before = account
    failed = [start.end != CLOSED for start in starts]
    if starts and starts[-1].end is None:  # as far as is known, it runs
        failed[-1] = False
    lasts = [account.marks[-1] for account in accounts.values() if account.marks]
    return Goodput(
        starts=tuple(starts),
        spent=Spent.sum(start.spent for start in starts),
        trained_in_all=math.fsum(last.trained_s for last in lasts),
        stalled_in_all=math.fsum(last.stalled_s for last in lasts),
        num_saves=sum(account.num_saves for account in accounts.values()),
        failures=sum(failed),
    )


def _limits(accounts: Sequence[Account]) -> list[float]:
    """Returns, for each start, the last of its steps that counts: the lowest step at which a later start went on."""
    limits: list[float] = []
    limit = math.inf
    for account in reversed(accounts):
        limits.append(limit)
        if account.marks:
            limit = min(limit, account.marks[0].step)
    return limits[::-1]


def _start(generation: GenerationId, account: Account, limit: float, gap: float, until: float) -> Start:
    """Returns one start of the job. `limit`: its last step that counts. `gap`: seconds since the end of the previous
    start. `until`: when the next one began."""
    marks = account.marks or (Mark(0, 0.0, 0.0),)  # if it never trained
    first, last = marks[0], marks[-1]
    counts = max(min(limit, last.step), first.step)
    trained, stalled = spent_at(marks, counts)
    seconds = min(account.seconds, until - account.began)
    # Spent on a step that was cut short, or waiting for the last commit.
    rest = max(seconds - account.restoring_s - last.trained_s - last.stalled_s, 0.0)
    closed = account.end == CLOSED
    spent = Spent(
        trained=trained,
        stalled=stalled,
        lost=last.trained_s - trained + last.stalled_s - stalled + (0.0 if closed else rest),
        restoring=account.restoring_s,
        closing=rest if closed else 0.0,
        down=max(gap, 0.0),
    )
    return Start(
        generation=generation,
        began=account.began,
        first=first.step if account.marks else None,
        last=last.step if account.marks else None,
        steps_lost=last.step - int(counts),
        end=account.end,
        spent=spent,
        skew=max(-gap, 0.0),
    )
