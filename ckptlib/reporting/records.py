"""What a report shows, as its root records it. Types only; bytes, and seconds since the epoch."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from ckptlib.catalog.codings import Codings, Count
from ckptlib.catalog.goodput import Goodput, Start
from ckptlib.format.account import DIED, Mark
from ckptlib.format.keys import GenerationId, SaveId
from ckptlib.format.manifest import Generation


@dataclass(frozen=True, slots=True)
class Content:
    """The chunks of one step, by its parts."""

    codecs: Mapping[str, Count]
    """By codec, raw first."""
    taken_over: Count
    """Of all of them: those that lie in packs of earlier saves."""
    packs: Mapping[SaveId, int]
    """Bytes of this step's chunks in the packs of each save, its own included."""


@dataclass(frozen=True, slots=True)
class Times:
    """What one save took, as far as that is recorded."""

    persist_s: float | None = None
    """From the snapshot to the commit: the snapshot's time by rank 0's clock, the commit's by the store's."""
    stall_s: float | None = None
    """That training stood still from this save until the next one of its start."""
    since_s: float | None = None
    """From the save before, or from the start's first step, to this one."""
    since_steps: int | None = None
    """The same in steps."""


@dataclass(frozen=True, slots=True)
class Step:
    """One committed save."""

    save: SaveId
    created: float
    world_size: int
    nbytes_state: int
    """That a load gives back."""
    nbytes: int
    """That were put for it, in packs."""
    num_uses: int
    """Other saves whose packs it needs."""
    on_history: bool
    metrics: Mapping[str, object]
    interval: int | None
    """Steps between saves that the ranks had agreed upon, with `Overhead`."""
    why: str | None
    """Why that interval was chosen, where that is recorded."""
    kept: tuple[str, ...]
    """Why retention keeps it, whatever its age."""
    times: Times = field(default_factory=Times)
    content: Content | None = None
    """None where its parts were not read."""


@dataclass(frozen=True, slots=True)
class Begin:
    """One generation: a start of the job, or a rewind."""

    id: GenerationId
    record: Generation | None
    """None where it cannot be read."""
    on_history: bool
    start: Start | None
    """What its account tells; None without one."""
    marks: tuple[Mark, ...]
    """Of its account and of all of its manifests."""
    num_saves: int | None
    """Snapshots that it took, by its account."""
    restored_from: str | None = None
    """The tier, where that is recorded."""

    @property
    def is_rewind(self) -> bool:
        return self.record is not None and self.record.rewind

    @property
    def end(self) -> str | None:
        """CLOSED, DIED, or None where nobody has told; see `Account.end`."""
        return None if self.start is None else self.start.end


@dataclass(frozen=True, slots=True)
class FailedSave:
    """A save that was begun and is not committed."""

    save: SaveId
    modified: float
    """When its newest object was put, by the store's clock."""
    num_parts: int
    """Ranks that put their part."""
    nbytes: int
    """Of its packs."""
    errors: Mapping[int, str]
    """By rank: what it said."""
    may_come: bool
    """Whether it may still be under way: its generation is the newest one, and no later save of it is committed."""


@dataclass(frozen=True, slots=True)
class Dropped:
    """A step that retention has dropped, and not deleted yet."""

    save: SaveId
    reason: str
    at: float
    """By the store's clock."""


@dataclass(frozen=True, slots=True)
class Records:
    """All of it."""

    url: str
    at: float
    """When it was read."""
    steps: Sequence[Step]
    """In the order in which they were taken."""
    begins: Sequence[Begin]
    """Ascending."""
    goodput: Goodput
    failed: Sequence[FailedSave]
    dropped: Sequence[Dropped]
    nbytes_packs: int
    """Of all packs in the root, whoever needs them."""
    newest: Codings | None
    """What the newest step on the history is stored as."""
    num_without_content: int
    """Steps whose parts were not read, since there are too many parts."""
    untold: int
    """Starts without an account."""
    problems: Sequence[str]
    """Objects that could not be read."""

    @property
    def failed_starts(self) -> list[Begin]:
        """Those that did not come to their end; the newest one, where nobody told of its end, is taken to run."""
        known = [begin for begin in self.begins if begin.start is not None]
        return [b for b in known if b.end == DIED or (b.end is None and b is not known[-1])]

    @property
    def history(self) -> list[Step]:
        return sorted((step for step in self.steps if step.on_history), key=lambda step: step.save)
