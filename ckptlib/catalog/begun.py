"""Notes, on local disks, of generations that save there before the store has their record: the next job can put it.

Without that record no step of the generation counts; see `Catalog.visible`. The note is on the disk of the host of rank
0, without whose part no local step is whole. No torch.
"""

from __future__ import annotations

import logging
from collections.abc import Collection, Iterable
from dataclasses import dataclass, replace

from ckptlib.catalog.catalog import Catalog
from ckptlib.catalog.history import history
from ckptlib.catalog.known_generations import KnownGenerations
from ckptlib.catalog.shared_documents import put_new
from ckptlib.catalog.unreadable import UNUSABLE
from ckptlib.format import keys
from ckptlib.format.documents import decode, encode
from ckptlib.format.keys import GenerationId, SaveId
from ckptlib.format.manifest import Generation
from ckptlib.format.values import Json
from ckptlib.stores import Store

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Begun:
    """A generation as it began: all that is needed to put its record."""

    record: Generation
    first_step: int
    """The first step that it saved."""
    continues: bool
    """Whether the job did not say which step it goes on from, so that the store decides when the record is put."""
    seen: KnownGenerations | None = None
    """The generations that the job knew of when it opened the root; None if an earlier ckptlib wrote the note."""

    def encode(self) -> bytes:
        fields: dict[str, Json] = {"record": self.record.encode().decode(), "step": self.first_step}
        fields["continues"] = self.continues
        if self.seen is not None:
            fields["seen"] = self.seen.to_json()
        return encode("begun", fields)

    @classmethod
    def decode(cls, data: bytes, where: str) -> Begun:
        fields = decode("begun", data, where)
        record = Generation.decode(fields.text("record").encode(), where)
        seen = KnownGenerations.from_json(fields.raw("seen"), where) if "seen" in fields else None
        return cls(record, fields.integer("step", 0, keys.MAX_STEP), fields.flag("continues"), seen)


def note(disk: Store, begun: Begun) -> None:
    """Notes a generation on the disk, before any share of it is there."""
    put_new(disk, begun.record.id.begun_key, begun.encode())


def noted(disk: Store) -> list[Begun]:
    """Returns every note on this disk; warns of those that cannot be read and leaves them out. Raises StoreError."""
    found = []
    for entry in disk.scan(keys.BEGUN):
        generation = keys.parse_begun_key(entry.key)
        if generation is None:
            continue
        try:
            begun = Begun.decode(disk.get(entry.key), f"{disk.url}/{entry.key}")
        except UNUSABLE as error:
            log.warning("steps of generation %s on the local disk may not be found: %s", generation, error)
            continue
        if begun.record.id == generation:
            found.append(begun)
    return found


def noted_ids(disk: Store) -> set[GenerationId]:
    """Returns the ids of the generations noted on this disk, from the names alone. Raises StoreError."""
    return {*filter(None, (keys.parse_begun_key(entry.key) for entry in disk.scan(keys.BEGUN)))}


def unrecorded(noted: Iterable[Begun], catalog: Catalog) -> list[Begun]:
    """Returns the generations whose record may be put, oldest first. Raises StoreError.

    If the store has a generation that the job did not know of, another job went on without these steps, and the record
    is not put. If the job did not note what it knew, a generation with its number or a higher one counts as such.

    Nor is the record put if an older job, for example one that was suspended, has since committed steps that the record
    would hide: nothing told that job to stop, and somebody relies on them. Steps that the job itself left behind, by
    going on from an earlier step, are no obstacle.
    """
    by_id = {begun.record.id: begun for begun in noted}
    if not by_id:  # as at nearly all starts, which then need no listing
        return []
    saves = catalog.saves()
    ids = catalog.generations.ids()
    begun_there = {*ids, *(save.generation for save in saves)}
    # A newer record is no error here, as in `ckptlib ls`.
    records, _ = catalog.generations.records(saves, newer=True, ids=ids)
    visible = history(saves, records)  # if one of these goes on from another, that other one hides what it hides
    entering: list[Begun] = []
    for _, begun in sorted(by_id.items()):
        if not _may_begin(begun, begun_there):
            continue
        record = _as_put(begun, visible, begun_there)
        first = SaveId(begun.first_step, record.id)
        hidden = {*visible} - {*history([*saves, first], {**records, record.id: record})}
        since = sorted(save for save in hidden if begun.seen is None or not begun.seen.knew(save))
        if since:
            log.warning(
                "%s: the steps of generation %s on local disks are not used: an older job has committed %s since that "
                "one began. Two jobs have used one root",
                *(catalog.store.url, record.id, since[-1]),
            )
            continue
        entering.append(begun)
    return entering


def _may_begin(begun: Begun, ids: Collection[GenerationId]) -> bool:
    own = begun.record.id
    if begun.seen is None:
        return own.number > max((generation.number for generation in ids), default=0)
    return own not in ids and not begun.seen.begun_since(ids, own)


def _as_put(begun: Begun, visible: Iterable[SaveId], there: Collection[GenerationId]) -> Generation:
    """Returns the record with the step that it goes on from, as `writer.generation` puts it. `there`: generations of
    which the root has a step, or a record, even a damaged one."""
    origin = begun.record.resumed_from
    if origin is not None and origin.generation in there:
        return begun.record
    return replace(begun.record, resumed_from=max((s for s in visible if s.step < begun.first_step), default=None))
