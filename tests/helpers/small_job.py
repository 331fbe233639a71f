"""A whole job in one thread: writers, committer and retention on a store in memory, beside a dict that knows better.

What runs is the code that runs in production, from persist to sweep. What judges it shares nothing with it: a dict of
what each save was made of, a plain reader of documents, and rules of history and retention that are written anew here.
Time is the store's: it moves when the job says so. Nothing is left to chance.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import timedelta
from math import inf
from typing import Any

import numpy as np
from helpers.actors import ActorStore, Crash, Inline
from helpers.memory_slots import memory_slot
from helpers.objects import objects_of
from helpers.plain_reader import Chunk, body_of, chunks_of, parts_of, tensors_of
from support import ROOT_ID, age

from ckptlib.catalog.catalog import Catalog
from ckptlib.catalog.commit import Committer
from ckptlib.catalog.finishing import finish_saves
from ckptlib.catalog.retention import Sweep, sweep
from ckptlib.catalog.shared_documents import put_new
from ckptlib.errors import SaveFailed, Superseded
from ckptlib.format.digests import XXH3
from ckptlib.format.keys import GenerationId, SaveId, parse_save
from ckptlib.format.manifest import Generation, Root
from ckptlib.policy.codec import RAW, Asked, CodecRules
from ckptlib.policy.keep import EARLY_S, Keep
from ckptlib.stores.memory import MemoryStore
from ckptlib.writer.known_origin import KnownOrigin, OwnPart
from ckptlib.writer.persist import Persister
from ckptlib.writer.rescue import rescue

HOUR_S = 3600.0
DEADLINE_S = HOUR_S
GRACE = timedelta(hours=24)
GRACE_S = GRACE.total_seconds()
REFRESH_S = 7 * 24 * HOUR_S

TENSORS, ROWS, COLUMNS = 4, 4, 1024
"""A row is a chunk. That of the last tensor is a table of many rows, of which few change at once."""

TABLE = f"t{TENSORS - 1}"
TABLE_ROWS, TABLE_COLUMNS = 16, 64
"""Of a chunk of it."""

SAVE = re.compile(r"[0-9]{12}-[0-9]{6}-[0-9a-f]{8}")


@dataclass
class Writer:
    """The writer process of one rank."""

    store: ActorStore
    persister: Persister
    committer: Committer


@dataclass
class Save:
    """One that is under way, or was left there."""

    id: SaveId
    world_size: int
    began: float
    persisted: set[int] = field(default_factory=set)


@dataclass
class Dropped:
    """A step that a reader may have looked up just before."""

    manifest: bytes
    at: float


class SmallJob:
    """Its generations follow one another; of the one that runs, each rank has a writer."""

    def __init__(
        self,
        store: MemoryStore | None = None,
        world_size: int = 2,
        refresh_s: float = REFRESH_S,
        codec: Asked = RAW,
    ) -> None:
        self.store = MemoryStore() if store is None else store
        self.store.pack_nbytes = 4 * COLUMNS * 4
        self.refresh_s, self.codec = refresh_s, codec
        self.now = 1e9
        self.drawn = np.random.default_rng(0)
        self.state = self.fresh_state()
        self.oracle: dict[SaveId, dict[str, np.ndarray]] = {}
        self.listed: set[SaveId] = set()
        """What must be listed, and nothing else."""
        self.origins: dict[GenerationId, SaveId | None] = {}
        self.dropped: dict[SaveId, Dropped] = {}
        self.saves: list[Save] = []
        self.in_memory: list[Save] = []
        """Those that a later generation went on from before they were committed, with what their hosts still hold."""
        self.crashed = False
        """Whether any process has been killed."""
        Catalog(self.store).open_root(Root(ROOT_ID, XXH3, DEADLINE_S))
        self.begin(None, world_size)

    # -- what it is made of

    def fresh_state(self) -> dict[str, np.ndarray]:
        found = {f"t{i}": np.stack([self._content(i) for _ in range(ROWS)]) for i in range(TENSORS)}
        found[TABLE] = found[TABLE].reshape(-1, TABLE_COLUMNS)
        return {**found, "bias": np.zeros(5, np.int64), "count": np.array(0.0)}

    def _content(self, tensor: int) -> np.ndarray:
        """Of a chunk: noise, NaNs of every payload among it; weights; ids; rows of noise."""
        if tensor == 1:
            return self.drawn.normal(0, 0.02, COLUMNS).astype(np.float32)
        if tensor == 2:
            return self.drawn.integers(0, 30_000, COLUMNS).astype(np.int32)
        return self._noise((COLUMNS,))

    def _noise(self, shape: tuple[int, ...]) -> np.ndarray:
        return np.frombuffer(self.drawn.bytes(4 * int(np.prod(shape))), np.float32).reshape(shape).copy()

    def change(self, rows: Iterable[int]) -> None:
        """Of all tensors, counted through; of a chunk of the table one row."""
        for row in rows:
            tensor, at = row // ROWS % TENSORS, row % ROWS
            if f"t{tensor}" == TABLE:
                touched = TABLE_ROWS * at + int(self.drawn.integers(TABLE_ROWS))
                self.state[TABLE][touched] = self._noise((TABLE_COLUMNS,))
            else:
                self.state[f"t{tensor}"][at] = self._content(tensor)

    def change_small(self) -> None:
        self.state["count"] = self.state["count"] + 1
        self.state["bias"] = self.state["bias"] + 1

    # -- processes

    def begin(self, resumed_from: SaveId | None, world_size: int, told: bool = False) -> None:
        """A new generation; what older ones left undone is seldom committed any more. `told`: the writers are, of what
        their trainers have read."""
        number = len(self.origins) + 1
        self.generation = GenerationId(number, f"{number:08x}")
        record = Generation(self.generation, world_size, resumed_from, self.now, {}, "here")
        Catalog(self.store).generations.put(record)
        self.origins[self.generation] = resumed_from
        self.world_size, self.step, self.began = world_size, 0, self.now
        if resumed_from is not None:
            self.state = {name: array.copy() for name, array in self.oracle[resumed_from].items()}
            self.step = resumed_from.step
        self.restart_all()
        if resumed_from is not None and told:
            manifest = self.catalog().manifest(resumed_from)
            for rank, writer in enumerate(self.writers):
                writer.persister.go_on_from(resumed_from, self.known(resumed_from, rank))
            self.writers[0].committer.catalog.keep_stand(manifest)

    def known(self, save: SaveId, rank: int) -> KnownOrigin:
        """What the trainer of a rank knows that has restored a step, on as many ranks as there are now."""
        manifest = self.catalog().manifest(save)
        if manifest.world_size != self.world_size:
            return KnownOrigin(save, None)
        name = manifest.parts[rank]
        return KnownOrigin(save, OwnPart(name, self.store.get(name.key)), self.store.get(save.manifest_key))

    def _writer(self, rank: int, world_size: int | None = None) -> Writer:
        store = ActorStore(self.store)
        rules = CodecRules.of(self.codec)
        catalog = Catalog(store)
        given = store, Inline(), rank, world_size or self.world_size, self.refresh_s, rules
        return Writer(store, Persister(*given, shared=catalog.shared), Committer(catalog))  # type: ignore[arg-type]

    def catalog(self) -> Catalog:
        return Catalog(self.store)

    def restart(self, rank: int) -> None:
        self.writers[rank] = self._writer(rank)

    def restart_all(self) -> None:
        self.writers = [self._writer(rank) for rank in range(self.world_size)]

    def advance(self, seconds: float) -> None:
        self.now += seconds
        age(self.store, seconds)

    @contextmanager
    def killed(self, writer: Writer, after: int | None) -> Iterator[None]:
        """Within, a writer does so many operations (None: all); if it dies of that, another one takes its place."""
        writer.store.left = after
        try:
            yield
        except Crash:
            self.crashed = True
            if writer in self.writers:
                self.restart(self.writers.index(writer))
        finally:
            writer.store.left = None

    # -- saves

    def begin_save(self) -> Save:
        self.step += 1
        save = Save(SaveId(self.step, self.generation), self.world_size, self.now)
        self.oracle[save.id] = {name: array.copy() for name, array in self.state.items()}
        self.saves.append(save)
        return save

    def slot(self, save: Save, rank: int) -> Any:
        return memory_slot(save.id, rank, self.oracle[save.id], save.world_size, save.began)

    def persist(self, save: Save, rank: int, killed_after: int | None = None) -> None:
        writer = self.writers[rank]
        with self.killed(writer, killed_after):
            writer.persister.persist(self.slot(save, rank), save.id)
            save.persisted.add(rank)

    def save(self) -> Save:
        """Persisted on all ranks."""
        save = self.begin_save()
        for rank in range(self.world_size):
            self.persist(save, rank)
        return save

    def commit(self, save: Save, killed_after: int | None = None) -> None:
        """Of the generation that runs. Refused only if parts are missing, or it comes too late."""
        writer = self.writers[0]
        with self.killed(writer, killed_after), self._refused_only(save):
            writer.committer.commit_when_whole(save.id, save.world_size, lambda: 0.0)
        self._committed(save.id)
        if save in self.saves:
            self.saves.remove(save)

    def save_and_commit(self) -> SaveId:
        save = self.save()
        self.commit(save)
        return save.id

    @contextmanager
    def _refused_only(self, save: Save) -> Iterator[None]:
        """Where parts are missing, or it comes too late."""
        error = None
        try:
            yield
        except SaveFailed as found:
            error = found
        whole = len(save.persisted) == save.world_size
        assert error is None or not whole or self.now - save.began > DEADLINE_S, error

    def _committed(self, save: SaveId) -> None:
        if save in self.found_listed():
            self.listed.add(save)
            self.dropped.pop(save, None)

    def rescue(self, save: Save, ranks: Iterable[int]) -> None:
        """The trainers are gone: these ranks' writers persist what they and their peers held, and commit."""
        slots = [self.slot(save, rank) for rank in range(save.world_size)]
        for rank in ranks:
            writer = self.writers[rank]
            with self._refused_only(save):
                rescue(slots, save.id, rank, writer.persister, writer.committer, inf)
                save.persisted = {*range(save.world_size)}
        self._committed(save.id)

    def begin_from_memory(self, save: Save) -> None:
        """A new generation, by a save that all ranks held, and that may be nowhere else."""
        self.in_memory = [*(other for other in self.in_memory if other is not save), save]
        self.begin(save.id, save.world_size)

    def rescue_later(self, save: Save, ranks: Iterable[int], killed_after: int | None = None) -> None:
        """Writers that are left persist what a later generation went on from, whatever that has come to. Refused only
        where the newest generation goes on from elsewhere, or where it was a step that retention has dropped."""
        slots, goes_on = [self.slot(save, rank) for rank in range(save.world_size)], self.goes_on_from(save.id)
        for rank in ranks:
            writer = self._writer(rank, save.world_size)
            with self.killed(writer, killed_after):
                try:
                    rescue(slots, save.id, rank, writer.persister, writer.committer, inf)
                    later = {other for other in self.listed if other.generation > save.id.generation}
                    found = {save.id, *filter(self.goes_on_from, later)}
                    assert goes_on, "saved, though the job goes on from elsewhere"
                    assert found & self.found_listed(), "neither this step is there, nor a later job's"
                except Superseded:
                    assert not goes_on, "refused, though the job goes on from it"
                except SaveFailed:
                    assert self.now - save.began > DEADLINE_S or save.id.trash_key in self.keys("trash/")
        self._committed(save.id)

    def goes_on_from(self, save: SaveId) -> bool:
        """Whether it is on the way of the newest generation, whether that has committed or not."""
        generation, limit = max(self.origins), 10**12
        while generation != save.generation:
            origin = self.origins[generation]
            if origin is None or generation < save.generation:
                return False
            generation, limit = origin.generation, min(limit, origin.step)
        return save.step <= limit

    def finish(self, killed_after: int | None = None) -> None:
        """What a new generation does first with what older ones left."""
        store = ActorStore(self.store, killed_after)
        try:
            finish_saves(Catalog(store), GenerationId(len(self.origins) + 1, "0" * 8))
        except Crash:
            self.crashed = True
        for save in self.found_listed() - self.listed:
            self._committed(save)
        self.saves.clear()

    # -- retention

    def sweep(
        self, keep: Keep | None, live: bool = False, killed_after: int | None = None, abandoned: bool = False
    ) -> Sweep | None:
        """By the job's own committer, or by `ckptlib gc`. What goes is compared with what may go."""
        manifests = {save: self.store.get(save.manifest_key) for save in self.listed}
        may_go = self.unwanted(keep, abandoned)
        store, done = ActorStore(self.store, killed_after), None
        try:
            if live:
                with self.killed(self.writers[0], killed_after):
                    done = sweep(self.writers[0].committer.catalog, keep, self.generation, abandoned=abandoned)
            else:
                done = sweep(Catalog(store), keep, None, abandoned=abandoned)
        except Crash:
            self.crashed = True
        self.note_dropped(manifests)
        left = {*manifests} & self.listed
        assert {*manifests} - left <= may_go, "a step that must be kept was dropped"
        if done is not None:
            assert not left & {*done.dropped}
        return done

    def make_room(self, keep: Keep, killed_after: int | None = None) -> None:
        """The job's own committer does, between two commits: the store is full. Not as soon as it has begun."""
        if self.now - self.began < EARLY_S:
            return
        manifests = {save: self.store.get(save.manifest_key) for save in self.listed}
        may_go = self.unwanted(keep, False)
        oldest = min(self.saves, key=lambda save: save.began, default=None)
        in_flight_s = 0.0 if oldest is None else self.now - oldest.began
        decided = SaveId(self.step if oldest is None else oldest.id.step - 1, self.generation)
        early_s = EARLY_S + in_flight_s
        with self.killed(self.writers[0], killed_after):
            catalog = self.writers[0].committer.catalog
            sweep(catalog, keep, self.generation, early_s=early_s, decided=decided)
        self.note_dropped(manifests)
        assert manifests.keys() - self.listed <= may_go, "a step that must be kept was dropped"
        self.dropped = {save: d for save, d in self.dropped.items() if self.now - d.at < early_s - 1}

    def note_dropped(self, manifests: dict[SaveId, bytes]) -> None:
        """`manifests`: of what was listed before."""
        for save in manifests.keys() - self.found_listed():
            self.listed.discard(save)
            self.dropped[save] = Dropped(manifests[save], self.now)

    def visible(self) -> list[SaveId]:
        """History, as docs tell it."""
        generation, limit, found = max((s.generation for s in self.listed), default=None), 10**12, list[SaveId]()
        while generation is not None:
            found += [s for s in self.listed if s.generation == generation and s.step <= limit]
            origin = self.origins[generation]
            generation = None if origin is None else origin.generation
            limit = limit if origin is None else min(limit, origin.step)
        return sorted(found)

    def unwanted(self, keep: Keep | None, abandoned: bool) -> set[SaveId]:
        visible = self.visible()
        found = {*self.listed} - {*visible} if abandoned else set()
        if keep is not None:
            found |= {s for s in visible[: -keep.last] if keep.every is None or s.step % keep.every}
        newest = max(self.origins)
        if not any(save.generation == newest for save in self.listed):
            found.discard(self.origins[newest])  # type: ignore[arg-type]
        return found

    def mark(self, save: SaveId) -> None:
        """What `ckptlib refresh` puts."""
        put_new(self.store, save.refresh_key, b"")

    # -- what must be true

    def found_listed(self) -> set[SaveId]:
        names = [key.removeprefix("steps/").partition(".") for key in self.keys("steps/")]
        return {parse_save(name) for name, _, kind in names if kind == "json"}

    def keys(self, prefix: str) -> list[str]:
        return sorted(key for key in objects_of(self.store) if key.startswith(prefix))

    def check(self) -> None:
        """Every step that is listed loads, bit for bit, and every one that is to be listed is; so do those that were
        dropped less than the grace period ago, by a manifest that was read before."""
        assert self.found_listed() == self.listed
        for save in self.listed:
            self.check_loads(save, self.store.get(save.manifest_key))
        self.dropped = {save: d for save, d in self.dropped.items() if self.now - d.at < GRACE_S - 60}
        for save, dropped in self.dropped.items():
            self.check_loads(save, dropped.manifest)

    def check_loads(self, save: SaveId, manifest: bytes) -> None:
        try:
            found = tensors_of(self.store.get, manifest)
        except Exception as error:
            raise AssertionError(f"{save} does not load: {error!r}") from error
        wanted = self.oracle[save]
        assert found.keys() == wanted.keys(), save
        for name, array in wanted.items():
            assert found[name].tobytes() == array.tobytes(), (save, name)

    def settle(self, keep: Keep | None = None) -> None:
        """Two sweeps, each beyond the grace period: what is left then is needed."""
        self.saves.clear()
        for _ in range(2):
            self.advance(GRACE_S + HOUR_S)
            self.sweep(keep)
            self.check()
        self.check_tidy()

    def check_tidy(self) -> None:
        manifests = {save: self.store.get(save.manifest_key) for save in self.listed}
        bodies = [body_of(data, str(save)) for save, data in manifests.items()]
        parts = [part for data in manifests.values() for part in parts_of(self.store.get, data)]
        packs = {key for part in parts for key, *_ in part["packs"]}
        used = {_set_of(key) for key in packs} | {str(save) for save in self.listed}
        assert packs <= {*self.keys("packs/")}
        found = {_set_of(key) for key in self.keys("packs/")}
        assert found <= used | {f"{save}-carried" for save in self.listed}, f"not needed: {sorted(found - used)}"
        of_others = {name.removesuffix("-carried") for name in used} - {str(save) for save in self.listed}
        assert {key[6:-5] for key in self.keys("trash/")} == of_others
        assert {key.split("/")[1] for key in self.keys("parts/")} == {str(save) for save in self.listed}
        layouts = {digest for body in bodies for digest in body["layouts"]}
        assert self.keys("layouts/") == sorted(f"layouts/{digest}.json" for digest in layouts)
        markers = {key[6:-8] for key in self.keys("steps/") if key.endswith(".refresh")}
        asked = max((parse_save(name) for name in markers), default=None)
        before = {name.removesuffix("-carried") for body in bodies for name in body["uses"]}
        assert asked is None or asked in self.listed or any(parse_save(name) <= asked for name in before)

    def nbytes_stored(self) -> int:
        """Of packs."""
        return sum(len(self.store.get(key)) for key in self.keys("packs/"))

    def nbytes_needed(self) -> int:
        """Of chunks that listed steps have, and of their bases, each place once."""
        return sum(nbytes for _, _, nbytes in self.places())

    def places(self) -> set[tuple[str, int, int]]:
        """Pack, offset and bytes of what listed steps need."""
        chunks = self.chunks()
        chunks |= {c.frame.base for c in chunks if c.frame is not None and c.frame.base is not None}
        return {(chunk.pack, chunk.offset, chunk.nbytes) for chunk in chunks}

    def chunks(self) -> set[Chunk]:
        """Of listed steps."""
        manifests = [self.store.get(save.manifest_key) for save in self.listed]
        return {c for data in manifests for part in parts_of(self.store.get, data) for c in chunks_of(part)}


def copied(job: SmallJob) -> SmallJob:
    """With a store of its own. What writers remember is not copied."""
    store = MemoryStore()
    store.pack_nbytes = job.store.pack_nbytes
    objects_of(store).update(objects_of(job.store))
    found = SmallJob.__new__(SmallJob)
    found.__dict__.update(job.__dict__)
    found.store, found.crashed = store, False
    found.state = {name: array.copy() for name, array in job.state.items()}
    found.oracle, found.origins, found.dropped = dict(job.oracle), dict(job.origins), dict(job.dropped)
    found.listed, found.saves, found.in_memory = {*job.listed}, [*job.saves], [*job.in_memory]
    found.restart_all()
    return found


def _set_of(key: str) -> str:
    save = key.split("/")[1]
    return f"{save}-carried" if "-carried-" in key else save
