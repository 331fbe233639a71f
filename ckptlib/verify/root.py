"""Reads all of a root, the way a load would, and reports what is damaged. Repairs nothing. No torch.

Every chunk is read and compared with its digest. Every document is compared with its own digest, and with others: the
manifest with the parts it was derived from, and each pack's safetensors header, which no load reads, with the rows of
its part. The gaps between chunks hold no data, and are not checked.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial

from ckptlib.catalog.catalog import Catalog
from ckptlib.catalog.completeness import Proof
from ckptlib.catalog.reading import GeneratorThreads, each, in_order
from ckptlib.catalog.second_read import decoded
from ckptlib.catalog.shards import PartIndex, ShardComparer
from ckptlib.errors import (
    CheckpointNotFound,
    CkptError,
    CorruptData,
    FormatError,
    ObjectNotFound,
    ObjectUnreadable,
    UnsupportedState,
)
from ckptlib.format import keys, values
from ckptlib.format.check import alike
from ckptlib.format.documents import is_version_altered
from ckptlib.format.keys import GenerationId, PackSet, PartName, SaveId
from ckptlib.format.layout import Layout
from ckptlib.format.manifest import Generation, Manifest, ranks_by_layout, told_users
from ckptlib.format.part import Part
from ckptlib.stores.io_limits import THREADS
from ckptlib.verify.findings import Finding, attempt, finding_of
from ckptlib.verify.packs import Advance, verify_packs
from ckptlib.verify.shared_chunks import SharedChunks

MAX_REGIONS = 100
"""The most regions of a tensor that are reported for the same two ranks."""


def verify_root(catalog: Catalog) -> Iterator[Finding]:
    """Yields what is wrong with the documents that all steps share: the root's own and those of the generations.

    Raises StoreError if the store cannot be listed.
    """
    root = attempt(catalog.root)
    if isinstance(root, CheckpointNotFound):
        yield Finding("missing", keys.ROOT, f"{keys.ROOT}: there is no such object; jobs would take it for a new root")
    elif isinstance(root, CkptError):
        yield finding_of(root, keys.ROOT, None)
    else:
        yield from _both(catalog, keys.ROOT, None)
    wanted = {save.generation for save in catalog.saves()}  # first: a committer has put its record before
    ids = catalog.generations.ids()
    for generation, record, altered in each(partial(_read_generation, catalog), ids):
        if isinstance(record, CkptError):
            yield finding_of(record, generation.key, None)
            continue
        yield from altered
        if record.resumed_from is not None:
            wanted.add(record.resumed_from.generation)
    for generation in sorted(wanted - {*ids}):
        if isinstance(attempt(partial(catalog.generations.record, generation)), Generation):
            yield from _both(catalog, generation.key, None)
            continue
        message = f"{generation.key}: there is no such object, but steps of this generation are, or one that went on "
        yield Finding("missing", generation.key, message + "from it; history ends with it")


def _read_generation(
    catalog: Catalog, generation: GenerationId
) -> tuple[GenerationId, Generation | CkptError, list[Finding]]:
    """Returns the generation's record, or why it cannot be read; and what is wrong with it or its copy if it can."""
    record = attempt(partial(catalog.generations.record, generation))
    altered = [] if isinstance(record, CkptError) else [*_both(catalog, generation.key, None)]
    return generation, record, altered


def verify_save(
    catalog: Catalog,
    save: SaveId,
    advance: Advance = lambda nbytes: None,
    expect: Advance = lambda nbytes: None,
    shared: SharedChunks | None = None,
) -> Iterator[Finding]:
    """Yields what is wrong with a committed step.

    `expect`: called once, before `advance`, with the bytes of packs to read. `advance`: called with bytes as they are
    done. `shared`: the chunks read for earlier steps; those that were good are not read again.

    Needs memory for the step's tables, and RUN_BYTES for each of THREADS requests. Raises CheckpointNotFound if there
    is no such step, StoreError if the store cannot be listed. A step that was dropped while it was read has lost
    objects, but is not damaged: CheckpointNotFound follows its findings.
    """
    try:
        manifest = catalog.manifest(save)
    except (CorruptData, FormatError, ObjectUnreadable) as error:
        yield finding_of(error, save.manifest_key, save)
        return
    good = True
    for finding in _verify(catalog, manifest, advance, expect, shared):
        good = False
        yield finding
    if not good and not catalog.is_committed(save):
        raise CheckpointNotFound(f"step {save.step} was dropped as it was read: there is no save {save} any more")


def _verify(
    catalog: Catalog, manifest: Manifest, advance: Advance, expect: Advance, shared: SharedChunks | None
) -> Iterator[Finding]:
    save = manifest.save
    with GeneratorThreads(THREADS, "ckptlib-verify") as executor:
        found = executor.map(lambda digest: attempt(partial(catalog.layout, digest)), manifest.layouts)
        layouts = dict(zip(manifest.layouts, found, strict=True))
        readable = {digest: layout for digest, layout in layouts.items() if isinstance(layout, Layout)}
        for digest, layout in layouts.items():
            key = keys.layout_key(digest)
            if isinstance(layout, CkptError):
                yield finding_of(layout, key, save)
            else:
                yield from _both(catalog, key, save)
        yield from _version_of(catalog, save.manifest_key, save)
        sound = []
        for name, part, altered in in_order(executor, partial(_read_part, catalog, manifest, readable), manifest.parts):
            if isinstance(part, Part):
                sound.append(part)
                yield from altered
            elif part is not None:
                yield finding_of(part, name.key, save, name.rank)
        if len(sound) == manifest.world_size:
            yield from _check_manifest(manifest, sound)
            yield from _check_cover(manifest, sound, readable, ShardComparer(catalog.store.get_into))
        yield from verify_packs(catalog, save, sound, readable, executor, expect, advance, shared)
    if shared is not None:
        shared.finish(save)


def _both(catalog: Catalog, key: str, save: SaveId | None) -> Iterator[Finding]:
    """Yields what is wrong with a document or its copy, if the other could be read.

    Roots of earlier versions have no copies, so a missing copy is no finding.
    """
    copy = keys.copy_key(key)
    first, second = (attempt(partial(catalog.shared.document_at, key, at)) for at in (key, copy))
    for at, document, other in ((key, first, copy), (copy, second, key)):
        if isinstance(document, ObjectNotFound) and at == copy:
            continue
        if isinstance(document, CkptError):
            finding = finding_of(document, at, save)
            yield replace(finding, message=f"{finding.message}; {other} is whole, and loads read that")
        elif at == copy and isinstance(first, bytes) and document != first:
            yield Finding("malformed", at, f"{at}: it says something else than {other}", save)
        else:
            yield from _version_of(catalog, at, save)


def _version_of(catalog: Catalog, key: str, save: SaveId | None) -> list[Finding]:
    """Returns what is wrong with the version in a document that can be read."""
    data = attempt(partial(catalog.store.get, key))
    return _altered_version(data, key, save) if isinstance(data, bytes) else []


def _altered_version(data: bytes, key: str, save: SaveId | None, rank: int | None = None) -> list[Finding]:
    if not is_version_altered(data):
        return []
    message = f"{key}: the version in it was altered; all else is as it was written, so loads read it and warn"
    return [Finding("altered", key, message, save, rank)]


def _read_part(
    catalog: Catalog, manifest: Manifest, layouts: Mapping[str, Layout], name: PartName
) -> tuple[PartName, Part | CkptError | None, list[Finding]]:
    """Reads a part. Returns it if it is sound, else what is wrong with it; None if its layout is damaged, which is
    another finding.

    Also returns findings that leave the part sound, which are about its version.
    """
    read = partial(catalog.store.get, name.key)
    found = attempt(lambda: decoded(catalog.store, read, lambda data: (data, Part.decode(name, data))))
    if isinstance(found, CkptError):
        return name, found, []
    data, part = found
    digest = part.table.layout
    problem = attempt(lambda: manifest.check_layout(name, digest))
    if problem is None:
        if digest not in layouts:
            return name, None, []
        problem = attempt(lambda: part.table.check(layouts[digest], name.key))
        problem = problem or attempt(lambda: _check_values(part, name))
    return name, part if problem is None else problem, _altered_version(data, name.key, manifest.save, name.rank)


def _check_values(part: Part, name: PartName) -> None:
    """Raises FormatError if the part has a value that a load would refuse."""
    for path, value in (*part.values.items(), *part.metrics.items()):
        try:
            values.decode(value, path)
        except FormatError as error:
            raise FormatError(f"{name.key}: {error}") from None
        except ImportError:
            continue  # a value of torch, which is not installed


def _check_manifest(manifest: Manifest, parts: Sequence[Part]) -> Iterator[Finding]:
    """Yields what differs between a manifest and its parts, from which it was derived."""
    layouts = ranks_by_layout((part.table.layout, part.rank) for part in parts)
    users: dict[PackSet, frozenset[int]] = {}
    for part in parts:
        users.update({of: users.get(of, frozenset()) | {part.rank} for of in part.uses})
    derived = {
        "agreement of replicas": alike(name.check for name in manifest.parts),
        "world size": {part.world_size for part in parts} == {manifest.world_size},
        "layouts": layouts == manifest.layouts,
        "size": sum(part.nbytes_put for part in parts) == manifest.nbytes,
        "size of the state": manifest.nbytes_state in (None, sum(part.table.nbytes_data for part in parts)),
        "use of other steps": users.keys() == manifest.uses.keys()
        and told_users({of: ranks for of, ranks in users.items() if len(ranks) < len(parts)}) == manifest.users,
        "time": parts[0].created == manifest.created,
        "set of metrics": parts[0].metrics == manifest.metrics,
        "exemption": parts[0].exempt == manifest.exempt,
        "account": parts[0].account == manifest.account,
    }
    for what, agrees in derived.items():
        if not agrees:
            key = manifest.save.manifest_key
            yield Finding("malformed", key, f"{key}: its {what} is not that of its parts", manifest.save)


def _check_cover(
    manifest: Manifest, parts: Sequence[Part], layouts: Mapping[str, Layout], contents: ShardComparer
) -> Iterator[Finding]:
    """Checks what the commit proved: the parts hold every element once, or more than once with the same value."""
    save, key = manifest.save, manifest.save.manifest_key
    proof = Proof()
    for part in parts:
        proof.add(part, layouts[part.table.layout])
    clash = proof.clash()
    if clash is not None:
        yield Finding("incomplete", key, f"{clash}: it is not the same tensor for all ranks", save)
        return
    try:
        missing = attempt(proof.missing)
    except UnsupportedState as error:  # no save has it, and its shards cannot be compared either
        yield Finding("malformed", key, f"{key}: {error}", save)
        return
    if isinstance(missing, CkptError):
        yield finding_of(missing, key, save)
    elif missing is not None:
        yield Finding("incomplete", key, f"{missing}: no part of step {save.step} holds these elements", save)
    try:
        doubts = proof.doubts()
    except UnsupportedState as error:
        yield Finding("incomplete", key, str(error), save)
        return
    shares = {part.rank: PartIndex(part, layouts[part.table.layout]) for part in parts if doubts}
    told: Counter[tuple[str, tuple[int, int]]] = Counter()
    for doubt in doubts:
        name, region, (first, second) = doubt.name, doubt.region, doubt.ranks
        if told[name, doubt.ranks] == MAX_REGIONS:
            continue
        # an unreadable chunk is another finding
        if attempt(partial(contents.settles, doubt, shares.__getitem__)) is False:
            told[name, doubt.ranks] += 1
            message = f"{name}{region}: ranks {first} and {second} saved different bytes for it"
            yield Finding("incomplete", key, message, save, second, ((name, region),))
