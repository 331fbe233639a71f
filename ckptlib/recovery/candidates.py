"""The steps that a job may be restored from, newest first, each in every place that has it: memory, local disks, the
store.

They are listed anew whenever one of them turns out to be unusable: a job that still runs here, or `ckptlib gc`, may
have dropped it since, and there may be a newer one instead.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass

from ckptlib.catalog.history import is_number, named, numbered
from ckptlib.errors import CheckpointNotFound
from ckptlib.format.keys import SaveId, parse_save
from ckptlib.ranks.together import by_rank_0
from ckptlib.recovery.inventory import Inventory, SnapshotId
from ckptlib.recovery.local_step import LocalStep
from ckptlib.saving.session import Session

MAX_LISTINGS = 10
"""Most listings that show newer steps. Whoever drops each of them before it is read saves every few milliseconds."""


@dataclass(frozen=True, slots=True)
class Candidate:
    """One way back to one step."""

    save: SaveId
    snapshot: SnapshotId | None
    """The snapshot in memory; None: not from memory."""
    committed: bool
    local: LocalStep | None = None
    """The step on local disks; None: not from there."""

    @property
    def way(self) -> tuple[SaveId, str, SnapshotId | None]:
        """What tells this candidate from all others."""
        return self.save, self.tier, self.snapshot

    @property
    def where(self) -> str:
        if self.snapshot is not None:
            return "memory"
        return "the store" if self.local is None else "local disks"

    @property
    def tier(self) -> str:
        """See `LoadReport.tier`."""
        return "memory" if self.snapshot is not None else "store" if self.local is None else "local"


class Untried:
    """The candidates that were not tried yet; the same on all ranks."""

    def __init__(
        self, session: Session, inventory: Inventory, on_disks: Mapping[SaveId, LocalStep], step: int | str | None
    ) -> None:
        """Lists the candidates. Collective. `step`: the only one that counts; then it is listed once."""
        self._session, self._inventory, self._step = session, inventory, step
        self._left = [*_candidates(session, inventory, on_disks, step)]
        self._listed = {candidate.save for candidate in self._left}
        self._tried: set[tuple[SaveId, str, SnapshotId | None]] = set()
        self._num_newer = 0

    def __bool__(self) -> bool:
        return bool(self._left)

    @property
    def next(self) -> SaveId | None:
        """The step of the next candidate."""
        return self._left[0].save if self._left else None

    def take(self) -> Candidate | None:
        """Returns the next candidate, which counts as tried from then on."""
        if not self._left:
            return None
        candidate = self._left.pop(0)
        self._tried.add(candidate.way)
        return candidate

    def safer(self, candidate: Candidate) -> SaveId | None:
        """See `safer_of`."""
        return safer_of(self._inventory, candidate, self._left)

    def look_again(self, on_disks: Mapping[SaveId, LocalStep]) -> None:
        """Lists the candidates again, after one that could not be used. Collective. Raises CheckpointNotFound if steps
        go as fast as they come: an older one that stays would be the wrong one."""
        if self._step is not None:
            return
        found = [*_candidates(self._session, self._inventory, on_disks)]
        self._left = [candidate for candidate in found if candidate.way not in self._tried]
        newer = {candidate.save for candidate in found} - self._listed
        self._listed |= newer
        self._num_newer += bool(newer)
        if self._num_newer > MAX_LISTINGS:
            raise CheckpointNotFound(
                f"{self._session.store.url}: each step is dropped before it is read, and newer ones come: another job "
                "saves here, and keeps few steps. Stop it, and start this one again; nothing was changed"
            )


def _candidates(
    session: Session,
    inventory: Inventory,
    on_disks: Mapping[SaveId, LocalStep] | None = None,
    step: int | str | None = None,
) -> Iterator[Candidate]:
    """Yields the candidates, newest first; the same on all ranks. Abandoned steps are left out, wherever they are. With
    `step`, yields only that one; by its full name also an abandoned one, if the store has it."""
    in_memory, on_disks = inventory.whole(), on_disks or {}

    def names() -> bytes:
        committed = {*session.catalog.saves()}
        further = {*on_disks, *(snapshot.save for snapshot in in_memory)}
        visible = session.catalog.visible(further, saves=committed)
        if step is not None:
            visible = [_chosen(session.store.url, step, visible, committed)]
        return "\n".join(f"{save} {int(save in committed)}" for save in reversed(visible)).encode()

    found = by_rank_0(session.group, "listing steps", names)
    for line in found.decode().splitlines():
        name, committed = line.split()
        save = parse_save(name)
        stored = committed == "1"
        yield from (Candidate(save, snapshot, stored) for snapshot in in_memory if snapshot.save == save)
        if save in on_disks:
            yield Candidate(save, None, stored, on_disks[save])
        if stored:
            yield Candidate(save, None, stored)


def safer_of(inventory: Inventory, candidate: Candidate, left: Sequence[Candidate]) -> SaveId | None:
    """Returns the newest snapshot among those `left` of which more hosts have each share than of this one. None if
    there is none, or if the store has this one, or any that would be restored before that snapshot. Pure."""
    if candidate.snapshot is None:
        return None
    least = inventory.copies(candidate.snapshot)
    for other in left:
        if other.committed:
            return None
        if other.snapshot is not None and inventory.copies(other.snapshot) > least:
            return other.save
    return None


def newest_in_memory(session: Session, inventory: Inventory) -> SaveId | None:
    """Returns the snapshot in memory that would be tried first; None if there is none. Collective."""
    if not inventory.whole():  # on no rank
        return None
    return next((found.save for found in _candidates(session, inventory) if found.snapshot is not None), None)


def _chosen(url: str, step: int | str, visible: Sequence[SaveId], committed: Collection[SaveId]) -> SaveId:
    """Returns the save that `step` means. Raises CheckpointNotFound."""
    if isinstance(step, str) and not is_number(step) and step != "latest":
        return named(step, lambda: [*visible, *committed], url)
    return numbered(step, visible, url)
