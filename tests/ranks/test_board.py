"""The board of the ranks of one host: drawn interleavings against a list, what may overtake what, real processes."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from launch import fork_ranks

from ckptlib.errors import AgreementFailed
from ckptlib.ranks import board as board_module
from ckptlib.ranks.board import AHEAD, PLACES, ROOM, Board, Collective

INT64 = st.integers(-(2**63), 2**63 - 1)


@contextmanager
def boards(size: int) -> Iterator[list[Board]]:
    """Those of all ranks, in one process."""
    made = Board.make(range(size), 0.2)
    assert made is not None
    joined = [Board.join(made[1], rank, range(size), 0.2) for rank in range(1, size)]
    found = [made[0], *(board for board in joined if board is not None)]
    assert len(found) == size
    try:
        yield found
    finally:
        for board in found:
            board.close()


@settings(deadline=None)
@given(st.data())
def test_whoever_comes_in_whatever_order_reads_what_was_given(data: st.DataObject) -> None:
    """Ranks begin as far ahead of the others as they may, and read as late as they like, or never."""
    size = data.draw(st.integers(2, 4))
    given_: list[list[list[int]]] = []
    begun: list[list[Collective]] = [[] for _ in range(size)]
    unread: list[list[int]] = [[] for _ in range(size)]
    with boards(size) as ranks:
        for _ in range(data.draw(st.integers(1, 150))):
            rank = data.draw(st.integers(0, size - 1))
            number = len(begun[rank])
            may_begin = number - AHEAD < min(len(other) for other in begun)
            ready = [n for n in unread[rank] if n < min(len(other) for other in begun)]
            if may_begin and (not ready or data.draw(st.integers(0, 3))):
                if number == len(given_):
                    count = data.draw(st.sampled_from([1, 2, ROOM]))
                    values = st.lists(INT64, min_size=count, max_size=count)
                    given_.append([data.draw(values) if count < 3 else [number + r] * count for r in range(size)])
                begun[rank].append(ranks[rank].begin(given_[number][rank]))
                unread[rank].append(number)
            elif ready:
                number = data.draw(st.sampled_from(ready))
                unread[rank].remove(number)
                if data.draw(st.integers(0, 9)):  # else it is forgotten
                    assert ranks[rank].end(begun[rank][number]) == given_[number]
        for rank, board in enumerate(ranks):
            for number in unread[rank]:
                if number < min(len(other) for other in begun):
                    assert board.end(begun[rank][number]) == given_[number]


def test_a_row_that_is_half_seen_is_not_read() -> None:
    """Another processor may show the digest before the values."""
    with boards(2) as (first, second):
        mine = first.begin([1, 2, 3])
        second.begin([4, 5, 6])
        numbers, row = second._numbers, second._row(0, 1)
        for at in range(row, row + 4):
            whole = numbers[at]
            numbers[at] = 0
            assert [*first._read(mine)] == [0], at
            numbers[at] = whole
        assert first.end(mine) == [[1, 2, 3], [4, 5, 6]]


def test_what_an_earlier_collective_left_is_never_taken_for_a_later_one() -> None:
    """Equal values, in the same place."""
    with boards(2) as (first, second):
        for _ in range(PLACES):
            pair = first.begin([7]), second.begin([7])
            assert first.end(pair[0]) == second.end(pair[1]) == [[7], [7]]
        again = first.begin([7])
        assert [*first._read(again)] == [0]


def test_an_invitation_to_elsewhere_is_not_followed(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    made = Board.make(range(2), 1.0)
    assert made is not None
    board, invitation = made
    pid, fd, token, boot = board_module._INVITATION.unpack(invitation)
    pack = board_module._INVITATION.pack
    other = os.open(tmp_path / "memfd:ckptlib-board", os.O_RDWR | os.O_CREAT)
    for wrong in (
        b"",
        pack(pid, fd, token, b"f" * len(boot)),  # another host
        pack(pid, fd, bytes(len(token)), boot),
        pack(pid, other, token, boot),
        pack(2**22 + 1, fd, token, boot),
        pack(pid, 10**6, token, boot),
    ):
        assert Board.join(wrong, 1, range(2), 1.0) is None, wrong
    assert Board.join(invitation, 1, range(3), 1.0) is None, "of another size"
    monkeypatch.setattr(board_module, "_boot_id", lambda: None)
    assert Board.make(range(2), 1.0) is None
    assert Board.join(invitation, 1, range(2), 1.0) is None
    os.close(other)
    board.close()


def test_real_ranks() -> None:
    """Thousands of collectives at every pace; a rank that is stopped, one that leaves, one that is killed; and ranks of
    which one cannot reach the board."""
    output = fork_ranks("board.py", 4, timeout_s=240)
    assert sorted(line for line in output.splitlines() if line.endswith("done")) == [
        f"rank {rank} done" for rank in range(4)
    ], output


def test_time_in_which_the_whole_job_was_stopped_is_not_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """Suspended for an hour, as this rank waits; then for a while nobody comes."""
    now, sleeps = 0.0, list[float]()

    def sleep(seconds: float) -> None:
        nonlocal now
        now += 3600.0 if len(sleeps) == 3 else seconds
        sleeps.append(seconds)
        if now > 3600 + comes_at:
            ranks[1].begin([7])

    with boards(2) as ranks:
        monkeypatch.setattr(ranks[0], "_timeout_s", 30.0)
        monkeypatch.setattr(ranks[0], "_lives", lambda rank: True)  # by a lock, which is no other process's here
        monkeypatch.setattr(board_module, "time", SimpleNamespace(monotonic=lambda: now, sleep=sleep))
        comes_at = 25.0
        assert ranks[0].end(ranks[0].begin([5])) == [[5], [7]]
        now, comes_at = 0.0, 1e9
        sleeps.clear()
        with pytest.raises(AgreementFailed, match="rank 1 did not answer within 30 s"):
            ranks[0].end(ranks[0].begin([5]))
        assert 3628 < now < 3632
