"""The data that a report shows, as its root records it. Only types; bytes, and seconds since the epoch."""

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
    """All chunks by codec, raw first."""
    taken_over: Count
    """Those of all chunks that lie in packs of earlier saves."""
    packs: Mapping[SaveId, int]
    """Bytes of this step's chunks in the packs of each save, its own included."""


@dataclass(frozen=True, slots=True)
class Times:
    """How long one save took, as far as that is recorded."""

    persist_s: float | None = None
    """Seconds from the snapshot, by rank 0's clock, to the commit, by the store's clock."""
    stall_s: float | None = None
    """Seconds that training stalled from this save until the next one of its start."""
    since_s: float | None = None
    """Seconds of training and stalls from the previous save, or from the start's first step, to this save."""
    since_steps: int | None = None
    """The same in steps."""


@dataclass(frozen=True, slots=True)
class Step:
    """One committed save."""

    save: SaveId
    created: float
    world_size: int
    nbytes_state: int
    """Bytes that a load returns."""
    nbytes: int
    """Bytes that were put for it, in packs."""
    num_uses: int
    """The number of other saves whose packs it needs."""
    on_history: bool
    metrics: Mapping[str, object]
    interval: int | None
    """Steps between saves that the ranks had agreed upon, with `Overhead`."""
    why: str | None
    """Why that interval was chosen, if that is recorded."""
    kept: tuple[str, ...]
    """Reasons to keep it, whatever its age: "pinned", "best", "exempt"."""
    times: Times = field(default_factory=Times)
    content: Content | None = None
    """None if its parts were not read."""


@dataclass(frozen=True, slots=True)
class Begin:
    """One generation: a start of the job, or a rewind."""

    id: GenerationId
    record: Generation | None
    """None if it cannot be read."""
    on_history: bool
    start: Start | None
    """What its account tells; None without one."""
    marks: tuple[Mark, ...]
    """The marks of its account and of all of its manifests."""
    num_saves: int | None
    """The number of snapshots that it took, by its account."""
    restored_from: str | None = None
    """The tier that it restored from, if that is recorded."""

    @property
    def is_rewind(self) -> bool:
        return self.record is not None and self.record.rewind

    @property
    def end(self) -> str | None:
        """CLOSED, DIED, or None if it is not known; see `Account.end`."""
        return None if self.start is None else self.start.end


@dataclass(frozen=True, slots=True)
class FailedSave:
    """A save that was begun and is not committed."""

    save: SaveId
    modified: float
    """When its newest object was put, by the store's clock."""
    num_parts: int
    """The number of ranks that put their part."""
    nbytes: int
    """Bytes of its packs."""
    errors: Mapping[int, str]
    """The errors that ranks published, by rank."""
    may_come: bool
    """Whether it may still be under way: its generation is the newest one, and no later save of it is committed."""


@dataclass(frozen=True, slots=True)
class Dropped:
    """A step that retention has dropped, but not deleted yet."""

    save: SaveId
    reason: str
    at: float
    """When it was dropped, by the store's clock."""


@dataclass(frozen=True, slots=True)
class Records:
    """All data of a report."""

    url: str
    at: float
    """When the root was read."""
    steps: Sequence[Step]
    """All committed steps, by generation, then by step."""
    begins: Sequence[Begin]
    """All generations, ascending."""
    goodput: Goodput
    failed: Sequence[FailedSave]
    dropped: Sequence[Dropped]
    nbytes_packs: int
    """Bytes of all packs in the root, needed or not."""
    newest: Codings | None
    """How the newest step on the history is stored; None if that is not known."""
    num_without_content: int
    """The number of steps whose parts were not all read: there are too many, or one cannot be read."""
    untold: int
    """The number of starts without an account."""
    problems: Sequence[str]
    """Messages about objects that could not be read."""

    @property
    def failed_starts(self) -> list[Begin]:
        """The starts that were not closed; the newest one, if its end is not known, is taken to be running."""
        known = [begin for begin in self.begins if begin.start is not None]
        return [b for b in known if b.end == DIED or (b.end is None and b is not known[-1])]

    @property
    def history(self) -> list[Step]:
        return sorted((step for step in self.steps if step.on_history), key=lambda step: step.save)
