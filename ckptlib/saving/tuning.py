"""Derives intervals from the cost of saves: each rank says which it needs, and all go by the longest."""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection, Hashable
from dataclasses import dataclass
from typing import NamedTuple

from ckptlib.events import IntervalChanged
from ckptlib.format.keys import SaveId
from ckptlib.policy.measured import Measured
from ckptlib.policy.overhead import overhead_in
from ckptlib.policy.tuner import Tuner
from ckptlib.policy.when import Policy
from ckptlib.ranks.beat import Word
from ckptlib.saving.cadence import Cadence
from ckptlib.saving.due import DueSaves
from ckptlib.saving.profile import Account, Profile
from ckptlib.saving.recall import recall, to_record
from ckptlib.saving.session import Session
from ckptlib.saving.snapshots import Snapshots

log = logging.getLogger(__name__)


@dataclass(slots=True)
class Kind:
    """Saves to the store, or in memory: one rank's account of their cost, and the interval that all ranks keep."""

    name: str
    """The kind's name in events: "store" or "memory"."""
    noun: str
    cadence: Cadence
    account: Account | None
    """The measurements of its saves; None if it keeps to no overhead."""
    under_way: Callable[[], Collection[Hashable]]
    """Returns this rank's saves of this kind that have not ended."""
    said: tuple[int, str] = 0, ""
    """The interval that this rank said last, and why."""

    def say(self) -> tuple[int, int]:
        """Returns the interval that this rank needs, and whether it needs a wider one once; zeros for none."""
        if self.account is None:
            return 0, 0
        self.account.note_under_way(self.under_way())
        tuner = self.account.tuner
        if tuner.interval != self.said[0]:
            self.said = tuner.interval, tuner.why
        return tuner.interval, int(tuner.widens)

    def measured(self) -> Measured | None:
        """Returns measurements for the next start. If another rank needs a longer interval, a save costs more than
        here."""
        found = None if self.account is None else self.account.tuner.measured
        if found is None or self.cadence.agreed is None:
            return None
        return found.scaled(max(self.cadence.agreed / max(self.said[0], 1), 1.0))


class Kinds(NamedTuple):
    store: Kind
    memory: Kind | None


class Tuning:
    """Adapts the intervals of one Checkpointer to what its saves cost."""

    def __init__(self, session: Session, kinds: Kinds) -> None:
        self._session, self._kinds = session, kinds
        self.profile = Profile([kind.account for kind in kinds if kind is not None and kind.account is not None])

    def remember(self, save: SaveId) -> None:
        """Goes on from what was measured before this save. Collective, before the first step."""
        kinds = [kind for kind in self._kinds if kind is not None]
        if not self._session.group.any(any(kind.account is not None for kind in kinds)):
            return
        found = recall(self._session, save)
        for kind in kinds:
            if kind.account is not None and kind.name in found:
                kind.account.tuner.remember(found[kind.name])

    def say(self) -> dict[str, int]:
        """Returns the fields of this rank's word that tell which intervals it needs."""
        store, memory = self._kinds
        interval, widen = store.say()
        fields = {"interval": interval, "widen": widen, "at_work": int(self._is_writing)}
        if memory is not None:
            interval, widen = memory.say()
            settling = int(self._session.snapshots.settling)
            fields |= {"memory_interval": interval, "memory_widen": widen, "memory_at_work": settling}
        return fields

    @property
    def _is_writing(self) -> bool:
        """Whether this rank's writer costs the training something."""
        snapshots, writer = self._session.snapshots, self._session.writer
        drains = self._session.settings.local is not None and writer.num_undrained > 0
        return snapshots.persisting or drains or writer.finishes

    def agree(self, word: Word) -> None:
        """Takes in the agreed word."""
        store, memory = self._kinds
        self._agree(store, word.step, word.interval, word.widen, word.at_work)
        if memory is not None:
            self._agree(memory, word.step, word.memory_interval, word.memory_widen, word.memory_at_work)

    def _agree(self, kind: Kind, step: int, interval: int, widen: int, at_work: int) -> None:
        if kind.account is not None:
            kind.account.note_agreed(bool(at_work))
        if self._session.group.rank == 0 and interval not in (0, kind.cadence.agreed):
            self._tell(kind, step, interval)
        kind.cadence.agree(interval, bool(widen))

    def _tell(self, kind: Kind, step: int, interval: int) -> None:
        """Reports a new interval, and why; on rank 0, though another rank may be the one that needs it."""
        (own, why), before = kind.said, kind.cadence.agreed
        if own < interval:
            why = f"another rank needs it; rank 0 needs {own}, as {why}" if own else "another rank needs it"
        instead = "" if before is None else f" instead of {before}"
        log.info("from step %d on a %s every %d steps%s: %s", step + 1, kind.noun, interval, instead, why)
        if kind.name == "store":
            self._session.stopwatch.note_interval(why)
        self._session.listener.tell(IntervalChanged(step, interval, before, why, kind.name))

    def note_saved(self, to_store: bool) -> None:
        """Notes that a snapshot begins at this step; `to_store`: whether it is saved to the store as well."""
        store, memory = self._kinds
        if self._session.group.rank == 0:
            measured = {kind.name: kind.measured() for kind in self._kinds if kind is not None}
            self._session.stopwatch.note_measured(to_record(self._session, measured))
        if to_store and store.account is not None:
            store.account.note_saved()
        if memory is not None and memory.account is not None:
            memory.account.note_saved()


def kinds_of(snapshots: Snapshots, due: DueSaves, store: Policy, memory: Policy | None) -> Kinds:
    """Returns the kinds of saves, each with its budget; `memory` is None without peers."""
    account = _account(store, snapshots=memory is not None)
    to_store = Kind("store", "save", due.store, account, lambda: snapshots.persisting_saves)
    if memory is None or due.memory is None:
        return Kinds(to_store, None)
    account = _account(memory)
    return Kinds(to_store, Kind("memory", "snapshot in memory", due.memory, account, lambda: snapshots.settling_steps))


def _account(policy: Policy, snapshots: bool = False) -> Account | None:
    budget = overhead_in(policy)
    return None if budget is None else Account(Tuner(budget, snapshots=snapshots))
