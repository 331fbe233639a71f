"""Which boxes of a tensor each coordinate of a device mesh holds.

Uses DTensor's terms (mesh, placement) as torch 2.13 means them, but pure integers: no torch, no I/O.

A sharded dim is modelled as the ordered list of its segments that a coordinate holds. The list begins with the whole
dim, and each placement, mesh axis by mesh axis from left to right, selects from it:

    Shard(d)             the list cut into equal chunks, the last ones shorter or empty (torch.chunk); one of them
    StridedShard(d, f)   the list cut into f chunks, each of these cut again; one piece of each, joined. It is how FSDP
                         writes down that a dim was sharded by later mesh axes (f shards in all) before its own
"""

from __future__ import annotations

import itertools
import math
import re
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import TypeAlias

from ckptlib.errors import FormatError, UnsupportedState
from ckptlib.format.box import Box
from ckptlib.format.segments import (
    Segments,
    chunk_at,
    chunks_touching,
    joined,
    length_of,
    num_chunks,
    take,
    with_local_start,
)


@dataclass(frozen=True, slots=True)
class Replicate:
    """Every coordinate of the mesh axis holds the same."""


@dataclass(frozen=True, slots=True)
class Shard:
    """The mesh axis cuts `dim` into contiguous chunks of ceil(size / ranks), so the last may be shorter or empty."""

    dim: int

    def __post_init__(self) -> None:
        if self.dim < 0:
            raise ValueError(f"{self}: expected dim >= 0; count dims from the front")


@dataclass(frozen=True, slots=True)
class StridedShard:
    """The mesh axis cuts each of the `split_factor` chunks of `dim`, and a coordinate holds one piece of each."""

    dim: int
    split_factor: int

    def __post_init__(self) -> None:
        if self.dim < 0:
            raise ValueError(f"{self}: expected dim >= 0; count dims from the front")
        if self.split_factor < 1:
            raise ValueError(f"{self}: expected split_factor >= 1")


Placement: TypeAlias = Replicate | Shard | StridedShard


@dataclass(frozen=True, slots=True)
class Piece:
    """A region that a coordinate holds."""

    box: Box
    """Where it lies in the tensor's global coordinates."""
    local: Box
    """Where it lies in the local tensor; the same shape as `box`."""


_NUMBER = "0|[1-9][0-9]{0,8}"
_ENCODED = re.compile(f"R|S({_NUMBER})|SS({_NUMBER})x([1-9][0-9]{{0,8}})")


MAX_PIECES = 2**18
"""The most pieces of a dim that strided axes cut, over all holders."""


def encode(placement: Placement) -> str:
    """Returns "R", "S0" or "SS0x2", for layouts and messages; `decode` reads it back."""
    if isinstance(placement, Replicate):
        return "R"
    if isinstance(placement, Shard):
        return f"S{placement.dim}"
    return f"SS{placement.dim}x{placement.split_factor}"


def decode(text: str) -> Placement:
    """Returns the placement that `encode` wrote. Raises FormatError for any other text."""
    match = _ENCODED.fullmatch(text)
    if match is None:
        raise FormatError(f"not a placement: {text[:40]!r}; expected R, S<dim> or SS<dim>x<split factor>")
    dim, dim_strided, factor = match.groups()
    if dim is not None:
        return Shard(int(dim))
    return Replicate() if factor is None else StridedShard(int(dim_strided), int(factor))


def replica_axes(placements: Sequence[Placement]) -> tuple[int, ...]:
    """Returns the mesh axes along which all coordinates hold the same."""
    return tuple(axis for axis, placement in enumerate(placements) if isinstance(placement, Replicate))


def pieces(
    shape_global: Sequence[int], mesh_shape: Sequence[int], placements: Sequence[Placement], coordinate: Sequence[int]
) -> tuple[Piece, ...]:
    """Returns everything that `coordinate` holds, sorted by offset in its local tensor.

    Most placements give one piece, strided shards that leave gaps several, and empty local tensors none.

    Raises ValueError if this is no layout, UnsupportedState for strided shards whose meaning torch leaves open.
    """
    held = _held(shape_global, mesh_shape, placements, coordinate)
    return tuple(_piece(parts) for parts in itertools.product(*map(with_local_start, held)))


def shape_local(
    shape_global: Sequence[int], mesh_shape: Sequence[int], placements: Sequence[Placement], coordinate: Sequence[int]
) -> tuple[int, ...]:
    """Returns the shape of the local tensor of `coordinate`, without padding. Raises what `pieces` raises."""
    return tuple(map(length_of, _held(shape_global, mesh_shape, placements, coordinate)))


def coordinates_touching(
    shape_global: Sequence[int], mesh_shape: Sequence[int], placements: Sequence[Placement], box: Box
) -> list[tuple[int, ...]]:
    """Returns the mesh coordinates, 0 on replica axes, that hold an element of `box`; in ascending order.

    The cost grows with the length of the result, not with the mesh. Raises what `pieces` raises.
    """
    cuts = _cuts(shape_global, mesh_shape, placements)
    if not box.within(Box.whole(shape_global)):
        raise ValueError(f"box {box} is not inside a tensor of shape {tuple(shape_global)}")
    if box.numel == 0:
        return []
    touched = [
        _touched(size, cut, start, start + length)
        for size, cut, start, length in zip(shape_global, cuts, box.offset, box.shape, strict=True)
    ]
    axes = [axis for cut in cuts for axis in cut.axes]
    found = []
    for indexes in itertools.product(*touched):
        coordinate = [0] * len(mesh_shape)
        for axis, i in zip(axes, itertools.chain.from_iterable(indexes), strict=True):
            coordinate[axis] = i
        found.append(tuple(coordinate))
    return sorted(found)


def least_pieces(shape_global: Sequence[int], mesh_shape: Sequence[int], placements: Sequence[Placement]) -> int:
    """Returns how many pieces different coordinates hold at least. Costs nothing, however large the mesh.

    Also returns some number if the arguments are no layout, or one whose meaning torch leaves open.
    """
    steps: dict[int, list[tuple[Shard | StridedShard, int]]] = {}
    for placement, n in zip(placements, mesh_shape, strict=True):
        if n > 1 and not isinstance(placement, Replicate):
            steps.setdefault(placement.dim, []).append((placement, n))
    return math.prod(_least_segments(size, steps.get(dim, ())) for dim, size in enumerate(shape_global))


def _least_segments(size: int, steps: Sequence[tuple[Shard | StridedShard, int]]) -> int:
    """Counts the fewest pieces of one dim. Several axes cut chunks of chunks, none larger than the first."""
    if len(steps) == 1 and isinstance(placement := steps[0][0], StridedShard):
        each = -(-size // placement.split_factor)
        # the first rank holds a chunk of one element whole, and then all that it holds are neighbours
        return size // each * num_chunks(each, steps[0][1]) if each > 1 else min(size, 1)
    largest = size
    for _, num in steps:
        largest = -(-largest // num)
    return -(-size // largest) if size else 0


@dataclass(frozen=True, slots=True)
class _Cut:
    """How the mesh cuts one dim; empty if no axis shards it."""

    axes: tuple[int, ...] = ()
    """The mesh axes of more than one rank that shard the dim, ascending."""
    steps: _Steps = ()
    """Placement and size of each of these axes."""


_Steps: TypeAlias = tuple[tuple[Shard | StridedShard, int], ...]


def _cuts(shape_global: Sequence[int], mesh_shape: Sequence[int], placements: Sequence[Placement]) -> list[_Cut]:
    """Returns the cut of each dim, checked."""
    if len(placements) != len(mesh_shape):
        raise ValueError(f"{len(placements)} placements for a mesh of shape {tuple(mesh_shape)}; expected one per axis")
    if any(n < 1 for n in mesh_shape) or any(n < 0 for n in shape_global):
        raise ValueError(f"not a tensor on a mesh: shape {tuple(shape_global)} over {tuple(mesh_shape)}")
    cuts = [_Cut()] * len(shape_global)
    for axis, (placement, num) in enumerate(zip(placements, mesh_shape, strict=True)):
        if isinstance(placement, Replicate):
            continue
        if placement.dim >= len(shape_global):
            raise ValueError(f"{placement} on mesh axis {axis}: no such dim in shape {tuple(shape_global)}")
        if num == 1:  # an axis of one rank cuts nothing, whatever the placement
            continue
        before = cuts[placement.dim]
        cuts[placement.dim] = _Cut((*before.axes, axis), (*before.steps, (placement, num)))
    for size, cut in zip(shape_global, cuts, strict=True):
        _require_one_reading(size, cut.steps)
    return cuts


def _held(
    shape_global: Sequence[int], mesh_shape: Sequence[int], placements: Sequence[Placement], coordinate: Sequence[int]
) -> list[Segments]:
    """Returns the segments of each dim that `coordinate` holds."""
    cuts = _cuts(shape_global, mesh_shape, placements)
    if len(coordinate) != len(mesh_shape) or any(not 0 <= i < n for i, n in zip(coordinate, mesh_shape, strict=True)):
        raise ValueError(f"coordinate {tuple(coordinate)} is not in a mesh of shape {tuple(mesh_shape)}")
    return [
        _segments(size, cut.steps, tuple(coordinate[axis] for axis in cut.axes))
        for size, cut in zip(shape_global, cuts, strict=True)
    ]


def _piece(parts: tuple[tuple[int, int, int], ...]) -> Piece:
    shape = tuple(stop - start for start, stop, _ in parts)
    return Piece(Box(tuple(start for start, _, _ in parts), shape), Box(tuple(local for _, _, local in parts), shape))


def _touched(size: int, cut: _Cut, start: int, stop: int) -> list[tuple[int, ...]]:
    """Returns the indexes of holders of [start, stop), which is not empty, on the mesh axes of `cut`."""
    if len(cut.steps) == 1 and isinstance(placement := cut.steps[0][0], StridedShard):
        return [(i,) for i in _touched_strided(size, placement.split_factor, cut.steps[0][1], start, stop)]
    order = _order(cut.steps)
    assert order is not None, "required by _cuts"
    found: list[tuple[int, int, dict[int, int]]] = [(0, size, {})]
    for step in order:
        found = [
            (first + low, first + high, {**held, step: i})
            for first, last, held in found
            for i, low, high in chunks_touching(last - first, cut.steps[step][1], start - first, stop - first)
        ]
    return [tuple(held[step] for step in range(len(order))) for _, _, held in found]


def _touched_strided(size: int, factor: int, num: int, start: int, stop: int) -> list[int]:
    """Does what `_touched` does, for one strided axis: the chunks between the first and the last touched one are whole,
    and have the same holders."""
    found: set[int] = set()
    each = -(-size // factor)
    head, tail = start // each, (stop - 1) // each
    for chunk in {head, min(head + 1, tail), max(tail - 1, head), tail}:
        first, last = chunk_at(size, factor, chunk)
        found.update(i for i, _, _ in chunks_touching(last - first, num, start - first, stop - first))
    return sorted(found)


def _segments(size: int, steps: _Steps, index: tuple[int, ...]) -> Segments:
    """Returns the segments of a dim that the holder at `index` on the axes of `steps` holds; `_cuts` checked them."""
    if len(steps) == 1 and isinstance(steps[0][0], StridedShard):
        return _left_to_right(size, steps, index)
    order = _order(steps)
    assert order is not None, "required by _cuts"
    return _in_order(size, steps, order, index)


def _left_to_right(size: int, steps: _Steps, index: tuple[int, ...]) -> Segments:
    """Applies the placements from left to right: the model at the top of this file."""
    segments: Segments = ((0, size),) if size else ()
    for (placement, num), i in zip(steps, index, strict=True):
        segments = _select(segments, placement, num, i)
    return segments


def _select(segments: Segments, placement: Shard | StridedShard, num: int, index: int) -> Segments:
    """Returns the part of `segments` that rank `index` of `num` holds."""
    factor = placement.split_factor if isinstance(placement, StridedShard) else 1
    length = length_of(segments)
    taken: list[tuple[int, int]] = []
    for chunk in range(min(factor, length)):
        first, last = chunk_at(length, factor, chunk)
        low, high = chunk_at(last - first, num, index)
        taken.extend(take(segments, first + low, first + high))
    return joined(taken)


@lru_cache(maxsize=4096)
def _require_one_reading(size: int, steps: _Steps) -> None:
    """Refuses strided shards of one dim by several axes that torch 2.13 reads in two ways.

    distribute_tensor applies placements from left to right. fully_shard over tensor parallelism, and full_tensor, take
    a strided axis as one that cuts after axes on its right, each of whose chunks it cuts apart. Both agree on even
    sizes and on many uneven ones, but not if joined pieces are cut again at another place. If no order of axes explains
    the split factors, full_tensor returns other elements than distribute_tensor gave, or raises.
    """
    factors = [placement.split_factor for placement, _ in steps if isinstance(placement, StridedShard)]
    if not factors:
        return
    if len(steps) == 1:
        if min(factors[0], size) * steps[0][1] > MAX_PIECES:
            raise UnsupportedState(_too_fine(size, steps))
        return
    order = _order(steps)
    if order is None:
        raise UnsupportedState(_unexplained(size, steps))
    holders = math.prod(num for _, num in steps)
    if size % holders == 0:
        return
    if len(steps) == 2 and order == [1, 0]:
        if not _two_agree(size, steps[0][1], steps[1][1]):
            raise UnsupportedState(_two_readings(size, steps, order))
        return
    if holders * math.prod(factors) > MAX_PIECES:
        raise UnsupportedState(_too_fine(size, steps))
    for index in itertools.product(*(range(num) for _, num in steps)):
        if _in_order(size, steps, order, index) != _left_to_right(size, steps, index):
            raise UnsupportedState(_two_readings(size, steps, order))


def _two_agree(size: int, num: int, num_first: int) -> bool:
    """Returns whether both readings agree for a dim that the second axis cuts first.

    A holder has a list of `whole` elements of each whole chunk, and then some of a shorter one. Cut again, the list
    must come apart where it was joined.
    """
    each = -(-size // num_first)
    num_whole, rest = divmod(size, each)
    # where holders change from whole pieces to short and empty ones
    ends = {n // -(-n // num) for n in (each, rest) if n}
    for i in {0, *(end + d for end in ends for d in (-1, 0, 1) if 0 <= end + d < num)}:
        whole, short = (last - first for first, last in (chunk_at(each, num, i), chunk_at(rest, num, i)))
        total = num_whole * whole + short
        if total and not (whole == min(-(-total // num_first), total) and short <= whole):
            return False
    return True


def _in_order(size: int, steps: _Steps, order: list[int], index: tuple[int, ...]) -> Segments:
    """Returns what the holder at `index` holds if the axes cut plain chunks, one after the other in `order`."""
    first, last = 0, size
    for step in order:
        low, high = chunk_at(last - first, steps[step][1], index[step])
        first, last = first + low, first + high
    return ((first, last),) if first < last else ()


def _too_fine(size: int, steps: _Steps) -> str:
    return (
        f"{_described(size, steps)}: these are more than {MAX_PIECES:,} pieces. Redistribute the tensor "
        "to Shard placements before saving"
    )


def _unexplained(size: int, steps: _Steps) -> str:
    return (
        f"{_described(size, steps)}: no order of these mesh axes makes that split factor, and torch's full_tensor does "
        f"not give back what distribute_tensor put there. Redistribute the tensor to Shard placements before saving"
    )


def _two_readings(size: int, steps: _Steps, order: list[int]) -> str:
    even = math.prod(steps[step][1] for step in order[:-1])  # the last to cut may cut unevenly: nobody cuts its pieces
    return (
        f"{_described(size, steps)}: distribute_tensor and fully_shard disagree on who holds which element, and the "
        f"tensor does not say which of them made it. Pad the dim to a multiple of {even} ({-(-size // even) * even}), "
        f"or let fully_shard shard another dim (shard_placement_fn)"
    )


def _described(size: int, steps: _Steps) -> str:
    cut = ", then ".join(f"{encode(placement)} over {num}" for placement, num in steps)
    return f"dim {steps[0][0].dim} of size {size}, sharded as {cut} ranks"


@lru_cache(maxsize=1024)  # layers are alike
def _order(steps: _Steps) -> list[int] | None:
    """Returns the order in which `steps` cut the dim by plain chunks, or None if no order explains the split factors.

    A strided step cuts after as many of the steps on its right as make `split_factor` shards (torch's shard order).
    """
    order: list[int] = []
    for step in reversed(range(len(steps))):
        placement = steps[step][0]
        factor = placement.split_factor if isinstance(placement, StridedShard) else 1
        shards = list(itertools.accumulate((steps[s][1] for s in order), int.__mul__, initial=1))
        if factor not in shards:
            return None
        order.insert(shards.index(factor), step)
    return order
