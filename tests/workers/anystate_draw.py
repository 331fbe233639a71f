"""States drawn at random, and changed at random: tensors are (seed, box), and nothing here is ckptlib's."""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import dataclass, field, replace

import torch
from torch.distributed.device_mesh import DeviceMesh

WORLD = 4
NAMES = list("abcdefgh")
"""Each case has names of its own: what once differed between ranks is every rank's own for the life of a job."""
DTYPES = (torch.float32, torch.bfloat16, torch.int64, torch.bool, torch.complex64)
SHAPES = ((), (1,), (5,), (6, 3), (4, 2, 3), (0, 2), (300, 70))
KINDS = ("plain", "plain", "hand", "hand", "hand", "own", "mesh", "mesh")


UNNAMED = ("the state of rank", "what several ranks hold")
"""What is said between comparisons; the next one names it."""


@dataclass(frozen=True)
class Held:
    """What one rank has under a name."""

    kind: str
    """plain, hand, own or mesh."""
    dtype: torch.dtype
    shape: tuple[int, ...]
    """Of the whole tensor."""
    seed: int
    """Tells the content of the whole."""
    start: tuple[int, ...] = ()
    size: tuple[int, ...] = ()
    """Of the box that is cut by hand."""
    mesh: int = 0
    placements: tuple[int | None, ...] = ()
    """By axis of the mesh: the dim that is sharded."""
    serial: int = 0
    """The same for names of one tensor, on a rank."""

    @property
    def whole(self) -> torch.Tensor:
        generator = torch.Generator().manual_seed(self.seed)
        numbers = torch.randint(-9, 10, self.shape, generator=generator)
        return numbers > 0 if self.dtype == torch.bool else numbers.to(self.dtype)


State = dict[str, Held]


@dataclass
class Meshes:
    """By number of ranks: their meshes, as (shape, ranks)."""

    found: dict[int, list[tuple[DeviceMesh, torch.Tensor]]] = field(default_factory=dict)

    def make(self) -> None:
        for size in range(1, WORLD + 1):
            grids = [torch.arange(size), torch.tensor([0]), torch.tensor([size - 1])]
            grids += [torch.arange(1, size)] if size > 2 else []
            grids += [torch.tensor([[0, 1], [2, 3]]), torch.tensor([[3, 0], [1, 2]])] if size == WORLD else []
            self.found[size] = [(DeviceMesh("cpu", grid), grid) for grid in grids]


MESHES = Meshes()


# Drawing


def draw_state(rng: random.Random, size: int) -> list[State]:
    """By rank."""
    states: list[State] = [{} for _ in range(size)]
    serial = iter(range(10**6))
    for name in rng.sample(NAMES, rng.randint(1, len(NAMES))):
        for rank, held in draw_tensor(rng, size, serial):
            states[rank][name] = held
    for _ in range(rng.choice((0, 0, 1, 1, 2, 3))):
        tie(rng, states)
    if rng.random() < 0.3:  # each rank meets its names in an order of its own
        states = [dict(rng.sample([*state.items()], len(state))) for state in states]
    return states


def draw_tensor(rng: random.Random, size: int, serial: Iterator[int]) -> Iterator[tuple[int, Held]]:
    kind = rng.choice(KINDS)
    base = Held(kind, rng.choice(DTYPES), rng.choice(SHAPES), rng.randrange(10**9))
    ranks = [*range(size)] if rng.random() < 0.7 else sorted(rng.sample(range(size), rng.randint(1, size)))
    if kind == "mesh":
        mesh = rng.randrange(len(MESHES.found[size]))
        grid = MESHES.found[size][mesh][1]
        dims = [None, *range(len(base.shape))]
        placements = tuple(rng.choice(dims) for _ in range(grid.ndim))
        if len(placements) == 2 and placements[0] == placements[1]:  # uneven cuts of one dim are refused by name
            placements = (placements[0], None)
        base = replace(base, mesh=mesh, placements=placements)
        ranks = [*range(size)]
    odd = rng.random() < 0.2
    for rank in ranks:
        held = replace(base, serial=next(serial))
        if kind == "own" or (odd and kind == "plain" and rng.random() < 0.5):
            held = replace(held, seed=base.seed + rng.randrange(3))
            if rng.random() < 0.2:
                held = replace(held, shape=rng.choice(SHAPES))
        if kind == "hand":
            held = draw_box(rng, held, size, rank, odd)
        if odd and kind == "hand" and rng.random() < 0.2:
            held = replace(held, seed=base.seed + 1)
        if rng.random() < 0.01:
            held = replace(held, kind="plain", start=(), size=())
        yield rank, held


def draw_box(rng: random.Random, held: Held, size: int, rank: int, odd: bool) -> Held:
    """A share of the first dim with a halo, or any box at all."""
    shape = held.shape
    if not shape or rng.random() < 0.1:
        return replace(held, start=(0,) * len(shape), size=shape)
    if odd:
        start = tuple(rng.randint(0, n) for n in shape)
        return replace(held, start=start, size=tuple(rng.randint(0, n - a) for n, a in zip(shape, start, strict=True)))
    halo = rng.choice((0, 1, 2))
    low, high = max(shape[0] * rank // size - halo, 0), min(shape[0] * (rank + 1) // size + halo, shape[0])
    return replace(held, start=(low, *(0,) * (len(shape) - 1)), size=(high - low, *shape[1:]))


def tie(rng: random.Random, states: list[State]) -> None:
    """Some ranks give one of their tensors another name, which others may have for another tensor."""
    ranks = rng.sample(range(len(states)), rng.randint(1, len(states)))
    first, second = rng.sample(NAMES, 2)
    for rank in ranks:
        if first in states[rank]:
            states[rank][second] = states[rank][first]


def change(rng: random.Random, states: list[State]) -> list[State]:
    """Without a word between ranks: on some of them, names, ties, boxes and contents become others."""
    changed = [dict(state) for state in states]
    for _ in range(rng.randint(1, 2)):
        rank, how = rng.randrange(len(states)), rng.choice(("tie", "untie", "drop", "new", "move", "drift"))
        state = changed[rank]
        if not state:
            continue
        first, second = rng.choice([*state]), rng.choice(NAMES)
        held = state[first]
        if how == "tie" and second not in state:
            state[second] = held
        elif how == "untie":
            state[first] = replace(held, serial=10**7 + rng.randrange(10**6))
        elif how == "drop":
            del state[first]
        elif how == "new" and all(second not in s for s in changed):
            state[second] = replace(held, kind="plain", start=(), size=(), placements=(), mesh=0, seed=7, serial=10**8)
        elif how == "drift" and not any(h.serial == held.serial for n, h in state.items() if n != first):
            state[first] = replace(held, seed=held.seed + 1)
        elif how == "move" and held.kind == "hand":
            state[first] = draw_box(rng, replace(held, serial=10**9), len(states), rank, odd=True)
    return changed
