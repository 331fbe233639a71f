"""Goodput: where the time of a whole run went, from the accounts of its starts. Pure.

Between two starts the clocks of two hosts are compared, nowhere else. A start's steps are good up to the step at which
a later start went on; those above were lost, and done again or given up.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, fields

from ckptlib.format.account import CLOSED, Account, Mark, spent_at
from ckptlib.format.keys import GenerationId


@dataclass(frozen=True, slots=True)
class Spent:
    """Seconds by use. They add up to the whole time."""

    trained: float
    """On steps that count, without the times below: computation, communication, data, evaluation."""
    stalled: float
    """By saves of the steps that count: in `after_step`, in `save` and at the fence."""
    lost: float
    """On steps that a later start did again or went back behind, and on the one that a failure cut short."""
    restoring: float
    """From the making of the Checkpointer until `restore` returned."""
    closing: float
    """From the last step to the end of a start that came to its end: the last commit is waited for."""
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
    """Steps that were done when it began; None where it never trained."""
    last: int | None
    """The last step that it did."""
    steps_lost: int
    end: str | None
    """See `Account.end`."""
    spent: Spent
    """`down`: before it."""
    skew: float
    """Seconds by which it began before the start before it had ended: by another clock, or since that one's writer was
    late to see it die. Counted as no time down, and not as lost by that one."""


@dataclass(frozen=True, slots=True)
class Goodput:
    """Where the time of a run went."""

    starts: Sequence[Start]
    spent: Spent
    trained_in_all: float
    """Seconds; of steps that count and of others."""
    stalled_in_all: float
    """The same."""
    num_saves: int
    failures: int
    """Starts that did not come to their end by themselves, but for the newest one where nobody told of its end."""

    @property
    def ettr(self) -> float | None:
        """Effective training time ratio: the share of the time that trained steps which count. MLPerf and ml-goodput
        call it goodput."""
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
        """Mean seconds from a failure until training goes on; None without one."""
        return (self.spent.down + self.spent.restoring) / self.failures if self.failures else None

    @property
    def predicted(self) -> float | None:
        """The ETTR that the formula gives: (1 - (u0 + dt/2) / MTBF) / (1 + w/dt).

        dt: `interval`; w: `save_cost`; u0: `restart`. Kokolis et al., Revisiting Reliability in Large-Scale Machine
        Learning Research Clusters (HPCA 2025).
        """
        interval, cost = self.interval, self.save_cost
        if not interval or cost is None:
            return None
        failing = 0.0 if self.mtbf is None or self.restart is None else (self.restart + interval / 2) / self.mtbf
        return max(0.0, 1 - failing) / (1 + cost / interval)


def goodput(accounts: Mapping[GenerationId, Account]) -> Goodput:
    """Starts by number, and those of one number, of which all but one never saved, by when they began."""
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
    if starts and starts[-1].end is None:  # it runs, for all that is known
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
    """Of each the last step that counts: where the earliest of all later ones went on."""
    limits: list[float] = []
    limit = math.inf
    for account in reversed(accounts):
        limits.append(limit)
        if account.marks:
            limit = min(limit, account.marks[0].step)
    return limits[::-1]


def _start(generation: GenerationId, account: Account, limit: float, gap: float, until: float) -> Start:
    """`until`: when the next one began."""
    marks = account.marks or (Mark(0, 0.0, 0.0),)  # where it never trained
    first, last = marks[0], marks[-1]
    counts = max(min(limit, last.step), first.step)
    trained, stalled = spent_at(marks, counts)
    seconds = min(account.seconds, until - account.began)
    # A step that was cut short, or the wait for the last commit.
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
