"""One rank's share of a save: from a ready slot to packs and a part in the store, top to bottom."""

from __future__ import annotations

import itertools
import logging
import math
import time
from collections import deque
from collections.abc import Iterable, Iterator, Set
from concurrent.futures import Executor, Future, ThreadPoolExecutor, wait
from contextlib import closing

from typing_extensions import Buffer

from ckptlib.catalog.catalog import Catalog
from ckptlib.catalog.elapsed import Elapsed
from ckptlib.catalog.shared_documents import SharedDocuments
from ckptlib.errors import CorruptData, FormatError, StoreError
from ckptlib.format.keys import PartName, SaveId, layout_key, new_nonce, pack_save
from ckptlib.format.part import FailedPart, Pack, Part
from ckptlib.policy.codec import RAW, CodecRules
from ckptlib.slots.slot import Slot
from ckptlib.slots.snapshot import Snapshot, SnapshotReader, check_body
from ckptlib.stores import InPlace, LateHead, Store
from ckptlib.stores.io_limits import PART_NBYTES, PARTS_IN_FLIGHT, WRITE_BYTES
from ckptlib.writer.coder import Coder, Encoded
from ckptlib.writer.drained_parents import DrainedParents
from ckptlib.writer.frame_packs import FRAMES_BYTES, FramePack, frames_of, in_packs
from ckptlib.writer.increment import Increment, Rules, plan, whole, without_base
from ckptlib.writer.known_origin import KnownOrigin
from ckptlib.writer.left_packs import LeftPacks
from ckptlib.writer.own_parts import OwnParts
from ckptlib.writer.packs import Packer, PackShape, Piece
from ckptlib.writer.parents import Parents
from ckptlib.writer.seen_packs import SeenPacks
from ckptlib.writer.share import PutChunks, assemble

log = logging.getLogger(__name__)

FRAMES_PUTS = 2
"""Packs of frames that are put at once, so that the store is busy while one is published or the next one encoded."""

GATHER_BYTES = 1024 * 1024
"""Smaller pieces are copied together: a write of each would cost more."""

_LOST = (
    "%s: %d packs that step %d needs are not there any more, as %s. Did somebody delete them, or a rule of the bucket "
    "that expires or archives objects? Step %d writes again what was in them; earlier steps that need them do not load"
)


class Persister:
    """Persists snapshots of one rank. Keeps packs and parents from one save to the next."""

    def __init__(
        self,
        store: Store,
        executor: Executor,
        rank: int,
        world_size: int,
        refresh_s: float = math.inf,
        rules: CodecRules | None = None,
        drained: DrainedParents | None = None,
        pack_nbytes: int | None = None,
        shared: SharedDocuments | None = None,
    ) -> None:
        """`executor` runs the digest check beside the writes; both release the GIL. `refresh_s`: chunks that are older
        are written again, though they have not changed. `rules`: None stores chunks as they are. `drained`: given if
        the store is a disk from which saves are drained to another one; whoever drains calls `note_upload`.
        `pack_nbytes`: most bytes of a pack, for a save that a killed process may have begun; packs that it left are not
        put again. `shared`: the committer's in this process, which need not read again what this has seen in the
        store."""
        self._store = store
        self._executor = executor
        self._rank, self._refresh_s = rank, refresh_s
        self._on_disk = drained is not None
        self._seen = SeenPacks(store, 0.0 if self._on_disk else None)
        self.parts = OwnParts(store)
        self._parents = Parents(Catalog(store), world_size, self._seen) if drained is None else drained
        self._snapshots = SnapshotReader()
        self._packer: Packer | None = None
        self._pack_nbytes = store.pack_nbytes if pack_nbytes is None else min(pack_nbytes, store.pack_nbytes)
        self._left = None if pack_nbytes is None else LeftPacks(store)
        self._coder = Coder(CodecRules.of(RAW) if rules is None else rules, store.is_local)
        self._shared = SharedDocuments(store) if shared is None else shared
        self._layout_put: str | None = None
        """Digest of the layout that this rank put with the last save: the only one that retention cannot have
        deleted."""
        self._deadline: float | None = None
        """Deadline of the save that is persisted now."""
        self._patience_s = 0.0
        """How long the last save took: waiting longer for the commit of a parent would cost more than it saves."""

    def note_upload(self, nbytes: int, began: float, ended: float) -> None:
        """See `Coder`."""
        self._coder.note_upload(nbytes, began, ended)

    def persist(
        self,
        slot: Slot,
        save: SaveId,
        deadline: float | None = None,
        may_be_parent: bool = True,
        puts_layout: bool = True,
    ) -> Part:
        """Puts the packs and the part of the snapshot in `slot`, whose content the caller has locked for reading.

        Chunks that have not changed since the parent are not put again. `deadline`: of all that is put, by the
        monotonic clock. `may_be_parent`: whether it will be committed, for all that is known now. `puts_layout`: if
        False, another rank of this save does, before its own part; so whoever finds all parts finds the layout. Raises
        CorruptData when the slot is not what was sealed, and the store's errors; no part is put then, or one too late.
        """
        self._deadline = deadline
        try:
            return self._persist(slot, save, may_be_parent, puts_layout)
        except BaseException:
            self._coder.forget_patches()
            raise

    def _persist(self, slot: Slot, save: SaveId, may_be_parent: bool, puts_layout: bool) -> Part:
        elapsed, may_take = Elapsed(), math.inf if self._deadline is None else self._deadline - time.monotonic()
        self._shared.check_there()
        snapshot = self.read(slot, save)
        parent, increment, refused = self._plan(snapshot)
        began = time.monotonic()
        attempt = new_nonce()
        checked = self._executor.submit(check_body, slot, snapshot, chunks=increment.written)
        try:
            put = [
                *self._put(slot, snapshot, attempt, increment.changed, parent, refused, checked, carried=False),
                *self._put(slot, snapshot, attempt, increment.carried, None, refused, checked, carried=True),
            ]
        finally:
            damage = checked.exception()
        if damage is not None:
            raise damage
        if slot.read_header() != snapshot.header:
            raise CorruptData(f"{slot.path}: was overwritten while it was persisted")
        if puts_layout:
            self._put_layout(snapshot)
        else:
            self._layout_put = None
        share = assemble(snapshot.digests, parent, increment.taken, put)
        part = Part(
            save=save,
            rank=snapshot.header.rank,
            world_size=snapshot.header.world_size,
            attempt=attempt,
            table=snapshot.table.placed(share.places.packs, share.places.offsets),
            packs=share.packs,
            algorithm=snapshot.algorithm,
            digests=share.digests,
            values=snapshot.values,
            metrics=snapshot.metrics,
            created=snapshot.created,
            check=snapshot.header.check,
            codings=share.places.codings,
            exempt=snapshot.exempt,
            account=snapshot.account,
        )
        name, document = part.encode()
        self.parts.put(part, name.key, document, elapsed, may_take, self._deadline)
        if self._on_disk and self._store.entry(layout_key(snapshot.layout.digest)) is None:
            self._put_layout(snapshot)  # a sweep of this disk removed it before this part named it
        if part.rank == self._rank:
            if may_be_parent:
                self._parents.remember(part)
            self._patience_s = time.monotonic() - began
        return part

    def begin_anew(self) -> None:
        """Looks for no parent: there was no step when the job opened the root, and no other writer of this rank."""
        if isinstance(self._parents, Parents):
            self._parents.begin_anew()

    def go_on_from(self, save: SaveId, known: KnownOrigin | None = None) -> None:
        """Notes the step that the job resumed from; if nobody does, the record of its generation tells. `known`: what
        its trainer has read of the step."""
        if isinstance(self._parents, Parents):  # else the first save is written whole
            self._parents.go_on_from(save, known)

    def search_again(self) -> None:
        """Searches parents again: a writer that died may have put a part of this rank, too. See
        `Parents.search_again`."""
        if isinstance(self._parents, Parents):
            self._parents.search_again()

    def read(self, slot: Slot, save: SaveId) -> Snapshot:
        """Returns the snapshot in a slot. Raises CorruptData, FormatError."""
        header = slot.read_header()
        if not header.ready or header.save != save:
            raise FormatError(f"{slot.path}: holds {header.save} ({header.sequence}), expected {save} and ready")
        return self._snapshots.read(slot, header)

    def _plan(self, snapshot: Snapshot) -> tuple[Part | None, Increment, Set[int]]:
        """Returns the parent, which chunks of a snapshot are written and which are taken over from the parent, and
        which are not patched."""
        if snapshot.header.rank != self._rank:  # this writer stands in for a rank whose parts it does not know
            return None, whole(len(snapshot.digests)), frozenset()
        step = snapshot.header.save.step
        try:
            parent, steps = self._parents.choose(snapshot, self._patience_s)
            lost = [] if parent is None else self._seen.lost(parent.packs)
        except StoreError as error:
            log.warning("step %d is written whole: %s", step, error)
            return None, whole(len(snapshot.digests)), frozenset()
        if parent is None:
            return None, whole(len(snapshot.digests)), frozenset()
        if lost and not self._on_disk:  # a disk's own sweeps leave no more than there is room for
            log.warning(_LOST, self._store.url, len(lost), parent.save.step, lost[0].key, step)
        owners = {owner for pack in parent.packs if (owner := pack_save(pack.key)) is not None}
        rules = Rules(snapshot.created, self._refresh_s, {*filter(steps.has, owners)}, steps.refreshes, lost)
        digests = self._coder.comparable(snapshot, parent)
        increment = plan(digests, parent, rules)
        if not self._coder.encodes:
            return parent, increment, frozenset()
        return parent, increment, without_base(digests, parent, rules)

    def _put(
        self,
        slot: Slot,
        snapshot: Snapshot,
        attempt: str,
        chunks: tuple[int, ...],
        parent: Part | None,
        refused: Set[int],
        checked: Future[None],
        carried: bool,
    ) -> list[PutChunks]:
        """Puts chunks: as frames if that is wanted and pays, else as they are. Those `refused` are not patched."""
        if self._packer is None or self._packer.table is not snapshot.table:
            self._packer = Packer(snapshot.table, snapshot.layout, self._pack_nbytes)
        keys = (snapshot.header.save.pack_key(snapshot.header.rank, attempt, n, carried) for n in itertools.count())
        coded, raw = self._coder.candidates(snapshot, chunks)
        if self._coder.samples:  # beside the check, samples took three times as long as the chunks of a whole save
            wait([checked])
        put: list[PutChunks] = []
        for run, head_nbytes in self._packer.frame_runs(coded):
            with closing(self._coder.encode(slot.body, snapshot, run, parent, refused)) as encoding:
                frames = frames_of(encoding, raw)
                if self._store.late_nbytes > FRAMES_BYTES:
                    put += self._put_stream(snapshot, self._packer, keys, head_nbytes, frames)
                else:
                    put += self._put_side_by_side(snapshot, self._packer, keys, frames)
        put.append(self._put_raw(slot, snapshot, self._packer, keys, tuple(sorted(raw))))
        return put

    def _put_stream(
        self, snapshot: Snapshot, packer: Packer, keys: Iterator[str], head_nbytes: int, frames: Iterator[Encoded]
    ) -> list[PutChunks]:
        """Puts frames in one pack; the store takes each as it is made.

        The pack's header is known last, so room is left for it: `head_nbytes`, the longest that it can be.
        """
        put: list[PutChunks] = []
        for first in frames:
            pack = FramePack(packer, head_nbytes)
            pieces = pack.take(itertools.chain([first], frames), self._store.late_nbytes)
            put.append(self._put_frames(snapshot, next(keys), pack, pieces))
        return put

    def _put_side_by_side(
        self, snapshot: Snapshot, packer: Packer, keys: Iterator[str], frames: Iterator[Encoded]
    ) -> list[PutChunks]:
        """Puts frames in packs that are each made before they are put: the store is busy while one is flushed."""
        put: list[PutChunks] = []
        with ThreadPoolExecutor(FRAMES_PUTS, "ckptlib-put") as puts:  # leaving it waits for what is under way
            under_way: deque[Future[PutChunks]] = deque()
            for some in in_packs(frames):
                pack = FramePack(packer)
                pieces = [*pack.take(some)]
                under_way.append(puts.submit(self._put_frames, snapshot, next(keys), pack, pieces))
                del some, pieces  # they would keep a pack in memory longer
                while len(under_way) >= FRAMES_PUTS:
                    put.append(under_way.popleft().result())
            put += [work.result() for work in under_way]
        return put

    def _put_frames(self, snapshot: Snapshot, key: str, pack: FramePack, pieces: Iterable[Buffer]) -> PutChunks:
        def head() -> bytes:
            return pack.close().head(snapshot.header.save, snapshot.header.rank, snapshot.layout.digest)

        known = LateHead(pack.head_nbytes, head) if pack.head_nbytes else head()
        began = time.monotonic()
        self._store.put(key, known, pieces, deadline=self._deadline)
        return pack.put(self._note_pack(snapshot, key, pack.close().nbytes, began))

    def _put_raw(
        self, slot: Slot, snapshot: Snapshot, packer: Packer, keys: Iterator[str], chunks: tuple[int, ...]
    ) -> PutChunks:
        """Puts packs of chunks as they are."""
        packing, packs = packer.pack(chunks), list[Pack]()
        for number, shape in enumerate(packing.packs):
            key = next(keys)
            left = None if self._left is None else self._left.find(snapshot, key, shape, packing.rows(number))
            if left is None:
                packs.append(self._put_pack(snapshot, key, shape, _read_by_store(slot.body, shape)))
            else:
                packs.append(Pack(left, shape.nbytes, snapshot.created))
        return PutChunks(tuple(packs), packing.chunks, packing.numbers, packing.offsets)

    def _put_pack(self, snapshot: Snapshot, key: str, shape: PackShape, data: Iterable[Buffer]) -> Pack:
        header, began = snapshot.header, time.monotonic()
        self._store.put(
            key, shape.head(header.save, header.rank, snapshot.layout.digest), data, deadline=self._deadline
        )
        return self._note_pack(snapshot, key, shape.nbytes, began)

    def _note_pack(self, snapshot: Snapshot, key: str, nbytes: int, began: float) -> Pack:
        if not self._on_disk:
            self.note_upload(nbytes, began, time.monotonic())
        self._seen.note(key)
        return Pack(key, nbytes, snapshot.created)

    def _put_layout(self, snapshot: Snapshot) -> None:
        """Puts the layout, if need be. On a disk it looks each time: other ranks' sweeps remove what no part names."""
        digest = snapshot.layout.digest
        if digest != self._layout_put:
            if self._shared.put_layout(digest, snapshot.layout.encoded):
                self._shared.keep_layout(digest, snapshot.layout)
            if not self._on_disk:
                self._layout_put = digest


def _read_by_store(body: memoryview, shape: PackShape) -> Iterable[Buffer]:
    """Returns the bytes of a pack. The store may read far ahead if what must be copied is no more than parts under way
    have at any rate."""
    writes = _in_writes(body, shape.pieces)
    copied = sum(stop - start for start, stop in shape.pieces if stop - start < GATHER_BYTES)
    return InPlace(shape.data_nbytes, writes) if copied <= PARTS_IN_FLIGHT * PART_NBYTES else writes


def _in_writes(body: memoryview, pieces: Iterable[Piece]) -> Iterator[Buffer]:
    """Yields the bytes of pieces, in as few writes as is sensible; large ones without a copy."""
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
