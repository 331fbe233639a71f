"""What a root holds: its steps, their history, and the one way by which a step comes to exist.

History is linear with rewinds. The head is the newest generation that has committed. Visible are its own steps and
those of the generation it resumed from, up to the step it resumed from, and so on. A generation that never committed
is no part of history. No torch.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache, partial
from typing import Any

from ckptlib.catalog.completeness import Doubt, Proof
from ckptlib.catalog.shards import Contents, Share
from ckptlib.errors import (
    CheckpointNotFound,
    CkptError,
    CorruptData,
    FormatError,
    NewerFormat,
    ObjectExists,
    ObjectNotFound,
    ObjectUnreadable,
    ReplicasDiffer,
    SaveFailed,
    Superseded,
    UnsupportedState,
)
from ckptlib.format import gc_pause, keys
from ckptlib.format.check import alike
from ckptlib.format.digests import XXH3, digester
from ckptlib.format.documents import as_written
from ckptlib.format.keys import GenerationId, PartName, SaveId
from ckptlib.format.layout import Layout, decode_layout
from ckptlib.format.manifest import Generation, Manifest, Root, ranks_by_layout
from ckptlib.format.part import FailedPart, Part, PartHead
from ckptlib.stores import Store
from ckptlib.stores.io_limits import Pace

log = logging.getLogger(__name__)

POLL_FIRST_S = 0.005
POLL_LAST_S = 0.5
"""How often a committer looks for parts: at once on a local disk, seldom when ranks are slow."""

SHARES_KEPT = 4
"""Parts that are kept while what several ranks wrote is compared, rank by rank."""


@dataclass(frozen=True, slots=True)
class CheckpointInfo:
    """One committed step, as `ckptlib.checkpoints` lists it."""

    step: int
    generation: int
    world_size: int
    nbytes: int
    """Of all packs."""
    created: float
    """When the snapshot was taken; seconds since the epoch, by rank 0's clock."""
    metrics: Mapping[str, Any]
    visible: bool
    """Whether it lies on the job's history; a step left behind by a rewind does not."""
    name: str
    """<step>-<generation>-<nonce>."""


def history(saves: Iterable[SaveId], generations: Mapping[GenerationId, Generation]) -> list[SaveId]:
    """The visible ones of committed saves, ascending by step. Pure."""
    by_generation: dict[GenerationId, list[SaveId]] = {}
    for save in saves:
        by_generation.setdefault(save.generation, []).append(save)
    found: list[SaveId] = []
    head = max(by_generation, default=None)
    limit = keys.MAX_STEP
    seen: set[GenerationId] = set()
    while head is not None and head not in seen:
        seen.add(head)
        found += [save for save in by_generation.get(head, []) if save.step <= limit]
        record = generations.get(head)
        origin = None if record is None else record.resumed_from
        if origin is not None:
            limit = min(limit, origin.step)
        head = None if origin is None else origin.generation
    return sorted(found)


class Catalog:
    """One root in one store. Immutable documents are read once and kept."""

    def __init__(self, store: Store) -> None:
        self.store = store
        self._generations: dict[GenerationId, Generation] = {}
        self._layouts: dict[str, Layout] = {}
        self._verified: dict[tuple[str | None, ...], tuple[Mapping[str, tuple[int, ...]], int]] = {}

    # Reading

    def root(self) -> Root:
        """Raises CheckpointNotFound where there is none."""
        try:
            return Root.decode(self.store.get(keys.ROOT), f"{self.store.url}/{keys.ROOT}")
        except ObjectNotFound as error:
            raise CheckpointNotFound(f"{self.store.url} holds no checkpoints: there is no {keys.ROOT}") from error

    def open_root(self, make: Root) -> Root:
        """The root's document; `make` is put where there is none."""
        try:
            return self.root()
        except CheckpointNotFound:
            self._put_new(keys.ROOT, make.encode())
            return self.root()

    def _put_new(self, key: str, data: bytes) -> None:
        try:
            self.store.put(key, data)
        except ObjectExists:
            return  # somebody else was first; theirs stands

    def saves(self) -> list[SaveId]:
        """Every committed save, by step."""
        found = (keys.parse_manifest_key(entry.key) for entry in self.store.scan(keys.STEPS))
        return sorted(save for save in found if save is not None)

    def generation_ids(self) -> list[GenerationId]:
        """Every generation that has put its record, ascending."""
        found = (keys.parse_generation_key(entry.key) for entry in self.store.scan(keys.GENERATIONS))
        return sorted(generation for generation in found if generation is not None)

    def generations(self) -> dict[GenerationId, Generation]:
        """Their records. Raises CorruptData or FormatError for a damaged one."""
        return {generation: self.generation(generation) for generation in self.generation_ids()}

    def records(self) -> tuple[dict[GenerationId, Generation], dict[GenerationId, CkptError]]:
        """Of each generation its record, or why it is not known what it resumed from; history ends with these.

        Raises NewerFormat.
        """
        saves = self.saves()  # first: who commits has put its record
        return self._records(self.generation_ids(), saves)

    def _records(
        self, ids: Iterable[GenerationId], saves: Iterable[SaveId], newer: bool = False
    ) -> tuple[dict[GenerationId, Generation], dict[GenerationId, CkptError]]:
        found: dict[GenerationId, Generation] = {}
        lost: dict[GenerationId, CkptError] = {}
        for generation in ids:
            try:
                found[generation] = self.generation(generation)
            except (CorruptData, FormatError, ObjectNotFound, ObjectUnreadable) as error:
                if isinstance(error, NewerFormat) and not newer:
                    raise
                lost[generation] = error
        origins = (record.resumed_from for record in found.values())
        for save in (*saves, *(origin for origin in origins if origin is not None)):
            if save.generation not in found:
                where = f"{self.store.url}/{save.generation.key}"
                lost.setdefault(save.generation, ObjectNotFound(f"{where}: no such object"))
        return found, lost

    def generation(self, generation: GenerationId) -> Generation:
        """Its record. Raises ObjectNotFound, CorruptData or FormatError."""
        if generation not in self._generations:
            key = generation.key
            record = Generation.decode(self.store.get(key), f"{self.store.url}/{key}")
            if record.id != generation:
                raise FormatError(f"{self.store.url}/{key}: content and name tell of different generations")
            self._generations[generation] = record
        return self._generations[generation]

    def check_versions(self) -> None:
        """Raises NewerFormat where a newer ckptlib has written the root's document or the record of a generation.

        What this one would take for the newest step may then be one that the job left behind, and what it would delete
        may be needed. Other damage of these documents is told where they are needed.
        """
        reads: list[Callable[[], object]] = [self.root, *(partial(self.generation, g) for g in self.generation_ids())]
        for read in reads:
            try:
                read()
            except NewerFormat:
                raise
            except (CheckpointNotFound, CorruptData, FormatError, ObjectNotFound, ObjectUnreadable):
                continue

    def visible(self, further: Collection[SaveId] = (), newer: bool = False) -> list[SaveId]:
        """The saves on the job's history, ascending by step. `further`: some that are whole, though not committed.

        Those of a generation without a record here are none: where a root was copied, both have its id, and a job of
        the other one may have left snapshots on this host.

        A lost or damaged record of a generation ends history, loudly: its own steps are whole all the same. A newer one
        raises NewerFormat; or with `newer`, for those who only look, it is like a damaged one.
        """
        saves = self.saves()
        generations = self.generation_ids()
        records, lost = self._records(generations, saves, newer)
        for generation, error in lost.items():
            log.error("what generation %s resumed from is not known: %s", generation, error)
        return history({*saves, *(save for save in further if save.generation in generations)}, records)

    def resolve(self, step: int | str) -> SaveId:
        """The save of a visible step; "latest", a step number, or a full name for one that is not visible.

        Raises CheckpointNotFound that says which steps there are, NewerFormat as `check_versions` does.
        """
        self.check_versions()
        visible = self.visible()
        if step == "latest":
            if not visible:
                raise CheckpointNotFound(f"{self.store.url} holds no committed step")
            return visible[-1]
        if isinstance(step, str) and not step.isdigit():
            try:
                save = keys.parse_save(step)
            except FormatError as error:
                raise CheckpointNotFound(
                    f"{self.store.url}: {step[:80]!r} is neither a step's number, nor its full name, nor 'latest'"
                ) from error
            if save in self.saves():
                return save
            raise CheckpointNotFound(f"{self.store.url} holds no save {step}")
        matching = [save for save in visible if save.step == int(step)]
        if not matching:
            steps = ", ".join(str(save.step) for save in visible[-8:])
            raise CheckpointNotFound(f"{self.store.url} holds no step {step}; the last ones are: {steps or 'none'}")
        return matching[-1]

    def manifest(self, save: SaveId) -> Manifest:
        """Raises CheckpointNotFound, CorruptData, FormatError."""
        try:
            return Manifest.decode(save, self.store.get(save.manifest_key), f"{self.store.url}/{save.manifest_key}")
        except ObjectNotFound as error:
            raise CheckpointNotFound(f"{self.store.url} holds no save {save}") from error

    def layout(self, digest: str) -> Layout:
        """Raises CorruptData, FormatError, ObjectNotFound."""
        found = self._layouts.get(digest)
        if found is None:
            key = keys.layout_key(digest)
            data = as_written(self.store.get(key), f"{self.store.url}/{key}")
            if digester(XXH3)(data) != digest:
                raise CorruptData(
                    f"{self.store.url}/{key} does not match the digest in its name; it was cut or altered"
                )
            found = self._layouts[digest] = decode_layout(data, key)
        return found

    def part(self, name: PartName) -> Part:
        """Verified against its name and its layout. Raises CorruptData, FormatError, ObjectNotFound."""
        data = self.store.get(name.key)
        with gc_pause.kept():  # of a thousand ranks, collections took twice as long as all else
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
            created=manifest.created,
            metrics=manifest.metrics,
            visible=visible,
            name=str(save),
        )

    # Writing

    def next_generation(self) -> GenerationId:
        """A number above all others. Nothing is put yet."""
        ids = self.generation_ids()
        last = max([*ids, *(save.generation for save in self.saves())], default=None)
        return GenerationId(1 if last is None else last.number + 1, keys.new_nonce())

    def put_generation(self, generation: Generation) -> None:
        """From here on, older generations are superseded."""
        self._put_new(generation.id.key, generation.encode())

    def put_layout(self, digest: str, document: bytes) -> None:
        """Once for all steps that share it; a damaged one is replaced, since every step that has it is lost with it."""
        key = keys.layout_key(digest)
        try:
            if digester(XXH3)(self.store.get(key)) == digest:
                return
            log.error("%s/%s does not match the digest in its name; it is put again", self.store.url, key)
            self.store.delete(key)
        except ObjectNotFound:
            pass
        except ObjectUnreadable as error:
            log.error("%s; it is put again", error)
            self.store.delete(key)
        self._put_new(key, document)

    def check_head(self, generation: GenerationId) -> None:
        """Raises Superseded when a newer generation has put its record."""
        newest = max(self.generation_ids(), default=generation)
        if newest > generation:
            raise Superseded(
                f"{self.store.url}: generation {generation} may no longer save: {newest} has begun. Two jobs use one "
                "root; stop one of them, or give each a root of its own"
            )

    def parts(self, save: SaveId) -> dict[int, list[PartName]]:
        """By rank: the parts of a save that are there, failed ones included, sorted."""
        found: dict[int, list[PartName]] = {}
        for entry in self.store.scan(save.parts_prefix):
            name = keys.parse_part_key(entry.key)
            if name is not None and name.save == save:
                found.setdefault(name.rank, []).append(name)
        return {rank: sorted(names, key=lambda n: n.attempt) for rank, names in found.items()}

    def is_committed(self, save: SaveId) -> bool:
        key = save.manifest_key
        return any(entry.key == key for entry in self.store.scan(key))

    def commit(self, save: SaveId, names: Sequence[PartName]) -> Manifest:
        """Makes the step exist. `names`: one part per rank.

        The first time that ranks lie as they do, all parts are read and it is proved that together they hold every
        element of every tensor, and one value of it; as long as the tables stay the same, and no two of them hold the
        same element, that proof stands. That ranks hold alike what one of them wrote for several is told by the checks
        in the parts' names, every time. Raises SaveFailed when they do not, ReplicasDiffer, Superseded, or what a
        damaged part raises; the step does not exist then.
        """
        assert [(n.save, n.rank) for n in names] == [(save, rank) for rank in range(len(names))], "one part per rank"
        if not alike(name.check for name in names):
            raise ReplicasDiffer(
                f"step {save.step}: what several ranks hold, and one of them wrote for all, is not the same on all of "
                "them; the step is not committed"
            )
        layouts, nbytes = self._prove(save, names)
        self.check_head(save.generation)
        first = PartHead.decode(names[0], self.store.get(names[0].key))
        manifest = Manifest(save, len(names), tuple(names), layouts, nbytes, first.created, first.metrics)
        self._put_new(save.manifest_key, manifest.encode())
        present = {entry.key for entry in self.store.scan(keys.LAYOUTS)}
        for digest in layouts:  # retention may have deleted one that no step named until now
            if keys.layout_key(digest) not in present:
                self.put_layout(digest, self.layout(digest).encoded)
        return manifest

    def _prove(self, save: SaveId, names: Sequence[PartName]) -> tuple[Mapping[str, tuple[int, ...]], int]:
        key = tuple(name.table for name in names)
        if key in self._verified:
            return self._verified[key]
        found: list[tuple[str, int]] = []
        nbytes, proof = 0, Proof()
        for name in names:
            part = self.part(name)
            if part.world_size != len(names):
                what = f"the part of rank {part.rank} is for {part.world_size} ranks, expected {len(names)}"
                raise SaveFailed(f"step {save.step}: {what}")
            found.append((part.table.layout, part.rank))
            nbytes += sum(pack.nbytes for pack in part.packs)
            proof.add(part, self.layout(part.table.layout))
        if (clash := proof.clash()) is not None:
            raise SaveFailed(f"step {save.step}: {clash}; the step is not committed")
        try:
            missing = proof.missing()
            doubts = proof.doubts() if missing is None else []
        except (FormatError, UnsupportedState) as error:
            raise SaveFailed(f"step {save.step}: {error}; the step is not committed") from error
        if missing is not None:
            raise SaveFailed(f"step {save.step}: no rank wrote {missing}; the step is not committed")
        self._settle(save, names, doubts)
        layouts = ranks_by_layout(found)
        if not doubts:  # what lies as it did may have other bytes the next time
            self._verified = {key: (layouts, nbytes)}
        return layouts, nbytes

    def _settle(self, save: SaveId, names: Sequence[PartName], doubts: Sequence[Doubt]) -> None:
        """Raises SaveFailed where what two ranks wrote of a tensor is not equal."""
        contents = Contents(self.store.get_into)

        @lru_cache(maxsize=SHARES_KEPT)
        def share(rank: int) -> Share:
            part = self.part(names[rank])
            return Share(part, self.layout(part.table.layout))

        for doubt in doubts:
            if not contents.settles(doubt, share):
                where, (first, second) = f"{doubt.name}{doubt.region}", doubt.ranks
                raise SaveFailed(
                    f"step {save.step}: {where}: ranks {first} and {second} saved different bytes for it; the step is "
                    "not committed. If each rank has its own, say PerRank; if these are pieces of one tensor, DTensor "
                    "or Sharded(tensor, offset, shape), with boxes that are equal where they overlap"
                )

    def commit_when_whole(self, save: SaveId, world_size: int, seconds_left: Callable[[], float]) -> Manifest:
        """Waits for a part of every rank, then commits.

        Raises SaveFailed with the ranks that failed, or that did not come while there were seconds left.
        """
        if self.is_committed(save):  # by one that died before it could say so
            return self.manifest(save)
        pause = POLL_FIRST_S
        while True:
            names, missing = self._complete(save, world_size)
            if not missing:
                return self.commit(save, names)
            if seconds_left() <= 0:
                some = ", ".join(map(str, missing[:16])) + (", ..." if len(missing) > 16 else "")
                raise SaveFailed(f"step {save.step}: no part came from {len(missing)} of {world_size} ranks: {some}")
            self.check_head(save.generation)
            time.sleep(pause)
            pause = min(pause * 1.5, POLL_LAST_S)

    def _complete(self, save: SaveId, world_size: int) -> tuple[list[PartName], list[int]]:
        """One good part per rank, and the ranks that have none. Raises SaveFailed for a rank that failed.

        All of one snapshot: there may be parts of two that were taken at the same step.
        """
        found = self.parts(save)
        self._raise_failure(save, found)
        by_number: dict[int, dict[int, PartName]] = {}
        for rank, names in found.items():
            for name in names:
                if name.ok and rank < world_size:
                    by_number.setdefault(-1 if name.check is None else name.check.number, {}).setdefault(rank, name)
        good = max(by_number.items(), key=lambda item: (len(item[1]), item[0]), default=(0, {}))[1]
        missing = [rank for rank in range(world_size) if rank not in good]
        return [good[rank] for rank in sorted(good)], missing

    def _raise_failure(self, save: SaveId, found: Mapping[int, list[PartName]]) -> None:
        for rank, names in found.items():
            if names and not any(name.ok for name in names):
                failure = FailedPart.decode(names[0], self.store.get(names[0].key))
                raise SaveFailed(f"step {save.step}: rank {rank} failed: {failure.error}")

    def raise_if_failed(self, save: SaveId) -> None:
        """Raises SaveFailed when a rank has published that its part will not come, or rank 0 that it gave up."""
        found = self.parts(save)
        self._raise_failure(save, found)
        self._raise_failure(save, {0: [name for name in found.get(0, []) if not name.ok]})

    def finish(self, generation: GenerationId) -> list[SaveId]:
        """Commits the saves of dead generations, older than `generation`, whose parts are all there.

        What was persisted whole before a crash is not lost with the committer.
        """
        committed = set(self.saves())
        waiting = {
            name.save
            for entry in self.store.scan(keys.PARTS)
            if (name := keys.parse_part_key(entry.key)) is not None and name.save not in committed
        }
        trashed = {keys.parse_trash_key(entry.key) for entry in self.store.scan(keys.TRASH)}
        done = []
        for save in sorted(waiting - trashed):
            if save.generation < generation and self._finish_one(save):
                done.append(save)
        return done

    def _finish_one(self, save: SaveId) -> bool:
        names = self.parts(save)
        if 0 not in names or not all(n.ok for found in names.values() for n in found):
            return False  # a rank, or the committer, said that it gave up
        self._verified.clear()  # nobody is left who knows whether these parts are whole: read them all
        try:
            world_size = self.part(next(n for n in names[0] if n.ok)).world_size
            complete, missing = self._complete(save, world_size)
            if missing:
                return False
            self.commit(save, complete)
        except (CorruptData, FormatError, ObjectNotFound, ObjectUnreadable, SaveFailed) as error:
            log.warning("step %d is not committed, though all its parts are there: %s", save.step, error)
            return False  # damaged or incomplete: it never existed, and retention will sweep it
        return True


class Committed:
    """A committed step, as a source for a Reader."""

    def __init__(self, catalog: Catalog, manifest: Manifest) -> None:
        self._catalog = catalog
        self._parts = manifest.parts
        self.save = manifest.save
        self.world_size, self.layouts = manifest.world_size, manifest.layouts
        self.where = catalog.store.url
        self.pace = Pace()

    def layout(self, digest: str) -> Layout:
        return self._catalog.layout(digest)

    def part(self, rank: int) -> Part:
        return self._catalog.part(self._parts[rank])

    def read_into(self, pack: str, offset: int, buffer: memoryview) -> None:
        self._catalog.store.get_into(pack, offset, buffer)

    def near(self, ranks: Collection[int]) -> None:
        """A store is as far from one rank as from another."""

    def bring(self, ranks: Collection[int]) -> None:
        """All of it is readable everywhere."""
