"""Finds which of the packs that a process put for the same save before it was killed need not be put again.

A pack of chunks as they are depends on the snapshot alone, but for the attempt in its name. So the pack that is to be
put may be there already, under the name of another attempt. Neither name nor size is believed: the header must be the
very same bytes, and each chunk, read back, must have the digest that the snapshot was sealed with. No torch.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor

from ckptlib.errors import FormatError, ObjectNotFound, ObjectUnreadable
from ckptlib.format.digests import digester
from ckptlib.format.keys import SaveId
from ckptlib.slots.snapshot import Snapshot
from ckptlib.stores import Store
from ckptlib.writer.packs import PackShape

log = logging.getLogger(__name__)

READS = 4
"""Reads at once, each into memory of its own."""

READ_BYTES = 8 * 1024 * 1024
"""Most bytes of neighbouring chunks in one request."""

_ATTEMPT = slice(len("000000-"), len("000000-00000000"))
"""Where the attempt is in the last word of a pack's key."""


class LeftPacks:
    """The packs that the store has of one save, the only one of a process; the store is listed once."""

    def __init__(self, store: Store) -> None:
        self._store = store
        self._save: SaveId | None = None
        self._there: dict[str, list[tuple[str, int]]] = {}
        """Keys and sizes of the packs, by the name without its attempt."""

    def find(self, snapshot: Snapshot, key: str, shape: PackShape, rows: Sequence[tuple[int, int]]) -> str | None:
        """Returns the key of a pack in the store with the content that the one of `key` is to have; None if none has.

        `rows`: its chunks, by number in the snapshot, with their offsets in the pack. Raises the store's errors, but
        for those of one object.
        """
        header = snapshot.header
        if self._save != header.save:
            self._save, self._there = header.save, {}
            for entry in self._store.scan(header.save.packs_prefix):
                self._there.setdefault(_without_attempt(entry.key), []).append((entry.key, entry.nbytes))
            if self._there:  # its process may have been killed before they were durable
                self._store.flush(header.save.packs_prefix)
        for other, nbytes in self._there.get(_without_attempt(key), ()):
            head = shape.head(header.save, header.rank, snapshot.layout.digest)
            if nbytes == shape.nbytes and self._has(other, head, snapshot, rows):
                log.info("step %d: %s is there, %d bytes, and is not put again", header.save.step, other, nbytes)
                return other
        return None

    def _has(self, key: str, head: bytes, snapshot: Snapshot, rows: Sequence[tuple[int, int]]) -> bool:
        digest, sizes = digester(snapshot.algorithm), snapshot.table.nbytes

        def is_good(some: Sequence[tuple[int, int]]) -> bool:
            start = some[0][1]
            data = memoryview(self._store.get(key, start, some[-1][1] + sizes[some[-1][0]] - start))
            return all(
                digest(data[offset - start : offset - start + sizes[chunk]]) == snapshot.digests[chunk]
                for chunk, offset in some
            )

        try:
            with ThreadPoolExecutor(READS, "ckptlib-left") as executor:
                return self._store.get(key, 0, len(head)) == head and all(executor.map(is_good, _reads(rows, sizes)))
        except (FormatError, ObjectNotFound, ObjectUnreadable) as error:
            log.warning("%s is put again: %s", key, error)
            return False


def _reads(rows: Sequence[tuple[int, int]], sizes: Sequence[int]) -> Iterator[list[tuple[int, int]]]:
    """Yields neighbours that are read together."""
    some: list[tuple[int, int]] = []
    for chunk, offset in rows:
        if some and offset + sizes[chunk] - some[0][1] > READ_BYTES:
            yield some
            some = []
        some.append((chunk, offset))
    if some:
        yield some


def _without_attempt(key: str) -> str:
    prefix, _, name = key.rpartition("/")
    return f"{prefix}/{name[: _ATTEMPT.start]}{name[_ATTEMPT.stop :]}"
