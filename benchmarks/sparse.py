"""What do saves of a table take of which few rows were touched? Bytes and CPU time: patches, zstd, unchanged chunks.

An embedding of float32 rows of 256 bytes is trained by SparseAdam; between two saves, 1 % of its rows are touched by
Zipf's law with exponent 1.05. Weights and both moments are saved in chunks of 4 MiB. Every row was touched once before,
so that no moments are zero. Speeds are bytes of chunks by the CPU time of one thread; nothing is written to a disk.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

import numpy as np
import torch
import zstandard
from numpy.typing import NDArray

from benchmarks.figures import Figures, Options, run
from ckptlib.codecs.codec import Content
from ckptlib.codecs.keyframes import Cycle
from ckptlib.codecs.patch import PatchCodec

T = TypeVar("T")
Chunk = NDArray[np.uint8]

CASES = ("hashed ids", "ids by frequency")
WIDTH = 64
ROW_BYTES = 4 * WIDTH
CHUNK_BYTES = 4 << 20
REUSED_BYTES = {"64 KiB": 64 << 10, "1 MiB": 1 << 20, "4 MiB": 4 << 20}
EXPONENT = 1.05
TOUCHED = 0.01
NUM_SAVES = 60
CONTENT = Content("float32", WIDTH)


def main(arguments: list[str]) -> None:
    run(arguments, "sparse", measure, gb=0.2, rounds=1)


def measure(options: Options, directory: Path, figures: Figures) -> None:
    num_rows = 6000 if options.toy else int(options.gb * 1e9 / 3 / ROW_BYTES)
    num_saves = 4 if options.toy else NUM_SAVES
    for number in range(options.rounds):
        for case in CASES:
            training = Training(num_rows, case == "hashed ids", number)
            patches, plain, reuse = Patches(case, figures), Zstd(case, figures), Reuse(case, figures)
            for touched_nbytes in training.saves(num_saves):
                patches.save(training.tables, touched_nbytes)
                plain.save(training.tables, touched_nbytes)
                reuse.save(training.tables, touched_nbytes)
            for method in (patches, plain, reuse):
                method.close(num_saves * training.nbytes)


class Training:
    """An embedding, and its optimizer."""

    def __init__(self, num_rows: int, hashed: bool, seed: int) -> None:
        self._rng = np.random.default_rng(seed)
        torch.manual_seed(seed)
        weights = np.arange(1, num_rows + 1) ** -EXPONENT
        self._bounds = np.cumsum(weights) / weights.sum()
        self._ids = self._rng.permutation(num_rows) if hashed else np.arange(num_rows)
        self._embedding = torch.nn.Embedding(num_rows, WIDTH, sparse=True)
        self._optimizer = torch.optim.SparseAdam(self._embedding.parameters(), lr=1e-3)
        self._step(np.arange(num_rows))
        state = self._optimizer.state[self._embedding.weight]
        tensors = self._embedding.weight.detach(), state["exp_avg"], state["exp_avg_sq"]
        self.tables = [tensor.numpy().view(np.uint8).ravel() for tensor in tensors]
        self.nbytes = sum(table.nbytes for table in self.tables)

    def saves(self, num: int) -> Iterator[int]:
        """When to save: once at first, then each time when 1 % of the rows were touched. Yields bytes of these."""
        yield self.nbytes
        num_rows = len(self._ids)
        for _ in range(num - 1):
            touched = np.zeros(num_rows, bool)
            while touched.sum() < TOUCHED * num_rows:
                draws = self._rng.random(max(8, int(TOUCHED * num_rows / 8)))
                ids = self._ids[np.minimum(np.searchsorted(self._bounds, draws), num_rows - 1)]
                touched[ids] = True
                self._step(ids)
            yield int(touched.sum()) * ROW_BYTES * len(self.tables)

    def _step(self, ids: NDArray[np.intp]) -> None:
        self._optimizer.zero_grad()
        rows = self._embedding(torch.from_numpy(ids))
        (rows * torch.randn_like(rows)).sum().backward()  # type: ignore[no-untyped-call]
        self._optimizer.step()


def chunks(tables: list[Chunk], nbytes: int) -> Iterator[Chunk]:
    for table in tables:
        for start in range(0, len(table), nbytes):
            yield table[start : start + nbytes]


@dataclass
class Base:
    cycle: Cycle
    chunk: bytes
    summary: bytes


class Patches:
    """As a writer stores them: against row hashes of the keyframe, each chunk with keyframes of its own."""

    def __init__(self, case: str, figures: Figures) -> None:
        self._codec = PatchCodec()
        self._bases: list[Base] = []
        self._case, self._figures = case, figures
        self._stored_nbytes = 0

    def save(self, tables: list[Chunk], touched_nbytes: int) -> None:
        stored, first = 0, not self._bases
        for number, chunk in enumerate(chunks(tables, CHUNK_BYTES)):
            stored += self._keyframe(number, chunk) if first else self._patch(number, chunk)
        self._stored_nbytes += stored
        if not first and all(base.cycle.num_saves == 2 for base in self._bases):
            self._add("first increment, of the touched rows", "", stored / touched_nbytes)

    def _keyframe(self, number: int, chunk: Chunk) -> int:
        summary = self._timed("hash rows", chunk, lambda: self._codec.summarize(chunk.data, CONTENT))
        assert summary is not None
        self._bases[number : number + 1] = [Base(Cycle(chunk.nbytes), chunk.tobytes(), summary)]
        return chunk.nbytes

    def _patch(self, number: int, chunk: Chunk) -> int:
        base, codec = self._bases[number], self._codec
        before = memoryview(base.chunk)
        if chunk.data == before:
            base.cycle = base.cycle.then(0)
            return 0
        summary = memoryview(codec.summarize(chunk.data, CONTENT) or b"")
        views = chunk.data, summary, memoryview(base.summary), CONTENT
        frame = self._timed("encode, rows hashed before", chunk, lambda: codec.encode_by_summaries(*views))
        assert frame == self._timed("encode with the base", chunk, lambda: codec.encode(chunk.data, before, CONTENT))
        if frame is None or base.cycle.ends_before(len(frame)):
            return self._keyframe(number, chunk)
        base.cycle = base.cycle.then(len(frame))
        out = np.empty_like(chunk)
        np.copyto(out, chunk)
        self._timed("copy", chunk, lambda: np.copyto(out, chunk))
        self._timed("decode", chunk, lambda: codec.decode(memoryview(frame), before, out.data))
        assert np.array_equal(out, chunk), "decoded other bytes than were encoded"
        return len(frame)

    def close(self, nbytes: int) -> None:
        self._add("mean of all saves, times fewer bytes", "", nbytes / self._stored_nbytes)

    def _timed(self, what: str, chunk: Chunk, function: Callable[[], T]) -> T:
        result, rate = timed(chunk, function)
        self._add(what, "GB/s", rate)
        return result

    def _add(self, what: str, unit: str, sample: float) -> None:
        self._figures.add(self._case, "patch", what, unit, [sample])


class Zstd:
    """Every chunk, whole, at level 1."""

    def __init__(self, case: str, figures: Figures) -> None:
        self._case, self._figures = case, figures
        self._stored_nbytes = 0

    def save(self, tables: list[Chunk], touched_nbytes: int) -> None:
        for chunk in chunks(tables, CHUNK_BYTES):
            frame, rate = timed(chunk, lambda chunk=chunk: zstandard.ZstdCompressor(level=1).compress(chunk.data))
            self._stored_nbytes += len(frame)
            self._figures.add(self._case, "zstd-1", "encode", "GB/s", [rate])
            _, rate = timed(chunk, lambda frame=frame: zstandard.ZstdDecompressor().decompress(frame))
            self._figures.add(self._case, "zstd-1", "decode", "GB/s", [rate])

    def close(self, nbytes: int) -> None:
        what = "mean of all saves, times fewer bytes"
        self._figures.add(self._case, "zstd-1", what, "", [nbytes / self._stored_nbytes])


class Reuse:
    """Chunks that are as they were at the save before take nothing; others are stored as they are."""

    def __init__(self, case: str, figures: Figures) -> None:
        self._case, self._figures = case, figures
        self._stored_nbytes = dict.fromkeys(REUSED_BYTES, 0)
        self._before: list[Chunk] | None = None

    def save(self, tables: list[Chunk], touched_nbytes: int) -> None:
        for name, nbytes in REUSED_BYTES.items():
            before = chunks(self._before, nbytes) if self._before is not None else None
            for chunk in chunks(tables, nbytes):
                if before is None or not np.array_equal(chunk, next(before)):
                    self._stored_nbytes[name] += chunk.nbytes
        self._before = [table.copy() for table in tables]

    def close(self, nbytes: int) -> None:
        what = "mean of all saves, times fewer bytes"
        for name, stored_nbytes in self._stored_nbytes.items():
            self._figures.add(self._case, f"unchanged chunks of {name}", what, "", [nbytes / stored_nbytes])


def timed(chunk: Chunk, function: Callable[[], T]) -> tuple[T, float]:
    """What it returns, and GB of the chunk by CPU seconds of this thread."""
    began = time.thread_time()
    result = function()
    return result, chunk.nbytes / max(time.thread_time() - began, 1e-9) / 1e9
