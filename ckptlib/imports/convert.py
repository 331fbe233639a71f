"""Saves a checkpoint of another library as a step."""

from __future__ import annotations

import json
import logging
import tempfile
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path

import torch

from ckptlib.catalog.catalog import Catalog
from ckptlib.catalog.commit import Committer
from ckptlib.catalog.resolving import resolve_manifest
from ckptlib.catalog.retention import drop
from ckptlib.checkpoint import SaveOrder, save_step
from ckptlib.errors import CorruptData, FormatError, ObjectNotFound, ObjectUnreadable, SaveFailed, StateError
from ckptlib.format.keys import STEPS, SaveId, checked_step
from ckptlib.format.manifest import Manifest
from ckptlib.format.values import Json
from ckptlib.imports import unfinished
from ckptlib.imports.foreign import Foreign
from ckptlib.imports.foreign_step import PIECE_BYTES, rows_of
from ckptlib.imports.formats import format_of
from ckptlib.imports.unfinished import IMPORTED, SOURCE, Unfinished
from ckptlib.loading.progress import progress
from ckptlib.loading.reader import Reader
from ckptlib.policy.codec import AUTO, RAW, Asked, CodecRules
from ckptlib.policy.patterns import patterns_of
from ckptlib.reading.committed import Committed
from ckptlib.reading.reader import Want
from ckptlib.saving.session import Session
from ckptlib.saving.settings import SAVE_DEADLINE, Resumable, Settings
from ckptlib.saving.standing import await_room
from ckptlib.saving.terminal import show
from ckptlib.staging.arena import searched
from ckptlib.staging.other_slots import OtherSlots
from ckptlib.state.collector import Flat
from ckptlib.state.raw_bytes import bytes_of
from ckptlib.stores import absolute, open_store

log = logging.getLogger(__name__)

PACK_BYTES = 256 * 1024 * 1024
"""Bytes of a pack: the most that a killed import has to write again. Smaller packs would be uploaded more slowly."""


@dataclass(frozen=True, slots=True)
class ImportReport:
    """The result of an import."""

    kind: str
    """The library that wrote the source."""
    url: str
    step: int
    tensors: int
    nbytes: int
    """Bytes of the tensors; tied ones count once."""
    values: int
    aliases: dict[str, str]
    """Further names of tied tensors, each with the first one."""
    optimizers: tuple[str, ...]
    """Names under which optimizers can be loaded."""
    left_out: tuple[str, ...]
    """Names that `only` and `skip` left out."""
    notes: tuple[str, ...]
    """Notes to read before loading the step."""


def convert(
    source: str | Path,
    url: str | Path,
    *,
    step: int | None = None,
    only: str | Collection[str] | None = None,
    skip: str | Collection[str] = (),
    params: Mapping[str, Sequence[str]] | None = None,
    tie: Mapping[str, str] | None = None,
    codec: Asked = AUTO,
    scratch: str | Path | None = None,
    storage_options: Mapping[str, object] | None = None,
) -> ImportReport:
    """Saves a checkpoint that another library wrote as a step of a root.

    The process that calls it does it alone, whatever process group there is: in a job, call it on one rank, not on all.

    The source is never unpickled: its pickles are read as data, so no code of it runs. When it returns, the step is
    committed, and was read back and compared with the source. A conversion that fails leaves no step, unless the store
    fails while the step is read back; one that is killed may leave a whole one. The same call then compares it, or goes
    on with what is there: packs that have the bytes which the source has now are not written again.

    step:    default: the source's own if it has one, else 0.
    only:    names, path prefixes or patterns of the entries to import; skip: of those to leave out.
    params:  by name of an optimizer whose source only numbers its parameters: their names, in the order in which the
             optimizer was given them, such as {"optimizer": ["model/wte.weight", ...]}.
    tie:     further names of tensors that the source has under one name: {"model/lm_head.weight": "model/wte.weight"}.
    scratch: a directory on a disk with room for a copy of the tensors, which lies there until the step is committed.
             Default: the directory for temporary files.

    Raises FormatError for a source that is damaged or of no known format, UnsupportedState for objects that only
    unpickling could make, StateError if the root has later steps already, Superseded if another process began to save
    to the root meanwhile.
    """
    if "://" in str(source):
        raise FormatError(f"{source}: an import reads files of this machine; copy them here first")
    path = Path(source)
    known = format_of(path)
    names = [] if only is None else sorted(patterns_of("only", only))  # a set has no order
    unwanted = sorted(patterns_of("skip", skip))
    foreign = Foreign(known.name, names, unwanted, params or {})
    known.read(path, foreign)
    _tie(foreign, tie or {})
    foreign.check_params()
    flat = foreign.flat
    number = checked_step(step if step is not None else foreign.step or 0)
    identity = unfinished.identity_of(path, names, unwanted, params, tie, codec)
    settings = Settings(
        url=absolute(url),
        options=storage_options or {},
        codec=CodecRules.of(codec),
        arena=Path(scratch or tempfile.gettempdir()),
        tags={IMPORTED: foreign.kind, SOURCE: identity},
    )
    is_there, left = _look(settings, number, identity)
    if is_there:
        with _manifest(settings, number) as (catalog, manifest):
            _compare(catalog, manifest, flat)
            catalog.store.flush(STEPS)  # a call that was killed may not have made the name durable
            _reclaim(catalog, settings)
    elif left is None or not left.names or not _finish(settings, flat, left):
        saved = _save(settings, flat, number, left)
        with _manifest(settings, number) as (catalog, manifest):
            try:
                _compare(catalog, manifest, flat)
            except CorruptData:
                drop(catalog, saved)
                log.error("step %d is not what the source has; it is dropped, and no longer listed", number)
                raise
    for note in foreign.notes:
        log.warning("%s", note)
    return ImportReport(
        foreign.kind,
        str(url),
        number,
        len(flat.leaves) - len(flat.aliases),
        _nbytes(flat),
        len(flat.values),
        flat.aliases,
        tuple(sorted(flat.objects)),
        tuple(sorted(foreign.left_out)),
        tuple(foreign.notes),
    )


def _tie(foreign: Foreign, tie: Mapping[str, str]) -> None:
    """Adds the ties. Raises FormatError if one names a tensor that is not there. If the tensor is left out, so are its
    further names."""
    for name, first in tie.items():
        if first not in foreign.leaves and first not in foreign.left_out:
            raise FormatError(
                f"tie= names {first!r}, to which {name!r} is to be tied; the source does not have a tensor of that name"
            )
        foreign.add_alias(name, first)


def _nbytes(flat: Flat) -> int:
    return sum(t.nbytes for leaf in flat.leaves if leaf.tied is None for _, t in leaf.pieces)


def _look(settings: Settings, step: int, identity: str) -> tuple[bool, Unfinished | None]:
    """Returns whether an earlier call has saved the step, even one that was killed afterwards; and what is left of a
    call that was killed before that.

    Raises StateError if there are later steps: a root with steps belongs to a run, and an import becomes part of its
    history.
    """
    with open_store(settings.url, settings.options) as store:
        catalog = Catalog(store)
        steps = [save.step for save in catalog.visible()]
        left = None if step in steps else unfinished.find(catalog, step, identity)
    if steps and step < max(steps):
        raise StateError(
            f"{settings.url}: has step {max(steps)} already, and an import of step {step} does not come after it; "
            "import into a new root, or give a later step"
        )
    return step in steps, left


def _finish(settings: Settings, flat: Flat, left: Unfinished) -> bool:
    """Commits a save that an earlier call stored whole before it was killed, if the source still has the same data.
    Returns whether it did."""
    with open_store(settings.url, settings.options) as store:
        catalog = Catalog(store)
        committer = Committer(catalog)
        try:
            _compare(catalog, committer.prover.manifest_of(left.save, left.names), flat)
        except (CorruptData, FormatError, ObjectNotFound, ObjectUnreadable, SaveFailed) as error:
            log.warning("step %d, which a killed import left, is written again: %s", left.save.step, error)
            return False
        committer.commit(left.save, left.names)
        _reclaim(catalog, settings)
        return True


def _reclaim(catalog: Catalog, settings: Settings) -> None:
    """Removes the copy that a killed import left, as a session would."""
    OtherSlots(catalog.root().id, catalog.next_generation(), searched(settings.arena)).reclaim()


def _resumable(settings: Settings, left: Unfinished | None) -> Resumable:
    """Returns how the save may go on from an unfinished one. Only packs of raw chunks can be proved, and only a save
    without a part can go on: with two parts, nobody knows which one is committed."""
    if left is None or left.names or settings.codec not in (CodecRules.of(AUTO), CodecRules.of(RAW)):
        return Resumable(PACK_BYTES, None)
    show(log, "an earlier import of step %d was interrupted: what it has stored is not written again", left.save.step)
    return Resumable(PACK_BYTES, left.save.generation)


def _save(settings: Settings, flat: Flat, step: int, left: Unfinished | None) -> SaveId:
    session = Session(replace(settings, resumable=_resumable(settings, left)), None, alone=True)
    clean = False
    try:
        await_room(session)
        nbytes = f"{_nbytes(flat):,} bytes"
        show(log, "1 of 3: copying %s to %s", nbytes, settings.arena)
        pending = save_step(session, SaveOrder(flat, step))
        pending.staging.go()
        show(log, "2 of 3: writing %s to %s; then they are compared with the source", nbytes, session.store.url)
        pending.wait_committed()
        clean = True
        return pending.save
    finally:
        session.close(SAVE_DEADLINE, clean=clean)


@contextmanager
def _manifest(settings: Settings, step: int) -> Iterator[tuple[Catalog, Manifest]]:
    with open_store(settings.url, settings.options) as store:
        catalog = Catalog(store)
        yield catalog, resolve_manifest(catalog, step)


def _compare(catalog: Catalog, manifest: Manifest, flat: Flat) -> None:
    """Compares the stored step with the source, bit by bit. Raises CorruptData."""
    catalog.store.reads_once = True
    buffer, step = torch.empty(PIECE_BYTES, dtype=torch.uint8), manifest.save.step
    with progress(f"comparing step {step} with its source", _nbytes(flat)) as advance:
        reader = Reader(Committed(catalog, manifest), 0)
        if any(flat.aliases.items() - layout.aliases.items() for layout in reader.layouts.values()):
            raise CorruptData(_differs("what is tied", step))
        if any(_described(layout.objects) != _described(flat.objects) for layout in reader.layouts.values()):
            raise CorruptData(_differs("which parameters an optimizer has, or how a container is made", step))
        names = {leaf.name for leaf in flat.leaves if leaf.tied is None}
        if more := {entry.name for layout in reader.layouts.values() for entry in layout.tensors} - names:
            raise CorruptData(_differs(min(more), step))
        for leaf in (leaf for leaf in flat.leaves if leaf.tied is None):
            kinds = {(entry.dtype, entry.shape) for entry in reader.entries(leaf.name).values()}
            if kinds != {(leaf.dtype, leaf.shape)}:
                raise CorruptData(_differs(leaf.name, step))
            for box, tensor in leaf.pieces:
                for part, source in rows_of(box, tensor):
                    if source.nbytes > buffer.numel():
                        buffer = torch.empty(source.nbytes, dtype=torch.uint8)
                    target = buffer[: source.nbytes].view(source.dtype).view(source.shape)
                    reader.read([Want(leaf.name, ((part, target),))], lambda nbytes: None)
                    if not torch.equal(bytes_of(target), bytes_of(source.contiguous())):
                        raise CorruptData(_differs(f"{leaf.name}{part}", step))
                    advance(source.nbytes)
        if dict(reader.part(0).values) != flat.values:
            raise CorruptData(_differs("a plain value", step))


def _described(objects: Mapping[str, Json]) -> str:
    """Returns objects as a layout holds them after it was read."""
    return json.dumps(dict(objects), sort_keys=True)


def _differs(what: str, step: int) -> str:
    return (
        f"{what}: step {step} is not what the source has now. Did the source change, or is the step of another one? "
        "Import into a new root"
    )
