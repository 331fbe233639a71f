"""Reads all packs of a step, and reports headers and chunks that are not as their parts say. No torch."""

from __future__ import annotations

import threading
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

import numpy as np

from ckptlib.catalog.catalog import Catalog
from ckptlib.catalog.chunks import decode_chunk
from ckptlib.catalog.reading import in_order
from ckptlib.catalog.second_read import decoded
from ckptlib.codecs import registry
from ckptlib.errors import CorruptData, FormatError, StoreError
from ckptlib.format import keys
from ckptlib.format.box import Box
from ckptlib.format.digests import digester
from ckptlib.format.keys import SaveId
from ckptlib.format.layout import Layout
from ckptlib.format.part import Part
from ckptlib.format.places import Coding
from ckptlib.stores.io_limits import GAP_BYTES, RUN_BYTES
from ckptlib.verify.findings import Damage, Finding, attempt, damage_of
from ckptlib.verify.pack_headers import MAX_HEAD_BYTES, check_head, expected_head
from ckptlib.verify.shared_chunks import SharedChunks
from ckptlib.words import count

Advance = Callable[[int], None]


@dataclass(frozen=True)
class _PackRead:
    """One pack to be read, as its part describes it."""

    part: Part
    number: int
    """Position in the part's packs."""
    chunks: tuple[int, ...]
    """Positions in the part's table, by offset in the pack."""
    layout: Layout

    @property
    def key(self) -> str:
        return self.part.packs[self.number].key

    @property
    def nbytes(self) -> int:
        """The size of the object, by the part."""
        return self.part.packs[self.number].nbytes

    @property
    def is_own(self) -> bool:
        """Whether the pack was put for this save."""
        return keys.pack_save(self.key) == self.part.save

    def shards(self, chunks: Iterable[int]) -> tuple[tuple[str, Box], ...]:
        """Returns the name and box of each shard that lies in these chunks, once."""
        table = self.part.table
        found = dict.fromkeys(shard for chunk in chunks for shard in table.shards_in(chunk))
        return tuple((self.layout.tensors[table.tensors[shard]].name, table.boxes[shard]) for shard in found)


@dataclass(frozen=True, slots=True)
class _Run:
    """One request: chunks that follow one another in a pack; without chunks, its header."""

    pack: _PackRead
    chunks: tuple[int, ...]
    start: int
    stop: int


@dataclass(frozen=True, slots=True)
class _Bad:
    """A chunk or header that is not as it should be."""

    damage: Damage
    chunk: int | None
    """None: the header."""
    message: str


def verify_packs(
    catalog: Catalog,
    save: SaveId,
    parts: Sequence[Part],
    layouts: Mapping[str, Layout],
    executor: ThreadPoolExecutor,
    expect: Advance,
    advance: Advance,
    shared: SharedChunks | None,
) -> Iterator[Finding]:
    """Reads all packs of these parts, and yields what is wrong. Chunks that `shared` knows to be good are not read.

    `expect`: called once with the number of bytes that will be read. `advance`: called with bytes as they are done.
    """
    owners = {keys.pack_save(pack.key) for part in parts for pack in part.packs}
    prefixes = [owner.packs_prefix for owner in owners if owner is not None]
    sizes = {entry.key: entry.nbytes for listed in executor.map(catalog.store.scan, prefixes) for entry in listed}
    lost: list[Finding] = []
    runs = _runs(_packs(parts, layouts), sizes, shared, lost)
    expect(sum(run.stop - run.start for run in _runs(_packs(parts, layouts), sizes, shared, [])))
    last: _PackRead | None = None
    bad: list[_Bad] = []
    for run, found in in_order(executor, lambda run: (run, _read_run(catalog, run)), runs):
        if last is not None and run.pack is not last:
            yield from _pack_findings(save, last, bad)
            bad = []
        last = run.pack
        bad += found
        if shared is not None:
            damaged = {one.chunk for one in found}
            shared.add(run.pack.part, run.pack.key, [chunk for chunk in run.chunks if chunk not in damaged])
        advance(run.stop - run.start)
        while lost:
            yield lost.pop(0)
    if last is not None:
        yield from _pack_findings(save, last, bad)
    yield from lost


def _packs(parts: Iterable[Part], layouts: Mapping[str, Layout]) -> Iterator[_PackRead]:
    for part in parts:
        table = part.table
        chunks: list[list[int]] = [[] for _ in part.packs]
        for chunk, pack in enumerate(table.packs):
            chunks[pack].append(chunk)
        for number, pack_chunks in enumerate(chunks):
            ordered = tuple(sorted(pack_chunks, key=table.offsets.__getitem__))
            yield _PackRead(part, number, ordered, layouts[table.layout])


def _runs(
    packs: Iterable[_PackRead], sizes: Mapping[str, int], shared: SharedChunks | None, lost: list[Finding]
) -> Iterator[_Run]:
    """Yields the runs to read of the packs that are there; adds to `lost` findings that need no reading."""
    for pack in packs:
        size, table = sizes.get(pack.key), pack.part.table
        readable = [c for c in pack.chunks if table.offsets[c] + pack.part.stored[c] <= (size or 0)]
        if size != pack.nbytes:
            lost.append(_wrong_size(pack, size, set(readable)))
        if size is None:
            continue
        if size == pack.nbytes and pack.is_own:  # the header of another save's pack follows that save's part
            yield _Run(pack, (), 0, min((table.offsets[c] for c in readable), default=size))
        yield from _data_runs(pack, readable if shared is None else shared.unknown(pack.part, pack.key, readable))


def _data_runs(pack: _PackRead, chunks: Sequence[int]) -> Iterator[_Run]:
    """Cuts chunks into runs with small gaps, each of at most RUN_BYTES, or of one larger chunk."""
    offsets, stored = pack.part.table.offsets, pack.part.stored
    run: list[int] = []
    start = end = 0
    for chunk in chunks:
        stop = offsets[chunk] + stored[chunk]
        if run and (stop - start > RUN_BYTES or offsets[chunk] - end > GAP_BYTES):
            yield _Run(pack, tuple(run), start, end)
            run = []
        if not run:
            start = offsets[chunk]
        run.append(chunk)
        end = max(end, stop)  # chunks overlap only in a forged part
    if run:
        yield _Run(pack, tuple(run), start, end)


def _wrong_size(pack: _PackRead, size: int | None, readable: set[int]) -> Finding:
    shards = pack.shards(c for c in pack.chunks if c not in readable)
    if size is None:
        message = f"{pack.key}: there is no such object; {count(len(shards), 'tensor')} of rank {pack.part.rank} lost"
        return Finding("missing", pack.key, message, pack.part.save, pack.part.rank, shards)
    hurt = f"; {count(len(shards), 'tensor')} cut" if shards else ""
    message = f"{pack.key}: has {size:,} bytes, expected {pack.nbytes:,}{hurt}"
    return Finding("malformed", pack.key, message, pack.part.save, pack.part.rank, shards)


def _read_run(catalog: Catalog, run: _Run, again: bool = False) -> list[_Bad]:
    """Reads a run, and returns what is wrong with it. If the store fails to return it, reads each chunk alone."""
    if not run.chunks:
        problem = attempt(lambda: _read_head(catalog, run))
        return [] if problem is None else [_Bad(damage_of(problem), None, str(problem))]
    part, table = run.pack.part, run.pack.part.table
    buffer = _buffer("read", run.stop - run.start)
    try:
        catalog.store.get_into(run.pack.key, run.start, buffer)
    except (StoreError, FormatError) as error:
        if len(run.chunks) == 1:
            return [_Bad(damage_of(error), run.chunks[0], str(error))]
        return [bad for c in run.chunks for bad in _read_run(catalog, _alone(run.pack, c), again)]
    found = []
    for c in run.chunks:
        at = table.offsets[c] - run.start
        bad = _problem(catalog, part, c, buffer[at : at + part.stored[c]])
        if bad is not None:
            found.append(bad)
    if found and not again and not catalog.store.is_local:  # read again, since the network may have altered it
        chunks = [bad.chunk for bad in found if bad.chunk is not None]
        return [bad for c in chunks for bad in _read_run(catalog, _alone(run.pack, c), again=True)]
    return found


def _alone(pack: _PackRead, chunk: int) -> _Run:
    at = pack.part.table.offsets[chunk]
    return _Run(pack, (chunk,), at, at + pack.part.stored[chunk])


def _problem(catalog: Catalog, part: Part, chunk: int, data: memoryview) -> _Bad | None:
    """Returns what is wrong with a chunk whose stored bytes are `data`; None if nothing."""
    if chunk in part.codings:
        out = _buffer("decoded", part.table.nbytes[chunk])
        try:
            decode_chunk(catalog.store.get_into, part, chunk, data, out)
            _check_bound(part.codings[chunk], data)
        except (CorruptData, FormatError, StoreError) as error:
            return _Bad(damage_of(error), chunk, str(error))
        data = out
    if digester(part.algorithm)(data) != part.digests[chunk]:
        return _Bad("altered", chunk, "does not match its digest")
    return None


def _check_bound(coding: Coding, frame: memoryview) -> None:
    """Raises FormatError if a frame and its part give different bounds of rounding, which no digest covers."""
    told = None if coding.loss is None else (coding.loss.absolute, coding.loss.relative)
    found = registry.bound(coding.codec, frame)
    if found != told:
        says, expected = map(_in_words, (found, told))
        raise FormatError(f"its frame of {coding.codec} {says}; expected as its part has it: {expected}")


def _in_words(bound: tuple[float, float] | None) -> str:
    return "loses nothing" if bound is None else f"is off by {bound[0]}, and by {bound[1]} of a block's largest value"


def _read_head(catalog: Catalog, run: _Run) -> None:
    pack = run.pack
    nbytes = min(run.stop, 8 + MAX_HEAD_BYTES)
    expected = expected_head(pack.part, pack.layout, pack.number)
    decoded(
        catalog.store,
        lambda: catalog.store.get(pack.key, 0, nbytes),
        lambda head: check_head(head, pack.nbytes, *expected, pack.key),
    )


def _pack_findings(save: SaveId, pack: _PackRead, bad: Iterable[_Bad]) -> Iterator[Finding]:
    """Yields a pack's findings: one for all damaged chunks of a shard, and one for shards that share a chunk."""
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
        stop = max(table.offsets[c] + pack.part.stored[c] for c in chunks)
        num_chunks = len(table.chunks(table.shards_in(chunks[0])[0]))
        of = f", {len(chunks)} of {num_chunks} chunks" if num_chunks > 1 else ""
        names = table.describe(chunks[0], pack.layout)
        message = f"{names} of rank {pack.part.rank}: {pack.key} [{start}:+{stop - start}]{of}: {ones[0].message}"
        yield Finding(damage, pack.key, message, save, pack.part.rank, shards, start, stop - start)


_local = threading.local()


def _buffer(use: str, nbytes: int) -> memoryview:
    """Returns this thread's buffer for a use. It is reused, since fresh memory costs more than the read."""
    held: np.ndarray | None = getattr(_local, use, None)
    if held is None or held.nbytes < nbytes:
        held = np.empty(nbytes, dtype=np.uint8)
        setattr(_local, use, held)
    return held.data[:nbytes]
