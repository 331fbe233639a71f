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
import os
import random
import shutil
import sys
import time
import traceback
from collections.abc import Iterator
from pathlib import Path

import pytest
import tied
import torch
import torch.distributed as dist
from anystate_draw import MESHES, NAMES, UNNAMED, WORLD, Held, State, change, draw_state
from anystate_oracle import Verdict, verdicts
from helpers.registry import close_sessions, session_for
from torch.distributed.tensor import Replicate, Shard, distribute_tensor

import ckptlib
from ckptlib.checkpoint import SaveOrder, save_step
from ckptlib.errors import CkptError, SaveFailed, UnsupportedState
from ckptlib.saving.standing import await_room

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
        await_room(session)
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
