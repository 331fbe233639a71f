"""Targets of a load that share memory with another one, such as slices of a buffer beside all of it, or whose own
elements share memory, such as an expanded buffer.

Filling each in place would overwrite what was read into the other, and the last one would win. So they are read into
memory of their own; then all are copied to where they belong, and each must still equal what was read.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import NamedTuple

import numpy as np
import torch

from ckptlib.errors import StateMismatch
from ckptlib.loading.aliases import repeats
from ckptlib.loading.targets import outside_inference
from ckptlib.reading.reader import Want
from ckptlib.state.raw_bytes import bytes_of, copyable

TensorWant = Want[torch.Tensor]


class Span(NamedTuple):
    """The addresses of a piece, from the first to behind the last, whatever lies between its elements."""

    begin: int
    end: int
    want: int
    piece: int


@dataclass(frozen=True, slots=True)
class Apart:
    """A target that is read into memory of its own."""

    read: TensorWant
    into: TensorWant
    others: tuple[str, ...]
    """Names of the targets whose memory it shares; none if only its own elements share theirs."""


def set_apart(wants: Sequence[TensorWant]) -> tuple[Sequence[TensorWant], list[Apart]]:
    """Returns the wants to read, and the targets to pass to `bring_together` after that."""
    with_others: dict[int, set[int]] = {
        n: set() for n, want in enumerate(wants) for _, piece in want.pieces if repeats(piece)
    }
    for spans in _meeting(wants):
        members = {span.want for span in spans}
        if len(members) > 1 and _share(wants, spans):
            for n in members:
                with_others.setdefault(n, set()).update(members - {n})
    if not with_others:
        return wants, []
    read, apart = [*wants], []
    for n, others in sorted(with_others.items()):
        read[n] = replace(wants[n], pieces=tuple((box, _empty_for(piece)) for box, piece in wants[n].pieces))
        apart.append(Apart(read[n], wants[n], tuple(wants[other].name for other in sorted(others))))
    return read, apart


def bring_together(apart: Sequence[Apart], step: int) -> None:
    """Raises StateMismatch if the step has different values for targets in the same place."""
    with torch.inference_mode():  # otherwise a target made in inference mode could not be written to
        for each in apart:
            for piece, found in _pairs(each):
                _each_once(piece, piece).copy_(_each_once(found, piece))
        for each in apart:
            if not all(_is_copy(piece, found) for piece, found in _pairs(each)):
                if not each.others:
                    raise StateMismatch(
                        f"{each.read.name}: elements of the target share memory, and step {step} has other values for "
                        "them; give tensor.contiguous()"
                    )
                more = f" and {len(each.others) - 4} more" if len(each.others) > 4 else ""
                raise StateMismatch(
                    f"{each.read.name}: its memory is in part that of {', '.join(each.others[:4])}{more}, and step "
                    f"{step} has other values for them there; load them into tensors of their own"
                )


def _empty_for(piece: torch.Tensor) -> torch.Tensor:
    with outside_inference():
        return torch.empty(piece.shape, dtype=piece.dtype, device=piece.device)


def _pairs(apart: Apart) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    for (_, piece), (_, found) in zip(apart.into.pieces, apart.read.pieces, strict=True):
        yield copyable(piece), copyable(found)


def _each_once(tensor: torch.Tensor, piece: torch.Tensor) -> torch.Tensor:
    """Returns the part of `tensor` at the first index of each dim along which `piece` has stride 0: torch refuses to
    write to an element twice there."""
    for dim, step in enumerate(piece.stride()):
        if step == 0 and tensor.shape[dim] > 1:
            tensor = tensor.narrow(dim, 0, 1)
    return tensor


def _is_copy(piece: torch.Tensor, found: torch.Tensor) -> bool:
    """Returns whether they are equal bit for bit."""
    now = torch.empty_like(found)
    now.copy_(piece)
    return torch.equal(bytes_of(now), bytes_of(found))


def _meeting(wants: Sequence[TensorWant]) -> Iterator[list[Span]]:
    """Yields spans of several wants, each of which overlaps with another."""
    at = [(n, m, piece) for n, want in enumerate(wants) for m, (_, piece) in enumerate(want.pieces)]
    begins = np.array([piece.data_ptr() for _, _, piece in at], np.uint64)  # Intel's GPUs have addresses beyond int64
    ends = begins + np.array([_extent(piece) for _, _, piece in at], np.uint64)
    order = np.argsort(begins, kind="stable")
    reach = np.maximum.accumulate(ends[order])
    cuts = np.flatnonzero(begins[order][1:] >= reach[:-1]) + 1
    bounds = np.concatenate([[0], cuts, [len(at)]])
    for i in np.flatnonzero(np.diff(bounds) > 1).tolist():  # nearly all stand alone
        yield sorted(Span(int(begins[k]), int(ends[k]), *at[k][:2]) for k in order[bounds[i] : bounds[i + 1]])


def _extent(piece: torch.Tensor) -> int:
    """Returns how many bytes lie from its first to its last element."""
    if piece.is_contiguous():
        return piece.nbytes
    return (sum(step * (size - 1) for step, size in zip(piece.stride(), piece.shape, strict=True)) + 1) * piece.itemsize


def _is_dense(piece: torch.Tensor) -> bool:
    """Returns whether its elements fill its span, each in a place of its own."""
    return piece.permute(sorted(range(piece.dim()), key=piece.stride, reverse=True)).is_contiguous()


def _share(wants: Sequence[TensorWant], spans: Sequence[Span]) -> bool:
    """Returns whether any two of these have an element in one place; columns of one matrix, for one, have not."""
    pieces = [_each_once(piece, piece) for span in spans for _, piece in [wants[span.want].pieces[span.piece]]]
    dense = [span for span, piece in zip(spans, pieces, strict=True) if _is_dense(piece)]
    if any(later.begin < earlier.end for earlier, later in pairwise(dense)):
        return True
    first = spans[0].begin
    unit = math.gcd(*(piece.itemsize for piece in pieces), *(span.begin - first for span in spans))
    taken = torch.zeros((max(span.end for span in spans) - first) // unit, dtype=torch.bool, device="cpu")
    for span, piece in zip(spans, pieces, strict=True):
        each = piece.itemsize // unit
        steps = (*(step * each for step in piece.stride()), 1)
        own = taken.as_strided((*piece.shape, each), steps, (span.begin - first) // unit)
        if own.any():
            return True
        own.fill_(True)
    return False
