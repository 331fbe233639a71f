"""Turns an index into a box of the tensor, and an index into that box. Pure."""

from __future__ import annotations

import operator
from collections.abc import Sequence
from typing import NamedTuple

from ckptlib.format.box import Box

Index = tuple[int | slice, ...]


class Cut(NamedTuple):
    """An index of a tensor, divided in two."""

    box: Box
    """The box to read."""
    inside: Index
    """The index into the box."""


def cut(name: str, shape: Sequence[int], index: object) -> Cut:
    """Cuts by an index of whole numbers, slices with a step of at least 1, and "...".

    Raises TypeError for any other type, ValueError for another step, IndexError outside of the tensor.
    """
    given = list(index) if isinstance(index, tuple) else [index]
    dots = [i for i, item in enumerate(given) if item is Ellipsis]
    if len(dots) > 1:
        raise IndexError(f"{name}: an index can have one '...', got {len(dots)}")
    if len(given) - len(dots) > len(shape):
        raise IndexError(f"{name}: {len(given) - len(dots)} indices of a tensor with {len(shape)} dims")
    at = dots[0] if dots else len(given)
    fill: list[object] = [slice(None)] * (len(shape) - len(given) + len(dots))
    given[at : at + len(dots)] = fill
    offset, sizes, inside = [], [], []
    for dim, (item, size) in enumerate(zip(given, shape, strict=True)):
        first, count, rest = _of_dim(name, dim, item, size)
        offset.append(first)
        sizes.append(count)
        inside.append(rest)
    return Cut(Box(tuple(offset), tuple(sizes)), tuple(inside))


def _of_dim(name: str, dim: int, item: object, size: int) -> tuple[int, int, int | slice]:
    """Returns the first index and the number of indices to read, and the index into these."""
    if isinstance(item, slice):
        start, stop, step = item.indices(size)
        if step < 1:
            raise ValueError(f"{name}: a step of {step} in dim {dim}; expected at least 1")
        found = range(start, stop, step)
        if not found:
            return min(start, size), 0, slice(None)
        return found[0], found[-1] - found[0] + 1, slice(None, None, step)
    try:
        at = operator.index(item)  # type: ignore[arg-type]
    except TypeError:
        raise TypeError(
            f"{name}: an index of a {type(item).__name__} in dim {dim}; expected whole numbers, slices and '...'"
        ) from None
    if not -size <= at < size:
        raise IndexError(f"{name}: index {at} is out of range for dim {dim} of size {size}")
    return at % size, 1, 0
