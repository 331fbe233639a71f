"""Replica digests: at each save, digests of what this rank holds and other ranks hold, too.

Tensors that no optimizer owns are digested whole, every time. Tensors that an optimizer owns, and frozen parameters,
are sampled: one window of each, at a place that is the same on all ranks and new at each save. If the save asks for it,
everything is digested whole.

Whatever may change as soon as `after_step` returns is read before that: small tensors through one buffer that is
reused, large ones where they lie, those of a device on training's stream, for which nobody waits. What is copied behind
the fence is read there as well, by the staging thread.
"""

from __future__ import annotations

import enum
import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import NamedTuple

import numpy as np
import torch
import xxhash

from ckptlib.devices import accelerator, cuda
from ckptlib.format.check import Check, check_of
from ckptlib.staging.pair import OVERLAP_FROM_BYTES, bytes_at
from ckptlib.staging.pieces import Addresses, Pieces, Scratch
from ckptlib.staging.tensor_digests import digest_there
from ckptlib.state.raw_bytes import bytes_of, dense, is_bytes

SAMPLE_BYTES = 128
"""Bytes of each sampled tensor. If training has drifted apart between two ranks, nearly all elements differ."""

_BUFFER_BYTES = 1 << 20
"""The buffer's size: small tensors pass through the cache, not through memory."""

_DIGEST_THERE_FROM_BYTES = 4096
"""On a device, smaller tensors are gathered with all others: a digest of their own costs more launches."""

Ranks = tuple[int, ...]


class Way(enum.Enum):
    """How much of a tensor is digested."""

    WHOLE = enum.auto()
    """The whole tensor: anybody may write to it."""
    SAMPLED = enum.auto()
    """One window: an optimizer is its only writer."""
    FROZEN = enum.auto()
    """One window, and whether that of the save before is unchanged."""


@dataclass(frozen=True, slots=True)
class Replica:
    """One box of a tensor, as this rank and others hold it."""

    ranks: Ranks
    """All ranks that hold it, ascending."""
    name: str
    tensor: torch.Tensor
    late: bool
    """Whether its only writer waits at the fence."""
    way: Way

    @property
    def small(self) -> bool:
        """Whether it goes through the buffer."""
        return self.tensor.nbytes < OVERLAP_FROM_BYTES and accelerator.device_of(self.tensor) is None


NOT_READ = b""

Kind = tuple[str, Way, int | None]
"""How a large tensor is read: its name, its way, and the bytes of its window; None if it is digested."""


class Seen(NamedTuple):
    """What one save read, which the next compares with what it finds. It keeps no tensor."""

    kinds: list[Kind]
    places: list[int]
    values: list[bytes]
    """Filled by the time that the next save begins, except what a failed snapshot did not read."""


class Reading:
    """Reads the replicas of one save."""

    def __init__(self, number: int, readers: _Readers, small: dict[Ranks, bytes], before: Seen | None) -> None:
        self.number = number
        self.places = readers.places(number)
        """The places of the windows of large tensors."""
        self.values: list[bytes] = [NOT_READ] * len(readers.large)
        """Windows or digests of large tensors."""
        self.moved: frozenset[str] = frozenset()
        """Frozen tensors that have changed since the reading before; known when it is finished."""
        self._readers, self._small, self._before = readers, small, before
        self._witnesses: dict[int, bytes] = {}
        """For frozen large tensors: the windows of the reading before, as they are now."""
        self._arrivals = self._gather()
        for i in readers.now:
            self._read(i)

    @property
    def seen(self) -> Seen:
        return Seen(self._readers.kinds, self.places, self.values)

    @property
    def late(self) -> bool:
        """Whether some tensors are read behind the fence."""
        return bool(self._readers.late)

    def read_late(self) -> None:
        """Reads what is read behind the fence, from the staging thread, while the fence is closed."""
        for i in self._readers.late:
            self._read(i)

    def finish(self, rank: int) -> Check:
        """Returns this rank's check. Waits for devices; called from the staging thread, after `read_late`."""
        for device in self._readers.on_devices:
            cuda.relax_capture(device)
        for arrive in self._arrivals:
            arrive()
        before, self._before = self._before, None
        then = before.values if before is not None else []
        changed = {i for i, found in self._witnesses.items() if then[i] not in (NOT_READ, found)}
        self.moved = frozenset(self._readers.large[i].name for i in changed)
        digests = {}
        for ranks, (start, stop) in self._readers.groups.items():
            found = xxhash.xxh3_128(self._small.get(ranks, b""))
            for i in range(start, stop):
                found.update(self.values[i])
                found.update(b"moved" if i in changed else b"")
            digests[ranks] = found.digest()
        return check_of(self.number, rank, digests)

    def let_go(self) -> None:
        """Lets go of all tensors, once the reading is finished, or will not be."""
        self._readers, self._arrivals = _Readers((), whole=False), []

    def _read(self, i: int) -> None:
        data, width = self._readers.data(i), self._readers.widths[i]
        if width is None:
            self.values[i] = xxhash.xxh3_128_digest(data)
            return
        self.values[i] = bytes(data[self.places[i] : self.places[i] + width])
        if self._before is not None and i in self._readers.frozen:
            place = self._before.places[i]
            self._witnesses[i] = bytes(data[place : place + width])

    def _gather(self) -> list[Callable[[], None]]:
        """Has devices gather their tensors' bytes; each function returned waits for one device, and takes its bytes."""
        arrivals: list[Callable[[], None]] = []
        for device, indices in self._readers.on_devices.items():
            pieces: list[torch.Tensor] = []
            takers: list[tuple[dict[int, bytes] | list[bytes], int]] = []
            for i in indices:
                tensor, width = self._readers.large[i].tensor, self._readers.widths[i]
                takers.append((self.values, i))
                if width is None:
                    pieces.append(digest_there(tensor).reshape(1).view(torch.uint8))
                    continue
                data = bytes_of(dense(tensor))
                pieces.append(data[self.places[i] : self.places[i] + width])
                if self._before is not None and i in self._readers.frozen:
                    takers.append((self._witnesses, i))
                    pieces.append(data[self._before.places[i] : self._before.places[i] + width])
            arrivals.append(_taking(accelerator.bring(torch.cat(pieces), device), [p.numel() for p in pieces], takers))
        return arrivals


def _taking(
    arrived: Callable[[], torch.Tensor], sizes: list[int], takers: list[tuple[dict[int, bytes] | list[bytes], int]]
) -> Callable[[], None]:
    def take() -> None:
        data = arrived().numpy().tobytes()
        ends = [*itertools.accumulate(sizes)]
        for (into, i), end, size in zip(takers, ends, sizes, strict=True):
            into[i] = data[end - size : end]

    return take


class ReplicaDigests:
    """Digests the replicas of one plan, as long as its tensors stay where they are. Main thread."""

    def __init__(self, replicas: Sequence[Replica], before: ReplicaDigests | None = None) -> None:
        """`replicas`: in the same order on all ranks that hold them; those of the same holders follow each other.

        `before`: the digests used until now, when the tensors were elsewhere.
        """
        self._replicas = replicas
        self._readers: dict[bool, _Readers] = {}
        self._last: Seen | None = None if before is None else before._last

    @torch.no_grad()
    def begin(self, number: int, whole: bool) -> Reading:
        """Reads what must be read before training goes on. `whole`: nothing is only sampled."""
        if whole not in self._readers:
            self._readers[whole] = _Readers(self._replicas, whole)
        readers = self._readers[whole]
        last = self._last
        before = last if last is not None and readers.frozen and last.kinds == readers.kinds else None
        reading = Reading(number, readers, readers.read_small(number), before)
        self._last = reading.seen
        return reading

    def let_go(self) -> None:
        """Lets go of all tensors. From then on, serves only as `before` of another."""
        self._replicas, self._readers = (), {}

    def nbytes_inline(self, whole: bool) -> int:
        """Bytes that `begin` reads in host memory."""
        return self._readers[whole].nbytes_inline


class _Readers:
    """How each replica is read, with everything digested whole, or not."""

    def __init__(self, replicas: Sequence[Replica], whole: bool) -> None:
        self.large: list[Replica] = []
        self.widths: list[int | None] = []
        """The bytes of each large tensor's window; None if it is digested whole."""
        self.groups: dict[Ranks, tuple[int, int]] = {}
        """The large tensors of each set of holders: the indices from and to."""
        self.on_devices: dict[torch.device, list[int]] = {}
        self._small: list[_Small] = []
        for ranks, group in itertools.groupby(replicas, lambda replica: replica.ranks):
            start, small = len(self.large), list[tuple[Replica, int]]()
            for replica in group:
                entire = whole or replica.way is Way.WHOLE
                nbytes = replica.tensor.nbytes
                if replica.small:
                    entire = entire or replica.way is Way.FROZEN
                    small.append((replica, nbytes if entire else min(nbytes, SAMPLE_BYTES)))
                    continue
                self.large.append(replica)
                there = accelerator.device_of(replica.tensor)
                if there is not None:
                    self.on_devices.setdefault(there, []).append(len(self.large) - 1)
                if entire and there is not None and nbytes < _DIGEST_THERE_FROM_BYTES:
                    self.widths.append(nbytes)
                else:
                    self.widths.append(None if entire else min(nbytes, SAMPLE_BYTES))
            self.groups[ranks] = start, len(self.large)
            if small:
                self._small.append(_Small(ranks, small))
        elsewhere = {i for indices in self.on_devices.values() for i in indices}
        on_host = [i for i in range(len(self.large)) if i not in elsewhere]
        plain = ((i, self.large[i].tensor) for i in on_host if is_bytes(self.large[i].tensor))
        self._views = {i: bytes_at(tensor.data_ptr(), tensor.nbytes) for i, tensor in plain}
        self.late = [i for i in on_host if self.large[i].late and i in self._views]
        late = {*self.late}
        self.now = [i for i in on_host if i not in late]
        self.frozen = {i for i, replica in enumerate(self.large) if replica.way is Way.FROZEN and not whole}
        self.kinds: list[Kind] = [
            (replica.name, replica.way, nbytes) for replica, nbytes in zip(self.large, self.widths, strict=True)
        ]

    @property
    def nbytes_inline(self) -> int:
        widths = ((self.widths[i], self.large[i].tensor.nbytes) for i in self.now)
        large = sum(nbytes if width is None else width for width, nbytes in widths)
        return large + sum(small.nbytes for small in self._small)

    def data(self, i: int) -> memoryview:
        """Returns the bytes of a large tensor in host memory; a strided one is made contiguous each time."""
        found = self._views.get(i)
        return bytes_of(dense(self.large[i].tensor)).numpy().data if found is None else found

    def places(self, number: int) -> list[int]:
        """Returns the place of each large tensor's window."""
        drawn = [raw for ranks, (i, j) in self.groups.items() if j > i for raw in _draw(number, ranks, j - i, 0)]
        return [
            0 if width is None else int(raw) % (replica.tensor.nbytes - width + 1)
            for raw, replica, width in zip(drawn, self.large, self.widths, strict=True)
        ]

    def read_small(self, number: int) -> dict[Ranks, bytes]:
        """Returns a digest of all small tensors of each set of holders."""
        return {small.ranks: small.read(number) for small in self._small}


class _Small:
    """The small tensors of one set of holders, read through a buffer by few calls of C."""

    def __init__(self, ranks: Ranks, replicas: Sequence[tuple[Replica, int]]) -> None:
        """`replicas`: each with the bytes of its window."""
        self.ranks = ranks
        tensors, self._widths = [replica.tensor for replica, _ in replicas], [width for _, width in replicas]
        self._rooms = np.array([t.nbytes - w + 1 for t, w in zip(tensors, self._widths, strict=True)], np.uint64)
        self._addresses = np.array([tensor.data_ptr() for tensor in tensors], np.uint64)
        self._strided = [(i, tensor) for i, tensor in enumerate(tensors) if not is_bytes(tensor)]
        self._fixed = not self._strided and bool((self._rooms == 1).all())
        """Whether each tensor is always read at the same place."""
        self.nbytes = sum(self._widths)
        self._batches = [
            (batch, Pieces(self._addresses[batch].tolist(), self._widths[batch])) for batch in _batches(self._widths)
        ]
        """Tensors that are read together, and their pieces."""
        self._scratch = Scratch()

    def read(self, number: int) -> bytes:
        copies = [(i, dense(tensor)) for i, tensor in self._strided]  # alive until they are read
        found = xxhash.xxh3_128()
        addresses = None if self._fixed else self._drawn(number, copies)
        for batch, pieces in self._batches:
            if addresses is not None:
                pieces.aim(addresses[batch])
            found.update(self._scratch.gather(pieces))
        return found.digest()

    def _drawn(self, number: int, copies: list[tuple[int, torch.Tensor]]) -> Addresses:
        places = _draw(number, self.ranks, len(self._rooms), 1) % self._rooms
        addresses = self._addresses
        if copies:
            addresses = addresses.copy()
            addresses[[i for i, _ in copies]] = [copy.data_ptr() for _, copy in copies]
        return addresses + places


def _batches(widths: Sequence[int]) -> list[slice]:
    """Splits tensors into batches that stay in the cache."""
    found, first, nbytes = list[slice](), 0, 0
    for i, width in enumerate(widths):
        nbytes += width
        if nbytes >= _BUFFER_BYTES or i + 1 == len(widths):
            found.append(slice(first, i + 1))
            first, nbytes = i + 1, 0
    return found


def _draw(number: int, ranks: Ranks, count: int, what: int) -> np.ndarray[tuple[int], np.dtype[np.uint64]]:
    """Returns 64-bit random numbers that all these ranks draw alike."""
    key = xxhash.xxh3_64_intdigest(_in_words(what, ranks), seed=number % 2**32)
    return np.random.Philox(key=key).random_raw(count)


@lru_cache(maxsize=64)  # with 16,384 ranks it takes 1 ms, for each draw of each save
def _in_words(what: int, ranks: Ranks) -> bytes:
    return repr((what, ranks)).encode()
