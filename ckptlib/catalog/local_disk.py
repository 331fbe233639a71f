"""A root's saves on the disk of one host, the local tier: which of them stay there, and for how long.

Names and bytes are those of the root. There is no manifest: a step is whole if the disks of all hosts together hold a
part of every rank. The disk belongs to its host: each rank's writer removes objects of its own rank, leftovers of
earlier generations, and layouts that no part names. No torch.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Collection, Iterable, Mapping, Set
from dataclasses import dataclass

from ckptlib.catalog.catalog import Catalog
from ckptlib.catalog.shared_documents import put_new
from ckptlib.errors import (
    CkptError,
    CorruptData,
    FormatError,
    NewerFormat,
    ObjectNotFound,
    ObjectUnreadable,
    StoreError,
)
from ckptlib.format import keys
from ckptlib.format.keys import GenerationId, PartName, SaveId
from ckptlib.format.manifest import Root
from ckptlib.stores import Entry, Store
from ckptlib.stores.local import LocalStore
from ckptlib.stores.probe import PREFIX as PROBE

log = logging.getLogger(__name__)

UNFINISHED_S = 3600.0
"""The age at which a half-written file of a crash, or a layout that no part names, is removed. Younger ones stay,
since other ranks write here, too."""


def open_disk(path: str, root: Root, store: Store | None) -> None:
    """Makes the directory, or checks that it belongs to this root, and is not the root itself.

    `store`: the root's store, to compare with; None if another rank does that. Raises StoreError, and ValueError if the
    directory is a root: objects swept from it would be lost.
    """
    with LocalStore(path) as disk:
        put_new(disk, keys.ROOT, root.encode())
        try:
            found = Root.decode(disk.get(keys.ROOT), f"{disk.url}/{keys.ROOT}")
        except NewerFormat:
            raise
        except (FormatError, CorruptData, ObjectUnreadable) as error:
            raise type(error)(
                f"{error}. So nothing tells which root the steps in local={path} are of, and nothing there is used or "
                f"removed. If no other root ever had this directory, delete {keys.ROOT} in it: the next start puts it "
                "again, and uses the steps there. Else give local= another directory, without those"
            ) from error
        is_root = bool(disk.scan(keys.GENERATIONS) or disk.scan(keys.STEPS))
        if store is not None and not is_root:
            probe = f"{PROBE}{keys.new_nonce()}"
            disk.put(probe, b"")
            try:
                is_root = store.entry(probe) is not None
            finally:
                disk.delete(probe)
    if is_root:
        raise ValueError(f"local={path}: is a root of its own, or the job's; give the local tier another directory")
    if found.id != root.id:
        raise StoreError(
            f"local={path}: holds what was saved for root {found.id}, but this job saves to root {root.id}; give each "
            "root a directory of its own, or delete that one if nothing in it is needed"
        )


def disk_for(path: str, store: Store) -> LocalStore:
    """Returns the disk with the properties of `store`, to which it is drained: packs are cut and chunks encoded for
    that store."""
    disk = LocalStore(path)
    disk.pack_nbytes, disk.late_nbytes, disk.is_local = store.pack_nbytes, store.late_nbytes, store.is_local
    return disk


def part_there(disk: Catalog, save: SaveId, rank: int) -> PartName | None:
    """Returns the rank's part of a save on this disk. Its packs are there too, since the part is put last."""
    good = [name for name in disk.parts(save).get(rank, []) if name.ok]
    return max(good, key=lambda name: (-1 if name.check is None else name.check.number, name.attempt), default=None)


@dataclass(frozen=True, slots=True)
class Stays:
    """The steps that must stay."""

    whole: SaveId | None
    """The newest step of the own generation that all ranks hold; None if not known: all of its steps stay then."""
    settled: int
    """Steps after `whole`, up to this one, failed on some rank."""
    pinned: Set[SaveId]
    """Steps that are being drained, or wait for it, and the step that later saves refer to."""
    last: int
    """How many of the newest steps stay."""
    recorded: bool = True
    """Whether the record of the own generation is in the store; if not, a restart finds it by the note on this disk."""
    earlier: Set[SaveId] | None = None
    """Steps of earlier generations that stay until all ranks hold a step of the own one and it is recorded; None: all
    of them."""

    @property
    def replaces(self) -> bool:
        """Whether steps of earlier generations are no longer needed."""
        return self.whole is not None and self.recorded


def kept(saves: Iterable[SaveId], stays: Stays) -> set[SaveId]:
    """Returns which of these steps stay; `saves`: of the own generation, of which a rank has a part. Pure."""
    ascending = sorted(saves)
    if stays.whole is None:
        return {*ascending}
    sound = [save for save in ascending if save <= stays.whole or save.step > stays.settled]
    newest = {save for save in sound if save >= stays.whole}
    return newest | {*sound[-stays.last :]} | stays.pinned


def unwanted(
    objects: Iterable[Entry], rank: int, generation: GenerationId, saves: Collection[SaveId], packs: Collection[str]
) -> list[Entry]:
    """Returns the objects to delete: parts, then packs. Pure.

    `saves`: those that stay, of this generation and of earlier ones. `packs`: those that their parts name. Objects of a
    newer generation stay, and so do those of other ranks of this one.
    """
    found: list[tuple[bool, Entry]] = []
    for entry in objects:
        part = keys.parse_part_key(entry.key)
        save, owner = keys.object_save(entry.key), keys.pack_rank(entry.key) if part is None else part.rank
        if save is None or save.generation > generation:
            continue
        mine = save.generation < generation or owner == rank
        if mine and save not in saves and entry.key not in packs:
            found.append((part is None, entry))
    return [entry for _, entry in sorted(found, key=lambda pair: (pair[0], pair[1].key))]


class DiskSweeper:
    """Removes objects of one rank from this host's disk when they are no longer needed. Used by the thread that puts
    them."""

    def __init__(self, disk: Catalog, rank: int) -> None:
        self._disk, self._rank = disk, rank
        self._packs: dict[str, frozenset[str]] = {}
        """The packs that each part names, by the part's key."""
        self._layouts: dict[str, str] = {}
        """The key of each part's layout, by the part's key; for parts of all ranks."""
        self._told = False
        """Whether the log says that somebody has taken the disk for a root."""

    def sweep(self, generation: GenerationId, stays: Stays) -> list[Entry]:
        """Removes objects that are not needed, and returns them; none while it is unknown which steps a restart needs.

        Raises StoreError, and what reading a damaged part raises, since the packs that it names are not known then.
        """
        store = self._disk.store
        parts = store.scan(keys.PARTS)
        oldest = self._now(parts) - UNFINISHED_S
        try:
            store.clean(oldest, keys.is_known)
        except StoreError as error:  # as of a file of another user: objects go all the same
            log.warning("what crashed uploads left on the local disk stays: %s", error)
        unknown = stays.whole is None and stays.earlier is None
        if unknown or (stays.whole is not None and stays.whole.generation != generation):
            return []
        earlier = frozenset[SaveId]() if stays.replaces else stays.earlier
        foreign = self._of_a_root()
        objects = [
            entry
            for entry in (*parts, *store.scan(keys.PACKS))
            if (save := keys.object_save(entry.key)) is None or save.generation not in foreign
        ]
        if earlier is None:
            saves_of = ((keys.object_save(entry.key), entry) for entry in objects)
            objects = [entry for save, entry in saves_of if save is not None and save.generation == generation]
            earlier = frozenset()
        names = [name for entry in objects if (name := keys.parse_part_key(entry.key)) is not None and name.ok]
        mine = [name for name in names if name.rank == self._rank and name.save.generation == generation]
        saves = kept({name.save for name in mine}, stays)
        left = [name for name in mine if name.save in saves] + [name for name in names if name.save in earlier]
        self._packs = {name.key: self._packs.get(name.key) or self._packs_of(name) for name in left}
        packs = frozenset[str]().union(*self._packs.values())
        gone = unwanted(objects, self._rank, generation, saves | earlier, packs)
        if stays.replaces:
            begun = ((keys.parse_begun_key(entry.key), entry) for entry in store.scan(keys.BEGUN))
            gone += [entry for of, entry in begun if of is not None and of < generation]
        for entry in gone:
            store.delete(entry.key)
        return gone + self._sweep_layouts(oldest)

    def _of_a_root(self) -> set[GenerationId]:
        """Returns the generations whose record is on this disk: since the job began, somebody has saved to the
        directory as to a root, and was told that this is committed. Those of a local tier have theirs in the store."""
        listed = [entry.key for entry in self._disk.store.scan(keys.GENERATIONS)]
        found = {*filter(None, map(keys.parse_generation_key, listed))}
        if found and not self._told:
            self._told = True
            log.warning(
                "%s: somebody saves there as to a root, by Checkpointer, save, import or copy, and it is the local= of "
                "this job. Those steps are left alone, and the job will not start again with such a directory: give "
                "one of the two another place",
                self._disk.store.url,
            )
        return found

    def _now(self, parts: Iterable[Entry]) -> float:
        """Returns when this rank put its newest part, by the disk's own clock, and at most now; before its first part,
        the host's time.

        By the host's time alone, if its clock was set forward or differs from a file server's, objects that another
        rank is about to publish would look too old.
        """
        names = ((keys.parse_part_key(entry.key), entry.modified) for entry in parts)
        mine = [(name.save, modified) for name, modified in names if name is not None and name.rank == self._rank]
        return min(time.time(), max(mine)[1]) if mine else time.time()

    def _sweep_layouts(self, oldest: float) -> list[Entry]:
        """Removes layouts from before `oldest` that no part of any rank on this disk names.

        Another rank may put a part that names one meanwhile. It looks for the layout again after it has put its part,
        and this looks at the parts again after the removal: the later of the two puts the layout again.
        """
        store = self._disk.store
        layouts = [entry for entry in store.scan(keys.LAYOUTS) if keys.is_layout_key(entry.key)]
        old = {entry.key: entry for entry in layouts if entry.modified < oldest}
        named = self._named() if old else None
        if named is None:
            return []
        gone = {key: entry for key, entry in old.items() if key not in named}
        documents = {}
        for key in [*gone]:
            try:
                documents[key] = store.get(key)
            except ObjectNotFound:  # another rank's sweep was faster
                del gone[key]
        for key in gone:
            store.delete(key)
        again = self._named() if gone else None
        for key in documents.keys() if again is None else documents.keys() & again:
            put_new(store, key, documents[key])
            del gone[key]
        return [*gone.values()]

    def _named(self) -> set[str] | None:
        """Returns the keys of the layouts that parts on this disk name; None if a part cannot be read."""
        names = [keys.parse_part_key(entry.key) for entry in self._disk.store.scan(keys.PARTS)]
        known, self._layouts = self._layouts, {}
        for name in names:
            if name is None or not name.ok:
                continue
            try:
                self._layouts[name.key] = known.get(name.key) or self._layout_of(name)
            except ObjectNotFound:  # its rank has removed it since it was listed
                continue
            except (CorruptData, FormatError, ObjectUnreadable) as error:
                log.warning("layouts stay on the local disk, since a part cannot be read: %s", error)
                return None
        return {*self._layouts.values()}

    def _layout_of(self, name: PartName) -> str:
        return keys.layout_key(self._disk.part_alone(name).table.layout)

    def _packs_of(self, name: PartName) -> frozenset[str]:
        return frozenset(pack.key for pack in self._disk.part(name).packs)


def by_save(parts: Iterable[PartName]) -> Mapping[SaveId, Mapping[int, list[PartName]]]:
    """Returns the good ones of these parts, by save and rank."""
    found: dict[SaveId, dict[int, list[PartName]]] = {}
    for name in parts:
        if name.ok:
            found.setdefault(name.save, {}).setdefault(name.rank, []).append(name)
    return found


def sweep_quietly(sweeper: DiskSweeper, generation: GenerationId, stays: Stays) -> None:
    """Sweeps the disk; only logs an error, since a disk that cannot be tidied is no reason to lose a save."""
    try:
        gone = sweeper.sweep(generation, stays)
    except (CkptError, OSError) as error:
        log.warning("nothing is removed from the local disk: %s", error)
        return
    if gone:
        log.info("%d objects, %d bytes removed from the local disk", len(gone), sum(entry.nbytes for entry in gone))
