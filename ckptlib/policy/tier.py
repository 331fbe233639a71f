"""The local tier: saves go to a disk of each host first, and some of them to the store from there. Only decides."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from numbers import Real
from pathlib import Path
from typing import Any

from ckptlib.policy.when import Policy
from ckptlib.policy.whole import check_whole

KEEP_LAST = 2
"""Steps that stay on local disks, whatever else does."""

MAX_UNDRAINED = 2
"""Steps that a rank has on its disk and that are to be drained, from which on no other one is: one is being copied, one
is next. What is saved meanwhile stays local, so an outage of the store, however long, takes no more of the disk."""


@dataclass(frozen=True, slots=True)
class LocalTier:
    """Where the local disk is, and what becomes of what is saved there."""

    path: Path
    """On a disk of this host; absolute."""
    drain: Policy | None = None
    """Which of the saved steps are copied to the store; None: all of them."""
    keep_last: int = KEEP_LAST
    """The newest so many steps stay."""
    bytes_per_second: float | None = None
    """The most that each rank drains; None: as fast as it goes."""

    def __post_init__(self) -> None:
        if not self.path.is_absolute():
            raise ValueError(f"local={str(self.path)!r}: expected an absolute path")
        if self.drain is not None and not callable(getattr(self.drain, "due", None)):
            raise TypeError(f"drain={self.drain!r}: expected a policy such as Steps(500), or None for every save")
        if isinstance(self.drain, Policy) and not self.drain.by_step:
            raise ValueError(
                f"drain={self.drain!r}: which saves are drained is told by the step alone; expected a policy such as "
                "Steps(500), or None for every save"
            )
        check_whole(f"local_keep={self.keep_last!r}", self.keep_last)
        if self.keep_last < 1:
            raise ValueError(f"local_keep={self.keep_last}: the newest step is never dropped; expected >= 1")
        most = self.bytes_per_second
        if most is not None and not isinstance(most, Real):
            raise TypeError(f"drain_bandwidth={most!r}: expected bytes per second, such as 50e6, or None for no bound")
        if most is not None and not most > 0:
            raise ValueError(f"drain_bandwidth={most}: expected bytes per second above 0, or None")

    def to_json(self) -> dict[str, object]:
        """For the writer process, which drains what it is told to."""
        return {"path": str(self.path), "keep_last": self.keep_last, "bytes_per_second": self.bytes_per_second}

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> LocalTier:
        """The inverse of `to_json`, but for `drain`."""
        return cls(Path(data["path"]), None, data["keep_last"], data["bytes_per_second"])


class DueDrains:
    """Whether the next save is drained. One rank's view; the ranks agree by the beat."""

    def __init__(self, policy: Policy | None) -> None:
        self._policy = policy
        self.owed = False
        """Whether a save is to be drained; it stays owed until one is."""

    def look_ahead(self, step: int) -> None:
        """`step` comes next. A save that falls due may be taken later, and so may the drain that is due with it."""
        self.owed = self.owed or self._policy is None or self._policy.due(step)

    def begin(self) -> None:
        """A save that is drained is taken now."""
        self.owed = False


def directory_of(name: str, path: str | Path) -> Path:
    """The directory that an option of this `name` tells. Raises ValueError for one below "~"."""
    if Path(path).parts[:1] == ("~",):
        raise ValueError(
            f"{name}={str(path)!r} would be below a directory called ~ in {Path.cwd()}, since only a shell makes the "
            f"home directory of it: pass {str(Path(path).expanduser())!r}, or the absolute path if that one is meant"
        )
    return Path(path).absolute()


def tier_of(
    local: str | Path | None, drain: Policy | None, keep_last: int, bytes_per_second: float | None
) -> LocalTier | None:
    """What a Checkpointer was asked for. Raises ValueError for what makes sense with a local tier only."""
    if local is not None:
        return LocalTier(directory_of("local", local), drain, keep_last, bytes_per_second)
    if (drain, keep_last, bytes_per_second) != (None, KEEP_LAST, None):
        raise ValueError("drain, local_keep and drain_bandwidth are of the local tier: give local=PATH, too")
    return None
