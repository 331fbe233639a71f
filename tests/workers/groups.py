"""One rank of three that tries every collective of a group, and its failures. Says "rank <n> done" at its end."""

from __future__ import annotations

import os
import sys
import threading
import time
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist
from workers.no_threads import NO_STACK

from ckptlib.errors import AgreementFailed, StoreFull, UnsupportedState
from ckptlib.ranks.group import Group
from ckptlib.ranks.meeting import group_of, meet
from ckptlib.ranks.together import together, together_at_length, together_while_all_live


def collectives(group: Group) -> None:
    rank = group.rank
    mine = b"" if rank == 1 else bytes([rank]) * (rank * 1000 + 1)
    assert group.gather(mine) == [b"\0", b"", b"\2" * 2001]
    assert group.gather(b"") == [b""] * 3
    for data in (b"", b"\x00\xff", bytes(100_000)):
        assert group.broadcast(data if rank == 0 else None) == data
    for source in range(3):
        buffer = torch.full((5,), rank, dtype=torch.uint8)
        group.broadcast_from(source, buffer)
        assert (buffer == source).all()
    assert group.max([rank, -rank, 2**40 * rank]) == [2, 0, 2**41]
    first, second = group.start_max([rank]), group.start_max([10 + rank])
    assert (first(), second()) == ([2], [12])
    assert group.any(rank == 1)
    assert not group.any(False)
    assert group.same(b"x")
    assert not group.same(b"x" if rank else b"y")
    assert [group.global_rank(r) for r in range(3)] == [0, 1, 2]


def failures(group: Group) -> None:
    def fail(ranks: tuple[int, ...], error: Exception) -> int:
        if group.rank in ranks:
            raise error
        return group.rank

    assert together(group, "all is well", lambda: fail((), ValueError())) == group.rank
    for error, expected in [
        (StoreFull("no space on /scratch"), StoreFull),
        (UnsupportedState("x: cannot: be saved"), UnsupportedState),
        (ValueError("a user's own"), AgreementFailed),
    ]:
        for ranks in [(0,), (1, 2), (0, 1, 2)]:
            with pytest.raises((expected, type(error))) as caught:
                together(group, "the attempt", lambda error=error, ranks=ranks: fail(ranks, error))  # type: ignore[misc]
            if group.rank in ranks:
                assert caught.value is error
            else:
                assert type(caught.value) is expected
                assert str(caught.value) == (
                    f"the attempt failed on {len(ranks)} of 3 ranks; on rank {ranks[0]}: {error}"
                )
    collectives(group)


def links() -> None:
    """The trainers' group sends the memory of a device where a backend of its own serves that device."""
    devices = torch.device("cpu"), torch.device("cuda")
    plain = group_of(None, timedelta(seconds=30))
    assert not any(plain.broadcast_there(0, torch.zeros(3), device) for device in devices), "gloo has no such links"
    dist.Backend.register_backend(
        "links", lambda store, rank, size, timeout: dist.ProcessGroupGloo(store, rank, size, timeout), devices=["cpu"]
    )
    group = group_of(dist.new_group([2, 0, 1], backend="links"), timedelta(seconds=30))
    for source in range(3):
        buffer = torch.full((5,), group.rank, dtype=torch.uint8)
        assert group.broadcast_there(source, buffer, devices[0])
        assert (buffer == source).all()
        assert not group.broadcast_there(source, buffer, devices[1])
    group.close()
    plain.close()


def parts() -> None:
    """Groups over some ranks only, made while the others do something else."""
    pair, single = dist.new_group([0, 2]), dist.new_group([1])
    mine = single if dist.get_rank() == 1 else pair
    group = group_of(mine, timedelta(seconds=30))
    size = 1 if dist.get_rank() == 1 else 2
    assert (group.size, group.rank) == (size, dist.get_rank() // 2)
    assert [group.global_rank(r) for r in range(size)] == ([1] if size == 1 else [0, 2])
    assert group.gather(bytes([dist.get_rank()])) == [bytes([group.global_rank(r)]) for r in range(size)]
    again = group_of(mine, timedelta(seconds=30))
    assert again.max([group.rank]) == [size - 1]
    group.close()
    again.close()


def meetings() -> None:
    for _ in range(3):
        meet(None, "here", "save(step=1)", timedelta.max)
    with pytest.raises(AgreementFailed) as caught:
        meet(None, "here", f"save(step={min(dist.get_rank(), 1)})", timedelta(seconds=30))
    assert "rank 0 called save(step=0)" in str(caught.value)
    assert "rank 1 called save(step=1)" in str(caught.value)
    if dist.get_rank() == 2:
        with pytest.raises(AgreementFailed, match=r"rank\(s\) \[0, 1\] did not come"):
            meet(None, "elsewhere", "save(step=2)", timedelta(seconds=0.2))
    dist.barrier()
    meet(None, "elsewhere", "save(step=3)", timedelta(seconds=30))  # all find each other again


def absence() -> None:
    """A rank that does not come is an error for the others, in time."""
    dist.barrier()
    group = group_of(None, timedelta(seconds=2))
    if dist.get_rank() != 1:
        with pytest.raises(AgreementFailed, match="gather among 3 ranks failed"):
            group.gather(b"x")
    dist.barrier()


def apart() -> None:
    """A rank that tried more often than the others, alone, meets them in the next group that all make, and again."""
    for odd in (0, 1):
        dist.barrier()
        if dist.get_rank() == odd:
            with pytest.raises(AgreementFailed):
                group_of(None, timedelta(seconds=0.3))
        dist.barrier()
        for _ in range(2):
            group = group_of(None, timedelta(seconds=30))
            assert group.max([group.rank]) == [2]
            group.close()


def at_length() -> None:
    """A rank that takes much longer than the others wait in a collective; one that fails after that; one without a
    thread."""
    dist.barrier()
    group = group_of(None, timedelta(seconds=3))  # of each collective; a busy machine needs some of it

    def work() -> int:
        time.sleep(3.5 if group.rank == 1 else 0.0)
        return group.rank

    def fail() -> None:
        if work() == 1:
            raise StoreFull("no space on /scratch")

    assert together_at_length(group, "the work", work) == group.rank
    with pytest.raises(StoreFull, match="no space on /scratch"):
        together_at_length(group, "the work", fail)
    before = threading.stack_size(NO_STACK if group.rank == 1 else 0)
    for how in (together_at_length, together_while_all_live):
        with pytest.raises(AgreementFailed, match=r"thread.* See ulimit -u"):
            how(group, "the work", lambda: None)
    threading.stack_size(before)
    group.close()
    dist.barrier()


def main() -> None:
    dist.init_process_group("gloo", timeout=timedelta(seconds=60))
    group = group_of(None, timedelta(seconds=30))
    collectives(group)
    failures(group)
    links()
    parts()
    meetings()
    group.close()
    apart()
    at_length()
    absence()
    sys.stdout.write(f"rank {dist.get_rank()} done\n")
    sys.stdout.flush()
    dist.barrier()
    sys.stdout.flush()
    os._exit(0)  # gloo's threads may abort an interpreter that ends in the ordinary way (torch 2.13)


if __name__ == "__main__":
    main()
