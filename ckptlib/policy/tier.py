"""The local tier: saves go to a disk of each host first, and some of them from there to the store. Only decides."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from numbers import Real
from pathlib import Path
from typing import Any

from ckptlib.policy.when import Policy
from ckptlib.policy.whole import check_whole

KEEP_LAST = 2
"""The number of newest steps that stay on local disks, whatever else stays."""

MAX_UNDRAINED = 2
"""While a rank has this many steps on its disk that are to be drained, no other one is: one is being copied, one is
next. Steps saved meanwhile stay local, so an outage of the store, however long, takes no more of the disk."""


_URL = re.compile(r"[A-Za-z][A-Za-z0-9+.-]+:/")
"""How a URL begins, also one that went through `pathlib.Path`, which makes one slash of two."""


@dataclass(frozen=True, slots=True)
class LocalTier:
    """The place of the local disk, and what is done with the steps there."""

    path: Path
    """A directory on a disk of this host; absolute."""
    drain: Policy | None = None
    """Which of the saved steps are copied to the store; None: all of them."""
    keep_last: int = KEEP_LAST
    """The number of newest steps that stay."""
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
        """Returns JSON for the writer process, which drains the steps that it is told to."""
        return {"path": str(self.path), "keep_last": self.keep_last, "bytes_per_second": self.bytes_per_second}

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> LocalTier:
        """Decodes what `to_json` returned, without `drain`."""
        return cls(Path(data["path"]), None, data["keep_last"], data["bytes_per_second"])


class DueDrains:
    """Decides whether the next save is drained. One rank's view; the ranks agree by the beat."""

    def __init__(self, policy: Policy | None) -> None:
        self._policy = policy
        self.owed = False
        """Whether a save is to be drained; it stays owed until one is."""

    def look_ahead(self, step: int) -> None:
        """Looks at `step`, which comes next. A save that falls due may be taken later, and so may its drain."""
        self.owed = self.owed or self._policy is None or self._policy.due(step)

    def begin(self) -> None:
        """Notes that a save that is drained is taken now."""
        self.owed = False


def directory_of(name: str, path: str | Path) -> Path:
    """Returns the directory given for the option `name`, absolute. Raises ValueError for one below "~", a URL, and an
    empty text: each would be a directory below the working directory, or that one, which may be on no local disk."""
    if not str(path):
        raise ValueError(f"{name}='' is empty, where it needs a directory: is a variable in it not set?")
    if _URL.match(str(path)):
        raise ValueError(
            f"{name}={str(path)!r} is a URL, where it needs a directory of this host: give its path, or "
            f"{'./' + str(path)!r} if the directory below {Path.cwd()} is meant"
        )
    if Path(path).parts[:1] == ("~",):
        raise ValueError(
            f"{name}={str(path)!r} would be below a directory called ~ in {Path.cwd()}, since only a shell makes the "
            f"home directory of it: pass {str(Path(path).expanduser())!r}, or the absolute path if that one is meant"
        )
    return Path(path).absolute()


def tier_of(
    local: str | Path | None, drain: Policy | None, keep_last: int, bytes_per_second: float | None
) -> LocalTier | None:
    """Returns the tier that a Checkpointer was asked for, or None. Raises ValueError for options of a tier without
    `local`."""
    if local is not None:
        return LocalTier(directory_of("local", local), drain, keep_last, bytes_per_second)
    if (drain, keep_last, bytes_per_second) != (None, KEEP_LAST, None):
        raise ValueError("drain, local_keep and drain_bandwidth are of the local tier: give local=PATH, too")
    return None
