"""Which steps stay in the store, and how long the bytes of the others do. Decides; `catalog/retention` deletes."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, Protocol, TypeVar

GRACE = timedelta(hours=24)
"""Longer than any load takes, and long enough for somebody to notice in the morning."""


class _Save(Protocol):
    """Saves sort by step."""

    @property
    def step(self) -> int: ...

    def __lt__(self, other: Any, /) -> bool: ...


S = TypeVar("S", bound=_Save)


@dataclass(frozen=True, slots=True)
class Keep:
    """Which steps stay."""

    last: int = 3
    """The newest ones; at least 1."""
    every: int | None = None
    """And those whose step is a multiple of this."""
    grace: timedelta = GRACE
    """How long the bytes of a dropped step stay; at least twice the save deadline of the root."""

    def __post_init__(self) -> None:
        if self.last < 1:
            raise ValueError(f"Keep(last={self.last}): the newest step is never dropped; expected last >= 1")
        if self.every is not None and self.every < 1:
            raise ValueError(f"Keep(every={self.every}): expected a number of steps >= 1, or None")

    def to_json(self) -> dict[str, object]:
        """For the writer process; `from_json` is its inverse."""
        return {"last": self.last, "every": self.every, "grace_s": self.grace.total_seconds()}

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> Keep:
        return cls(data["last"], data["every"], timedelta(seconds=data["grace_s"]))

    def choose(self, saves: Iterable[S]) -> list[S]:
        """Those of the visible saves that are dropped, ascending. Pure."""
        older = sorted(saves)[: -self.last]
        return [save for save in older if self.every is None or save.step % self.every]

    def check(self, save_deadline_s: float) -> None:
        """Raises ValueError where a save may live longer than half the grace period."""
        if self.grace.total_seconds() < 2 * save_deadline_s:
            raise ValueError(
                f"Keep(grace={self.grace}): what a save has put so far could be deleted before it commits; expected "
                f"at least {timedelta(seconds=2 * save_deadline_s)}, twice the save deadline of the root"
            )
