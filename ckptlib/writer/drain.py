"""Copies one rank's share of a save from its host's disk to the store: the same keys, the same bytes.

Packs go first, then the layout, and the part last. So a crash leaves in the store what it leaves of a save that goes
there directly, and a copy that is begun again skips what is whole. No copy takes long: what lies in a store for longer
than a save may take could be swept while it is being committed. No torch.

    a crash ...                 leaves in the store         then the next writer of the rank
    between packs               packs without a part        puts those that are missing
    before the part             all packs                   puts the part
    after the part              the rank's share            has nothing to do; the commit is rank 0's
"""

from __future__ import annotations

import logging
import mmap
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Set
from concurrent.futures import Executor, ThreadPoolExecutor
from functools import partial

from typing_extensions import Buffer

from ckptlib.catalog import clock
from ckptlib.catalog.catalog import Catalog
from ckptlib.catalog.chunks import read_chunk
from ckptlib.catalog.elapsed import Elapsed
from ckptlib.catalog.local_disk import part_there
from ckptlib.catalog.reading import in_order
from ckptlib.errors import (
    CorruptData,
    FormatError,
    ObjectExists,
    ObjectNotFound,
    ObjectUnreadable,
    SaveFailed,
    StoreError,
)
from ckptlib.format import keys
from ckptlib.format.digests import digester
from ckptlib.format.keys import SaveId
from ckptlib.format.part import Pack, Part
from ckptlib.pages import PAGE_BYTES
from ckptlib.stores import Entry
from ckptlib.stores.io_limits import WRITE_BYTES
from ckptlib.writer.own_parts import OwnParts
from ckptlib.writer.seen_packs import SeenPacks

log = logging.getLogger(__name__)

PIECE_BYTES = min(WRITE_BYTES, 4 * 1024 * 1024)
"""Bytes read at once: pieces wait in memory until the store has taken them."""

NoteUpload = Callable[[int, float, float], None]
"""Is told the bytes of a pack, when its upload began, and when it ended, by the monotonic clock."""


class Pace:
    """Limits the bytes per second, over all threads."""

    def __init__(self, bytes_per_second: float | None) -> None:
        self._bytes_per_second = bytes_per_second
        self._lock = threading.Lock()
        self._free_at = 0.0

    def take(self, nbytes: int) -> None:
        """Returns when these bytes may go."""
        if self._bytes_per_second is None:
            return
        with self._lock:
            now = time.monotonic()
            begin = max(self._free_at, now)
            self._free_at = begin + nbytes / self._bytes_per_second
        time.sleep(begin - now)


def missing(part: Part, present: Mapping[str, int]) -> list[Pack]:
    """Returns the packs of a part's own save that are yet to be put, in their order. `present`: bytes by key. Pure.

    Raises SaveFailed if a key has an object of another size.
    """
    own = [pack for pack in part.packs if keys.pack_save(pack.key) == part.save]
    for pack in own:
        if present.get(pack.key, pack.nbytes) != pack.nbytes:
            raise SaveFailed(
                f"{pack.key}: the store has an object of {present[pack.key]} bytes under this key, expected "
                f"{pack.nbytes}; something else writes to this root"
            )
    return [pack for pack in own if pack.key not in present]


class Drain:
    """Copies the shares of one rank, one save after the other. For one thread."""

    def __init__(
        self,
        disk: Catalog,
        bucket: Catalog,
        executor: Executor,
        rank: int,
        deadline_s: float,
        pace: Pace,
        note_upload: NoteUpload,
    ) -> None:
        """`executor` compares what is copied with its digests. `deadline_s`: how long one copy may take."""
        self._disk, self._bucket = disk, bucket
        self._executor, self._reader = executor, ThreadPoolExecutor(1, "ckptlib-read")
        self._rank, self._deadline_s = rank, deadline_s
        self._pace, self._note_upload = pace, note_upload
        self._seen = SeenPacks(bucket.store)
        self.parts = OwnParts(bucket.store)
        self._layout_put: str | None = None
        """Digest of the layout of the drain before, if this rank put it: the only one that retention cannot have
        deleted since."""

    def copy(self, save: SaveId, is_new: bool = False, puts_layout: bool = True) -> int:
        """Copies a share; returns how many bytes of packs were put, 0 if all was there. `is_new`: nothing can be there.
        `puts_layout`: if False, another rank of this save puts it.

        Raises StoreError if the store fails: to be tried again. Its other errors are final: Superseded, SaveFailed if
        it took too long, CorruptData or SaveFailed if the disk does not have what was put on it.
        """
        self._bucket.shared.check_there()
        self._bucket.generations.check_goes_on(save)
        part, name, document = self._on_disk(save)
        present = {} if is_new else self._present(part)
        lacking = missing(part, {key: entry.nbytes for key, entry in present.items()})
        if name in present:
            if lacking:  # the part was put late
                raise SaveFailed(
                    f"step {save.step}: the store has a part of it and lacks {lacking[0].key}, which a sweep has "
                    "deleted, or somebody else; it is given up, and stays on the local disk"
                )
            return 0
        deadline = self._deadline(save, present.values())
        elapsed, may_take_s = Elapsed(), deadline - time.monotonic()
        lost = self._lost(part)
        packs = [*lost, *lacking]
        given_up = threading.Event()
        checked = self._executor.submit(self._check, part, [*lost, *missing(part, {})], given_up)  # all, each time
        try:
            for pack in packs:
                self._put(pack, deadline)
        except BaseException:
            given_up.set()
            raise
        checked.result()
        layout = part.table.layout
        if puts_layout and layout != self._layout_put:
            self._bucket.shared.put_layout(layout, self._disk.layout(layout).encoded)
        self._layout_put = layout if puts_layout else None
        self.parts.put(part, name, document, elapsed, may_take_s, deadline)
        return sum(pack.nbytes for pack in packs)

    def _on_disk(self, save: SaveId) -> tuple[Part, str, bytes]:
        """Returns the rank's part, its key, and its bytes."""
        try:
            name = part_there(self._disk, save, self._rank)
            if name is None:
                raise SaveFailed(f"step {save.step}: {self._disk.store.url} has no part of rank {self._rank} to drain")
            document = self._disk.store.get(name.key)
            return self._disk.decode_part(name, document), name.key, document
        except StoreError as error:
            raise _unreadable(save.step, error) from error

    def _present(self, part: Part) -> dict[str, Entry]:
        """Returns the objects of this share that the store has, and flushes them: who put them may have died before."""
        store, start, found = self._bucket.store, f"{part.rank:06d}-{part.attempt}", dict[str, Entry]()
        for prefix in (part.save.packs_prefix, part.save.parts_prefix):
            if listed := store.scan(f"{prefix}{start}"):
                store.flush(prefix)
            found.update((entry.key, entry) for entry in listed)
        return found

    def _lost(self, part: Part) -> list[Pack]:
        """Returns packs of earlier saves that are not in the store any more, to be put from this disk. Raises
        SaveFailed for one that is in the store, but cannot be read."""
        lost = self._seen.lost(pack for pack in part.packs if keys.pack_save(pack.key) != part.save)
        for pack in lost:
            if self._bucket.store.entry(pack.key) is not None:
                raise SaveFailed(
                    f"step {part.save.step}: needs {self._bucket.store.url}/{pack.key}, which cannot be read up to its "
                    f"{pack.nbytes} bytes: was it altered, or moved to an archive? The step is not committed; 'ckptlib "
                    "refresh' has the next save write again what is in it"
                )
            log.warning(
                "%s/%s, which step %d needs, is not there any more: did somebody delete it, or a rule of the bucket "
                "that expires objects? It is put again from the local disk",
                self._bucket.store.url,
                pack.key,
                part.save.step,
            )
        return lost

    def _deadline(self, save: SaveId, present: Iterable[Entry]) -> float:
        """Returns when this copy must end, by the monotonic clock. Raises SaveFailed if that time has passed."""
        first = min((entry.modified for entry in present), default=None)
        age = 0.0 if first is None else max(0.0, clock.now(self._bucket.store) - first)
        if age > self._deadline_s:
            raise SaveFailed(
                f"step {save.step}: a part of it has been in the store for {age:.0f} s, longer than a save may take "
                f"(save_deadline, {self._deadline_s:.0f} s); it is given up, and stays on the local disk. If the store "
                "was there all the time, and its clock was not set forward, drain seldom, raise drain_bandwidth, or "
                "create roots with a longer deadline"
            )
        return time.monotonic() + self._deadline_s - age

    def _put(self, pack: Pack, deadline: float) -> None:
        began = time.monotonic()
        head = self._read(pack.key, 0, min(PAGE_BYTES, pack.nbytes))
        try:
            self._bucket.store.put(pack.key, head, self._pieces(pack), deadline=deadline)
        except ObjectExists:  # put by a request whose answer was lost; the listing before the next try compares sizes
            raise StoreError(f"{pack.key}: was put meanwhile") from None
        self._note_upload(pack.nbytes, began, time.monotonic())
        self._seen.note(pack.key)

    def _pieces(self, pack: Pack) -> Iterator[Buffer]:
        """Yields the bytes behind the first page; the next piece is read while one is sent."""
        for piece in in_order(self._reader, partial(self._piece, pack), range(PAGE_BYTES, pack.nbytes, PIECE_BYTES), 2):
            self._pace.take(piece.nbytes)
            yield piece

    def _piece(self, pack: Pack, offset: int) -> memoryview:
        """Reads a piece into memory that begins on a page: local stores take such pieces the fast way."""
        buffer = memoryview(mmap.mmap(-1, min(PIECE_BYTES, pack.nbytes - offset)))
        self._read_into(pack.key, offset, buffer)
        return buffer

    def _read_into(self, key: str, offset: int, buffer: memoryview) -> None:
        try:
            self._disk.store.get_into(key, offset, buffer)
        except StoreError as error:
            raise _unreadable(key, error) from error

    def _read(self, key: str, offset: int, nbytes: int) -> bytes:
        try:
            return self._disk.store.get(key, offset, nbytes)
        except StoreError as error:
            raise _unreadable(key, error) from error

    def _check(self, part: Part, packs: Iterable[Pack], given_up: threading.Event) -> None:
        """Checks what the disk has of these packs, chunk by chunk: nothing is committed that it has damaged.

        A base that the disk has damaged or lost does no harm if the store has it. Raises CorruptData, and StoreError if
        the store is away and cannot give such a base. Ends early once `given_up` is set.
        """
        own, table = {pack.key for pack in packs}, part.table
        for chunk in range(len(part.digests)):
            if given_up.is_set():
                return
            needed = _packs_of(part, chunk)
            if own.isdisjoint(needed):
                continue
            wrong = self._wrong(part, chunk, needed)
            if wrong is not None and not own.issuperset(needed):
                wrong = self._wrong(part, chunk, own)
            if wrong is not None:
                key, offset = part.packs[table.packs[chunk]].key, table.offsets[chunk]
                raise CorruptData(
                    f"{self._disk.store.url}/{key} [{offset}:+{part.stored[chunk]}]: {wrong}: the local disk has "
                    "altered it; the step is not committed"
                )

    def _wrong(self, part: Part, chunk: int, here: Set[str]) -> str | None:
        """Returns why a load would not get this chunk back; None if it would. `here`: packs that are read from the
        disk; others are read from the store."""

        def read(key: str, offset: int, buffer: memoryview) -> None:
            (self._read_into if key in here else self._bucket.store.get_into)(key, offset, buffer)

        try:
            found = digester(part.algorithm)(read_chunk(read, part, chunk))
        except (CorruptData, FormatError, SaveFailed, ObjectNotFound, ObjectUnreadable) as error:
            return str(error)
        expected = part.digests[chunk]
        return None if found == expected else f"does not match {expected} (got {found})"


def _packs_of(part: Part, chunk: int) -> set[str]:
    """Returns the keys of the packs that a load needs for this chunk."""
    found, coding = {part.packs[part.table.packs[chunk]].key}, part.codings.get(chunk)
    if coding is not None and coding.base is not None:
        found.add(part.packs[coding.base.pack].key)
    return found


def _unreadable(what: object, error: StoreError) -> SaveFailed:
    """Returns the error for what the disk cannot read: trying again would not help, as it would if the store failed."""
    return SaveFailed(f"{what}: cannot be read from the local disk, and is not drained: {error}")
