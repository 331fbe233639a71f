"""The copies from one device for one slot, prepared once for as long as the same tensors go to the same places.

A snapshot must cost its thread no more than a call per copy: the views, and the windows that are compared, are made
when they are first needed and kept. Small tensors go to one buffer on the device, and from there in one piece.
"""

from __future__ import annotations

import random
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch

from ckptlib.devices import accelerator
from ckptlib.devices.cuda import stretches
from ckptlib.staging.pinned_ring import Move
from ckptlib.staging.watch import Counts
from ckptlib.state.raw_bytes import bytes_of, dense, is_bytes

MOVE_BYTES = 64 << 20
"""The most bytes of one copy over the link: whoever reads a number from the device in between waits no longer than for
that (1 to 3 ms). Divides `PIN_BYTES`."""

SAMPLE_BYTES = 64

NUM_WINDOWS = 8
"""The number of places, drawn at random, at which a tensor may be sampled; each snapshot samples one of them."""

_WORDS = (torch.int64, torch.int32, torch.int16, torch.uint8)


@dataclass(frozen=True, slots=True)
class Places:
    """Where shards lie on a device, and where they go; in the same order."""

    sources: list[torch.Tensor]
    targets: list[torch.Tensor]
    """Of the sources' dtypes and shapes; contiguous."""


class Inside:
    """Copies within the memory of a device."""

    def __init__(self, places: Places) -> None:
        """Groups tensors by the width of the numbers that they can be copied as: one kernel then copies hundreds of
        them."""
        self._groups: dict[torch.dtype, tuple[list[torch.Tensor], list[torch.Tensor]]] = {}
        self._odd: list[tuple[torch.Tensor, torch.Tensor]] = []
        for source, target in zip(places.sources, places.targets, strict=True):
            if is_bytes(source):
                word = _word(source, target)
                targets, sources = self._groups.setdefault(word, ([], []))
                targets.append(bytes_of(target).view(word))
                sources.append(bytes_of(source).view(word))
            else:
                self._odd.append((target, source))

    def enqueue(self) -> None:
        for targets, sources in self._groups.values():
            torch._foreach_copy_(targets, sources, non_blocking=True)
        for target, source in self._odd:
            bytes_of(target).copy_(bytes_of(dense(source)), non_blocking=True)


def _word(source: torch.Tensor, target: torch.Tensor) -> torch.dtype:
    """Returns the widest number type that the bytes of both can be viewed as."""
    common = source.nbytes
    for tensor in (source, target):  # torch checks the offset in the storage, the device the address
        common |= tensor.data_ptr() | int(tensor.storage_offset()) * tensor.itemsize
    return next(word for word in _WORDS if common % word.itemsize == 0)


class Round(NamedTuple):
    """Tensors that are gathered in memory of the device, which other rounds use too, and brought to the host."""

    memory: torch.Tensor
    inside: Inside
    runs: Across


class Across:
    """Copies from a device to the host."""

    def __init__(self, places: Places, rounds: Sequence[Round] = ()) -> None:
        self._rounds = rounds
        self._moves: list[Move] = []
        self._odd: list[tuple[torch.Tensor, torch.Tensor]] = []
        for source, target in zip(places.sources, places.targets, strict=True):
            if is_bytes(source):
                self._moves += _cut(bytes_of(target), bytes_of(source))
            else:
                self._odd.append((bytes_of(target), source))

    def __bool__(self) -> bool:
        return bool(self._rounds or self._moves or self._odd)

    def moves(self) -> Iterable[Move]:
        """Yields the copies. None is longer than `MOVE_BYTES`, or goes to two registrations. Each must be begun on the
        current stream before the next is asked for: what follows may overwrite its source."""
        for memory, inside, runs in self._rounds:
            memory.zero_()  # also the gaps between its tensors
            inside.enqueue()
            yield from runs.moves()
        yield from self._moves
        for target, source in self._odd:
            yield from _cut(target, bytes_of(dense(source)))


def _cut(target: torch.Tensor, source: torch.Tensor) -> list[Move]:
    cuts = stretches(target.data_ptr(), target.numel(), MOVE_BYTES)
    return [Move(target[start:stop], source[start:stop]) for start, stop in cuts]


class _Windows(NamedTuple):
    """A few bytes of each tensor, at the same place in source and target."""

    of_sources: list[torch.Tensor]
    of_targets: list[torch.Tensor]


class Samples:
    """Samples of every tensor that is copied behind the fence: a few bytes before and after the copy, and as they were
    copied."""

    def __init__(self, names: list[str], places: Places, device: torch.device | None, on_device: bool) -> None:
        """`on_device`: whether the targets are in memory of `device`; else they are sampled on the host."""
        self.names, self._on_device = names, on_device
        self._sources = [bytes_of(source) for source in places.sources]
        self._targets = [bytes_of(target) for target in places.targets]
        self._windows: list[_Windows] = []
        self._at = 0
        self._random = random.Random()
        shape = 3, len(names), SAMPLE_BYTES
        self._rows = torch.zeros(shape, dtype=torch.uint8, device=device)
        self._before, self._after, self._copied = (list(rows) for rows in self._rows)
        self._found = accelerator.pinned(3 * len(names) * SAMPLE_BYTES).view(shape)

    def look_before(self) -> None:
        """Samples the sources before the copy, at places drawn anew. On the current stream, as all of these methods."""
        self._at = self._random.randrange(NUM_WINDOWS)
        while len(self._windows) <= self._at:
            self._windows.append(self._draw())
        _look(self._before, self._windows[self._at].of_sources)

    def look_after(self) -> None:
        _look(self._after, self._windows[self._at].of_sources)
        if self._on_device:
            _look(self._copied, self._windows[self._at].of_targets)

    def _draw(self) -> _Windows:
        starts = [self._random.randrange(source.numel() - SAMPLE_BYTES + 1) for source in self._sources]
        return _Windows(
            *(
                [data[start : start + SAMPLE_BYTES] for data, start in zip(tensors, starts, strict=True)]
                for tensors in (self._sources, self._targets)
            )
        )

    def take(self) -> None:
        """Brings the samples to the host."""
        if self.names:
            self._found.copy_(self._rows, non_blocking=True)

    def written(self) -> list[str]:
        """Returns the names of tensors that were written to meanwhile. Only once samples and copies are on the host."""
        if not self.names:
            return []
        before, after, copied = self._found
        if not self._on_device:
            copied = torch.stack(self._windows[self._at].of_targets)
        same = (before == after).all(1) & (before == copied).all(1)
        return [name for name, good in zip(self.names, same.tolist(), strict=True) if not good]


def _look(rows: list[torch.Tensor], windows: list[torch.Tensor]) -> None:
    if rows:
        torch._foreach_copy_(rows, windows)


@dataclass(frozen=True, slots=True, eq=False)
class DeviceWork:
    """The copies of one device for one slot."""

    inside_now: Inside
    """Copies to memory of the device, made before training goes on."""
    across_now: Across
    """Copies to the host, made before training goes on."""
    inside_later: Inside
    """Copies to memory of the device, made behind the fence, if there is memory for all."""
    across_later: Across
    """Copies to the host, made behind the fence, if there is no such memory."""
    then: Across
    """Copies from memory of the device to the host, for which nothing waits."""
    samples: Samples
    """Samples of what is copied behind the fence."""
    counts: Counts
    """Torch's counts of the writes to it."""
    home: torch.Tensor
    """Bytes of the host to which all of it goes."""
