"""The ranks of a job, and the few collectives that ckptlib needs of them.

Every collective here is called by all ranks, in the same order, on the main thread. Bytes and integers only: nothing is
pickled. A group of its own (gloo, CPU) keeps them apart from the trainer's.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import TypeVar

import torch
import torch.distributed as dist
import xxhash
from typing_extensions import override

from ckptlib import errors
from ckptlib.errors import AgreementFailed


class Group(ABC):
    """Ranks 0..size-1 of the job, as seen by one of them.

    Raises AgreementFailed, from every collective, when the others do not come in time or one of them is gone.
    """

    rank: int
    size: int

    @abstractmethod
    def gather(self, data: bytes) -> list[bytes]:
        """What every rank gave, by rank."""

    @abstractmethod
    def broadcast(self, data: bytes | None) -> bytes:
        """What rank 0 gave; the others give None."""

    @abstractmethod
    def broadcast_from(self, rank: int, buffer: torch.Tensor) -> None:
        """Fills `buffer`, bytes in host memory and of the same size everywhere, with that of `rank`."""

    def same(self, data: bytes) -> bool:
        """Whether every rank gave the same bytes; they are compared by digest."""
        high, low = divmod(xxhash.xxh3_128_intdigest(data), 2**64)
        words = [high >> 32, high & 0xFFFFFFFF, low >> 32, low & 0xFFFFFFFF]
        found = self.max([*words, *(-word for word in words)])
        return found[:4] == [-word for word in found[4:]]

    @abstractmethod
    def start_max(self, values: Sequence[int]) -> Callable[[], list[int]]:
        """Begins an element-wise maximum over all ranks; call the result, on the main thread, to wait for it."""

    def max(self, values: Sequence[int]) -> list[int]:
        """The element-wise maximum over all ranks."""
        return self.start_max(values)()

    def any(self, flag: bool) -> bool:
        """Whether any rank says so."""
        return bool(self.max([int(flag)])[0])

    @abstractmethod
    def global_rank(self, rank: int) -> int:
        """The rank in the job's world, which is what meshes are made of."""

    @abstractmethod
    def meet(self, name: str, timeout: timedelta) -> None:
        """Waits until every rank has called this with the same `name`, without a collective that could be left broken.

        Raises AgreementFailed that names the ranks that did not come.
        """

    @abstractmethod
    def close(self) -> None:
        """Gives back what the group holds."""


class SoloGroup(Group):
    """A job of one process."""

    rank = 0
    size = 1

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

    @override
    def global_rank(self, rank: int) -> int:
        return 0

    @override
    def meet(self, name: str, timeout: timedelta) -> None:
        pass

    @override
    def close(self) -> None:
        pass


class TorchGroup(Group):
    """The ranks of a torch.distributed process group, over a gloo group of our own."""

    def __init__(self, over: dist.ProcessGroup | None, timeout: timedelta) -> None:
        """Collective over `over` (None: the world); every rank of the world must call it, as `new_group` demands."""
        self._ranks = dist.get_process_group_ranks(over if over is not None else dist.group.WORLD)
        self._group = dist.new_group(
            self._ranks,
            timeout=timeout,
            backend="gloo",
            use_local_synchronization=over is not None,
            group_desc="ckptlib",
        )
        self._timeout = timeout
        self.size = len(self._ranks)
        self.rank = self._ranks.index(dist.get_rank())

    @override
    def gather(self, data: bytes) -> list[bytes]:
        sizes = [torch.zeros(1, dtype=torch.int64) for _ in range(self.size)]
        self._run("gather", lambda: dist.all_gather(sizes, torch.tensor([len(data)]), group=self._group))
        longest = max(int(size) for size in sizes)
        mine = torch.zeros(longest, dtype=torch.uint8)
        mine[: len(data)] = torch.frombuffer(bytearray(data), dtype=torch.uint8) if data else 0
        found = [torch.zeros(longest, dtype=torch.uint8) for _ in range(self.size)]
        if longest:
            self._run("gather", lambda: dist.all_gather(found, mine, group=self._group))
        return [t[: int(n)].numpy().tobytes() for t, n in zip(found, sizes, strict=True)]

    @override
    def broadcast(self, data: bytes | None) -> bytes:
        source = self._ranks[0]
        size = torch.tensor([len(data) if data is not None else 0])
        self._run("broadcast", lambda: dist.broadcast(size, source, group=self._group))
        if not int(size):
            return b""
        if self.rank == 0:
            assert data is not None
            buffer = torch.frombuffer(bytearray(data), dtype=torch.uint8)
        else:
            buffer = torch.empty(int(size), dtype=torch.uint8)
        self._run("broadcast", lambda: dist.broadcast(buffer, source, group=self._group))
        return buffer.numpy().tobytes()

    @override
    def broadcast_from(self, rank: int, buffer: torch.Tensor) -> None:
        self._run("broadcast", lambda: dist.broadcast(buffer, self._ranks[rank], group=self._group))

    @override
    def start_max(self, values: Sequence[int]) -> Callable[[], list[int]]:
        tensor = torch.tensor(values, dtype=torch.int64)
        work = self._run(
            "agreement", lambda: dist.all_reduce(tensor, dist.ReduceOp.MAX, group=self._group, async_op=True)
        )

        def wait() -> list[int]:
            self._run("agreement", lambda: work.wait())
            found: list[int] = tensor.tolist()
            return found

        return wait

    @override
    def global_rank(self, rank: int) -> int:
        return self._ranks[rank]

    @override
    def meet(self, name: str, timeout: timedelta) -> None:
        store = torch._C._distributed_c10d.PrefixStore(f"ckptlib/{name}", dist.distributed_c10d._get_default_store())
        store.set(str(self.rank), "here")
        try:
            store.wait([str(rank) for rank in range(self.size)], timeout)
        except RuntimeError as error:
            missing = [self._ranks[rank] for rank in range(self.size) if not store.check([str(rank)])]
            raise AgreementFailed(
                f"{name}: rank(s) {missing} did not call it within {timeout.total_seconds():.0f} s, rank "
                f"{self._ranks[self.rank]} did. Call it on every rank of the process group, with the same arguments"
            ) from error

    @override
    def close(self) -> None:
        if dist.is_initialized():
            dist.destroy_process_group(self._group)

    def _run(self, what: str, call: Callable[[], object]) -> dist.Work:
        try:
            return call()  # type: ignore[return-value]
        except RuntimeError as error:  # what gloo raises for a time-out and for a lost peer alike
            raise AgreementFailed(
                f"{what} among {self.size} ranks failed on rank {self._ranks[self.rank]}: a rank is gone, or did not "
                f"come within {self._timeout.total_seconds():.0f} s: {error}"
            ) from error


Result = TypeVar("Result")


def together(group: Group, what: str, call: Callable[[], Result]) -> Result:
    """What `call` returns, if it succeeds on every rank; collective.

    Where it fails on this rank its own error is raised; on the others one of the same class, when it is ckptlib's, that
    names the failing rank. No rank goes on alone, and none waits for one that gave up.
    """
    try:
        result = call()
    except Exception as error:
        group.gather(f"{type(error).__name__}: {error}".encode())
        raise
    failures = {rank: text.decode() for rank, text in enumerate(group.gather(b"")) if text}
    if failures:
        rank, text = min(failures.items())
        name, _, message = text.partition(": ")
        cls = getattr(errors, name, AgreementFailed)
        raise cls(f"{what} failed on {len(failures)} of {group.size} ranks; on rank {rank}: {message}")
    return result


def group_of(over: dist.ProcessGroup | None, timeout: timedelta) -> Group:
    """The group over a process group; a job of one where torch.distributed is not initialised."""
    if not (dist.is_available() and dist.is_initialized()):
        return SoloGroup()
    return TorchGroup(over, timeout)
