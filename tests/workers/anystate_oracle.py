"""What a save of a drawn state must come to, told without ckptlib."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from anystate_draw import MESHES, Held, State

# What is to be expected


def pieces(held: Held, size: int, rank: int) -> torch.Tensor | None:
    """Which elements of the whole a rank holds; None where it is not in the mesh."""
    mine = torch.zeros(held.shape, dtype=torch.bool)
    if held.kind == "hand":
        mine[tuple(slice(a, a + n) for a, n in zip(held.start, held.size, strict=True))] = True
        return mine
    if held.kind != "mesh":
        return torch.ones(held.shape, dtype=torch.bool)
    grid = MESHES.found[size][held.mesh][1]
    at = (grid == rank).nonzero()
    if not len(at):
        return None
    indices = torch.arange(math.prod(held.shape))
    kept = indices.reshape(held.shape)
    for axis, dim in enumerate(held.placements):
        if dim is not None:
            chunks = kept.chunk(grid.shape[axis], dim) if kept.shape[dim] else (kept,)
            index = int(at[0][axis])
            kept = chunks[index] if index < len(chunks) else kept.narrow(dim, 0, 0)
    mine.view(-1)[kept.flatten()] = True
    return mine


@dataclass(frozen=True)
class Verdict:
    """What a save of a name may come to."""

    must_fail: bool
    may_fail: bool
    value: torch.Tensor | None
    """One for all ranks; None: each has its own."""


def judge(by_rank: dict[int, Held], size: int, compared: bool) -> Verdict:
    """`compared`: whether the ranks did; else, each may keep its own of what was not alike before."""
    kinds = {(h.kind, h.dtype, h.shape, h.mesh, h.placements) for h in by_rank.values()}
    first = next(iter(by_rank.values()))
    if {h.kind for h in by_rank.values()} == {"plain"}:
        alike = len(kinds) == 1 and all(torch.equal(h.whole, first.whole) for h in by_rank.values())
        return Verdict(False, False, first.whole if alike and compared else None)
    if {h.kind for h in by_rank.values()} == {"own"}:
        return Verdict(False, len({h.dtype for h in by_rank.values()}) > 1, None)
    if len(kinds) > 1:
        return Verdict(False, True, None)
    value, known = first.whole.clone(), torch.zeros(first.shape, dtype=torch.bool)
    for rank, held in sorted(by_rank.items()):
        mine = pieces(held, size, rank)
        if mine is None:
            continue
        if not torch.equal(value[mine & known], held.whole[mine & known]):
            return Verdict(True, True, None)
        value[mine] = held.whole[mine]
        known |= mine
    return Verdict(not bool(known.all()), not bool(known.all()), value)


def verdicts(states: list[State], compared: bool) -> dict[str, Verdict]:
    size = len(states)
    names = sorted({name for state in states for name in state})
    by_name = {name: {r: s[name] for r, s in enumerate(states) if name in s} for name in names}
    held = {n: {r: h for r, h in ranks.items() if pieces(h, size, r) is not None} for n, ranks in by_name.items()}
    return {name: judge(ranks, size, compared) for name, ranks in held.items() if ranks}
