"""What all steps of a root share: its own document, and the layouts. No step loads without, so each is there twice.

    ckptlib.json             copies/ckptlib.json
    layouts/<digest>.json    copies/layouts/<digest>.json

Whoever commits a step puts the copies, before it exists. Whoever reads takes a copy where the first cannot be read.
No torch.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable
from functools import partial
from typing import TypeVar

from ckptlib.errors import (
    CheckpointNotFound,
    CorruptData,
    FormatError,
    NewerFormat,
    ObjectExists,
    ObjectNotFound,
    ObjectUnreadable,
    StoreError,
)
from ckptlib.format import keys
from ckptlib.format.digests import XXH3, digester
from ckptlib.format.documents import as_written
from ckptlib.format.layout import Layout, decode_layout
from ckptlib.format.manifest import Root
from ckptlib.stores import Store

log = logging.getLogger(__name__)

T = TypeVar("T")


class SharedDocuments:
    """Of one root in one store. Layouts are read once and kept; the root's document is read when it is asked for."""

    def __init__(self, store: Store) -> None:
        self.store = store
        self._layouts: dict[str, Layout] = {}
        self._root: Root | None = None
        """As it was read last."""
        self._copied: set[str] = set()
        self._told: set[str] = set()

    # Reading

    def root(self) -> Root:
        """Raises CheckpointNotFound where there is none, CorruptData, FormatError, ObjectUnreadable."""
        try:
            self._root = self._either(keys.ROOT, self.root_at)
        except ObjectNotFound as error:
            raise CheckpointNotFound(f"{self.store.url} holds no checkpoints: there is no {keys.ROOT}") from error
        return self._root

    def layout(self, digest: str) -> Layout:
        """Raises CorruptData, FormatError, ObjectNotFound, ObjectUnreadable."""
        found = self._layouts.get(digest)
        if found is None:
            key = keys.layout_key(digest)
            found = self._layouts[digest] = self._either(key, partial(self.layout_at, digest))
        return found

    def root_at(self, key: str) -> Root:
        """One of the two. Raises ObjectNotFound, CorruptData, FormatError, ObjectUnreadable."""
        return Root.decode(self.store.get(key), f"{self.store.url}/{key}")

    def layout_at(self, digest: str, key: str) -> Layout:
        """As `root_at`."""
        data = as_written(self.store.get(key), f"{self.store.url}/{key}")
        if digester(XXH3)(data) != digest:
            raise CorruptData(f"{self.store.url}/{key} does not match the digest in its name; it was cut or altered")
        return decode_layout(data, key)

    def _either(self, key: str, read: Callable[[str], T]) -> T:
        """The first, or where that cannot be read its copy, with a warning. Raises what reading the first raised."""
        try:
            return read(key)
        except NewerFormat:
            raise
        except (CorruptData, FormatError, ObjectNotFound, ObjectUnreadable) as error:
            copy = keys.copy_key(key)
            try:
                found = read(copy)
            except (CorruptData, FormatError, StoreError):
                raise error from None
            if key not in self._told:
                log.warning("%s. Its copy %s is whole, and is read instead; look at the disks", error, copy)
                self._told.add(key)
            return found

    # Writing

    def open_root(self, make: Root) -> Root:
        """The root's document; `make` is put where there is none. A damaged one is replaced by its copy."""
        try:
            root = self.root()
        except CheckpointNotFound:
            put_new(self.store, keys.ROOT, make.encode(), create=True)  # two jobs may begin at the same moment
            return self.root()
        if keys.ROOT in self._told:
            document = self.store.get(keys.copy_key(keys.ROOT))
            Root.decode(document, keys.copy_key(keys.ROOT))
            self.store.delete(keys.ROOT)
            put_new(self.store, keys.ROOT, document, create=True)
            self._told.discard(keys.ROOT)
            log.warning("%s/%s is put again, from its copy", self.store.url, keys.ROOT)
        return root

    def put_layout(self, digest: str, document: bytes) -> None:
        """Once for all steps that share it; a damaged one is replaced, since every step that has it needs it."""
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
        put_new(self.store, key, document)

    def put_copies(self, digests: Iterable[str]) -> None:
        """Of the root's document and of these layouts, where there is none, or one of another size.

        Before a step that has these layouts exists. Costs a request when there is nothing new.
        """
        documents = {keys.layout_key(digest): digest for digest in digests}
        wanted = {keys.ROOT, *documents} - self._copied
        if not wanted:
            return
        there = {entry.key: entry.nbytes for entry in self.store.scan(keys.COPIES)}
        for key in sorted(wanted):
            copy = keys.copy_key(key)
            try:
                document = (
                    self.layout(documents[key]).encoded if key in documents else (self._root or self.root()).encode()
                )
            except (CheckpointNotFound, CorruptData, FormatError, ObjectUnreadable) as error:
                if key in documents:
                    raise
                log.warning("%s; no copy of it is put", error)  # whoever opens the root next is told; steps are whole
                continue
            if there.get(copy) == len(document):
                continue
            if copy in there:
                log.error("%s/%s has not the size of what it is a copy of; it is put again", self.store.url, copy)
                self.store.delete(copy)
            put_new(self.store, copy, document)
        self._copied |= wanted

    def put_again(self, digests: Iterable[str]) -> None:
        """Those of these layouts that are gone, each with its copy. Costs a listing."""
        present = {entry.key for entry in self.store.scan(keys.LAYOUTS)}
        gone = [digest for digest in digests if keys.layout_key(digest) not in present]
        for digest in gone:
            self.put_layout(digest, self.layout(digest).encoded)
        self._copied -= {*map(keys.layout_key, gone)}
        if gone:
            self.put_copies(gone)


def put_new(store: Store, key: str, data: bytes, create: bool = False) -> None:
    """Puts an object, unless somebody else was first: theirs stands, where the store can tell; see `Store.put`."""
    try:
        store.put(key, data, create=create)
    except ObjectExists:
        return
