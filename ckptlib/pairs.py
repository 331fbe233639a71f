"""What a snapshot copies: shards of the state and their places in a slot, sorted by the way that each of them goes.

From the host's memory by address. From a device to the host; or, where memory of the device is to spare, to a copy that
lies there as it will lie in the slot, which nobody writes to, and from there to the host in few large runs.
"""

from __future__ import annotations

import ctypes
from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass

import torch

from ckptlib.cuda import DeviceWork
from ckptlib.memory import copyable, is_bytes

OVERLAP_FROM_BYTES = 64 * 1024
"""Below this, handing a tensor over costs as much as copying it at once."""


@dataclass(frozen=True, slots=True)
class Source:
    """One shard to be copied."""

    name: str
    tensor: torch.Tensor
    """This rank's box of it, of the box's shape; any strides."""
    overlap: bool
    """Whether its only writer waits at the fence."""


class Pair:
    """A shard and its place in a slot, with all that a copy needs to know looked up once."""

    __slots__ = (
        "_target",
        "body",
        "copied",
        "device",
        "late",
        "movable",
        "nbytes",
        "now",
        "offset",
        "source",
        "source_address",
        "target_address",
    )

    def __init__(self, source: Source, body: torch.Tensor, offset: int) -> None:
        tensor = source.tensor
        self.source, self.body, self.offset, self.nbytes = source, body, offset, tensor.nbytes
        self._target: torch.Tensor | None = None
        on_host = tensor.device.type == "cpu"
        self.device = None if on_host else tensor.device
        self.movable = on_host and is_bytes(tensor)
        self.source_address, self.target_address = tensor.data_ptr(), body.data_ptr() + offset
        self.late = source.overlap and self.nbytes >= OVERLAP_FROM_BYTES and is_bytes(tensor)
        """Whether it is copied behind the fence."""
        if self.movable and self.late:
            self.now, self.copied = (bytes_at(a, self.nbytes) for a in (self.source_address, self.target_address))

    @property
    def target(self) -> torch.Tensor:
        """The place, as torch needs it. Made when asked for: most shards are copied by address."""
        if self._target is None:
            self._target = self.place_in(self.body)
        return self._target

    def place_in(self, body: torch.Tensor) -> torch.Tensor:
        """Where the shard lies in a body, of this slot or laid out as it is."""
        tensor = self.source.tensor
        return body[self.offset : self.offset + self.nbytes].view(tensor.dtype).view(tensor.shape)

    def move(self) -> None:
        """No dispatch, no autograd, no thread pool that would compete with the trainer's; the GIL is released."""
        ctypes.memmove(self.target_address, self.source_address, self.nbytes)


def bytes_at(address: int, nbytes: int) -> memoryview:
    """Memory that lives as long as its tensor, which the caller keeps; not by way of numpy, after which a tensor cannot
    be resized."""
    return memoryview((ctypes.c_char * nbytes).from_address(address)).cast("B")


move_small = ctypes.PyDLL(None).memmove
"""Keeps the GIL: giving it up hundreds of times would let any other thread hold up the trainer."""
move_small.argtypes = [ctypes.c_void_p, ctypes.c_void_p, ctypes.c_size_t]
move_small.restype = None


class Pairs:
    """The shards of a snapshot and their places in one slot, sorted by how they are copied."""

    def __init__(self, pairs: list[Pair], offsets: tuple[int, ...]) -> None:
        self.all = pairs
        self.offsets = offsets
        self.late = [pair for pair in pairs if pair.movable and pair.late]
        now = [pair for pair in pairs if pair.movable and not pair.late]
        self.large = [pair for pair in now if pair.nbytes >= OVERLAP_FROM_BYTES]
        small = [pair for pair in now if pair.nbytes < OVERLAP_FROM_BYTES]
        self.small = tuple(
            [getattr(pair, of) for pair in small] for of in ("target_address", "source_address", "nbytes")
        )
        """Addresses of targets and of sources, and sizes."""
        self.strided = [pair for pair in pairs if pair.device is None and not pair.movable]
        self.devices = list(dict.fromkeys(pair.device for pair in pairs if pair.device is not None))
        self._works: dict[tuple[torch.device, bool], DeviceWork] = {}
        """By device, and whether by way of its spare memory."""

    def move_now(self) -> None:
        """All that is in host memory and is not copied behind the fence."""
        deque(map(move_small, *self.small), maxlen=0)
        for pair in self.large:
            pair.move()
        for pair in self.strided:
            copyable(pair.target).copy_(copyable(pair.source.tensor))

    def work(self, device: torch.device, spare: torch.Tensor | None) -> DeviceWork:
        """The copies from one device; by way of `spare`, bytes of that device and as many as of the body, if given."""
        key = device, spare is not None
        if key not in self._works:
            self._works[key] = work_of(self.all, device, spare)
        return self._works[key]


def work_of(pairs: Iterable[Pair], device: torch.device | None, spare: torch.Tensor | None) -> DeviceWork:
    """See `Pairs.work`."""
    pairs = [pair for pair in pairs if pair.nbytes]
    mine = [pair for pair in pairs if pair.device == device]
    late, names = [pair for pair in mine if pair.late], [pair.source.name for pair in mine if pair.late]
    if spare is None:
        now = [(pair.target, pair.source.tensor) for pair in mine if not pair.late]
        return DeviceWork(now, [(pair.target, pair.source.tensor) for pair in late], [], names)
    now = [(pair.place_in(spare), pair.source.tensor) for pair in mine if not pair.late]
    later = [(pair.place_in(spare), pair.source.tensor) for pair in late]
    places = ((pair.offset, pair.offset + pair.nbytes, pair.device == device) for pair in pairs)
    runs = [(mine[0].body[start:stop], spare[start:stop]) for start, stop in _runs(places)]
    return DeviceWork(now, later, runs, names)


def _runs(places: Iterable[tuple[int, int, bool]]) -> list[tuple[int, int]]:
    """The fewest stretches with all places that are ours, and none of another's; (start, stop, whether it is ours)."""
    runs: list[tuple[int, int]] = []
    before = False
    for start, stop, ours in sorted(places):
        if ours and before:
            runs[-1] = (runs[-1][0], stop)
        elif ours:
            runs.append((start, stop))
        before = ours
    return runs
