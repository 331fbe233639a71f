"""The documents that steps share: the root's own, layouts, and the records of generations. Each is there twice.

    ckptlib.json                 copies/ckptlib.json
    layouts/<digest>.json        copies/layouts/<digest>.json
    generations/<gen>.json       copies/generations/<gen>.json

No step loads without its layout, and history ends at a record that cannot be read. A committer puts the copies of the
first two kinds before the step exists, and checks once in each start that they are good; the process that puts a record
puts its copy, too. Readers use the copy if the first cannot be read. No torch.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Collection, Iterable
from functools import partial
from itertools import takewhile

from ckptlib.catalog.second_read import decoded
from ckptlib.catalog.unreadable import UNUSABLE
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
from ckptlib.format.keys import GenerationId
from ckptlib.format.layout import Layout, decode_layout
from ckptlib.format.manifest import Generation, Root
from ckptlib.stores import Store

log = logging.getLogger(__name__)

LAYOUTS_KEPT_NBYTES = 64 * 1024 * 1024
"""The most bytes of layouts that are kept, as documents. A state that changes at every save has another layout at
each."""


class SharedDocuments:
    """The shared documents of one root in one store. It keeps the most recently used layouts, and reads the rest each
    time."""

    def __init__(self, store: Store, elsewhere: SharedDocuments | None = None) -> None:
        """`elsewhere`: layouts that cannot be read here are read there."""
        self.store = store
        self._elsewhere = elsewhere
        self._layouts: dict[str, Layout] = {}
        self._lock = threading.Lock()
        """Guards the layouts; it is not held while the store is read."""
        self._found: set[str] = set()
        """Digests of layouts that were already there when they were to be put; after a commit, only the step's own."""
        self._root: bytes | None = None
        """The root's document, as last read."""
        self.opened_id: str | None = None
        """The id of the root that the job has opened, if a caller set it; else that of the root that was read first."""
        self.own_record: Generation | None = None
        """The record of the job's generation, as it was put; None if no caller set it."""
        self._copied: set[str] = set()
        """Keys of the last step's documents that have a good copy; retention may have deleted those of other steps."""
        self._told: set[str] = set()
        """Keys of the documents that a warning said were read from their copies."""

    # Reading

    def root(self) -> Root:
        """Returns the root's document. Raises CheckpointNotFound if there is none, CorruptData, FormatError,
        ObjectUnreadable."""
        try:
            return self._root_there()
        except ObjectNotFound as error:
            found = sum(keys.parse_manifest_key(entry.key) is not None for entry in self.store.scan(keys.STEPS))
            why = f"holds no checkpoints: there is no {keys.ROOT}. Is this a run's URL, and its file system mounted?"
            if self.opened_id is not None and not found:
                why = _gone(keys.ROOT)
            elif found:
                why = f"lacks {keys.ROOT} beside {found} checkpoints; a job that saves here puts it again"
            raise CheckpointNotFound(f"{self.store.url} {why}") from error

    def _root_there(self) -> Root:
        """Returns the root's document; raises ObjectNotFound if there is none."""
        self._root = self.document(keys.ROOT)
        root = Root.decode(self._root, keys.ROOT)
        self.opened_id = self.opened_id or root.id
        return root

    @property
    def has_read_root(self) -> bool:
        """Whether this version can read the root's document, since it has."""
        return self._root is not None

    def is_same_root(self) -> bool:
        """Whether the root is still the one that the job has opened; False if that is not known."""
        before = self.opened_id
        try:
            return before is not None and self.root().id == before
        except CheckpointNotFound:
            return False

    def check_there(self) -> None:
        """Raises StoreError if a file system has neither the document of the root, opened before, nor any record of a
        generation: objects put there now would lie in a directory that was made anew, or below a mount point."""
        if not self.store.is_local or self.opened_id is None:
            return
        if any(self.store.scan(key) for key in (keys.ROOT, keys.copy_key(keys.ROOT))):
            return
        if not any(keys.parse_generation_key(entry.key) for entry in self.store.scan(keys.GENERATIONS)):
            raise self.gone(keys.ROOT)

    def gone(self, document: str) -> StoreError:
        """Returns the error for a root that lacks a document which it had before, and which is essential to it."""
        return StoreError(f"{self.store.url} {_gone(document)}")

    def layout(self, digest: str) -> Layout:
        """Returns a layout. Raises CorruptData, FormatError, ObjectNotFound, ObjectUnreadable."""
        with self._lock:
            found = self._layouts.pop(digest, None)
            if found is not None:
                self._layouts[digest] = found  # now the most recently used
                return found
        found = self._read_layout(digest, keys.layout_key(digest))
        self.keep_layout(digest, found)
        return found

    def _read_layout(self, digest: str, key: str) -> Layout:
        try:
            return decode_layout(self.document(key), key)
        except UNUSABLE as error:
            if self._elsewhere is None:
                raise
            try:
                found = self._elsewhere.layout(digest)
            except UNUSABLE:
                raise error from None
            log.warning("%s. It is read from %s instead", error, self._elsewhere.store.url)
            return found

    def keep_layout(self, digest: str, layout: Layout) -> None:
        """Keeps a layout that the caller has just seen whole in the store, so that it is not read again."""
        with self._lock:
            self._layouts.pop(digest, None)
            self._layouts[digest] = layout
            kept = self._layouts
            while len(kept) > 1 and sum(len(one.encoded) for one in kept.values()) > LAYOUTS_KEPT_NBYTES:
                del kept[next(iter(kept))]

    def generation(self, generation: GenerationId) -> Generation:
        """Returns a generation's record. Raises as `layout` does."""
        return Generation.decode(self.document(generation.key), generation.key)

    def document(self, key: str) -> bytes:
        """Returns a document as it was written; if it cannot be read, warns and returns its copy.

        Raises what reading the first raised; NewerFormat if either is of a newer ckptlib; StoreError if the store does
        not answer for the copy, which may be good.
        """
        try:
            return self.document_at(key, key)
        except NewerFormat:
            raise
        except UNUSABLE as error:
            copy = keys.copy_key(key)
            try:
                found = self.document_at(key, copy)
            except NewerFormat:
                raise
            except UNUSABLE:
                raise error from None
            if key not in self._told:
                what = "make it readable, or" if isinstance(error, ObjectUnreadable) else "see what hurt it, then"
                log.warning(
                    "%s. Its copy %s is whole, and is read instead; %s put it again: ckptlib verify --mend %s",
                    *(error, copy, what, self.store.url),
                )
                self._told.add(key)
            return found

    def document_at(self, key: str, at: str) -> bytes:
        """Returns the document `key` from where it lies, `at`: its own key or its copy's. It may have fields that this
        version does not know. Raises ObjectNotFound, CorruptData, FormatError, ObjectUnreadable."""
        where = f"{self.store.url}/{at}"
        return decoded(self.store, partial(self.store.get, at), partial(_checked, key, where))

    # Writing

    def open_root(self, make: Root) -> Root:
        """Returns the root's document; puts `make` if there is none. Replaces a damaged one by its copy."""
        try:
            root = self._root_there()
        except ObjectNotFound:
            put_new(self.store, keys.ROOT, make.encode(), create=True)  # two jobs may begin at the same moment
            return self.root()
        except (CorruptData, FormatError) as error:  # before its first step a root has no copy
            if isinstance(error, NewerFormat) or self.store.scan(keys.STEPS):
                raise
            raise type(error)(
                f"{error}. The root has no step yet: delete {self.store.url}/{keys.ROOT}, and start the job again. But "
                f"if local= holds steps already, put the {keys.ROOT} of that directory in its place: with a new one "
                "the job does not find them"
            ) from error
        if keys.ROOT in self._told:
            self._put_again(keys.ROOT, self.document_at(keys.ROOT, keys.copy_key(keys.ROOT)))
            self._told.discard(keys.ROOT)
        return root

    def put_layout(self, digest: str, document: bytes) -> bool:
        """Puts a layout if it is not there. Replaces a damaged one, since every step that shares it needs it.

        Returns whether it was there and whole: then it was read, and need not be read again.
        """
        key = keys.layout_key(digest)
        try:
            if digester(XXH3)(self.store.get(key)) == digest:
                self.store.flush(keys.LAYOUTS)  # its writer may have died before its name was durable
                self._found.add(digest)
                return True
            log.warning("%s/%s does not match the digest in its name; it is put again", self.store.url, key)
            self.store.delete(key)
        except ObjectNotFound:
            pass
        except ObjectUnreadable as error:
            log.warning("%s; it is put again", error)
            self.store.delete(key)
        put_new(self.store, key, document)
        return False

    def put_generation(self, generation: GenerationId, document: bytes) -> None:
        """Puts a record and its copy. If it was put before, the first record stands, where the store can tell."""
        if not put_new(self.store, generation.key, document):
            document = self.document(generation.key)
        put_new(self.store, keys.copy_key(generation.key), document)

    def complete_generation(self, generation: GenerationId) -> None:
        """Makes a record that is there durable, and puts its copy if there is none. Replaces nothing, since Google
        Cloud Storage allows that only with the right to delete."""
        document, copy = self.document(generation.key), keys.copy_key(generation.key)
        self.store.flush(keys.GENERATIONS)
        if self.store.is_local or self.store.entry(copy) is None:
            put_new(self.store, copy, document)

    def put_copies(self, digests: Iterable[str]) -> None:
        """Puts copies of the root's document and of these layouts, if they are missing or differ.

        Called before a step with these layouts exists. Makes no request for those that the previous step had, too.
        """
        digests = {*digests}
        documents = {keys.ROOT, *map(keys.layout_key, digests)}
        self._copied &= documents
        wanted = documents - self._copied
        if not wanted:
            return
        # Layouts of an earlier save usually have copies: these are read without a listing.
        listed = None if digests <= self._found else self._present([*map(keys.copy_key, wanted)])
        with self._lock:
            known = {keys.layout_key(digest): layout.encoded for digest, layout in self._layouts.items()}
        if self._root is not None:
            known[keys.ROOT] = self._root
        for key in sorted(wanted):
            try:
                document = known[key] if key in known else self.document(key)
            except UNUSABLE as error:
                if key != keys.ROOT:
                    raise
                log.warning("%s; no copy of it is put", error)  # whoever opens the root next is told; steps are whole
                continue
            copy = keys.copy_key(key)
            try:
                if listed is not None and copy not in listed:
                    put_new(self.store, copy, document)
                else:
                    self._put_copy(copy, document)
            except FormatError as error:  # a directory is in its place: no reason to lose the step
                log.error("%s. Until then there is no second copy of %s", error, key)
                continue
            self._copied.add(key)
        self._found &= digests

    def mend(self, wanted: Iterable[str]) -> list[str]:
        """Puts these documents or their copies again if one is damaged or gone, and the other is whole.

        Returns the keys of the objects it put. The rest is left as it is, for `ckptlib verify` to report.
        """
        mended = []
        for key in wanted:
            try:
                document = self.document(key)
            except UNUSABLE:
                continue
            for at in (key, keys.copy_key(key)):
                if not self._has(at, document):
                    self._put_again(at, document)
                    mended.append(at)
        return mended

    def _put_copy(self, copy: str, document: bytes) -> None:
        """Puts a copy unless it is there and the same."""
        try:
            good = self.store.get(copy) == document
        except ObjectNotFound:
            put_new(self.store, copy, document)
            return
        except ObjectUnreadable:
            good = False
        if not good:
            self._put_again(copy, document)

    def _has(self, key: str, document: bytes) -> bool:
        try:
            return self.store.get(key) == document
        except (ObjectNotFound, ObjectUnreadable):
            return False

    def _put_again(self, key: str, document: bytes) -> None:
        """Replaces one of the two. If the process is killed in between, the other one is left."""
        log.warning("%s/%s is put again: it was gone, or not as it was written", self.store.url, key)
        self.store.delete(key)
        put_new(self.store, key, document, create=key == keys.ROOT)

    def put_again(self, digests: Collection[str]) -> None:
        """Puts those of these layouts again that are gone, each with its copy. Costs a listing."""
        present = self._present([*map(keys.layout_key, digests)])
        gone = [digest for digest in digests if keys.layout_key(digest) not in present]
        for digest in gone:
            self.put_layout(digest, self.layout(digest).encoded)
        self._copied -= {*map(keys.layout_key, gone)}
        if gone:
            self.put_copies(gone)

    def _present(self, wanted: Collection[str]) -> set[str]:
        """Returns the keys that are there of those `wanted`, and maybe others, by one listing of their common prefix.

        Listing all layouts would take longer: if the state changes at every save, there is one for each, while most
        steps have one.
        """
        same = takewhile(lambda pair: pair[0] == pair[1], zip(min(wanted), max(wanted), strict=False))
        return {entry.key for entry in self.store.scan("".join(letter for letter, _ in same))}


def _checked(key: str, where: str, data: bytes) -> bytes:
    data = as_written(data, where)
    if key == keys.ROOT:
        Root.decode(data, where)
    elif (generation := keys.parse_generation_key(key)) is not None:
        if Generation.decode(data, where).id != generation:
            raise FormatError(f"{where}: content and name tell of different generations")
    elif keys.layout_key(digester(XXH3)(data)) != key:
        raise CorruptData(f"{where} does not match the digest in its name; it was cut or altered")
    return data


def put_new(store: Store, key: str, data: bytes, create: bool = False) -> bool:
    """Puts an object, unless another process was first: its object stands, where the store can tell; see `Store.put`.

    Returns whether this call put it.
    """
    try:
        store.put(key, data, create=create)
    except ObjectExists:
        store.flush(key[: key.rfind("/") + 1])  # its writer may have died before its name was durable
        return False
    return True


def _gone(document: str) -> str:
    return (
        f"is not there any more: it has no {document}, which it had before. Was it moved or removed, or is its file "
        "system not mounted? Nothing is saved there. Put it back, and the next save succeeds; or stop the job, and "
        "start it again to begin a new root"
    )
