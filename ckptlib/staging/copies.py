"""The copies of a snapshot: shards of the state and their places in a slot, sorted by how each is copied.

Host memory is copied by address. A device's memory is copied to the host directly; or, if the device has memory to
spare, first to a copy on the device that is laid out as in the slot and that nobody writes to, and from there to the
host in few large runs. Small tensors always go that way.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch

from ckptlib.slots.slot import Mapped
from ckptlib.staging.gathered import Gathered, nbytes_of, stretches_of
from ckptlib.staging.pair import Pair
from ckptlib.staging.pieces import Pieces
from ckptlib.staging.prepared_copies import Across, DeviceWork, Inside, Places, Round, Samples
from ckptlib.staging.watch import Counts
from ckptlib.staging.windows import Windows
from ckptlib.state.raw_bytes import copyable

PACK_BELOW_BYTES = 1 << 20
"""Below this size, a copy over the link takes less time than the call for it: such tensors are gathered on the device
first."""

PACKED_BYTES = 16 << 20
"""The most bytes gathered at once, for each slot: memory that training does not get."""

ROUND_BYTES = 4 << 20
"""Small tensors beyond that are gathered in rounds of this size, each of which waits until the one before is on the
host."""


def counts_of(pairs: Iterable[Pair]) -> Counts:
    return Counts([(pair.source.name, pair.source.tensor, pair.source.outer) for pair in pairs])


class Pairs:
    """Shards of a snapshot and their places in one slot, sorted by how they are copied."""

    def __init__(self, pairs: list[Pair], beside: Sequence[int]) -> None:
        """`beside`: where the slot's other shards begin, which are copied apart; empty shards do not count."""
        self.all, self._beside = pairs, beside
        self.late = [pair for pair in pairs if pair.movable and pair.late]
        self.windows = Windows([pair.source_address for pair in self.late], [pair.nbytes for pair in self.late])
        self.counts = counts_of(self.late)
        self.frozen = {pair.source.name for pair in pairs if pair.late and pair.source.frozen}
        """The names of those behind the fence to which nobody writes, as far as known."""
        now = [pair for pair in pairs if pair.movable and not pair.late]
        self.large = [pair for pair in now if pair.large]
        small = [pair for pair in now if not pair.large]
        self.small = Pieces(*([getattr(pair, of) for pair in small] for of in ("source_address", "nbytes", "offset")))
        self.strided = [pair for pair in pairs if pair.device is None and not pair.movable]
        self.devices = list(dict.fromkeys(pair.device for pair in pairs if pair.device is not None))
        self._straight: dict[torch.device, DeviceWork] = {}

    def move_now(self, body: Mapped) -> None:
        """Copies everything that is in host memory and not copied behind the fence."""
        self.small.copy(body)
        for pair in self.large:
            pair.move()
        for pair in self.strided:
            copyable(pair.target).copy_(copyable(pair.source.tensor))

    def straight(self, device: torch.device) -> DeviceWork:
        """Returns the copies from one device that has no memory to spare for all of them."""
        if device not in self._straight:
            self._straight[device] = work_of(self.all, device, None, self._beside)
        return self._straight[device]

    def by_way_of(self, spare: torch.Tensor, device: torch.device) -> DeviceWork:
        """Returns the copies from one device by way of its memory `spare`, which has as many bytes as the body. They
        are not kept here: they would keep that memory alive."""
        return work_of(self.all, device, spare, self._beside)


def work_of(
    pairs: Iterable[Pair], device: torch.device | None, spare: torch.Tensor | None, beside: Sequence[int] = ()
) -> DeviceWork:
    """Returns the copies from one device; by way of `spare`, if given. `beside`: see `Pairs`."""
    pairs = [pair for pair in pairs if pair.nbytes]
    mine = [pair for pair in pairs if pair.device == device]
    body = mine[0].body if mine else torch.empty(0, dtype=torch.uint8, device="cpu")
    if spare is None:
        return _straight(mine, pairs, body, device, beside)
    gathered = Gathered(stretches_of([mine], pairs, beside)[0], spare, like_body=True)
    late = [pair for pair in mine if pair.late]
    places = gathered.places(late)
    return DeviceWork(
        inside_now=Inside(gathered.places([pair for pair in mine if not pair.late])),
        across_now=Across(_NOWHERE),
        inside_later=Inside(places),
        across_later=Across(_NOWHERE),
        then=Across(gathered.runs(body)),
        samples=Samples([pair.source.name for pair in late], places, device, on_device=True),
        counts=counts_of(late),
        home=body,
    )


def _straight(
    mine: list[Pair], pairs: list[Pair], body: torch.Tensor, device: torch.device | None, beside: Sequence[int]
) -> DeviceWork:
    """Returns the copies of a device that has no memory to spare for all of them."""
    packed, others = _parted(mine)
    turns = _turns(others)
    stretches, *by_turn = stretches_of([packed, *turns], pairs, beside)
    try:
        memory = torch.zeros(nbytes_of(stretches), dtype=torch.uint8, device=device)
        shared = torch.zeros(max(map(nbytes_of, by_turn), default=0), dtype=torch.uint8, device=device)
    except torch.OutOfMemoryError:  # training needs the last few MiB itself
        memory = shared = torch.empty(0, dtype=torch.uint8, device=device)
        packed, others, stretches, turns, by_turn = [], mine, [], [], []
    gathered, rounds = Gathered(stretches, memory), dict[bool, list[Round]]()
    for some, where in zip(turns, by_turn, strict=True):
        one = Gathered(where, shared[: nbytes_of(where)])
        made = Round(one.memory, Inside(one.places(some)), Across(one.runs(body)))
        rounds.setdefault(some[0].late, []).append(made)
    by_turns = {id(pair) for some in turns for pair in some}

    def across(late: bool) -> Across:
        alone = [pair for pair in others if pair.late == late and id(pair) not in by_turns]
        return Across(_to_host(alone), rounds.get(late, ()))

    late = [pair for pair in others if pair.late]
    return DeviceWork(
        inside_now=Inside(gathered.places(packed)),
        across_now=across(late=False),
        inside_later=Inside(_NOWHERE),
        across_later=across(late=True),
        then=Across(gathered.runs(body)),
        samples=Samples([pair.source.name for pair in late], _to_host(late), device, on_device=False),
        counts=counts_of(late),
        home=body,
    )


_NOWHERE = Places([], [])


def _to_host(some: list[Pair]) -> Places:
    return Places([pair.source.tensor for pair in some], [pair.target for pair in some])


def _parted(pairs: list[Pair]) -> tuple[list[Pair], list[Pair]]:
    """Splits pairs into those that are gathered at once, and the others.

    The first ones of the body are gathered, as far as there is room: scalars from farther back, between others, would
    each take a copy over the link.
    """
    packed, others, room = list[Pair](), list[Pair](), PACKED_BYTES
    for pair in sorted(pairs, key=lambda pair: pair.offset):
        if pair.nbytes < PACK_BELOW_BYTES and pair.nbytes <= room:
            packed.append(pair)
            room -= pair.nbytes
        else:
            others.append(pair)
            room = room if pair.nbytes >= PACK_BELOW_BYTES else 0
    return packed, others


def _turns(pairs: Iterable[Pair]) -> list[list[Pair]]:
    """Groups small pairs into rounds: each has those of one part of the body, all of them behind the fence or none."""
    turns = [list[Pair]()]
    small = (pair for pair in pairs if pair.nbytes < PACK_BELOW_BYTES)
    for pair in sorted(small, key=lambda pair: (pair.late, pair.offset)):
        first = turns[-1][0] if turns[-1] else pair
        if pair.late != first.late or pair.offset + pair.nbytes - first.offset > ROUND_BYTES:
            turns.append([])
        turns[-1].append(pair)
    return [some for some in turns if len(some) > 1]
