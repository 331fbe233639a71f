"""Policies that say when to save. Each rank may answer differently; what all agree upon counts.

Pure: policies hold settings only, and are given what they decide by.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from typing import NamedTuple

from typing_extensions import override


class Moment(NamedTuple):
    """The facts that a policy may decide by, about a step that comes next."""

    step: int
    """Number of steps that will be done."""
    saved: int
    """The step of the last save; before there is one, the step that this run went on from."""
    now: float
    """Seconds, by a clock that only goes forward."""
    saved_at: float
    """When the last save was taken, by the same clock; before there is one, when this run went on."""
    is_first: bool
    """Whether this run has not saved yet."""
    interval: int | None = None
    """Steps between saves that all ranks have agreed upon; None: not yet, or no rank has an overhead to keep to."""


class Policy:
    """Decides when to save. `|` combines policies: a save that falls due by one of them is taken.

    To write your own, override `due`; it is asked once for each step, ahead of it. A function of the step does as well,
    wherever a policy is expected. Ranks may disagree: all save when one of them wants to.
    """

    @property
    def by_step(self) -> bool:
        """Whether `due` can tell from the step alone."""
        return True

    def due(self, step: int) -> bool:
        """Returns whether the state after `step` steps should be saved."""
        raise NotImplementedError(f"{type(self).__name__} does not say when a save is due: override due(step)")

    def due_at(self, moment: Moment) -> bool:
        """Does what `due` does, for policies that go by more than the step."""
        return self.due(moment.step)

    def __or__(self, other: When) -> Policy:
        return AnyOf((self, policy_of(other)))

    def __ror__(self, other: When) -> Policy:
        return AnyOf((policy_of(other), self))


When = Policy | int | timedelta | Callable[[int], bool]
"""Says when to save: a policy, a number of steps, a time, or a function of the step."""


@dataclass(frozen=True, slots=True)
class Steps(Policy):
    """Every n steps: `Steps(500)` saves after step 500, 1000, ..."""

    n: int

    def __post_init__(self) -> None:
        if isinstance(self.n, bool) or not isinstance(self.n, int):
            raise TypeError(f"Steps({self.n!r}): expected a whole number of steps, such as Steps(500)")
        if self.n < 1:
            raise ValueError(f"Steps(n) needs n >= 1, got {self.n}")

    @override
    def due(self, step: int) -> bool:
        return step % self.n == 0


@dataclass(frozen=True, slots=True)
class Minutes(Policy):
    """Saves when so many minutes have passed since the last save; the first rank whose clock says so counts."""

    minutes: float

    def __post_init__(self) -> None:
        if isinstance(self.minutes, bool) or not isinstance(self.minutes, (int, float)):
            raise TypeError(f"Minutes({self.minutes!r}): expected a number, such as Minutes(10)")
        if not 0 < self.minutes < float("inf"):
            raise ValueError(f"Minutes({self.minutes!r}): expected a time above 0, such as Minutes(10)")

    @property
    @override
    def by_step(self) -> bool:
        return False

    @override
    def due_at(self, moment: Moment) -> bool:
        return moment.now - moment.saved_at >= 60 * self.minutes


@dataclass(frozen=True, slots=True)
class First(Policy):
    """Saves the first step of each run, so that unsupported state is known at once: `First() | Steps(500)`."""

    @property
    @override
    def by_step(self) -> bool:
        return False

    @override
    def due_at(self, moment: Moment) -> bool:
        return moment.is_first


@dataclass(frozen=True, slots=True)
class AnyOf(Policy):
    """Saves when one of several policies says so."""

    policies: tuple[Policy, ...]

    @property
    @override
    def by_step(self) -> bool:
        return all(policy.by_step for policy in self.policies)

    @override
    def due(self, step: int) -> bool:
        return any(policy.due(step) for policy in self.policies)

    @override
    def due_at(self, moment: Moment) -> bool:
        return any(policy.due_at(moment) for policy in self.policies)


@dataclass(frozen=True, slots=True)
class Asked(Policy):
    """Saves when a function of the step says so."""

    ask: Callable[[int], bool]

    @override
    def due(self, step: int) -> bool:
        return bool(self.ask(step))


def policy_of(when: When) -> Policy:
    """Returns the policy that is meant. Raises TypeError for an argument that says no time."""
    match when:
        case Policy():
            return when
        case bool():
            pass
        case int():
            return Steps(when)
        case timedelta():
            return Minutes(when.total_seconds() / 60)
        case _ if not isinstance(when, type):
            ask = getattr(when, "due", when)
            if callable(ask):
                return Asked(ask)
    raise TypeError(
        f"every={when!r}: expected a number of steps, a timedelta, a function of the step that gives a bool, or a "
        "policy such as Steps(500), Minutes(10) or Overhead(at_most=0.035)"
    )


def parts_of(policy: Policy) -> tuple[Policy, ...]:
    """Returns the policies that it combines; itself if it combines none."""
    if not isinstance(policy, AnyOf):
        return (policy,)
    return tuple(part for inner in policy.policies for part in parts_of(inner))
