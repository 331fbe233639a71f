"""The settings of `every=Overhead(...)`: what checkpoints may cost. `tuner` derives the interval from them."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import timedelta

from typing_extensions import override

from ckptlib.policy.when import Moment, Policy, parts_of


@dataclass(frozen=True, slots=True)
class Overhead(Policy):
    """Saves as often as a budget allows: `Overhead(at_most=0.035)` lets saves slow the training by at most 3.5 %.

    at_most:      the budget, as a share of the time that the training takes without saves.
    at_most_lost: how much work may be lost at most; beats the budget. Counts to the last save that is durable.
    mtbf:         mean time between failures of the whole job. Saves are then at least as frequent as Young's formula
                  says: less often would cost more in lost work than it saves. Beats the budget, too.

    The interval follows what is measured while the training runs, up and down: steps beside which nothing is saved,
    and what each save adds in `after_step`, at the fence and in slower steps. All ranks use the longest interval that
    one of them needs. Snapshots in memory are no part of it: `Peers(every=Overhead(...))` gives them a budget of their
    own, and otherwise their cost counts as training.
    """

    at_most: float
    at_most_lost: timedelta | None = None
    mtbf: timedelta | None = None

    def __post_init__(self) -> None:
        if isinstance(self.at_most, bool) or not isinstance(self.at_most, (int, float)):
            raise TypeError(f"Overhead(at_most={self.at_most!r}): expected a number, such as 0.035 for 3.5 %")
        if not 0 < self.at_most < 1:
            percent = f"; for {self.at_most:g} % give {self.at_most / 100:g}" if 1 <= self.at_most < 100 else ""
            raise ValueError(
                f"Overhead(at_most={self.at_most!r}): expected a share of the training's time above 0 and below 1, "
                f"such as 0.035 for 3.5 %{percent}. No save is free: for saves now and then, give Minutes(60)"
            )
        for name, example in (("at_most_lost", "timedelta(minutes=10)"), ("mtbf", "timedelta(hours=8)")):
            value = getattr(self, name)
            if value is None:
                continue
            if not isinstance(value, timedelta):
                raise TypeError(f"Overhead({name}={value!r}): expected a timedelta, such as {example}")
            if value <= timedelta():
                raise ValueError(f"Overhead({name}={value!r}): expected a time above 0, such as {example}, or None")

    @property
    @override
    def by_step(self) -> bool:
        return False

    @override
    def due_at(self, moment: Moment) -> bool:
        return moment.interval is not None and moment.step - moment.saved >= moment.interval


def overhead_in(policy: Policy) -> Overhead | None:
    """Returns the budget of a policy, alone or combined with others, or None. Raises ValueError if it has two."""
    found = [part for part in parts_of(policy) if isinstance(part, Overhead)]
    if len(found) > 1:
        budgets = " and ".join(f"{one.at_most:.1%}" for one in found)
        raise ValueError(f"every= has {len(found)} budgets ({budgets}), and a run keeps to one: give one Overhead")
    return found[0] if found else None
