"""Measures a store: the time of small requests, and bytes per second by size and number at once, up and down."""

from __future__ import annotations

import mmap
import secrets
import statistics
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import partial
from typing import NamedTuple

from ckptlib.errors import StoreError
from ckptlib.stores import InPlace, Store
from ckptlib.stores.io_limits import DOCUMENT_THREADS, THREADS
from ckptlib.stores.probe import PREFIX

MIB = 1024 * 1024

SMALL_NBYTES = 64
SMALL_ROUNDS = 8

WHOLE_ROUNDS = 3
WHOLE_SECONDS = 1.0
"""Seconds after which no other whole object is put."""
PAUSE_S = 0.5
"""Seconds before each whole object."""

SHAPES = ((MIB, 1), (4 * MIB, 1), (16 * MIB, 1), (16 * MIB, 4), (4 * MIB, THREADS), (16 * MIB, THREADS))
"""Bytes of a request, and requests at once, that are tried in both directions."""


class Transfer(NamedTuple):
    """The rate of requests of one size."""

    nbytes: int
    """Bytes of each request."""
    at_once: int
    bytes_per_second: float


class Line(NamedTuple):
    """The best fit: a request of n bytes, alone, takes `latency_s + n / bytes_per_second`."""

    latency_s: float
    bytes_per_second: float

    @property
    def knee_nbytes(self) -> float:
        """Bytes of a request that takes twice as long as its bytes alone would."""
        return self.latency_s * self.bytes_per_second


@dataclass(frozen=True, slots=True)
class Speeds:
    """How fast a store is from this host."""

    latency_s: Mapping[str, float]
    """Median of put, scan, get and delete of an object of 64 bytes."""
    puts_per_second: float
    gets_per_second: float
    """Rates of such objects, as many at once as documents are read."""
    up: tuple[Transfer, ...]
    down: tuple[Transfer, ...]
    whole_up: float
    """Bytes per second of one object, put as a pack is."""

    @property
    def best_down(self) -> float:
        """The best rate down, in bytes per second."""
        return max(transfer.bytes_per_second for transfer in self.down)

    @property
    def best_up(self) -> float:
        """The best rate up, in bytes per second."""
        return max(self.whole_up, *(transfer.bytes_per_second for transfer in self.up))


def line(transfers: Sequence[Transfer]) -> Line:
    """Returns the fit by least squares through requests that were alone."""
    points = [(t.nbytes, t.nbytes / t.bytes_per_second) for t in transfers if t.at_once == 1]
    mean_n, mean_s = (statistics.fmean(values) for values in zip(*points, strict=True))
    spread = sum((n - mean_n) ** 2 for n, _ in points)
    slope = sum((n - mean_n) * (s - mean_s) for n, s in points) / spread if spread else 0.0
    if slope <= 0:  # larger requests were no slower: what limits is not the size
        fastest = max(transfer.bytes_per_second for transfer in transfers)
        return Line(max(0.0, min(s - n / fastest for n, s in points)), fastest)
    return Line(max(0.0, mean_s - slope * mean_n), 1 / slope)


def measure(store: Store, nbytes: int) -> Speeds:
    """Returns the speeds of a store. Moves up to `nbytes` for each size and number, and deletes what it put. Raises the
    store's errors."""
    with _objects(store) as new_key, memoryview(_random(max(nbytes, MIB))) as data, _threads() as threads:
        latency_s = _small(store, new_key)
        puts, gets = _small_at_once(store, new_key, threads)
        up = tuple(_up(store, new_key, data, n, at_once, threads) for n, at_once in _shapes(len(data)))
        whole, whole_up = _whole_up(store, new_key, data)
        down = tuple(_down(store, whole, n, at_once, threads) for n, at_once in _shapes(len(data)))
    return Speeds(latency_s, puts, gets, up, down, whole_up)


def _random(nbytes: int) -> mmap.mmap:
    data = mmap.mmap(-1, nbytes)  # page-aligned, as a slot is
    for _ in range(0, nbytes, MIB):
        data.write(secrets.token_bytes(min(MIB, nbytes - data.tell())))
    return data


def _shapes(nbytes: int) -> Iterator[tuple[int, int]]:
    """Yields the shapes that `nbytes` bytes suffice for, at least the first."""
    for size, at_once in SHAPES:
        if size * at_once <= nbytes or (size, at_once) == SHAPES[0]:
            yield size, at_once


@contextmanager
def _objects(store: Store) -> Iterator[Callable[[], str]]:
    """Yields a function that makes keys for objects, and deletes these in the end. An error in between is the one that
    is raised: who may not put, may not delete either."""
    keys: list[str] = []

    def new_key() -> str:
        keys.append(f"{PREFIX}{secrets.token_hex(8)}")
        return keys[-1]

    try:
        yield new_key
    except BaseException:
        with suppress(StoreError):
            store.delete(*keys)
        raise
    store.delete(*keys)


def _threads() -> ThreadPoolExecutor:
    return ThreadPoolExecutor(max(DOCUMENT_THREADS, *(at_once for _, at_once in SHAPES)), "ckptlib-measure")


def _small(store: Store, new_key: Callable[[], str]) -> Mapping[str, float]:
    seconds: dict[str, list[float]] = {}

    def timed(name: str, call: Callable[[], object]) -> None:
        began = time.perf_counter()
        call()
        seconds.setdefault(name, []).append(time.perf_counter() - began)

    for _ in range(SMALL_ROUNDS):
        key = new_key()
        timed("put", partial(store.put, key, bytes(SMALL_NBYTES)))
        timed("list", partial(store.scan, key))
        timed("get", partial(store.get, key))
        timed("delete", partial(store.delete, key))
    return {name: statistics.median(values) for name, values in seconds.items()}


def _small_at_once(store: Store, new_key: Callable[[], str], threads: ThreadPoolExecutor) -> tuple[float, float]:
    """Returns puts, and gets, per second."""
    keys = [new_key() for _ in range(4 * DOCUMENT_THREADS)]
    began = time.perf_counter()
    list(threads.map(lambda key: store.put(key, bytes(SMALL_NBYTES)), keys))
    put = time.perf_counter()
    list(threads.map(store.get, keys))
    return len(keys) / (put - began), len(keys) / (time.perf_counter() - put)


def _up(
    store: Store, new_key: Callable[[], str], data: memoryview, nbytes: int, at_once: int, threads: ThreadPoolExecutor
) -> Transfer:
    objects = [(new_key(), data[n * nbytes : (n + 1) * nbytes]) for n in range(at_once)]
    began = time.perf_counter()
    list(threads.map(lambda one: store.put(one[0], b"", [one[1]]), objects))
    return Transfer(nbytes, at_once, at_once * nbytes / (time.perf_counter() - began))


def _whole_up(store: Store, new_key: Callable[[], str], data: memoryview) -> tuple[str, float]:
    """Returns a key of the whole data, and the median rate of puts of it. A slow store is asked once.

    Pauses before each put, as between checkpoints: some disks are faster after one. Deletes nothing in between: a file
    system that discards what was deleted would do so beside the next put.
    """
    seconds: list[float] = []
    while len(seconds) < WHOLE_ROUNDS and sum(seconds) < WHOLE_SECONDS:
        time.sleep(PAUSE_S)
        key, pieces = new_key(), [data[at : at + 16 * MIB] for at in range(0, len(data), 16 * MIB)]
        began = time.perf_counter()
        store.put(key, b"", InPlace(len(data), pieces))
        seconds.append(time.perf_counter() - began)
    return key, len(data) / statistics.median(seconds)


def _down(store: Store, key: str, nbytes: int, at_once: int, threads: ThreadPoolExecutor) -> Transfer:
    """Gets ranges, as a load does."""
    into = [memoryview(bytearray(nbytes)) for _ in range(at_once)]
    began = time.perf_counter()
    list(threads.map(lambda n: store.get_into(key, n * nbytes, into[n]), range(at_once)))
    return Transfer(nbytes, at_once, at_once * nbytes / (time.perf_counter() - began))
