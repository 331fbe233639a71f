"""What a root holds: its steps, the generations that saved them, and the documents of both.

It lists and reads. `generations` also puts the records of generations; `history` decides which steps are on the job's
history, and `commit` brings a step into existence. No torch.
"""

from __future__ import annotations

import logging
from bisect import bisect_left
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, NamedTuple

from ckptlib.catalog.generations import Generations
from ckptlib.catalog.history import (
    check_known,
    history,
    is_number,
    is_outrun,
    named,
    newest,
    newest_first,
    numbered,
    successor,
)
from ckptlib.catalog.metrics import best_of
from ckptlib.catalog.reading import warm
from ckptlib.catalog.second_read import decoded
from ckptlib.catalog.shared_documents import SharedDocuments
from ckptlib.catalog.stand import Stand
from ckptlib.errors import (
    CheckpointNotFound,
    CorruptData,
    FormatError,
    ObjectNotFound,
    ObjectUnreadable,
)
from ckptlib.format import gc_pause, keys
from ckptlib.format.keys import GenerationId, PartName, SaveId
from ckptlib.format.layout import Layout
from ckptlib.format.manifest import Manifest, Root, TrashRecord
from ckptlib.format.part import Part
from ckptlib.policy.best import Best
from ckptlib.stores import Entry, Store

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class CheckpointInfo:
    """One committed step, as `ckptlib.checkpoints` lists it."""

    step: int
    generation: int
    world_size: int
    nbytes: int
    """Bytes of all packs that were put for it; chunks unchanged since an earlier step lie in that step's packs."""
    nbytes_state: int
    """Bytes of all tensors."""
    created: float
    """When the snapshot was taken; seconds since the epoch, by rank 0's clock."""
    metrics: Mapping[str, Any]
    visible: bool
    """Whether it lies on the job's history; a step left behind by a rewind does not."""
    name: str
    """<step>-<generation>-<nonce>."""


class Steps(NamedTuple):
    """The result of one listing of the steps."""

    saves: list[SaveId]
    """Every committed save, by step."""
    refreshes: list[SaveId]
    """Saves to whose packs later saves shall no longer refer, by `ckptlib refresh`; ascending."""
    pins: Mapping[SaveId, Sequence[Entry]] = MappingProxyType({})
    """The pinned saves, committed or not, and the objects that pin them."""
    put: Mapping[SaveId, float] = MappingProxyType({})
    """When the manifest of each committed save was put; seconds since the epoch, by the store's own clock."""

    def has(self, save: SaveId) -> bool:
        """Whether the save is committed, by a binary search."""
        return self.saves[(at := bisect_left(self.saves, save)) : at + 1] == [save]


class Catalog:
    """One root in one store. Immutable documents are read once and kept."""

    def __init__(self, store: Store, root: Catalog | None = None) -> None:
        """`root`: for a local disk, the catalog of the root, which has most of the disk's layouts, too."""
        self.store = store
        self.shared: SharedDocuments = SharedDocuments(store, None if root is None else root.shared)
        self.generations = Generations(self.shared)
        self._stands: dict[SaveId, Stand] = {}
        self._trash: dict[SaveId, TrashRecord] = {}

    def root(self) -> Root:
        """Returns the root's document. Raises CheckpointNotFound if there is none."""
        return self.shared.root()

    def open_root(self, make: Root) -> Root:
        """Returns the root's document; puts `make` if there is none."""
        return self.shared.open_root(make)

    def saves(self) -> list[SaveId]:
        """Returns every committed save, by step."""
        return self.steps().saves

    def steps(self, since: SaveId | None = None) -> Steps:
        """Lists `steps/`: all of it, or from this save on."""
        entries = self.store.scan(keys.STEPS, "" if since is None else f"{keys.STEPS}{since}")
        put = {save: entry.modified for entry in entries if (save := keys.parse_manifest_key(entry.key)) is not None}
        saves, refreshes = sorted(put), filter(None, (keys.parse_refresh_key(entry.key) for entry in entries))
        pins: dict[SaveId, list[Entry]] = {}
        for entry in entries:
            if (pinned := keys.parse_pin_key(entry.key)) is not None:
                pins.setdefault(pinned, []).append(entry)
        if since is None:
            self._stands = {save: self._stands[save] for save in saves if save in self._stands}
        return Steps(saves, sorted(refreshes), pins, put)

    def visible(
        self, further: Collection[SaveId] = (), newer: bool = False, saves: Collection[SaveId] | None = None
    ) -> list[SaveId]:
        """Returns the saves on the job's history, ascending by step. `saves`: the committed ones, if listed before.

        `further`: saves that are whole but not committed. Those of a generation without a record here are ignored: a
        copy of a root has the same id, and a job of the copy may have left snapshots on this host. So are those of a
        generation that was outrun.

        Raises CorruptData if it cannot be told whether the job went back.

        A lost or damaged record of a generation ends history, with an error in the log; its own steps are whole all the
        same. A record of a newer ckptlib raises NewerFormat; with `newer`, for readers, it counts as damaged.
        """
        saves = self.saves() if saves is None else saves  # first: a committer has put its record before
        generations = self.generations.ids()
        there = [save for save in further if save.generation in generations]
        further = [save for save in there if not is_outrun(save.generation, saves)]
        return self._visible([*saves, *further], saves, generations, newer)

    def _visible(
        self, whole: Iterable[SaveId], saves: Iterable[SaveId], ids: Sequence[GenerationId], newer: bool = False
    ) -> list[SaveId]:
        whole = {*whole}
        records, lost = self.generations.records(saves, newer, ids)
        if not newer:
            there = {generation: error for generation, error in lost.items() if generation in ids}
            check_known({save.generation for save in whole}, records, there, self.store.url)
        for generation, error in lost.items():
            log.error("what generation %s resumed from is not known: %s", generation, error)
        return history(whole, records)

    def resolve(self, step: int | str, best: Best | None = None) -> SaveId:
        """Returns the save of a visible step: "latest", "best" or a number; or of any step, given its full name.

        `best`: what "best" means; None: the rule of the newest job that has one. Raises CheckpointNotFound, whose
        message lists the last steps, and NewerFormat as `Generations.check_versions` does.
        """
        saves = self.saves()  # first: a committer has put its record before
        ids = self.generations.ids()
        if step == "latest" and (found := self._newest(saves, ids)) is not None:
            return found
        self.generations.check_versions(ids)
        if step == "best":
            visible = self._visible(saves, saves, ids)
            return best_of(self.known_metrics(visible), best or self.best_rule(saves, ids), self.store.url)
        if step != "latest" and isinstance(step, str) and not is_number(step):
            return named(step, lambda: saves, self.store.url)
        return numbered(step, self._visible(saves, saves, ids), self.store.url)

    def _newest(self, saves: Collection[SaveId], ids: Sequence[GenerationId]) -> SaveId | None:
        self.generations.warm(newest_first(ids, saves))
        return newest(saves, ids, self.generations.record)

    def known_metrics(self, saves: Sequence[SaveId]) -> dict[SaveId, Mapping[str, float]]:
        """Returns the numeric metrics of the saves whose manifest can be read; warns of the others."""
        self.warm_stands(saves)
        found: dict[SaveId, Mapping[str, float]] = {}
        for save in saves:
            try:
                found[save] = self.stand(save).metrics
            except CheckpointNotFound:  # dropped since it was listed
                continue
            except (CorruptData, FormatError, ObjectUnreadable) as error:
                log.warning("the metrics of step %d are not known: %s", save.step, error)
        return found

    def best_rule(self, saves: Iterable[SaveId], ids: Sequence[GenerationId] | None = None) -> Best | None:
        """Returns the rule for the best step of the newest job that has one.

        `saves`, `ids`: as for `Generations.records`. Lost records are reported when history is walked.
        """
        records, _ = self.generations.records(saves, newer=True, ids=ids)
        rules = (records[generation].best for generation in sorted(records, reverse=True))
        return next((best for best in rules if best is not None), None)

    def manifest(self, save: SaveId) -> Manifest:
        """Returns the save's manifest. Raises CheckpointNotFound, CorruptData, FormatError."""
        return self.manifest_as_put(save)[0]

    def manifest_as_put(self, save: SaveId) -> tuple[Manifest, bytes]:
        """Returns the manifest and its document. Raises as `manifest` does."""
        where = f"{self.store.url}/{save.manifest_key}"
        with gc_pause.kept():
            return decoded(
                self.store, lambda: self.manifest_document(save), lambda d: (Manifest.decode(save, d, where), d)
            )

    def manifest_document(self, save: SaveId) -> bytes:
        """Returns the bytes of the save's manifest. Raises CheckpointNotFound."""
        try:
            return self.store.get(save.manifest_key)
        except ObjectNotFound as error:
            raise CheckpointNotFound(f"{self.store.url} holds no save {save}") from error

    def stand(self, save: SaveId) -> Stand:
        """Returns the stand of a committed save. Raises CheckpointNotFound, CorruptData, FormatError."""
        if save not in self._stands:
            self._stands[save] = Stand.of(self.manifest(save))
        return self._stands[save]

    def keep_stand(self, manifest: Manifest) -> None:
        """Keeps the stand of a manifest that the caller has read, so that it is not read again for that."""
        self._stands[manifest.save] = Stand.of(manifest)

    def known_stands(self, saves: Iterable[SaveId] | None = None) -> dict[SaveId, Stand]:
        """Returns those stands of these saves that were read before; without `saves`, all of them, newest last."""
        if saves is None:
            return dict(self._stands)
        return {save: self._stands[save] for save in saves if save in self._stands}

    def warm_stands(self, saves: Iterable[SaveId]) -> None:
        """Reads the stands of these saves ahead, many at once; right after a start, none is known yet."""
        warm(self.stand, [save for save in saves if save not in self._stands])

    def trash_record(self, save: SaveId) -> TrashRecord:
        """Returns the trash record of a dropped save. Raises ObjectNotFound, CorruptData, FormatError."""
        if save in self._trash:
            return self._trash[save]
        where = f"{self.store.url}/{save.trash_key}"
        record = decoded(
            self.store, lambda: self.store.get(save.trash_key), lambda data: TrashRecord.decode(save, data, where)
        )
        if record.created:  # a save that never was a step may be committed after all, and dropped again
            self._trash[save] = record
        return record

    def warm_records(self, saves: Iterable[SaveId]) -> None:
        """Reads the trash records of these saves ahead, many at once."""
        warm(self.trash_record, [save for save in saves if save not in self._trash])

    def forget_records(self, left: Collection[SaveId]) -> None:
        """Forgets all trash records but those of these saves."""
        self._trash = {save: self._trash[save] for save in left if save in self._trash}

    def layout(self, digest: str) -> Layout:
        """Returns the layout. Raises CorruptData, FormatError, ObjectNotFound, ObjectUnreadable."""
        return self.shared.layout(digest)

    def part(self, name: PartName) -> Part:
        """Returns a part, checked against its name and its layout. Raises CorruptData, FormatError, ObjectNotFound."""
        return decoded(self.store, lambda: self.store.get(name.key), lambda data: self.decode_part(name, data))

    def part_alone(self, name: PartName) -> Part:
        """Returns a part without reading its layout, so it is checked against its name only. Raises as `part` does."""
        return decoded(self.store, lambda: self.store.get(name.key), lambda data: Part.decode(name, data))

    def decode_part(self, name: PartName, data: bytes) -> Part:
        """Decodes and checks a part, as `part` does, from its bytes."""
        with gc_pause.kept():  # with a thousand ranks, garbage collection took twice as long as all else
            part = Part.decode(name, data)
            part.table.check(self.layout(part.table.layout), name.key)
        return part

    def info(self, save: SaveId, visible: bool) -> CheckpointInfo:
        manifest = self.manifest(save)
        return CheckpointInfo(
            step=save.step,
            generation=save.generation.number,
            world_size=manifest.world_size,
            nbytes=manifest.nbytes,
            nbytes_state=manifest.nbytes_loaded,
            created=manifest.created,
            metrics=manifest.metrics,
            visible=visible,
            name=str(save),
        )

    def parts(self, save: SaveId) -> dict[int, list[PartName]]:
        """Returns the parts of a save that are there, failed ones included, by rank; sorted by attempt."""
        found: dict[int, list[PartName]] = {}
        entries = self.store.scan(save.parts_prefix)
        with gc_pause.kept():
            for entry in entries:
                name = keys.parse_part_key(entry.key)
                if name is not None and name.save == save:
                    found.setdefault(name.rank, []).append(name)
        for names in found.values():
            if len(names) > 1:
                names.sort(key=lambda n: n.attempt)
        return found

    def is_committed(self, save: SaveId) -> bool:
        """Whether the save's manifest is there."""
        return self.is_there(save.manifest_key)

    def is_there(self, key: str) -> bool:
        """Whether the store has an object that is not empty, readable or not; at a tenth of the price of a listing."""
        try:
            return bool(self.store.get(key, 0, 1))
        except ObjectNotFound:
            return False
        except (FormatError, ObjectUnreadable):  # it cannot be read, but it is there, or something in its place
            return self.store.entry(key) is not None

    def next_generation(self) -> GenerationId:
        """Returns a new id with a number above all others. Puts nothing yet."""
        return successor(self.generations.ids(), self.saves())
