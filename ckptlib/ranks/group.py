"""The ranks of a job, and the few collectives that ckptlib needs of them.

All ranks call every collective here, in the same order, on the main thread. Collectives take bytes and integers only:
nothing is pickled. A group of their own (gloo, CPU) keeps them apart from the trainer's.
"""

from __future__ import annotations

import operator
import time
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import NamedTuple, TypeVar

import torch
import torch.distributed as dist
import xxhash
from typing_extensions import override

from ckptlib.ranks.board import ROOM, Board
from ckptlib.ranks.connections import connect, disconnect, failure, links_of

Result = TypeVar("Result")

MEET_S = 5.0
"""How often ranks meet while they wait for something long: the death of one ends what the others wait for."""


class Extremes(NamedTuple):
    """Element by element, the largest or the smallest value of all ranks."""

    highs: list[int]
    lows: list[int]


class Group(ABC):
    """Ranks 0..size-1 of the job, as seen by one of them.

    Raises AgreementFailed, from every collective, when the others do not come in time or one of them is gone.
    """

    rank: int
    size: int
    patience_s: float
    """How long a rank may do something by itself before it meets the others: then none of them times out in a
    collective, and one that is gone is noticed."""

    @abstractmethod
    def gather(self, data: bytes) -> list[bytes]:
        """Returns each rank's bytes, by rank."""

    @abstractmethod
    def broadcast(self, data: bytes | None) -> bytes:
        """Returns rank 0's bytes; the others pass None."""

    @abstractmethod
    def broadcast_from(self, rank: int, buffer: torch.Tensor) -> None:
        """Fills `buffer`, bytes in host memory and of the same size everywhere, with that of `rank`."""

    def broadcast_there(self, rank: int, buffer: torch.Tensor, device: torch.device) -> bool:
        """Does what `broadcast_from` does with a device's bytes, over the trainers' own group, such as NCCL's.

        Returns False, on all ranks, if that group has no links between devices of this type.
        """
        return False

    def same(self, data: bytes) -> bool:
        """Returns whether every rank gave the same bytes; they are compared by digest."""
        high, low = divmod(xxhash.xxh3_128_intdigest(data), 2**64)
        words = [high >> 32, high & 0xFFFFFFFF, low >> 32, low & 0xFFFFFFFF]
        largest, smallest = self.extremes(words, words)
        return largest == smallest

    @abstractmethod
    def start_max(self, values: Sequence[int]) -> Callable[[], list[int]]:
        """Begins an element-wise maximum over all ranks; call the result once, on the main thread, to wait for it."""

    @abstractmethod
    def start_sum(self, values: Sequence[int]) -> Callable[[], list[int]]:
        """Begins an element-wise sum over all ranks, as `start_max` begins a maximum. Sums have at most 64 bits."""

    def max(self, values: Sequence[int]) -> list[int]:
        """Returns the element-wise maximum over all ranks."""
        return self.start_max(values)()

    def start_extremes(self, highs: Sequence[int], lows: Sequence[int]) -> Callable[[], Extremes]:
        """Begins one collective for the maximum of `highs` and the minimum of `lows`; call the result as `start_max`'s.

        Both element-wise, over all ranks.
        """
        wait = self.start_max([*highs, *map(operator.neg, lows)])

        def extremes() -> Extremes:
            found = wait()
            return Extremes(found[: len(highs)], [*map(operator.neg, found[len(highs) :])])

        return extremes

    def extremes(self, highs: Sequence[int], lows: Sequence[int]) -> Extremes:
        """Returns the element-wise maximum of `highs` and minimum of `lows` over all ranks, by one collective."""
        return self.start_extremes(highs, lows)()

    def any(self, flag: bool) -> bool:
        """Returns whether any rank says so."""
        return bool(self.max([int(flag)])[0])

    @abstractmethod
    def global_rank(self, rank: int) -> int:
        """Returns the rank in the job's world, by which meshes count."""

    @abstractmethod
    def close(self) -> None:
        """Closes the group's connections."""


class SoloGroup(Group):
    """A job of one process."""

    rank = 0
    size = 1
    patience_s = 60.0

    @override
    def gather(self, data: bytes) -> list[bytes]:
        return [data]

    @override
    def broadcast(self, data: bytes | None) -> bytes:
        assert data is not None
        return data

    @override
    def broadcast_from(self, rank: int, buffer: torch.Tensor) -> None:
        pass

    @override
    def start_max(self, values: Sequence[int]) -> Callable[[], list[int]]:
        return lambda: list(values)

    start_sum = start_max

    @override
    def global_rank(self, rank: int) -> int:
        return 0

    @override
    def close(self) -> None:
        pass


class TorchGroup(Group):
    """The ranks of a torch.distributed process group, over gloo connections of our own."""

    def __init__(self, over: dist.ProcessGroup, timeout: timedelta) -> None:
        """Connects the ranks. Collective over `over`."""
        self._over = over
        self._links = links_of(over)
        self._ranks = dist.get_process_group_ranks(over)
        self._timeout = timeout
        self.patience_s = min(timeout.total_seconds() / 2, MEET_S)
        self.size = len(self._ranks)
        self.rank = self._ranks.index(dist.get_rank())
        self._held: deque[tuple[torch.Tensor, ...]] = deque(maxlen=8)
        self._max, self._sum = _options(dist.ReduceOp.MAX), _options(dist.ReduceOp.SUM)
        self._numbers: dict[int, list[_Numbers]] = {}
        """Buffers that no collective is at work on, by how many integers they hold."""
        self._gloo = connect(over, timeout)
        self._board: Board | None = None
        self._board = self._share_board()

    def _share_board(self) -> Board | None:
        """Returns a board for the small collectives, if all ranks are on one host. Collective."""
        if self.size == 1:
            return None
        given = self._ranks, self._timeout.total_seconds()
        made = Board.make(*given) if self.rank == 0 else None
        invitation = self.broadcast(None if self.rank else b"" if made is None else made[1])
        board = Board.join(invitation, self.rank, *given) if made is None else made[0]
        if not self.any(board is None):
            return board
        if board is not None:
            board.close()
        return None

    @override
    def gather(self, data: bytes) -> list[bytes]:
        sizes = [torch.zeros(1, dtype=torch.int64, device="cpu") for _ in range(self.size)]
        length = torch.tensor([len(data)], device="cpu")
        self._hold(length, *sizes)
        self._wait("gather", lambda: self._gloo.allgather([sizes], [length]))
        longest = max(int(size) for size in sizes)
        mine = torch.zeros(longest, dtype=torch.uint8, device="cpu")
        mine[: len(data)] = torch.frombuffer(bytearray(data), dtype=torch.uint8) if data else 0
        found = [torch.zeros(longest, dtype=torch.uint8, device="cpu") for _ in range(self.size)]
        self._hold(mine, *found)
        if longest:
            self._wait("gather", lambda: self._gloo.allgather([found], [mine]))
        return [t[: int(n)].numpy().tobytes() for t, n in zip(found, sizes, strict=True)]

    @override
    def broadcast(self, data: bytes | None) -> bytes:
        size = torch.tensor([len(data) if data is not None else 0], device="cpu")
        self.broadcast_from(0, size)
        if not int(size):
            return b""
        if self.rank == 0:
            assert data is not None
            buffer = torch.frombuffer(bytearray(data), dtype=torch.uint8)
        else:
            buffer = torch.empty(int(size), dtype=torch.uint8, device="cpu")
        self.broadcast_from(0, buffer)
        return buffer.numpy().tobytes()

    @override
    def broadcast_from(self, rank: int, buffer: torch.Tensor) -> None:
        options = dist.BroadcastOptions()
        options.rootRank = rank
        self._hold(buffer)
        self._wait("broadcast", lambda: self._gloo.broadcast([buffer], options))

    @override
    def broadcast_there(self, rank: int, buffer: torch.Tensor, device: torch.device) -> bool:
        if device.type not in self._links:
            return False
        source = self._ranks[rank]
        self._wait("broadcast", lambda: dist.broadcast(buffer, source, group=self._over, async_op=True))
        return True

    @override
    def start_max(self, values: Sequence[int]) -> Callable[[], list[int]]:
        if self._board is None or len(values) > ROOM:
            return self._start(self._max, values)
        board, begun = self._board, self._board.begin(values)
        return lambda: [*map(max, *board.end(begun))]

    @override
    def start_sum(self, values: Sequence[int]) -> Callable[[], list[int]]:
        if self._board is None or len(values) > ROOM:
            return self._start(self._sum, values)
        board, begun = self._board, self._board.begin(values)
        return lambda: [*map(sum, zip(*board.end(begun), strict=True))]

    def _start(self, options: dist.AllreduceOptions, values: Sequence[int]) -> Callable[[], list[int]]:
        free = self._numbers.setdefault(len(values), [])
        numbers = free.pop() if free else _Numbers(len(values))
        numbers.array[:] = values
        self._hold(numbers.tensor)
        work = self._run("agreement", lambda: self._gloo.allreduce([numbers.tensor], options))

        def wait() -> list[int]:
            self._run("agreement", work.wait)
            found: list[int] = numbers.array.tolist()
            free.append(numbers)
            return found

        return wait

    @override
    def global_rank(self, rank: int) -> int:
        return self._ranks[rank]

    @override
    def close(self) -> None:
        if self._board is not None:
            self._board.close()
        self._let_threads_go()
        disconnect(self._gloo)

    def _let_threads_go(self) -> None:
        """Waits until gloo's threads have let go of every tensor, a little later than their collective ended.

        Letting go takes the GIL. In an interpreter that has begun to end by then, the thread is cancelled and takes the
        process with it ("terminate called without an active exception", seen in one of ten exits with torch 2.13).
        """
        deadline = time.monotonic() + LET_GO_S
        for tensor in (tensor for tensors in self._held for tensor in tensors):
            while tensor._use_count() > 1 and time.monotonic() < deadline:  # type: ignore[attr-defined]
                time.sleep(0.001)
        self._held.clear()

    def _hold(self, *tensors: torch.Tensor) -> None:
        """Keeps tensors until long after their collective.

        A gloo thread lets go of them a little later than the caller; were it the last to do so, it would need the GIL,
        which whoever destroys a process group holds while it waits for that thread: both would hang.
        """
        self._held.append(tensors)

    def _wait(self, what: str, start: Callable[[], dist.Work]) -> None:
        self._run(what, lambda: start().wait())

    def _run(self, what: str, call: Callable[[], Result]) -> Result:
        try:
            return call()
        except RuntimeError as error:  # what gloo raises for a time-out and for a lost peer alike
            raise failure(what, self.size, self._timeout, error) from error


class _Numbers:
    """Integers for a collective. They are reused: after a step of training it takes 0.1 ms to make a tensor."""

    __slots__ = ("array", "tensor")

    def __init__(self, count: int) -> None:
        self.tensor = torch.zeros(count, dtype=torch.int64, device="cpu")
        self.array = self.tensor.numpy()


def _options(op: dist.ReduceOp.RedOpType) -> dist.AllreduceOptions:
    options = dist.AllreduceOptions()
    options.reduceOp = dist.ReduceOp(op)
    return options


LET_GO_S = 1.0
"""More than a thread takes to get the GIL; a collective that never ends would keep its tensors for ever."""
