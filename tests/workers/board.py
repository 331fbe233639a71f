"""One rank of four that share a board. Says "rank <n> done" at its end."""

from __future__ import annotations

import multiprocessing
import os
import random
import signal
import sys
import time
from datetime import timedelta
from multiprocessing.connection import Connection

import pytest
import torch.distributed as dist

from ckptlib.errors import AgreementFailed
from ckptlib.ranks.board import ROOM, Board
from ckptlib.ranks.group import TorchGroup
from ckptlib.ranks.meeting import group_of

NUMBERS = 2000


def value(number: int, rank: int, at: int) -> int:
    return (number * 7919 + rank * 104729 + at * 13) % 1_000_003 - 500_000


def counts(number: int) -> int:
    return (1, 5, 30, ROOM, ROOM + 1)[number % 5]  # the last of these by gloo


def many(group: TorchGroup) -> None:
    """Several at once, in another order than they were begun in; some are never asked for."""
    drawn, pending = random.Random(group.rank), []
    for number in range(NUMBERS):
        mine = [value(number, group.rank, at) for at in range(counts(number))]
        begin = group.start_sum if number % 3 == 0 else group.start_max
        pending.append((number, begin(mine)))
        if drawn.random() < 0.001:
            time.sleep(drawn.random() / 20)
        while pending and (len(pending) > 5 or drawn.random() < 0.4):
            which, wait = pending.pop(drawn.randrange(len(pending)))
            if which % 5 != 4 and drawn.random() < 0.05:
                continue
            rows = [[value(which, rank, at) for at in range(counts(which))] for rank in range(group.size)]
            merge = sum if which % 3 == 0 else max
            assert wait() == [merge(column) for column in zip(*rows, strict=True)], which
    for _, wait in pending:
        wait()


def stand(board: Connection, rank: int) -> None:
    """A process that comes to one collective of two, and stays."""
    found = Board.join(board.recv(), rank, (7, 9), 60.0)
    assert found is not None
    found.end(found.begin([rank]))
    board.send("there")
    time.sleep(600)


def partners() -> None:
    """One that is stopped is waited for until the time-out; one that is killed ends the wait soon."""
    for number, message in ((signal.SIGSTOP, "did not answer within 2 s"), (signal.SIGKILL, "is gone")):
        made = Board.make((7, 9), 2.0 if number == signal.SIGSTOP else 60.0)
        assert made is not None
        here, there = multiprocessing.Pipe()
        other = multiprocessing.get_context("fork").Process(target=stand, args=(there, 1), daemon=True)
        other.start()
        here.send(made[1])
        first = made[0].begin([5])
        assert here.recv() == "there"
        assert made[0].end(first) == [[5], [1]]
        os.kill(other.pid or 0, number)
        if number == signal.SIGKILL:
            other.join()
        began = time.monotonic()
        with pytest.raises(AgreementFailed, match=f"among 2 ranks failed on rank 7: rank 9 {message}"):
            made[0].end(made[0].begin([6]))
        assert time.monotonic() - began < 30
        other.kill()
        made[0].close()


def leaves() -> None:
    """What it gave before it left is read; what it did not give is an error on all others."""
    group = group_of(None, timedelta(seconds=60))
    assert isinstance(group, TorchGroup)
    assert group._board is not None
    wait = group.start_max([group.rank])
    if group.rank == 2:
        group._board.close()
    else:
        assert wait() == [3]
        with pytest.raises(AgreementFailed, match="rank 2 is gone: its process ended, or left the group"):
            group.start_max([group.rank])()
    dist.barrier()


def one_cannot_reach_it() -> None:
    """Then nobody goes by it."""
    join = Board.join
    if dist.get_rank() == 1:
        Board.join = classmethod(lambda cls, *given: None)  # type: ignore[method-assign, assignment]
    group = group_of(None, timedelta(seconds=60))
    assert isinstance(group, TorchGroup)
    assert group._board is None
    assert group.max([group.rank]) == [3]
    Board.join = join  # type: ignore[method-assign]
    group.close()


def main() -> None:
    dist.init_process_group("gloo", timeout=timedelta(seconds=60))
    group = group_of(None, timedelta(seconds=60))
    assert isinstance(group, TorchGroup)
    assert group._board is not None, "ranks of one host have one"
    many(group)
    dist.barrier()
    group.close()
    if dist.get_rank() == 0:
        partners()
    one_cannot_reach_it()
    leaves()
    sys.stdout.write(f"rank {dist.get_rank()} done\n")
    sys.stdout.flush()
    dist.barrier()
    sys.stdout.flush()
    os._exit(0)  # gloo's threads may abort an interpreter that ends in the ordinary way (torch 2.13)


if __name__ == "__main__":
    main()
