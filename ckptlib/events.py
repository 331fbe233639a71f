"""What a Checkpointer tells `on_event=` of: one frozen dataclass per kind of event.

Each rank is told what it knows itself. Rank 0 is told of every commit and of every failure; another rank of its own
snapshots, and of an outcome only where it waited for it.
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
    """Base of all of them."""

    step: int


@dataclass(frozen=True, slots=True)
class Begun(Event):
    """A snapshot was begun."""

    nbytes: int
    """Of this rank's share of the state, in memory."""
    tier: str
    """Where it goes at last: "memory", "local" (local disks) or "store"."""
    stall_s: float
    """Seconds that the training stood still for it, up to here."""


@dataclass(frozen=True, slots=True)
class Staged(Event):
    """This rank's snapshot is whole, in memory that outlives the process."""

    nbytes: int
    """As in `Begun`."""
    seconds: float
    """That the copy beside the training took."""
    fence_s: float
    """Seconds that an optimizer's step waited for that copy."""


@dataclass(frozen=True, slots=True)
class Held(Event):
    """All ranks have their snapshots of this step in memory and, with `Peers`, all replicas of them. Some steps are
    passed over, where a newer one is held already."""


@dataclass(frozen=True, slots=True)
class Committed(Event):
    """The step exists in the store and is durable."""

    nbytes: int | None
    """Of the whole step, all ranks together; None on ranks other than 0."""
    seconds: float | None
    """From when the writer took the snapshot up, which is copied by then, to the commit; None on ranks other than 0."""


@dataclass(frozen=True, slots=True)
class Failed(Event):
    """This save will never be committed, or this snapshot is not kept; earlier steps are untouched. Where the store or
    a writer was lost just as a part or the manifest was put, nobody knows: `error` says that `ckptlib ls` tells."""

    error: Exception
    tier: str
    """Where it should have gone: "memory", or "store" (also by way of local disks)."""


@dataclass(frozen=True, slots=True)
class Torn(Event):
    """Something wrote to the state while it was being copied: the snapshot is given up, and another one is due."""

    error: Exception


@dataclass(frozen=True, slots=True)
class Voided(Event):
    """Ranks hold different data where it should be alike, or the state has other tensors than before: the snapshot is
    given up on all ranks, and another one, compared before, is due."""

    error: Exception


@dataclass(frozen=True, slots=True)
class Restored(Event):
    """`restore` has filled the state. There is none of a fresh run."""

    nbytes: int
    """That this rank read."""
    seconds: float
    tier: str
    """Where it came from: "memory", "local" (local disks) or "store"."""
    skipped: int
    """Newer steps, or nearer copies, that were damaged or could not be read."""


@dataclass(frozen=True, slots=True)
class Exported(Event):
    """`Checkpointer(export=)` has exported a step. Rank 0 is told."""

    out: str
    nbytes: int
    """Of the tensors in the files."""
    seconds: float


@dataclass(frozen=True, slots=True)
class ExportFailed(Event):
    """It could not. The step itself is whole. Rank 0 is told."""

    out: str
    error: Exception


@dataclass(frozen=True, slots=True)
class Initialized(Event):
    """A fresh run has begun from `Checkpointer(init_from=)`; its step is 0."""

    source: str
    """For people."""
    nbytes: int
    """That this rank read."""
    seconds: float


@dataclass(frozen=True, slots=True)
class IntervalChanged(Event):
    """With `Overhead`: all ranks have agreed upon another interval. Rank 0 is told."""

    interval: int
    """Steps between saves from now on."""
    before: int | None
    """Up to now; None for the first."""
    why: str
    """For people."""
    tier: str = "store"
    """"store", or "memory" for snapshots of `Peers(every=Overhead(...))`."""


@dataclass(frozen=True, slots=True)
class Stopping(Event):
    """All ranks were asked to stop, by SIGTERM, SIGUSR1 or `preempted`; this step is saved as the last one."""
