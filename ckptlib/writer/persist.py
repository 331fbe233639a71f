"""One rank's share of a save: from a ready slot to packs and a part in the store, top to bottom."""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator
from concurrent.futures import Executor

from typing_extensions import Buffer

from ckptlib.catalog.catalog import Catalog
from ckptlib.errors import CorruptData, FormatError
from ckptlib.format.keys import PartName, SaveId, new_nonce
from ckptlib.format.part import FailedPart, Pack, Part
from ckptlib.slots.slot import Slot
from ckptlib.slots.snapshot import Snapshot, SnapshotReader, check_body
from ckptlib.stores import Store
from ckptlib.stores.io_limits import WRITE_BYTES
from ckptlib.writer.increment import Increment, Rules, plan, whole
from ckptlib.writer.packs import Packer, Piece
from ckptlib.writer.parents import Parents
from ckptlib.writer.share import PutChunks, assemble

GATHER_BYTES = 1024 * 1024
"""Pieces that are smaller are copied together: a write of each would cost more."""


class Persister:
    """Persists snapshots of one rank. Keeps what is the same from one save to the next."""

    def __init__(self, store: Store, executor: Executor, rank: int, world_size: int, refresh_s: float) -> None:
        """`executor` runs the digest check beside the writes; both release the GIL. `refresh_s`: chunks that are older
        are written again, though they have not changed."""
        self._store = store
        self._executor = executor
        self._rank, self._refresh_s = rank, refresh_s
        self._parents = Parents(Catalog(store), world_size)
        self._snapshots = SnapshotReader()
        self._packer: Packer | None = None
        self._layouts_put: set[str] = set()
        self._patience_s = 0.0
        """How long the last save took: waiting longer for the commit of a parent would cost more than it saves."""

    def persist(self, slot: Slot, save: SaveId) -> Part:
        """Puts the packs and the part of the snapshot in `slot`, whose content the caller has locked for reading.

        What has not changed since the parent is not put again. Raises CorruptData when the slot is not what was sealed,
        and what the store raises; no part is put then.
        """
        snapshot = self.read(slot, save)
        parent, increment = self._plan(snapshot)
        began = time.monotonic()
        attempt = new_nonce()
        checked = self._executor.submit(check_body, slot, snapshot, chunks=increment.written)
        try:
            put = [
                self._put(slot, snapshot, attempt, increment.changed, carried=False),
                self._put(slot, snapshot, attempt, increment.carried, carried=True),
            ]
        finally:
            damage = checked.exception()
        if damage is not None:
            raise damage
        if slot.read_header() != snapshot.header:
            raise CorruptData(f"{slot.path}: was overwritten while it was persisted")
        self._put_layout(snapshot)
        packs, places = assemble(len(snapshot.digests), parent, increment.taken, put)
        part = Part(
            save=save,
            rank=snapshot.header.rank,
            world_size=snapshot.header.world_size,
            attempt=attempt,
            table=snapshot.table.placed(places.packs, places.offsets),
            packs=packs,
            algorithm=snapshot.algorithm,
            digests=snapshot.digests,
            values=snapshot.values,
            metrics=snapshot.metrics,
            created=snapshot.created,
            check=snapshot.header.check,
            codings=places.codings,
        )
        name, document = part.encode()
        self._store.put(name.key, document)
        if part.rank == self._rank:
            self._parents.remember(part)
            self._patience_s = time.monotonic() - began
        return part

    def read(self, slot: Slot, save: SaveId) -> Snapshot:
        """The snapshot in a slot. Raises CorruptData, FormatError."""
        header = slot.read_header()
        if not header.ready or header.save != save:
            raise FormatError(f"{slot.path}: holds {header.save} ({header.sequence}), expected {save} and ready")
        return self._snapshots.read(slot, header)

    def _plan(self, snapshot: Snapshot) -> tuple[Part | None, Increment]:
        """What is written of a snapshot, and what is taken over from which part."""
        parent, steps = None, None
        if snapshot.header.rank == self._rank:  # of another, whose stand-in this is, no parent is known
            parent, steps = self._parents.choose(snapshot, self._patience_s)
        if parent is None or steps is None:
            return None, whole(len(snapshot.digests))
        distrusted = max(steps.refreshes, default=None)
        rules = Rules(snapshot.created, self._refresh_s, {*steps.saves}, distrusted)
        return parent, plan(snapshot.digests, parent, rules)

    def _put(self, slot: Slot, snapshot: Snapshot, attempt: str, chunks: tuple[int, ...], carried: bool) -> PutChunks:
        """Puts chunks, as they are."""
        if self._packer is None or self._packer.table is not snapshot.table:
            self._packer = Packer(snapshot.table, snapshot.layout, self._store.pack_nbytes)
        header, packing, packs = snapshot.header, self._packer.pack(chunks), []
        for number, shape in enumerate(packing.packs):
            key = header.save.pack_key(header.rank, attempt, number, carried)
            with self._store.upload(key, shape.head_nbytes) as upload:
                for data in _in_writes(slot.body, shape.pieces):
                    upload.write(data)
                upload.commit(shape.head(header.save, header.rank, snapshot.layout.digest))
            packs.append(Pack(key, shape.nbytes, snapshot.created))
        return PutChunks(tuple(packs), packing.chunks, packing.numbers, packing.offsets)

    def _put_layout(self, snapshot: Snapshot) -> None:
        digest = snapshot.layout.digest
        if digest not in self._layouts_put:
            Catalog(self._store).put_layout(digest, snapshot.layout.encoded)
            self._layouts_put.add(digest)


def _in_writes(body: memoryview, pieces: Iterable[Piece]) -> Iterator[Buffer]:
    """The bytes of pieces, in as few writes as is sensible; large ones without a copy."""
    small: list[memoryview] = []
    nbytes = 0
    for start, stop in pieces:
        if small and (stop - start >= GATHER_BYTES or nbytes + stop - start > GATHER_BYTES):
            yield b"".join(small)
            small, nbytes = [], 0
        if stop - start < GATHER_BYTES:
            small.append(body[start:stop])
            nbytes += stop - start
            continue
        for at in range(start, stop, WRITE_BYTES):
            yield body[at : min(at + WRITE_BYTES, stop)]
    if small:
        yield b"".join(small)


def put_failure(store: Store, save: SaveId, rank: int, error: str) -> PartName:
    """Tells the committer that this rank's part will not come."""
    name, document = FailedPart(save, rank, new_nonce(), error).encode()
    store.put(name.key, document)
    return name
