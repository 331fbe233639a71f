"""Threads that stand for ranks, for claims about what ranks conclude and not about how they talk."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar

import torch
from typing_extensions import override

from ckptlib.errors import AgreementFailed
from ckptlib.ranks.group import Group

Result = TypeVar("Result")

TIMEOUT_S = 150.0


class _Meeting:
    """One value per rank, handed to all of them."""

    def __init__(self, size: int) -> None:
        self.barrier = threading.Barrier(size, timeout=TIMEOUT_S)
        self.values: list[Any] = [None] * size
        self.collectives: list[list[str]] = [[] for _ in range(size)]


class ThreadGroup(Group):
    patience_s = TIMEOUT_S / 2

    def __init__(self, rank: int, meeting: _Meeting, first_global_rank: int) -> None:
        self.rank = rank
        self.size = len(meeting.values)
        self._meeting = meeting
        self._first = first_global_rank

    def _exchange(self, what: str, value: object) -> list[Any]:
        meeting = self._meeting
        meeting.collectives[self.rank].append(what)
        meeting.values[self.rank] = value
        try:
            meeting.barrier.wait()
            found = list(meeting.values)
            meeting.barrier.wait()
        except threading.BrokenBarrierError as error:
            raise AgreementFailed(f"{what}: a rank did not come") from error
        return found

    @override
    def gather(self, data: bytes) -> list[bytes]:
        return self._exchange("gather", data)

    @override
    def broadcast(self, data: bytes | None) -> bytes:
        found: bytes = self._exchange("broadcast", data)[0]
        return found

    @override
    def start_max(self, values: Sequence[int]) -> Callable[[], list[int]]:
        found = [max(column) for column in zip(*self._exchange("max", list(values)), strict=True)]
        return lambda: found

    @override
    def start_sum(self, values: Sequence[int]) -> Callable[[], list[int]]:
        found = [sum(column) for column in zip(*self._exchange("sum", list(values)), strict=True)]
        return lambda: found

    @override
    def global_rank(self, rank: int) -> int:
        return rank + self._first

    @override
    def broadcast_from(self, rank: int, buffer: torch.Tensor) -> None:
        buffer.copy_(self._exchange("broadcast", buffer)[rank])

    @override
    def close(self) -> None:
        self._meeting.barrier.abort()


def run_ranks(size: int, on_rank: Callable[[Group], Result], first_global_rank: int = 0) -> list[Result]:
    """What each rank returned. Raises what the first of them raised; ranks that entered different collectives fail."""
    meeting = _Meeting(size)

    def run(rank: int) -> Result:
        group = ThreadGroup(rank, meeting, first_global_rank)
        return on_rank(group)

    with ThreadPoolExecutor(size) as executor:
        futures = [executor.submit(run, rank) for rank in range(size)]
        errors = [future.exception() for future in futures]
    assert len({tuple(calls) for calls in meeting.collectives}) == 1, meeting.collectives
    for error in errors:
        if error is not None:
            raise error
    return [future.result() for future in futures]
