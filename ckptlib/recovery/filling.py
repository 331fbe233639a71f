"""Fills the state from one candidate: from the memory of hosts, from their local disks, or from the store.

A read that may have been altered on its way, or that a file system refused for a moment, is made once more before the
candidate counts as damaged.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from typing import NamedTuple

from ckptlib.catalog.catalog import Catalog
from ckptlib.catalog.unreadable import UNUSABLE
from ckptlib.checkpoint import LoadOrder, load_step
from ckptlib.errors import AgreementFailed, CkptError, ObjectUnreadable
from ckptlib.format import values
from ckptlib.format.keys import SaveId
from ckptlib.format.part import Part
from ckptlib.loading.committed import read_manifest
from ckptlib.loading.report import LoadReport
from ckptlib.ranks.together import together
from ckptlib.reading.source import StepSource, own_rank
from ckptlib.recovery.candidates import Candidate
from ckptlib.recovery.inventory import Inventory, SnapshotId
from ckptlib.recovery.local_step import LocalStep, OnDisks
from ckptlib.recovery.memory_source import InMemory
from ckptlib.recovery.store_check import check_store
from ckptlib.recovery.stored_step import StoredStep
from ckptlib.saving.session import Session
from ckptlib.state.rng import RNG, LoadedRng
from ckptlib.stores.local import LocalStore

log = logging.getLogger(__name__)


class Marks(NamedTuple):
    """What retention goes by, as saved with a step. Rank 0's marks count."""

    metrics: Mapping[str, object]
    exempt: bool
    """Whether the step is to stay for good."""
    created: float | None = None
    """When its snapshot was taken; seconds since the epoch."""


class Filled(NamedTuple):
    """What a filled state leaves to do."""

    report: LoadReport
    generators: LoadedRng | None = None
    """The saved state of the random generators, unless only a part was restored."""
    marks: Marks = Marks({}, False)
    """Empty if only a part was restored."""


class Filling:
    """Fills the state of one restore from one candidate at a time. Collective."""

    def __init__(self, session: Session, inventory: Inventory, order: LoadOrder) -> None:
        self._session, self._inventory, self._order = session, inventory, order

    def fill(self, candidate: Candidate) -> Filled:
        """Fills the state. If the candidate cannot be used, raises on all ranks what is wrong with it."""
        if candidate.snapshot is not None:
            return self._from_memory(candidate.snapshot)
        try:
            return self._from_files(candidate)
        except ObjectUnreadable as error:  # also of a file system that had lost its server for a moment
            if self._session.group.rank == 0:
                log.warning("retrying step %s once: %s", candidate.save, error)
            if candidate.local is None:
                check_store(self._session)
            return self._from_files(candidate)

    def _from_files(self, candidate: Candidate) -> Filled:
        return self._from_store(candidate.save) if candidate.local is None else self._from_disks(candidate.local)

    def _from_store(self, save: SaveId) -> Filled:
        session = self._session
        manifest = read_manifest(session.group, session.catalog, save)
        stored = StoredStep(session.catalog, manifest, session.group)
        found = self._load(stored)
        session.lineage.known = stored.known()
        return found

    def _from_disks(self, step: LocalStep) -> Filled:
        session = self._session
        assert session.settings.local is not None
        with LocalStore(str(session.settings.local.path)) as store:
            disk = Catalog(store, session.catalog)
            source = OnDisks(session.group, session.over, disk, step, session.settings.timeout)
            with _closed_together(source):
                return self._load(source)

    def _from_memory(self, snapshot: SnapshotId) -> Filled:
        session, save = self._session, snapshot.save
        if session.group.rank == 0:
            log.info("restoring step %d from memory: %s", save.step, self._plan(snapshot))
        source = InMemory(session.group, session.over, self._inventory, snapshot, session.settings.timeout)
        again = True
        with _closed_together(source):
            while True:
                try:
                    return self._load(source)
                except UNUSABLE as error:
                    if source.drop_damaged():
                        continue
                    if not again:
                        raise
                    again = False  # what was altered on its way is read once more
                    if session.group.rank == 0:
                        log.warning("retrying step %s in memory once, where no slot is damaged: %s", save, error)

    def _plan(self, snapshot: SnapshotId) -> str:
        """Describes, for people, which ranks have their snapshot at hand, and which get it from where."""
        size = self._session.group.size
        needs = [{own_rank(rank, snapshot.world_size)} for rank in range(size)]
        moves = self._inventory.moves(snapshot, needs)
        text = f"{size - len(moves)} of {size} ranks have their snapshot on their host"
        return text + "".join(
            f", rank {m.receiver} gets that of rank {m.found.rank} from rank {m.sender}" for m in moves
        )

    def _load(self, source: StepSource) -> Filled:
        order, group = self._order, self._session.group
        if order.only is not None:
            return Filled(load_step(group, source, order).report)
        generators = LoadedRng(group.rank, source.world_size)
        optional = [order.optional] if isinstance(order.optional, str) else order.optional
        order = replace(order, optional=[*optional, RNG])  # other libraries' checkpoints that were imported have none
        loaded = load_step(group, source, order, generators)
        step = loaded.report.step
        marks = together(group, f"reading the metrics of step {step}", lambda: _marks_in(loaded.part))
        together(group, f"putting back the random generators of step {step}", generators.restore)
        return Filled(loaded.report, generators, marks)


def _marks_in(part: Part) -> Marks:
    metrics = {name: values.decode(value, f"metrics[{name}]") for name, value in part.metrics.items()}
    return Marks(metrics, part.exempt, part.created)


@contextmanager
def _closed_together(source: InMemory | OnDisks) -> Iterator[None]:
    """Closes the source in the end, together with the other ranks if all come there. AgreementFailed, and an error that
    is not ckptlib's, may be this rank's alone."""
    together = False
    try:
        yield
        together = True
    except CkptError as error:
        together = not isinstance(error, AgreementFailed)
        raise
    finally:
        source.close(together)
