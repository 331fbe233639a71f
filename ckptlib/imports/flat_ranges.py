"""A tensor that was cut as if it had one dim: its runs of elements, as boxes of the shape that it has."""

from __future__ import annotations

from collections.abc import Iterator

import torch

from ckptlib.format.box import Box
from ckptlib.imports.mapped import numel_of


def boxes_of(shape: tuple[int, ...], begin: int, run: torch.Tensor) -> Iterator[tuple[Box, torch.Tensor]]:
    """The boxes of a run of elements, in row-major order, each with a view of its elements.

    `begin`: where in the tensor the run begins; `run`: 1-d, and no longer than what the tensor has from there.
    """
    if not run.numel():
        return
    if len(shape) < 2:
        yield Box((begin,) if shape else (), tuple(run.shape) if shape else ()), run.view(run.shape if shape else ())
        return
    row = numel_of(shape[1:])
    first, within = divmod(begin, row)
    head = min(row - within, run.numel()) if within else 0
    yield from _in_row(shape, first, within, run[:head])
    first += head > 0
    rows = (run.numel() - head) // row
    if rows:
        whole = run[head : head + rows * row]
        sizes = (rows, *shape[1:])
        yield Box((first, *(0 for _ in shape[1:])), sizes), whole.view(sizes)
    yield from _in_row(shape, first + rows, 0, run[head + rows * row :])


def _in_row(shape: tuple[int, ...], row: int, begin: int, run: torch.Tensor) -> Iterator[tuple[Box, torch.Tensor]]:
    for box, tensor in boxes_of(shape[1:], begin, run):
        yield Box((row, *box.offset), (1, *box.shape)), tensor[None]
