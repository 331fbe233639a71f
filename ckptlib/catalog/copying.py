"""Copies one step into a root of its own, with the same keys and bytes, so that it stands alone.

The documents of a step do not name its root, so they are copied as they are, with all packs that the step needs,
whichever saves put these, and the records of the generations that led to it. Packs go first, then layouts. The caller
then checks what was put, by a catalog of `CopiedObjects`; the other documents follow, and the manifest last. A layout
is there twice: if the source has lost one of the two, the other is copied. No torch.

    a crash ...                 leaves                      then a copy that is begun again
    between packs               packs that no part names    puts those that are missing
    between documents           no step, or the whole one   puts what is missing
    behind the manifest         the step                    looks whether it is good

A sweep of the new root condemns what a crash has left, and deletes it a grace period later. A copy that finds such a
trash record does not begin; and since a sweep may begin later, the copy looks again after it has put the manifest, as
`late_commit` does: for records, then for parts and packs.

A job may begin in the new root while packs are copied. So the copy looks for one again before it puts the records, and
once more before the manifest.
"""

from __future__ import annotations

import mmap
import secrets
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from functools import partial

from typing_extensions import Buffer, override

from ckptlib.catalog.catalog import Catalog
from ckptlib.catalog.late_commit import take_back
from ckptlib.catalog.reading import in_order
from ckptlib.catalog.second_read import decoded
from ckptlib.catalog.shared_documents import put_new
from ckptlib.catalog.step_objects import StepObjects, check_there
from ckptlib.catalog.unreadable import UNREADABLE
from ckptlib.errors import CheckpointNotFound, CkptError, CorruptData, ObjectExists, ObjectNotFound, SaveFailed
from ckptlib.format import keys
from ckptlib.format.keys import SaveId
from ckptlib.format.manifest import Generation, Root
from ckptlib.format.part import checked
from ckptlib.pages import PAGE_BYTES
from ckptlib.stores import Counted, Entry, Store
from ckptlib.stores.base import LateHead

AT_ONCE = 4
"""How many packs are copied at the same time."""

NBYTES_IN_PACKS = 16
"""The most bytes that are copied at the same time, as a multiple of the target's `pack_nbytes`; a larger pack goes
alone. Stores reached through fsspec hold each pack in memory: there it is 1 GiB, the size of four packs of an import.
Stores that take pieces reach AT_ONCE first."""

PIECE_BYTES = 4 * 1024 * 1024

AHEAD = 2
"""How many pieces of a pack are read ahead of the store that takes them."""


def lineage_of(catalog: Catalog, save: SaveId) -> tuple[list[Generation], CkptError | None]:
    """Returns the records of the generations that led to a step, its own first; and why the next one cannot be read, if
    they end for that reason."""
    found: list[Generation] = []
    at: SaveId | None = save
    while at is not None and at.generation not in [record.id for record in found]:
        try:
            record = catalog.generations.record(at.generation)
        except UNREADABLE as error:
            return found, error
        found.append(record)
        at = record.resumed_from
    return found, None


def open_copy(source: Catalog, target: Catalog, step: StepObjects, lineage: list[Generation]) -> None:
    """Makes the new root, or finds that of an earlier copy of the same step.

    Raises CkptError for a root that is in use, or whose sweeps are deleting what that copy left.
    """
    where, origin = target.store.url, source.root()
    with suppress(CheckpointNotFound):
        is_source = target.root().id == origin.id
        if what := "the id of the source" if is_source else _used_for(target, step, lineage):
            raise CkptError(f"{where} is a root that is in use: it has {what}. Name a new one; nothing was changed")
        if (condemned := _condemned(target, step)) is not None:
            raise CkptError(
                f"{where} has a trash record, {condemned.trash_key}: a sweep, such as ckptlib gc, has found what is "
                "left of an earlier copy, and deletes it after the grace period. Name a new root, or delete this one; "
                "nothing was changed"
            )
        return
    if target.store.scan(""):
        raise CkptError(f"{where} is not empty, and is no root. Name a new one; nothing was changed")
    target.open_root(Root(secrets.token_hex(16), origin.algorithm, origin.save_deadline_s))


def _used_for(target: Catalog, step: StepObjects, lineage: list[Generation]) -> str | None:
    """Returns what a root has that no copy of this step leaves; None if there is nothing."""
    save, saves = step.manifest.save, target.saves()
    if saves and (saves != [save] or target.manifest_document(save) != step.document):
        return "steps"
    generations = {*target.generations.ids()}
    if not generations:  # a copy puts generations before any part
        parts = filter(None, (keys.parse_part_key(entry.key) for entry in target.store.scan(keys.PARTS)))
        return "parts of other steps, as the local= of a job has" if any(part.save != save for part in parts) else None
    return "generations of its own" if generations - {record.id for record in lineage} else None


def copy_packs(source: Store, target: Store, step: StepObjects, advance: Callable[[int], None]) -> int:
    """Puts the packs that are missing; returns how many bytes. Tells `advance` each time how many more bytes are
    done; first those that were there.

    Raises CorruptData if a key is taken by an object of another size.
    """
    there = {entry.key: entry.nbytes for entry in target.scan(keys.PACKS)}
    wanted = sorted(step.packs.items())
    for key, nbytes in wanted:
        if there.get(key, nbytes) != nbytes:
            raise CorruptData(
                f"{target.url}/{key}: has {there[key]} bytes, expected {nbytes}; something else writes there. Delete "
                "the copy, or name a new root"
            )
    for prefix in sorted({key[: key.rfind("/") + 1] for key in step.packs if key in there}):
        target.flush(prefix)  # a copy that was killed may not have made the names durable
    missing = [(key, nbytes) for key, nbytes in wanted if key not in there]
    advance(step.nbytes - sum(nbytes for _, nbytes in missing))
    with ThreadPoolExecutor(AT_ONCE, "ckptlib-copy") as executor, ThreadPoolExecutor(AT_ONCE, "ckptlib-read") as reads:
        waiting: deque[tuple[int, Future[None]]] = deque()
        for key, nbytes in missing:
            while waiting and not _has_room(target, [*(size for size, _ in waiting), nbytes]):
                waiting.popleft()[1].result()
            waiting.append((nbytes, executor.submit(_put_pack, source, target, key, nbytes, reads, advance)))
        for _, copied in waiting:
            copied.result()
    return sum(nbytes for _, nbytes in missing)


def _has_room(target: Store, sizes: list[int]) -> bool:
    """Whether packs of these sizes may be put at the same time."""
    return len(sizes) <= AT_ONCE and sum(sizes) <= NBYTES_IN_PACKS * target.pack_nbytes


def _put_pack(
    source: Store, target: Store, key: str, nbytes: int, reads: ThreadPoolExecutor, advance: Callable[[int], None]
) -> None:
    first = min(PAGE_BYTES, nbytes)  # the rest begins on a page boundary: local stores write whole pages faster
    head = source.get(key, 0, first)

    def read(at: int) -> memoryview:
        buffer = memoryview(mmap.mmap(-1, min(PIECE_BYTES, nbytes - at)))
        source.get_into(key, at, buffer)
        return buffer

    def pieces() -> Iterator[Buffer]:
        for piece in in_order(reads, read, range(first, nbytes, PIECE_BYTES), AHEAD):
            advance(piece.nbytes)
            yield piece

    advance(first)
    try:
        target.put(key, head, Counted(nbytes - first, pieces()))
    except ObjectExists:  # put by another copy of the same step, which may be flushing it still; it is checked later
        target.flush(key[: key.rfind("/") + 1])


def copy_layouts(source: Catalog, target: Catalog, step: StepObjects) -> None:
    """Puts the step's layouts that are missing, each with its copy, and the copy of the root's document."""
    for digest in step.manifest.layouts:
        layout = source.layout(digest)
        target.shared.put_layout(digest, layout.encoded)
        target.shared.keep_layout(digest, layout)
    target.shared.put_copies(step.manifest.layouts)


def commit_copy(source: Catalog, target: Catalog, step: StepObjects, lineage: list[Generation]) -> None:
    """Puts the other documents of a step whose packs and layouts are there and are good; the step exists then.

    Raises CkptError if a job has begun there meanwhile: the records may supersede that job, and its steps hide the
    copied one or are hidden by it. Raises SaveFailed if a sweep has deleted some of the step, or may have: a step that
    this copy put is taken back.
    """
    manifest = step.manifest
    _check_unused(target, step, lineage, "no document of the step but its layouts is there")
    for record in reversed(lineage):
        target.shared.put_generation(record.id, source.shared.document(record.id.key))
    for name in manifest.parts:
        part = decoded(source.store, partial(source.store.get, name.key), partial(checked, name))
        put_new(target.store, name.key, part)
    left = (
        "the step is not there, but records of its generations are. If that job ends with Superseded by them, ckptlib "
        f"ls --all {target.store.url} lists what it has saved, and ckptlib rewind goes back to it"
    )
    _check_unused(target, step, lineage, left)
    # Another copy of the same step may have put it, and have reported success.
    is_own = put_new(target.store, manifest.save.manifest_key, step.document, create=True)
    try:
        _check_stays(target, step)
    except (CorruptData, ObjectNotFound, SaveFailed) as error:
        if is_own:
            take_back(target, manifest.save)
        raise SaveFailed(
            f"{error}. A sweep of the new root, such as ckptlib gc, took what an earlier copy had left for the remains "
            f"of a crash. The step is {'taken back' if is_own else 'what another copy put'}: delete "
            f"{target.store.url}, or name a new root, and copy again"
        ) from error
    target.shared.put_again(manifest.layouts)


def _check_unused(target: Catalog, step: StepObjects, lineage: list[Generation], left: str) -> None:
    """Raises CkptError if a job has begun, unless another copy has put the step, from which jobs may go on."""
    what = _used_for(target, step, lineage)
    if what and not target.is_committed(step.manifest.save):
        raise CkptError(
            f"a job has begun in {target.store.url} meanwhile: it has {what}. Name a new root, and copy again; {left}"
        )


def _check_stays(target: Catalog, step: StepObjects) -> None:
    """Raises SaveFailed, CorruptData or ObjectNotFound if the step has a trash record, or lacks parts or packs.

    The record is looked for first, since a sweep deletes it last: once it is gone, all that the sweep deletes is gone.
    """
    save = step.manifest.save
    if (condemned := _condemned(target, step)) is not None:
        raise SaveFailed(f"step {save.step}: there is a trash record, {condemned.trash_key}")
    there = {name for names in target.parts(save).values() for name in names}
    if not there.issuperset(step.manifest.parts):
        raise SaveFailed(f"step {save.step}: parts of it are gone")
    check_there(target, step.packs)


def _condemned(target: Catalog, step: StepObjects) -> SaveId | None:
    """Returns a save that has a trash record, and whose objects the step needs; None if there is none."""
    saves = {keys.parse_trash_key(entry.key) for entry in target.store.scan(keys.TRASH)}
    return next((save for save in (step.manifest.save, *step.owners) if save in saves), None)


class CopiedObjects(Store):
    """A view of the copy before all of it is there: packs and layouts of the target, all else of the source.

    It puts and deletes nothing.
    """

    def __init__(self, source: Store, target: Store) -> None:
        self._source, self._target = source, target
        self.url, self.is_local = target.url, target.is_local
        self.pack_nbytes, self.late_nbytes = target.pack_nbytes, target.late_nbytes

    def _of(self, key: str) -> Store:
        return self._target if key.startswith((keys.PACKS, keys.LAYOUTS, keys.COPIES)) else self._source

    @override
    def get(self, key: str, offset: int = 0, nbytes: int | None = None) -> bytes:
        return self._of(key).get(key, offset, nbytes)

    @override
    def get_into(self, key: str, offset: int, buffer: memoryview, *, deadline: float | None = None) -> None:
        self._of(key).get_into(key, offset, buffer, deadline=deadline)

    @override
    def scan(self, prefix: str, after: str = "") -> list[Entry]:
        return self._of(prefix).scan(prefix, after)

    @override
    def put(
        self,
        key: str,
        head: Buffer | LateHead,
        pieces: Iterable[Buffer] = (),
        *,
        create: bool = False,
        deadline: float | None = None,
    ) -> None:
        raise AssertionError("a copy is only looked at")

    @override
    def delete(self, *keys: str) -> None:
        raise AssertionError("a copy is only looked at")
