"""The record of a job's generation, as rank 0's writer puts it: before anything of this generation can be committed.

From then on older generations may commit nothing but what this one goes on from. No torch.
"""

from __future__ import annotations

import logging
from collections.abc import Collection, Sequence
from dataclasses import replace

from ckptlib.catalog.catalog import Catalog
from ckptlib.catalog.elapsed import Elapsed
from ckptlib.catalog.known_generations import KnownGenerations
from ckptlib.catalog.late_commit import LATE_S
from ckptlib.errors import CkptError, Superseded
from ckptlib.format.keys import GenerationId, SaveId
from ckptlib.format.manifest import Generation

log = logging.getLogger(__name__)


class GenerationRecord:
    """Puts the record of the job's generation. There is one per writer."""

    def __init__(
        self,
        record: Generation,
        root_id: str,
        first_step: int,
        continues: bool,
        again: bool = False,
        seen: KnownGenerations | None = None,
    ) -> None:
        """`root_id`: id of the root that the job opened. `first_step`: the first that is saved. `continues`: whether
        the job named no step to go on from, and goes on from what it finds. `again`: a writer that died may have put
        the record. `seen`: the generations that the job saw as it opened the root; None: the caller knows that no other
        job has begun since."""
        self.record = record
        self._root_id = root_id
        self._first_step = first_step
        self._continues, self._again, self._seen = continues, again, seen
        self._warning: str | None = None
        self.is_put = False

    def put(self, catalog: Catalog) -> str | None:
        """Puts the record; returns warnings for the user. Raises the store's errors.

        Raises Superseded if two jobs made the root in the same moment and the store kept the other's, or if another job
        has begun since this one opened the root: what that one has saved would be left behind.
        """
        found = catalog.root()
        if found.id != self._root_id:
            raise Superseded(
                f"{catalog.store.url}: this job opened root {self._root_id}, but {found.id} is there now: another job "
                "made it in the same moment. Stop one of the two, or give each a root of its own, and start again"
            )
        elapsed, ids = Elapsed(), catalog.generations.ids()
        if self._again and self.record.id in ids:
            # The record stays: what this job itself has saved and removed since is no reason to write another.
            self.record, self._continues = catalog.generations.record(self.record.id), False
            catalog.shared.complete_generation(self.record.id)
            self.note_put(catalog)
            return None
        self._check_others(catalog, self._unknown(ids))
        self._forget_foreign(catalog, ids)
        restored = None if self._continues else self.record.resumed_from
        if self._continues:
            is_new = not ids and self._seen is not None and not self._seen.newest  # nobody can have saved since
            origin, warning = (None, None) if is_new else _continued(catalog, self._first_step)
            self._warning = self._warning or warning
            self.record = replace(self.record, resumed_from=origin)
            self._continues = False
        catalog.generations.put(self.record)
        if elapsed.at_most() > LATE_S and not self.record.rewind:
            self._check_in_time(catalog)
        self.note_put(catalog)
        if restored is not None and not self.record.rewind:
            self._warning = self._warning or _left_behind(catalog, restored)  # of an earlier try that the store failed
        return self._warning

    def _unknown(self, ids: Collection[GenerationId]) -> list[GenerationId]:
        """Returns those of the generations that have begun since this job opened the root, ascending."""
        return [] if self._seen is None else self._seen.begun_since(ids, self.record.id)

    def _check_others(self, catalog: Catalog, others: Sequence[GenerationId]) -> None:
        if others:
            raise Superseded(
                f"{catalog.store.url}: generation {self.record.id} may no longer save: {others[-1]} has begun since "
                "this job opened the root. Another job uses this root, or a process that still writes for one that has "
                "ended, on a host that is not of this job. Stop the other job, or give each a root of its own. If no "
                "other job runs, start this one again: it goes on from what is saved"
            )

    def _check_in_time(self, catalog: Catalog) -> None:
        """Raises Superseded if another job has begun, and saved, while this record was on its way, for example through
        an outage. The number of the record may be above that of the other: then the first step of this job would leave
        behind what that one has saved, and reported as saved."""
        others = self._unknown(catalog.generations.ids())
        saved = {save.generation for save in catalog.saves()} if others else set()
        self._check_others(catalog, [other for other in others if other in saved])

    def _forget_foreign(self, catalog: Catalog, ids: Collection[GenerationId]) -> None:
        """Forgets a restored step of another root: loaded by the same URL from another store, or from a root that was
        there before. The job then goes on from what is here."""
        origin = self.record.resumed_from
        if origin is None or origin.generation in ids:
            return
        if all(save.generation != origin.generation for save in catalog.saves()):
            self.record, self._continues = replace(self.record, resumed_from=None), True
            self._warning = f"{catalog.store.url}: this job restored {origin}, of another root; steps here stay"

    def note_put(self, catalog: Catalog) -> None:
        """Notes that the record is there, and keeps it, so that it can be put again if somebody deletes it."""
        self.is_put = True
        catalog.shared.own_record = self.record


def _left_behind(catalog: Catalog, restored: SaveId) -> str | None:
    """Returns a warning if this job leaves steps behind, such as those of an older job that stood still while this one
    restored. No more of them can come, now that the record is there."""
    try:
        later = [save for save in catalog.steps(restored).saves if save.step > restored.step]
        visible = [save for save in catalog.visible() if save.step > restored.step] if later else []
    except CkptError as error:
        return f"{catalog.store.url}: it is not known whether there are steps after {restored.step}: {error}"
    if not visible:
        return None
    return (
        f"{catalog.store.url} holds steps up to {visible[-1]}, but this job goes on from step {restored.step}: steps "
        f"{visible[0].step} and later are no longer listed (they stay in the store). Unless this job was told to go "
        "back, they could not be restored, or an older job saved them after this one had restored: see that it has "
        "ended"
    )


def _continued(catalog: Catalog, step: int) -> tuple[SaveId | None, str | None]:
    """Returns the step that a job continues if it restored none, the newest before its own first, and a warning."""
    visible = catalog.visible() if catalog.saves() else []
    hidden = [save.step for save in visible if save.step >= step]
    warning = None
    if hidden:
        warning = (
            f"{catalog.store.url} holds steps up to {hidden[-1]}, but this job saves step {step} without having "
            f"restored an earlier one: steps {hidden[0]} and later are no longer listed (they stay in the store)"
        )
    return max((save for save in visible if save.step < step), default=None), warning
