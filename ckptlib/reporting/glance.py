"""Follows the newest saves of a run: each look lists, and reads only documents that were not read before."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence, Set
from dataclasses import dataclass
from functools import partial

from ckptlib.catalog.accounts import read_accounts
from ckptlib.catalog.catalog import Catalog
from ckptlib.catalog.failed_parts import failure
from ckptlib.catalog.goodput import Goodput, goodput
from ckptlib.catalog.history import history
from ckptlib.catalog.resolving import TRIES
from ckptlib.errors import CheckpointNotFound, CkptError, ObjectNotFound
from ckptlib.format import keys
from ckptlib.format.account import Account
from ckptlib.format.keys import GenerationId, SaveId
from ckptlib.format.manifest import Generation, Manifest
from ckptlib.reporting.gather import INTERVAL
from ckptlib.reporting.records import Times
from ckptlib.reporting.times import marks_of, times_of
from ckptlib.verify.findings import attempt

RECENT = 8
"""How many saves are shown."""


@dataclass(frozen=True, slots=True)
class Recent:
    """One of the newest saves on the history."""

    save: SaveId
    created: float
    world_size: int
    nbytes_state: int
    nbytes: int
    interval: int | None
    """Steps between saves that the ranks had agreed upon, with `Overhead`."""
    times: Times


@dataclass(frozen=True, slots=True)
class UnderWay:
    """A save of the newest generation that is not committed."""

    save: SaveId
    num_parts: int
    """The number of ranks that are done."""
    nbytes: int
    """Bytes of the packs that are there."""


@dataclass(frozen=True, slots=True)
class Glance:
    """The result of one look at a run."""

    at: float
    num_steps: int
    """The number of committed steps on the history."""
    recent: Sequence[Recent]
    """The newest saves, ascending."""
    under_way: Sequence[UnderWay]
    failed: Mapping[SaveId, str]
    """Saves that failed, each with the error that a rank published."""
    num_starts: int
    goodput: Goodput
    problems: Sequence[str]

    @property
    def newest(self) -> Recent | None:
        return self.recent[-1] if self.recent else None

    @property
    def last_known(self) -> Recent | None:
        """The newest save whose stall is known: what comes after a save tells it."""
        return next((recent for recent in reversed(self.recent) if recent.times.stall_s is not None), None)


class Watcher:
    """Looks at one root. It remembers what never changes. Used by one thread."""

    def __init__(self, catalog: Catalog) -> None:
        self._catalog = catalog
        self._deadline_s: float | None = None
        self._manifests: dict[SaveId, Manifest] = {}
        self._failed: dict[SaveId, str] = {}
        self._accounts_of: tuple[Sequence[str], Set[GenerationId]] | None = None
        """The objects beside the generations, and the generations with steps, when accounts were last read."""
        self._told: Mapping[GenerationId, Account] = {}
        self._problems: Sequence[str] = ()
        self._seen: SaveId | None = None
        """Saves up to this one were looked through for failures; if a start goes on from an earlier step, those after
        that step are looked through again."""

    def look(self) -> Glance:
        """Takes a look. Raises CheckpointNotFound if there is no root yet, and the store's errors."""
        catalog = self._catalog
        for _ in range(TRIES):
            put_at = {
                save: entry.modified
                for entry in catalog.store.scan(keys.STEPS)
                if (save := keys.parse_manifest_key(entry.key)) is not None
            }
            generations, lost = catalog.generations.records(put_at, newer=True)
            saves = history(put_at, generations)
            problems = [*map(str, lost.values())]
            manifests = self._read(saves[-RECENT - 1 :], problems)
            if not saves or problems or saves[-1] in self._manifests:  # else it was dropped, and there is a newer one
                break
        if self._deadline_s is None or not put_at:  # a root that is gone lists nothing, like a new one
            self._deadline_s = catalog.root().save_deadline_s
        self._note_accounts({save.generation for save in put_at})
        under_way = self._look_at_parts(put_at, generations, saves[-1] if saves else None)
        return Glance(
            at=time.time(),
            num_steps=len(saves),
            recent=_recent(manifests, put_at, self._told, self._deadline_s, generations),
            under_way=under_way,
            failed=dict(sorted(self._failed.items())),
            num_starts=sum(not record.rewind for record in generations.values()),
            goodput=goodput(self._told),
            problems=[*problems, *self._problems],
        )

    def _read(self, saves: Sequence[SaveId], problems: list[str]) -> list[Manifest]:
        found: dict[SaveId, Manifest] = {}
        for save in saves:
            manifest = self._manifests.get(save) or attempt(partial(self._catalog.manifest, save))
            if isinstance(manifest, Manifest):
                found[save] = manifest
            elif not isinstance(manifest, CheckpointNotFound):  # dropped since it was listed
                problems.append(str(manifest))
        self._manifests = found
        return [*found.values()]

    def _note_accounts(self, saved: Set[GenerationId]) -> None:
        """Reads accounts again if there may be new ones. `saved`: the generations with steps.

        An account is put when a start ends, and is never altered. The first step of a start shows that the previous one
        has ended.
        """
        there = [entry.key for entry in self._catalog.store.scan(keys.GENERATIONS)], saved
        if there != self._accounts_of:
            accounts = read_accounts(self._catalog)
            self._told, self._problems, self._accounts_of = accounts.told, accounts.problems, there

    def _look_at_parts(
        self, committed: Mapping[SaveId, float], generations: Mapping[GenerationId, Generation], newest: SaveId | None
    ) -> list[UnderWay]:
        """Returns saves under way, and notes failed ones. Lists the saves after the step that the run goes on from; at
        the first look all of them, to find those that failed."""
        head = max(generations, default=None)
        origin = newest
        if head is not None and newest is not None and newest.generation < head:
            origin = generations[head].resumed_from
        store = self._catalog.store
        after = "" if self._seen is None or origin is None else str(min(self._seen, origin))
        all_read = True
        parts: dict[SaveId, set[int]] = {}
        nbytes: dict[SaveId, int] = {}
        for entry in store.scan(keys.PARTS, after and f"{keys.PARTS}{after}"):
            name = keys.parse_part_key(entry.key)
            if name is None or name.save in committed:
                continue
            if name.ok:
                parts.setdefault(name.save, set()).add(name.rank)
            elif name.save not in self._failed:
                said = attempt(partial(failure, self._catalog, name))
                if isinstance(said, CkptError):
                    all_read = isinstance(said, ObjectNotFound) and all_read
                else:
                    self._failed[name.save] = f"rank {name.rank}: {said.error}"
        for entry in store.scan(keys.PACKS, after and f"{keys.PACKS}{after}"):
            save = keys.pack_save(entry.key)
            if save is not None and save not in committed:
                nbytes[save] = nbytes.get(save, 0) + entry.nbytes
        if all_read:  # if not, they are looked through again
            self._seen = origin
        return [
            UnderWay(save, len(parts.get(save, ())), nbytes.get(save, 0))
            for save in sorted(parts.keys() | nbytes.keys())
            if save.generation == head and save not in self._failed and (origin is None or save > origin)
        ]


def _recent(
    manifests: Sequence[Manifest],
    put_at: Mapping[SaveId, float],
    told: Mapping[GenerationId, Account],
    deadline_s: float,
    generations: Mapping[GenerationId, Generation],
) -> list[Recent]:
    """Returns the newest saves. There may be one manifest more than is shown: it only serves to compute the interval of
    the next."""
    in_memory = {of for of, record in generations.items() if record.domains}
    times = times_of(manifests, put_at, marks_of(told, manifests), deadline_s, in_memory)
    return [
        Recent(
            save=manifest.save,
            created=manifest.created,
            world_size=manifest.world_size,
            nbytes_state=manifest.nbytes_loaded,
            nbytes=manifest.nbytes,
            interval=interval if type(interval := manifest.metrics.get(INTERVAL)) is int else None,
            times=times[manifest.save],
        )
        for manifest in manifests[-RECENT:]
    ]
