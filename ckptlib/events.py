"""The events that a Checkpointer reports to `on_event=`: one frozen dataclass per kind.

Each rank reports what it knows itself. Rank 0 reports every commit and every failure; another rank reports its own
snapshots, and an outcome only if it waited for it.
"""

from __future__ import annotations

from dataclasses import dataclass

__all__ = [
    "Begun",
    "Committed",
    "Event",
    "ExportFailed",
    "Exported",
    "Failed",
    "Held",
    "Initialized",
    "IntervalChanged",
    "Restored",
    "Staged",
    "Stopping",
    "Torn",
    "Voided",
]


@dataclass(frozen=True, slots=True)
class Event:
    """Base class of all events."""

    step: int


@dataclass(frozen=True, slots=True)
class Begun(Event):
    """A snapshot was begun."""

    nbytes: int
    """Bytes of this rank's share of the state, in memory."""
    tier: str
    """The last place it goes to: "memory", "local" (local disks) or "store"."""
    stall_s: float
    """Seconds that the training has stood still for it so far."""


@dataclass(frozen=True, slots=True)
class Staged(Event):
    """This rank's snapshot is whole, in memory that outlives the process."""

    nbytes: int
    """Bytes as in `Begun`."""
    seconds: float
    """Seconds that the copy beside the training took."""
    fence_s: float
    """Seconds that an optimizer's step waited for that copy."""


@dataclass(frozen=True, slots=True)
class Held(Event):
    """All ranks have their snapshots of this step in memory and, with `Peers`, all replicas of them. There is no event
    for some steps, if a newer one is held already."""


@dataclass(frozen=True, slots=True)
class Committed(Event):
    """The step exists in the store and is durable."""

    nbytes: int | None
    """Bytes of the whole step, all ranks together; None on ranks other than 0."""
    seconds: float | None
    """Seconds from the writer's start on the snapshot, copied by then, to the commit; None on ranks other than 0."""


@dataclass(frozen=True, slots=True)
class Failed(Event):
    """This save will never be committed, or this snapshot is not kept; earlier steps are untouched. If the store or a
    writer was lost just as a part or the manifest was put, nobody knows: `error` says that `ckptlib ls` tells."""

    error: Exception
    tier: str
    """Where it should have gone: "memory", or "store" (also by way of local disks)."""


@dataclass(frozen=True, slots=True)
class Torn(Event):
    """Something wrote to the state while it was being copied: the snapshot is given up, and another one is due."""

    error: Exception


@dataclass(frozen=True, slots=True)
class Voided(Event):
    """Ranks hold different data that should be equal, or the state has other tensors than before. The snapshot is given
    up on all ranks, and another one, compared before, is due."""

    error: Exception


@dataclass(frozen=True, slots=True)
class Restored(Event):
    """`restore` has filled the state. A fresh run has no such event."""

    nbytes: int
    """Bytes that this rank read."""
    seconds: float
    tier: str
    """Where it came from: "memory", "local" (local disks) or "store"."""
    skipped: int
    """Number of newer steps, or nearer copies, that were damaged or could not be read."""


@dataclass(frozen=True, slots=True)
class Exported(Event):
    """`Checkpointer(export=)` has exported a step. Rank 0 is told."""

    out: str
    nbytes: int
    """Bytes of the tensors in the files."""
    seconds: float


@dataclass(frozen=True, slots=True)
class ExportFailed(Event):
    """`Checkpointer(export=)` could not export a step. The step itself is whole. Rank 0 is told."""

    out: str
    error: Exception


@dataclass(frozen=True, slots=True)
class Initialized(Event):
    """A fresh run has begun from `Checkpointer(init_from=)`; its step is 0."""

    source: str
    """Description for people."""
    nbytes: int
    """Bytes that this rank read."""
    seconds: float


@dataclass(frozen=True, slots=True)
class IntervalChanged(Event):
    """With `Overhead`: all ranks have agreed upon another interval. Rank 0 is told."""

    interval: int
    """Steps between saves from now on."""
    before: int | None
    """Steps between saves until now; None for the first."""
    why: str
    """Reason for people."""
    tier: str = "store"
    """"store", or "memory" for snapshots of `Peers(every=Overhead(...))`."""


@dataclass(frozen=True, slots=True)
class Stopping(Event):
    """All ranks were asked to stop, by SIGTERM, SIGUSR1 or `preempted`; this step is saved as the last one."""
