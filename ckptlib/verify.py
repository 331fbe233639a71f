"""Reads a root the way a load would, but all of it, and tells what is damaged. Repairs nothing. No torch.

Every chunk is read and compared with its digest; every document with its own, and with the others: the manifest with
the parts it was derived from, each pack's safetensors header with the rows of its part, although no load reads it.
What fills the gaps between chunks is nobody's data and is not compared with anything.
"""

from __future__ import annotations

import threading
from collections import defaultdict, deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from typing import Literal, TypeVar

import numpy as np

from ckptlib import keys
from ckptlib.box import Box, find_overlap
from ckptlib.catalog import Catalog
from ckptlib.contents import Contents, SavedShard, Share
from ckptlib.coverage import Coverage
from ckptlib.digests import digester
from ckptlib.errors import (
    CheckpointNotFound,
    CkptError,
    CorruptData,
    FormatError,
    NewerFormat,
    ObjectNotFound,
    StoreError,
)
from ckptlib.heads import MAX_HEAD_BYTES, check_head, expected_head
from ckptlib.keys import GenerationId, PartName, SaveId
from ckptlib.layout import ByHand, Layout, PerRank
from ckptlib.manifest import Generation, Manifest, Part

READ_THREADS = 8
"""Requests under way at once: a local disk is busy with 4, an object store wants more."""

RUN_BYTES = 16 * 1024 * 1024
"""The most that one request asks for, where no chunk is larger; times READ_THREADS, the memory for data."""

AHEAD = 2 * READ_THREADS
"""Requests handed out before the result of the first is looked at."""

Damage = Literal["missing", "altered", "malformed", "incomplete", "unreadable"]
"""No such object; bytes that do not match their digest; an object that is not what it should be; elements that nobody
holds, or that two hold differently; the store failed to give it."""

Advance = Callable[[int], None]

T = TypeVar("T")
R = TypeVar("R")


@dataclass(frozen=True, slots=True)
class Finding:
    """One thing that is wrong."""

    damage: Damage
    key: str
    """The object in which it is."""
    message: str
    save: SaveId | None = None
    """The step that is hurt; None: the root as a whole."""
    rank: int | None = None
    """Whose part or pack it is."""
    shards: tuple[tuple[str, Box], ...] = ()
    """The tensors that are hurt, each with its box in global coordinates."""
    offset: int | None = None
    """First damaged byte of the object, where that is known to the chunk."""
    nbytes: int | None = None
    """From there to the end of the last damaged chunk."""


def verify_root(catalog: Catalog) -> Iterator[Finding]:
    """What is wrong with the documents that all steps share: the root itself and the generations.

    Raises StoreError when the store cannot be listed, NewerFormat.
    """
    root = _attempt(catalog.root)
    if isinstance(root, CheckpointNotFound):
        yield Finding("missing", keys.ROOT, f"{keys.ROOT}: there is no such object; jobs would take it for a new root")
    elif isinstance(root, CkptError):
        yield _finding(root, keys.ROOT, None)
    ids = catalog.generation_ids()
    wanted = {save.generation for save in catalog.saves()}
    for generation in ids:
        problem = _attempt(partial(_check_generation, catalog, generation))
        if problem is not None:
            yield _finding(problem, generation.key, None)
    for generation in sorted(wanted - {*ids}):
        message = f"{generation.key}: steps of this generation are there, but not its record; history ends with them"
        yield Finding("missing", generation.key, message)


def _check_generation(catalog: Catalog, generation: GenerationId) -> None:
    record = Generation.decode(catalog.store.get(generation.key), generation.key)
    if record.id != generation:
        raise FormatError(f"{generation.key}: content and name tell of different generations")


def verify_save(catalog: Catalog, save: SaveId, advance: Advance = lambda nbytes: None) -> Iterator[Finding]:
    """What is wrong with a committed step. `advance` is told of bytes of packs as they are done, their sum is `nbytes`
    of the manifest when nothing is missing.

    The memory it takes is that of the step's tables, and RUN_BYTES for each of READ_THREADS requests. Raises
    CheckpointNotFound where there is no such step (any more), StoreError when the store cannot be listed, NewerFormat.
    """
    try:
        manifest = catalog.manifest(save)
    except (CorruptData, FormatError) as error:
        if isinstance(error, NewerFormat):
            raise
        yield _finding(error, save.manifest_key, save)
        return
    with ThreadPoolExecutor(READ_THREADS, "ckptlib-verify") as executor:
        layouts = {digest: _attempt(partial(catalog.layout, digest)) for digest in manifest.layouts}
        readable = {digest: layout for digest, layout in layouts.items() if isinstance(layout, Layout)}
        for digest, layout in layouts.items():
            if isinstance(layout, CkptError):
                yield _finding(layout, keys.layout_key(digest), save)
        sound = []
        for name, part in _in_order(executor, partial(_read_part, catalog, manifest, readable), manifest.parts):
            if isinstance(part, Part):
                sound.append(part)
            elif part is not None:
                yield _finding(part, name.key, save, name.rank)
        if len(sound) == manifest.world_size:
            yield from _check_manifest(manifest, sound)
            yield from _check_cover(manifest, sound, readable, Contents(catalog.store.get_into))
        yield from _verify_packs(catalog, save, sound, readable, executor, advance)


def _read_part(
    catalog: Catalog, manifest: Manifest, layouts: Mapping[str, Layout], name: PartName
) -> tuple[PartName, Part | CkptError | None]:
    """A part that is sound; what is wrong with it; or None where its layout is damaged, which is another's finding."""
    part = _attempt(lambda: Part.decode(name, catalog.store.get(name.key)))
    if not isinstance(part, Part):
        return name, part
    digest = part.table.layout
    if digest not in manifest.layouts:
        return name, FormatError(f"{name.key}: its layout {digest} is none of the manifest's")
    if digest not in layouts:
        return name, None
    problem = _attempt(lambda: part.table.check(layouts[digest], name.key))
    return name, part if problem is None else problem


def _check_manifest(manifest: Manifest, parts: Sequence[Part]) -> Iterator[Finding]:
    """A manifest is derived from its parts, so it can be derived again."""
    layouts: dict[str, tuple[int, ...]] = {}
    for part in parts:
        layouts[part.table.layout] = (*layouts.get(part.table.layout, ()), part.rank)
    derived = {
        "world size": {part.world_size for part in parts} == {manifest.world_size},
        "layouts": layouts == manifest.layouts,
        "size": sum(pack.nbytes for part in parts for pack in part.packs) == manifest.nbytes,
        "time": parts[0].created == manifest.created,
        "metrics": parts[0].metrics == manifest.metrics,
    }
    for what, agrees in derived.items():
        if not agrees:
            key = manifest.save.manifest_key
            yield Finding("malformed", key, f"{key}: its {what} is not that of its parts", manifest.save)


def _check_cover(
    manifest: Manifest, parts: Sequence[Part], layouts: Mapping[str, Layout], contents: Contents
) -> Iterator[Finding]:
    """Whether the parts hold every element once, or more than once but alike."""
    save, key = manifest.save, manifest.save.manifest_key
    coverage = Coverage()
    for part in parts:
        coverage.add(part, layouts[part.table.layout])
    missing = coverage.missing()
    if missing is not None:
        yield Finding("incomplete", key, f"{missing}: no part of step {save.step} holds these elements", save)
    held: dict[tuple[str, Box], SavedShard] = {}
    by_hand: defaultdict[str, list[Box]] = defaultdict(list)
    for part in parts:
        layout = layouts[part.table.layout]
        share = Share(part, layout)
        for shard, name, box in _shards(part, layout):
            holding = layout.tensors[part.table.tensors[shard]].holding
            if isinstance(holding, PerRank):
                continue
            saved = share.shard(shard)
            first = held.setdefault((name, box), saved)
            if _attempt(partial(contents.same, first, saved)) is False:  # what cannot be read is another's finding
                message = f"{name}{box}: ranks {first.part.rank} and {part.rank} saved different bytes for it"
                yield Finding("incomplete", key, message, save, part.rank, ((name, box),))
            elif isinstance(holding, ByHand) and first.part.rank == part.rank:
                by_hand[name].append(box)
    for name, boxes in by_hand.items():
        overlap = find_overlap(Box.whole(_shape_of(name, layouts)), boxes)
        if overlap is not None:
            message = f"{name}{overlap}: two of the boxes given by hand overlap here, so its value is not known"
            yield Finding("incomplete", key, message, save, None, ((name, overlap),))


def _shape_of(name: str, layouts: Mapping[str, Layout]) -> tuple[int, ...]:
    return next(entry.shape for layout in layouts.values() if (entry := layout.find(name)) is not None)


def _shards(part: Part, layout: Layout) -> Iterator[tuple[int, str, Box]]:
    for shard, (tensor, box) in enumerate(zip(part.table.tensors, part.table.boxes, strict=True)):
        yield shard, layout.tensors[tensor].name, box


# Packs


@dataclass(frozen=True)
class _PackRead:
    """One pack that is to be read: what its part says of it."""

    part: Part
    number: int
    """Position in the part's packs."""
    chunks: tuple[int, ...]
    """Positions in the part's table, by offset in the pack."""
    shards_in: Sequence[Sequence[int]]
    """Per chunk of the part: the shards that lie in it."""
    layout: Layout

    @property
    def key(self) -> str:
        return self.part.packs[self.number].key

    @property
    def nbytes(self) -> int:
        """Of the object, by the part."""
        return self.part.packs[self.number].nbytes

    def shards(self, chunks: Iterable[int]) -> tuple[tuple[str, Box], ...]:
        """Those that lie in the chunks; each once."""
        found = dict.fromkeys(shard for chunk in chunks for shard in self.shards_in[chunk])
        table = self.part.table
        return tuple((self.layout.tensors[table.tensors[shard]].name, table.boxes[shard]) for shard in found)


@dataclass(frozen=True, slots=True)
class _Run:
    """One request: chunks that follow one another in a pack, or (with none) its header."""

    pack: _PackRead
    chunks: tuple[int, ...]
    start: int
    stop: int


@dataclass(frozen=True, slots=True)
class _Bad:
    """What became of a run that is not as it should be."""

    damage: Damage
    chunk: int | None
    """None: the header."""
    message: str


def _verify_packs(
    catalog: Catalog,
    save: SaveId,
    parts: Sequence[Part],
    layouts: Mapping[str, Layout],
    executor: ThreadPoolExecutor,
    advance: Advance,
) -> Iterator[Finding]:
    owners = {keys.pack_save(pack.key) for part in parts for pack in part.packs} - {None}
    sizes = {e.key: e.nbytes for owner in owners if owner for e in catalog.store.scan(owner.packs_prefix)}
    lost: list[Finding] = []
    runs = _runs(_packs(parts, layouts), sizes, lost)
    last: _PackRead | None = None
    bad: list[_Bad] = []
    for run, found in _in_order(executor, lambda run: (run, _read_run(catalog, run)), runs):
        if last is not None and run.pack is not last:
            yield from _pack_findings(save, last, bad)
            bad = []
        last = run.pack
        bad += found
        advance(run.stop - run.start)
        while lost:
            yield lost.pop(0)
    if last is not None:
        yield from _pack_findings(save, last, bad)
    yield from lost


def _packs(parts: Iterable[Part], layouts: Mapping[str, Layout]) -> Iterator[_PackRead]:
    for part in parts:
        table = part.table
        shards_in: list[list[int]] = [[] for _ in table.nbytes]
        for shard in range(len(table.tensors)):
            for chunk in table.chunks(shard):
                shards_in[chunk].append(shard)
        chunks: list[list[int]] = [[] for _ in part.packs]
        for chunk, pack in enumerate(table.packs):
            chunks[pack].append(chunk)
        for number, pack_chunks in enumerate(chunks):
            ordered = tuple(sorted(pack_chunks, key=table.offsets.__getitem__))
            yield _PackRead(part, number, ordered, shards_in, layouts[table.layout])


def _runs(packs: Iterable[_PackRead], sizes: Mapping[str, int], lost: list[Finding]) -> Iterator[_Run]:
    """What is to be read of the packs that are there; `lost` takes what is known without reading."""
    for pack in packs:
        size, table = sizes.get(pack.key), pack.part.table
        readable = [c for c in pack.chunks if table.offsets[c] + table.nbytes[c] <= (size or 0)]
        if size != pack.nbytes:
            lost.append(_wrong_size(pack, size, set(readable)))
        if size is None:
            continue
        head = min((table.offsets[c] for c in readable), default=size)
        if size == pack.nbytes:
            yield _Run(pack, (), 0, head)
        yield from _data_runs(pack, readable, head, size)


def _data_runs(pack: _PackRead, chunks: Sequence[int], start: int, size: int) -> Iterator[_Run]:
    """Cut so that a run is longer than RUN_BYTES only where one chunk is; they follow one another without gaps."""
    table = pack.part.table
    run: list[int] = []
    for chunk in chunks:
        if run and table.offsets[chunk] + table.nbytes[chunk] - start > RUN_BYTES:
            yield _Run(pack, tuple(run), start, table.offsets[chunk])
            start, run = table.offsets[chunk], []
        run.append(chunk)
    if run:
        yield _Run(pack, tuple(run), start, size)


def _wrong_size(pack: _PackRead, size: int | None, readable: set[int]) -> Finding:
    shards = pack.shards(c for c in pack.chunks if c not in readable)
    if size is None:
        message = f"{pack.key}: there is no such object; {_count(len(shards), 'tensor')} of rank {pack.part.rank} lost"
        return Finding("missing", pack.key, message, pack.part.save, pack.part.rank, shards)
    hurt = f"; {_count(len(shards), 'tensor')} cut" if shards else ""
    message = f"{pack.key}: has {size:,} bytes, expected {pack.nbytes:,}{hurt}"
    return Finding("malformed", pack.key, message, pack.part.save, pack.part.rank, shards)


def _read_run(catalog: Catalog, run: _Run) -> list[_Bad]:
    """What is wrong with it. Where the store gives the whole of it not, each chunk is asked for alone."""
    if not run.chunks:
        problem = _attempt(lambda: _read_head(catalog, run))
        return [] if problem is None else [_Bad(_damage(problem), None, str(problem))]
    table = run.pack.part.table
    stop = max(table.offsets[c] + table.nbytes[c] for c in run.chunks)  # what follows is slack
    buffer = _buffer(stop - run.start)
    try:
        catalog.store.get_into(run.pack.key, run.start, buffer)
    except (StoreError, FormatError) as error:
        if len(run.chunks) == 1:
            return [_Bad(_damage(error), run.chunks[0], str(error))]
        alone = (_Run(run.pack, (c,), table.offsets[c], table.offsets[c] + table.nbytes[c]) for c in run.chunks)
        return [bad for one in alone for bad in _read_run(catalog, one)]
    digest = digester(run.pack.part.algorithm)
    found = []
    for c in run.chunks:
        at = table.offsets[c] - run.start
        if digest(buffer[at : at + table.nbytes[c]]) != run.pack.part.digests[c]:
            found.append(_Bad("altered", c, "does not match its digest"))
    return found


def _read_head(catalog: Catalog, run: _Run) -> None:
    pack = run.pack
    nbytes = min(run.stop, 8 + MAX_HEAD_BYTES)
    head = catalog.store.get(pack.key, 0, nbytes)
    check_head(head, pack.nbytes, *expected_head(pack.part, pack.layout, pack.number), pack.key)


def _pack_findings(save: SaveId, pack: _PackRead, bad: Iterable[_Bad]) -> Iterator[Finding]:
    """Damaged chunks of one shard are one finding, and so are the shards that share one."""
    by_shards: defaultdict[tuple[tuple[tuple[str, Box], ...], Damage], list[_Bad]] = defaultdict(list)
    for one in bad:
        if one.chunk is None:
            yield Finding(one.damage, pack.key, one.message, save, pack.part.rank)
        else:
            by_shards[pack.shards([one.chunk]), one.damage].append(one)
    table = pack.part.table
    for (shards, damage), ones in by_shards.items():
        chunks = [one.chunk for one in ones if one.chunk is not None]
        start = min(table.offsets[c] for c in chunks)
        stop = max(table.offsets[c] + table.nbytes[c] for c in chunks)
        num_chunks = len(table.chunks(pack.shards_in[chunks[0]][0]))
        of = f", {len(chunks)} of {num_chunks} chunks" if num_chunks > 1 else ""
        names = table.describe(chunks[0], pack.layout)
        message = f"{names} of rank {pack.part.rank}: {pack.key} [{start}:+{stop - start}]{of}: {ones[0].message}"
        yield Finding(damage, pack.key, message, save, pack.part.rank, shards, start, stop - start)


# Findings from errors


def _damage(error: CkptError) -> Damage:
    if isinstance(error, ObjectNotFound | CheckpointNotFound):
        return "missing"
    if isinstance(error, CorruptData):
        return "altered"
    return "malformed" if isinstance(error, FormatError) else "unreadable"


def _finding(error: CkptError, key: str, save: SaveId | None, rank: int | None = None) -> Finding:
    return Finding(_damage(error), key, str(error), save, rank)


def _attempt(call: Callable[[], T]) -> T | CkptError:
    """Its result, or the error that is to be a finding. A newer format is no damage, and is raised."""
    try:
        return call()
    except NewerFormat:
        raise
    except (CheckpointNotFound, CorruptData, FormatError, StoreError) as error:
        return error


def _in_order(executor: ThreadPoolExecutor, call: Callable[[T], R], items: Iterable[T]) -> Iterator[R]:
    """Results in the order of the items, of which only AHEAD are taken before they are asked for."""
    waiting: deque[Future[R]] = deque()
    for item in items:
        waiting.append(executor.submit(call, item))
        if len(waiting) >= AHEAD:
            yield waiting.popleft().result()
    while waiting:
        yield waiting.popleft().result()


_local = threading.local()


def _buffer(nbytes: int) -> memoryview:
    """This thread's buffer: made once and reused, since fresh memory costs more than the read."""
    held: np.ndarray | None = getattr(_local, "buffer", None)
    if held is None or held.nbytes < nbytes:
        held = _local.buffer = np.empty(nbytes, dtype=np.uint8)
    return held.data[:nbytes]


def _count(number: int, noun: str, plural: str | None = None) -> str:
    return f"{number:,} {noun if number == 1 else plural or noun + 's'}"
