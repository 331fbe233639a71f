"""The copies of a snapshot: shards of the state and their places in a slot, sorted by the way that each of them goes.

From the host's memory by address. From a device to the host; or, where memory of the device is to spare, to a copy that
lies there as it will lie in the slot, which nobody writes to, and from there to the host in few large runs. Small
tensors always go that way.
"""

from __future__ import annotations

import ctypes
from bisect import bisect_right
from collections.abc import Iterable
from dataclasses import dataclass
from typing import NamedTuple

import torch

from ckptlib.devices import accelerator
from ckptlib.slots.slot import Mapped
from ckptlib.staging.pieces import Pieces
from ckptlib.staging.pinned_ring import Move
from ckptlib.staging.prepared_copies import Across, DeviceWork, Inside, Places, Samples
from ckptlib.staging.windows import Windows
from ckptlib.state.raw_bytes import copyable, is_bytes

OVERLAP_FROM_BYTES = 64 * 1024
"""Below this, handing a tensor over costs as much as copying it at once."""

PACK_BELOW_BYTES = 1 << 20
"""Below this, a copy over the link takes less than the call for it: such tensors are gathered on the device first."""

PACKED_BYTES = 16 << 20
"""The most that is gathered so, for each slot: memory that the training does not get."""


@dataclass(frozen=True, slots=True)
class CopySource:
    """One shard to be copied."""

    name: str
    tensor: torch.Tensor
    """This rank's box of it, of the box's shape; any strides."""
    overlap: bool
    """Whether its only writer waits at the fence."""
    lent: bool = False
    """See `Leaf.lent`."""


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

    def __init__(self, source: CopySource, body: torch.Tensor, offset: int) -> None:
        tensor = source.tensor
        self.source, self.body, self.offset, self.nbytes = source, body, offset, tensor.nbytes
        self._target: torch.Tensor | None = None
        self.device = accelerator.device_of(tensor)
        self.movable = self.device is None and is_bytes(tensor)
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

    def place_in(self, body: torch.Tensor, shift: int = 0) -> torch.Tensor:
        """Where the shard lies in a body: of this slot, laid out as it is, or with so many bytes less before it."""
        tensor, at = self.source.tensor, self.offset - shift
        return body[at : at + self.nbytes].view(tensor.dtype).view(tensor.shape)

    def move(self) -> None:
        """No dispatch, no autograd, no thread pool that would compete with the trainer's; the GIL is released."""
        ctypes.memmove(self.target_address, self.source_address, self.nbytes)


def bytes_at(address: int, nbytes: int) -> memoryview:
    """Memory that lives as long as its tensor, which the caller keeps; not by way of numpy, after which a tensor cannot
    be resized."""
    return memoryview((ctypes.c_char * nbytes).from_address(address)).cast("B")


class Pairs:
    """The shards of a snapshot and their places in one slot, sorted by how they are copied."""

    def __init__(self, pairs: list[Pair]) -> None:
        self.all = pairs
        self.late = [pair for pair in pairs if pair.movable and pair.late]
        self.windows = Windows([pair.source_address for pair in self.late], [pair.nbytes for pair in self.late])
        now = [pair for pair in pairs if pair.movable and not pair.late]
        self.large = [pair for pair in now if pair.nbytes >= OVERLAP_FROM_BYTES]
        small = [pair for pair in now if pair.nbytes < OVERLAP_FROM_BYTES]
        self.small = Pieces(*([getattr(pair, of) for pair in small] for of in ("source_address", "nbytes", "offset")))
        self.strided = [pair for pair in pairs if pair.device is None and not pair.movable]
        self.devices = list(dict.fromkeys(pair.device for pair in pairs if pair.device is not None))
        self.works: dict[tuple[torch.device, int], DeviceWork] = {}
        """By device, and the address of the copy in its memory; 0: only small tensors have one."""

    def move_now(self, body: Mapped) -> None:
        """All that is in host memory and is not copied behind the fence."""
        self.small.copy(body)
        for pair in self.large:
            pair.move()
        for pair in self.strided:
            copyable(pair.target).copy_(copyable(pair.source.tensor))

    def work(self, device: torch.device, spare: torch.Tensor | None) -> DeviceWork:
        """The copies from one device; by way of `spare`, bytes of that device and as many as of the body, if given."""
        key = device, 0 if spare is None else spare.data_ptr()
        if key not in self.works:
            self.works[key] = work_of(self.all, device, spare)
        return self.works[key]


def work_of(pairs: Iterable[Pair], device: torch.device | None, spare: torch.Tensor | None) -> DeviceWork:
    """See `Pairs.work`."""
    pairs = [pair for pair in pairs if pair.nbytes]
    mine = [pair for pair in pairs if pair.device == device]
    inside, across, runs = mine, list[Pair](), list[Move]()
    if spare is None:
        inside, across = _parted(mine)
    stretches = _runs_of(inside, pairs)
    memory = spare
    if memory is None:
        try:
            memory = torch.zeros(sum(stop - start for start, stop in stretches), dtype=torch.uint8, device=device)
        except torch.OutOfMemoryError:  # what the training has left for a few MiB is its own
            memory = torch.empty(0, dtype=torch.uint8, device=device)
            inside, across, stretches = [], mine, []
    # the body of a slot has one place for every byte; what is gathered lies run by run
    begins, end = {}, 0
    for start, stop in stretches:
        begins[start] = start if spare is not None else end
        runs.append(Move(mine[0].body[start:stop], memory[begins[start] : begins[start] + stop - start]))
        end += stop - start
    shifts = {id(pair): _shift(pair, stretches, begins) for pair in inside}

    def within(some: list[Pair]) -> Places:
        return Places([pair.source.tensor for pair in some], [pair.place_in(memory, shifts[id(pair)]) for pair in some])

    def to_host(some: list[Pair]) -> Places:
        return Places([pair.source.tensor for pair in some], [pair.target for pair in some])

    late = [pair for pair in mine if pair.late] if spare is not None else [pair for pair in across if pair.late]
    late_places = within(late) if spare is not None else to_host(late)
    return DeviceWork(
        inside_now=Inside(within([pair for pair in inside if spare is None or not pair.late])),
        across_now=Across(to_host([pair for pair in across if not pair.late])),
        inside_later=Inside(late_places if spare is not None else Places([], [])),
        across_later=Across(late_places if spare is None else Places([], [])),
        then=Across(Places([run.source for run in runs], [run.target for run in runs])),
        samples=Samples([pair.source.name for pair in late], late_places, device, on_device=spare is not None),
        home=mine[0].body if mine else torch.empty(0, dtype=torch.uint8, device="cpu"),
    )


def _parted(pairs: list[Pair]) -> tuple[list[Pair], list[Pair]]:
    """Those that are gathered on the device, and those that go to the host as they are."""
    small, large, room = list[Pair](), list[Pair](), PACKED_BYTES
    for pair in pairs:
        if pair.nbytes < PACK_BELOW_BYTES and pair.nbytes <= room:
            small.append(pair)
            room -= pair.nbytes
        else:
            large.append(pair)
    return small, large


def _runs_of(some: list[Pair], pairs: list[Pair]) -> list[Stretch]:
    ours = set(map(id, some))
    return _runs((pair.offset, pair.offset + pair.nbytes, id(pair) in ours) for pair in pairs)


def _shift(pair: Pair, stretches: list[Stretch], begins: dict[int, int]) -> int:
    """How much farther back a shard lies in gathered memory than in the body."""
    start = stretches[bisect_right(stretches, (pair.offset, 1 << 62)) - 1].start
    return start - begins[start]


class Stretch(NamedTuple):
    """[start, stop) of a body."""

    start: int
    stop: int


def _runs(places: Iterable[tuple[int, int, bool]]) -> list[Stretch]:
    """The fewest stretches with all places that are ours, and none of another's; (start, stop, whether it is ours)."""
    runs: list[Stretch] = []
    before = False
    for start, stop, ours in sorted(places):
        if ours and before:
            runs[-1] = Stretch(runs[-1].start, stop)
        elif ours:
            runs.append(Stretch(start, stop))
        before = ours
    return runs
