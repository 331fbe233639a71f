"""One rank's share of a save: from a ready slot to packs and a part in the store, top to bottom."""

from __future__ import annotations

from concurrent.futures import Executor

from ckptlib.catalog.catalog import Catalog
from ckptlib.errors import CorruptData, FormatError
from ckptlib.format.keys import PartName, SaveId, new_nonce
from ckptlib.format.part import FailedPart, Pack, Part
from ckptlib.format.table import Table
from ckptlib.slots.slot import Slot
from ckptlib.slots.snapshot import Snapshot, SnapshotReader, check_body
from ckptlib.stores import Store
from ckptlib.stores.io_limits import WRITE_BYTES
from ckptlib.writer.packs import Packing, pack


class Persister:
    """Persists snapshots of one rank. Keeps what is the same from one save to the next."""

    def __init__(self, store: Store, executor: Executor) -> None:
        """`executor` runs the digest check beside the writes; both release the GIL."""
        self._store = store
        self._executor = executor
        self._snapshots = SnapshotReader()
        self._packing: tuple[Table, Packing] | None = None
        self._layouts_put: set[str] = set()

    def persist(self, slot: Slot, save: SaveId) -> Part:
        """Puts the packs and the part of the snapshot in `slot`, whose content the caller has locked for reading.

        Raises CorruptData when the slot is not what was sealed, and what the store raises; no part is put then.
        """
        snapshot, packing = self.read(slot, save)
        attempt = new_nonce()
        rank = snapshot.header.rank
        checked = self._executor.submit(check_body, slot, snapshot)
        try:
            packs = tuple(
                self._put_pack(slot, snapshot, packing, number, save.pack_key(rank, attempt, number))
                for number in range(len(packing.packs))
            )
        finally:
            damage = checked.exception()
        if damage is not None:
            raise damage
        if slot.read_header() != snapshot.header:
            raise CorruptData(f"{slot.path}: was overwritten while it was persisted")
        self._put_layout(snapshot)
        part = Part(
            save=save,
            rank=rank,
            world_size=snapshot.header.world_size,
            attempt=attempt,
            table=packing.table,
            packs=packs,
            algorithm=snapshot.algorithm,
            digests=snapshot.digests,
            values=snapshot.values,
            metrics=snapshot.metrics,
            created=snapshot.created,
            check=snapshot.header.check,
        )
        name, document = part.encode()
        self._store.put(name.key, document)
        return part

    def read(self, slot: Slot, save: SaveId) -> tuple[Snapshot, Packing]:
        """The snapshot in a slot, and how it is packed. Raises CorruptData, FormatError."""
        header = slot.read_header()
        if not header.ready or header.save != save:
            raise FormatError(f"{slot.path}: holds {header.save} ({header.sequence}), expected {save} and ready")
        snapshot = self._snapshots.read(slot, header)
        if self._packing is None or self._packing[0] is not snapshot.table:
            self._packing = (snapshot.table, pack(snapshot.table, snapshot.layout, self._store.pack_nbytes))
        return snapshot, self._packing[1]

    def _put_pack(self, slot: Slot, snapshot: Snapshot, packing: Packing, number: int, key: str) -> Pack:
        shape, body = packing.packs[number], slot.body
        with self._store.upload(key, shape.head_nbytes) as upload:
            for at in range(shape.start, shape.stop, WRITE_BYTES):
                upload.write(body[at : min(at + WRITE_BYTES, shape.stop)])
            upload.commit(shape.head(snapshot.header.save, snapshot.header.rank, snapshot.layout.digest))
        return Pack(key, shape.nbytes)

    def _put_layout(self, snapshot: Snapshot) -> None:
        digest = snapshot.layout.digest
        if digest not in self._layouts_put:
            Catalog(self._store).put_layout(digest, snapshot.layout.encoded)
            self._layouts_put.add(digest)


def put_failure(store: Store, save: SaveId, rank: int, error: str) -> PartName:
    """Tells the committer that this rank's part will not come."""
    name, document = FailedPart(save, rank, new_nonce(), error).encode()
    store.put(name.key, document)
    return name
