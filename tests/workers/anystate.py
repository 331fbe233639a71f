"""Saves states drawn at random, whose ranks tie, cut and hold tensors each in its own way:

    torchrun anystate.py <directory> <seconds> <most cases> <seed>

Of each case all ranks draw all that any of them holds, and make their own of it; so each knows what every rank had. A
save is either refused on all ranks, by name, where the oracle knows why; or it loads bit for bit: into the state that
was saved, and into whole tensors in one process and in others. Then the state changes while ranks do not compare.

The oracle knows tensors as (seed, box) and shares no code with ckptlib. Writes what was wrong, and how many cases there
were, to <directory>/rank<n>.json; before them, the cases of `tied.py` write theirs to <directory>/<case>.rank<n>.
"""

from __future__ import annotations

import faulthandler
import json
import math
import os
import random
import shutil
import sys
import time
import traceback
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path

import pytest
import tied
import torch
import torch.distributed as dist
from helpers.registry import close_sessions, session_for
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Replicate, Shard, distribute_tensor

import ckptlib
from ckptlib.errors import CkptError, SaveFailed, UnsupportedState
from ckptlib.saving.registry import registry

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


# Saving and loading


def build(state: State, size: int, rank: int, blank: bool) -> dict[str, object]:
    """What is given to ckptlib; `blank`: to be filled."""
    made: dict[object, object] = {}
    built: dict[str, object] = {}
    for name, held in state.items():
        key = (held.serial, held)
        if key not in made:
            whole = torch.zeros_like(held.whole) if blank else held.whole
            made[key] = _wrap(held, whole, size)
        built[name] = made[key]
    return built


def _wrap(held: Held, whole: torch.Tensor, size: int) -> object:
    if held.kind == "plain":
        return whole
    if held.kind == "own":
        return ckptlib.PerRank(whole)
    if held.kind == "hand":
        box = tuple(slice(a, a + n) for a, n in zip(held.start, held.size, strict=True))
        return ckptlib.Sharded(whole[box].clone(), held.start, held.shape)
    mesh = MESHES.found[size][held.mesh][0]
    placements = [Replicate() if dim is None else Shard(dim) for dim in held.placements]
    return distribute_tensor(whole, mesh, placements, src_data_rank=None)


def local(value: object) -> torch.Tensor:
    if isinstance(value, ckptlib.PerRank):
        value = value.value
    if isinstance(value, ckptlib.Sharded):
        value = value.tensor
    found = value.to_local() if hasattr(value, "to_local") else value
    assert isinstance(found, torch.Tensor)
    return found


def equal(left: torch.Tensor, right: torch.Tensor) -> bool:
    return (left.dtype, left.shape) == (right.dtype, right.shape) and torch.equal(left, right)


class Job:
    """One group of ranks and its root."""

    def __init__(self, directory: Path, size: int, group: dist.ProcessGroup) -> None:
        self.root = directory / f"of{size}"
        self.size = size
        self.group = group
        self.rank = dist.get_rank()
        self.step = 0

    def save(self, states: list[State]) -> str | None:
        """Why it was refused; None: it was saved."""
        self.step += 1
        state = build(states[self.rank], self.size, self.rank, blank=False)
        try:
            ckptlib.save(self.root, state, self.step, process_group=self.group)
        except (SaveFailed, UnsupportedState) as error:
            return str(error)
        return None

    def save_alone(self, states: list[State]) -> str | None:
        """As a Checkpointer saves between comparisons, which the ranks do when one of them said that it changed."""
        self.step += 1
        state = build(states[self.rank], self.size, self.rank, blank=False)
        session = session_for(f"file://{self.root}", self.group, state, self.step)
        session.await_room()
        compare = session.group.any(session.planner.must_compare)
        try:
            pending = save_step(session, SaveOrder(state, self.step, compare=compare))
            pending.staging.go()
            pending.wait_committed(60)
        except (SaveFailed, UnsupportedState) as error:
            return str(error)
        return None

    def told(self, reason: str | None) -> list[str | None]:
        """What each rank was told."""
        found: list[str | None] = [None] * self.size
        dist.all_gather_object(found, reason, group=self.group)
        return found

    def wrong_after_load(self, states: list[State], verdict: dict[str, Verdict], rng: random.Random) -> Iterator[str]:
        state = {name: held for name, held in states[self.rank].items() if name in verdict}  # else no rank holds it
        target = build(state, self.size, self.rank, blank=True)
        expected = build(state, self.size, self.rank, blank=False)
        ckptlib.load(self.root, target, self.step, process_group=self.group)
        for name, tensor in target.items():
            if not equal(local(tensor), local(expected[name])):
                yield f"{name}: {local(tensor)} instead of {local(expected[name])}"
        num = rng.randint(1, WORLD)
        yield from self._wrong_in_whole(states, verdict, num)

    def _wrong_in_whole(self, states: list[State], verdict: dict[str, Verdict], num: int) -> Iterator[str]:
        """Into whole tensors of another number of ranks; those of this job that are among them."""
        shared = {name: v.value for name, v in verdict.items() if v.value is not None}
        new = GROUPS[min(num, self.size)]
        if self.rank >= min(num, self.size):
            return
        whole = {name: torch.zeros_like(value) for name, value in shared.items()}
        certain = {name for name, v in verdict.items() if not v.may_fail}
        mine = {n: held for n, held in states[self.rank].items() if n in certain and n not in shared}
        own = {n: held.whole for n, held in mine.items() if held.kind in ("plain", "own")}  # else of a mesh elsewhere
        target = {**whole, **{name: torch.zeros_like(value) for name, value in own.items()}}
        ckptlib.load(self.root, target, self.step, strict=False, process_group=new)
        for name, tensor in target.items():
            if not equal(tensor, shared[name] if name in shared else own[name]):
                yield f"{name} as a whole: {tensor} instead of {shared[name] if name in shared else own[name]}"

    def clear(self) -> None:
        """So that a long run does not fill the disk."""
        dist.barrier(self.group)
        if self.rank == 0:
            for name in ("steps", "packs", "parts"):
                shutil.rmtree(self.root / name, ignore_errors=True)
        dist.barrier(self.group)


GROUPS: dict[int, dist.ProcessGroup] = {}
LAST: list[str] = []
"""The states of the case under way, for messages."""


def run_case(job: Job, seed: int, counts: dict[str, int]) -> Iterator[str]:
    """What was wrong."""
    rng = random.Random(seed)
    NAMES[:] = [f"{letter}.{seed}" for letter in "abcdefgh"]
    states = draw_state(rng, job.size)
    for turn in range(rng.choice((1, 1, 3))):
        if turn:
            states = change(rng, states)
        expected = verdicts(states, compared=turn == 0)
        LAST[:] = [f"turn {turn}, rank {r}: {s}" for r, s in enumerate(states)]
        reason = job.save(states) if turn == 0 else job.save_alone(states)
        told = job.told(reason)
        if (None in told) and any(told):
            yield f"some ranks were told otherwise: {told}"
            return
        guilty = [name for name, v in expected.items() if v.may_fail]
        if reason is None:
            counts["saved alone" if turn else "saved"] += 1
            if any(v.must_fail for v in expected.values()):
                yield f"saved, though no load could tell what {guilty} are"
            else:
                yield from job.wrong_after_load(states, expected, rng)
        else:
            counts["refused alone" if turn else "refused"] += 1
            if turn == 0 and not guilty:
                yield f"refused without a reason: {reason}"
            if turn == 0 and not any(f"{name} " in reason or f"{name}[" in reason for name in guilty):
                yield f"the message names none of {guilty}: {reason}"
            if turn and not any(text in reason for name in NAMES for text in (f"{name} ", f"{name}[", *UNNAMED)):
                yield f"the message names nothing: {reason}"
            if turn == 0:
                return


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


def main() -> None:
    directory, seconds, most, seed = Path(sys.argv[1]), float(sys.argv[2]), int(sys.argv[3]), int(sys.argv[4])
    faulthandler.dump_traceback_later(seconds + 120, exit=True)
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    for size in range(1, WORLD + 1):
        group = dist.new_group([*range(size)])
        assert group is not None
        GROUPS[size] = group
    MESHES.make()
    for directed in tied.CASES:
        try:
            name = directed.__name__
            directed(directory / (name if name in tied.ALONE else "cases"))
            (directory / f"{directed.__name__}.rank{rank}").write_text("ok")
        except (Exception, pytest.fail.Exception) as error:
            (directory / f"{directed.__name__}.rank{rank}").write_text("".join(traceback.format_exception(error)))
        dist.barrier()
    jobs = {size: Job(directory, size, GROUPS[size]) for size in GROUPS}
    wrong: list[str] = []
    counts = dict.fromkeys(("saved", "refused", "saved alone", "refused alone"), 0)
    deadline = time.monotonic() + seconds
    case = 0
    while case < most:
        go_on = torch.tensor([int(time.monotonic() < deadline and not wrong)])
        dist.all_reduce(go_on, dist.ReduceOp.MIN)
        if not go_on.item():
            break
        size = 1 + (seed + case) % WORLD
        if rank < size:
            try:
                wrong += [f"seed {seed + case}: {text}" for text in run_case(jobs[size], seed + case, counts)]
                jobs[size].clear()
            except (CkptError, AssertionError, RuntimeError, ValueError, KeyError) as error:
                wrong.append(f"seed {seed + case}: {''.join(traceback.format_exception(error))}")
            if wrong:
                wrong += LAST
        case += 1
    (directory / f"rank{rank}.json").write_text(json.dumps({"wrong": wrong, "cases": case, **counts}))
    dist.barrier()
    close_sessions()
    sys.stdout.flush()
    os._exit(0)  # gloo's threads may abort an interpreter that ends in the ordinary way (torch 2.13)


if __name__ == "__main__":
    import logging

    logging.disable(logging.ERROR)
    torch.set_num_threads(1)
    main()
