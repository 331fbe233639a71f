"""How small and how fast are the lossless codecs? Real training state, beside other compressors, in one process.

Size: of raw bytes, and of the order-0 limit, that is of what a perfect coder of single bytes could do if it knew how
often each occurs: of exponents, of the sign with the top of the mantissa, and of each byte below, over all tensors of a
kind. Speed: raw bytes per second of CPU time, of all threads that a subject has; of ours also as a save has it, which
decodes each frame again and compares. Two threads, and two processes: their speed over that of one, by the clock; it
means something only on a machine with two idle cores, so see `load`.
"""

from __future__ import annotations

import importlib.util
import multiprocessing
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from itertools import cycle, islice
from pathlib import Path
from typing import Any, ClassVar, NamedTuple

import numpy as np
import torch
from typing_extensions import override

from benchmarks import trained
from benchmarks.figures import Figures, Options, rotated, run
from ckptlib.codecs import registry
from ckptlib.codecs.codec import Codec, Content
from ckptlib.format.body_layout import CHUNK_BYTES, SHARED_CHUNK_BYTES
from ckptlib.format.digests import XXH3
from ckptlib.writer import frames

STEP = 400


class Chunk(NamedTuple):
    """As a writer hands it to a codec."""

    raw: bytes
    content: Content


class Subject(ABC):
    """One compressor."""

    name: ClassVar[str]
    needs: ClassVar[str | None] = None
    """The module, if it may be missing."""

    @abstractmethod
    def encode(self, chunk: Chunk) -> Any:
        """Something with a length."""

    @abstractmethod
    def decode(self, frame: Any, chunk: Chunk, out: bytearray) -> bytes | bytearray:
        """What it stands for: in `out`, if the compressor can do that."""


class Ours(Subject):
    """A codec of ckptlib; what it finds not worth it stays raw."""

    def __init__(self) -> None:
        codec = registry.find(self.name)
        assert isinstance(codec, Codec)
        self._codec = codec

    @override
    def encode(self, chunk: Chunk) -> bytes:
        return self._codec.encode(memoryview(chunk.raw), chunk.content) or chunk.raw

    def encode_for_a_save(self, chunk: Chunk) -> None:
        frames.encode(self._codec, memoryview(chunk.raw), chunk.content, XXH3)

    @override
    def decode(self, frame: bytes, chunk: Chunk, out: bytearray) -> bytearray:
        if frame is chunk.raw:
            out[:] = frame
        else:
            self._codec.decode(memoryview(frame), memoryview(out))
        return out


class Planes(Ours):
    name = "planes"


class Zstd(Ours):
    """Level 1."""

    name = "zstd"


class Memcpy(Subject):
    name = "memcpy"

    @override
    def encode(self, chunk: Chunk) -> bytearray:
        return bytearray(chunk.raw)

    @override
    def decode(self, frame: bytearray, chunk: Chunk, out: bytearray) -> bytearray:
        out[:] = frame
        return out


class ZipNN(Subject):
    name = needs = "zipnn"

    @override
    def encode(self, chunk: Chunk) -> Any:
        return self._zipnn(chunk).compress(bytearray(chunk.raw))  # it may write to what it is given

    @override
    def decode(self, frame: Any, chunk: Chunk, out: bytearray) -> bytes:
        return bytes(self._zipnn(chunk).decompress(frame))

    def _zipnn(self, chunk: Chunk) -> Any:
        import zipnn

        return zipnn.ZipNN(bytearray_dtype=chunk.content.dtype, threads=1)


class Blosc2(Subject):
    name, needs = "blosc2 shuffle + zstd-1", "blosc2"

    @override
    def encode(self, chunk: Chunk) -> bytes:
        import blosc2

        blosc2.set_nthreads(1)
        itemsize = getattr(torch, chunk.content.dtype).itemsize
        found: bytes = blosc2.compress2(
            chunk.raw, typesize=itemsize, codec=blosc2.Codec.ZSTD, clevel=1, filters=[blosc2.Filter.SHUFFLE]
        )
        return found

    @override
    def decode(self, frame: bytes, chunk: Chunk, out: bytearray) -> bytearray:
        import blosc2

        blosc2.decompress2(frame, dst=out)
        return out


SUBJECTS: tuple[type[Subject], ...] = (Planes, Zstd, Memcpy, ZipNN, Blosc2)


def chunks(tensors: dict[str, torch.Tensor]) -> list[Chunk]:
    """Each tensor by itself, in pieces as a writer has them."""
    found = []
    for tensor in tensors.values():
        dtype, row = str(tensor.dtype).removeprefix("torch."), tensor[0].numel() if tensor.dim() > 1 else 1
        raw = tensor.contiguous().view(-1).view(torch.uint8).numpy().tobytes()
        for at in range(0, len(raw), CHUNK_BYTES):
            first = at // tensor.element_size() % row
            found.append(Chunk(raw[at : at + CHUNK_BYTES], Content(dtype, row, first)))
    return found


def order_0_bytes(tensors: dict[str, torch.Tensor]) -> float:
    """The limit: see above. Of float32 and bfloat16."""
    flat = torch.cat([tensor.flatten() for tensor in tensors.values()])
    upper = flat.view(torch.int16).numpy().view(np.uint16)
    low = []
    if flat.dtype == torch.float32:
        low, upper = [upper[::2] & 255, upper[::2] >> 8], upper[1::2]
    return sum(map(_entropy_bytes, [upper >> 7 & 255, upper & 127 | upper >> 15 << 7, *low]))


def _entropy_bytes(symbols: Any) -> float:
    counts = np.bincount(symbols)
    counts = counts[counts > 0]
    return float(np.sum(counts * np.log2(len(symbols) / counts)) / 8)


def measure(options: Options, directory: Path, figures: Figures) -> None:
    step = 2 if options.toy else STEP
    state = trained.states(trained.TOY if options.toy else trained.REAL, [step])[step]
    subjects = [kind() for kind in SUBJECTS if kind.needs is None or (_found(kind.needs) and not options.toy)]
    for kind in trained.KINDS:
        for peer in SUBJECTS:
            if peer.needs is not None and not options.toy and not _found(peer.needs):
                figures.failed(kind, peer.name, "not installed; it is in the extra called bench")
        # smaller ones share chunks, which are never coded
        least = 0 if options.toy else SHARED_CHUNK_BYTES
        tensors = {name: tensor for name, tensor in state[kind].items() if tensor.nbytes >= least}
        some, limit = chunks(tensors), order_0_bytes(tensors)
        for number in range(1 if options.toy else options.rounds):
            for subject in rotated(subjects, number):
                _one(subject, some, limit, kind, options, figures)


def _found(module: str) -> bool:
    return importlib.util.find_spec(module) is not None


def _one(subject: Subject, some: Sequence[Chunk], limit: float, kind: str, options: Options, figures: Figures) -> None:
    """Sizes once, and the speeds of one turn."""
    nbytes = sum(len(chunk.raw) for chunk in some)
    encoded = [subject.encode(chunk) for chunk in some]
    outs = [bytearray(len(chunk.raw)) for chunk in some]
    for chunk, frame, out in zip(some, encoded, outs, strict=True):
        assert subject.decode(frame, chunk, out) == chunk.raw, f"{subject.name} lost something"
    stored = sum(map(len, encoded))
    figures.add(kind, subject.name, "size", "of raw", [stored / nbytes])
    figures.add(kind, subject.name, "size over the order-0 limit", "x", [stored / limit])
    times = max(1, round(options.gb * 1e9 / nbytes)) if not options.toy else 1

    def encode() -> None:
        for chunk in islice(cycle(some), times * len(some)):
            subject.encode(chunk)

    def decode() -> None:
        own = outs if subject.needs is None else [bytearray(len(chunk.raw)) for chunk in some]
        for chunk, frame, out in islice(cycle(zip(some, encoded, own, strict=True)), times * len(some)):
            subject.decode(frame, chunk, out)

    def encode_for_a_save() -> None:
        assert isinstance(subject, Ours)
        for chunk in islice(cycle(some), times * len(some)):
            subject.encode_for_a_save(chunk)

    works = [("encode", encode), ("decode", decode)]
    if isinstance(subject, Ours):
        works.insert(1, ("encode and decode again", encode_for_a_save))
    for what, work in works:
        cpu_s, wall_s = _timed(work)
        figures.add(kind, subject.name, what, "GB/s", [times * nbytes / cpu_s / 1e9])
        if isinstance(subject, Ours):
            for two, at_once in (("threads", _in_threads), ("processes", _in_processes)):
                figures.add(kind, subject.name, f"{what}, two {two} over one", "x", [2 * wall_s / at_once(work)])


def _timed(work: Callable[[], None]) -> tuple[float, float]:
    """Seconds of CPU, of all threads of this process, and by the clock."""
    cpu, wall = time.process_time(), time.perf_counter()
    work()
    return max(time.process_time() - cpu, 1e-9), time.perf_counter() - wall


def _in_threads(work: Callable[[], None]) -> float:
    """Seconds by the clock for two threads that do it at once."""
    with ThreadPoolExecutor(2) as pool:
        wall = time.perf_counter()
        for done in [pool.submit(work), pool.submit(work)]:
            done.result()
        return time.perf_counter() - wall


def _in_processes(work: Callable[[], None]) -> float:
    """Seconds by the clock for two processes that do it at once, from when both have begun."""
    fork = multiprocessing.get_context("fork")
    both, told = fork.Barrier(2, timeout=60), fork.Queue()

    def timed() -> None:
        both.wait()
        told.put(_timed(work)[1])

    children = [fork.Process(target=timed) for _ in range(2)]
    for child in children:
        child.start()
    seconds = max(told.get(timeout=600), told.get(timeout=600))
    for child in children:
        child.join()
    return seconds


def main(arguments: list[str]) -> None:
    run(arguments, "codecs", measure, gb=0.05, rounds=5)
