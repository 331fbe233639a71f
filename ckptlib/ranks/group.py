"""The ranks of a job, and the few collectives that ckptlib needs of them.

Every collective here is called by all ranks, in the same order, on the main thread. Bytes and integers only: nothing is
pickled. A group of its own (gloo, CPU) keeps them apart from the trainer's.
"""

from __future__ import annotations

import os
import time
from abc import ABC, abstractmethod
from collections import Counter, deque
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from datetime import timedelta
from typing import TypeVar, cast

import torch
import torch.distributed as dist
import xxhash
from torch._C._distributed_c10d import PrefixStore, Store
from typing_extensions import override

from ckptlib import errors
from ckptlib.errors import AgreementFailed
from ckptlib.ranks import incarnation

Result = TypeVar("Result")


class Group(ABC):
    """Ranks 0..size-1 of the job, as seen by one of them.

    Raises AgreementFailed, from every collective, when the others do not come in time or one of them is gone.
    """

    rank: int
    size: int
    patience_s: float
    """How long a rank may be at something by itself without making the others time out in a collective."""

    @abstractmethod
    def gather(self, data: bytes) -> list[bytes]:
        """What every rank gave, by rank."""

    @abstractmethod
    def broadcast(self, data: bytes | None) -> bytes:
        """What rank 0 gave; the others give None."""

    @abstractmethod
    def broadcast_from(self, rank: int, buffer: torch.Tensor) -> None:
        """Fills `buffer`, bytes in host memory and of the same size everywhere, with that of `rank`."""

    def broadcast_there(self, rank: int, buffer: torch.Tensor, device: torch.device) -> bool:
        """As `broadcast_from`, of a device's bytes, by the trainers' group; False, on all ranks, where that cannot."""
        return False

    def same(self, data: bytes) -> bool:
        """Whether every rank gave the same bytes; they are compared by digest."""
        high, low = divmod(xxhash.xxh3_128_intdigest(data), 2**64)
        words = [high >> 32, high & 0xFFFFFFFF, low >> 32, low & 0xFFFFFFFF]
        found = self.max([*words, *(-word for word in words)])
        return found[:4] == [-word for word in found[4:]]

    @abstractmethod
    def start_max(self, values: Sequence[int]) -> Callable[[], list[int]]:
        """Begins an element-wise maximum over all ranks; call the result, on the main thread, to wait for it."""

    @abstractmethod
    def start_sum(self, values: Sequence[int]) -> Callable[[], list[int]]:
        """Begins an element-wise sum over all ranks, as `start_max` a maximum. Of at most 64 bits."""

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
    def close(self) -> None:
        """Gives back what the group holds."""


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
        """Collective over `over`."""
        self._over = over
        self._ranks = dist.get_process_group_ranks(over)
        self._timeout = timeout
        self.patience_s = timeout.total_seconds() / 2
        self.size = len(self._ranks)
        self.rank = self._ranks.index(dist.get_rank())
        self._held: deque[tuple[torch.Tensor, ...]] = deque(maxlen=8)
        self._gloo = connect(over, timeout)

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
    def start_max(self, values: Sequence[int]) -> Callable[[], list[int]]:
        return self._start(dist.ReduceOp(dist.ReduceOp.MAX), values)

    @override
    def start_sum(self, values: Sequence[int]) -> Callable[[], list[int]]:
        return self._start(dist.ReduceOp(dist.ReduceOp.SUM), values)

    def _start(self, op: dist.ReduceOp, values: Sequence[int]) -> Callable[[], list[int]]:
        tensor = torch.tensor(values, dtype=torch.int64, device="cpu")
        self._hold(tensor)
        options = dist.AllreduceOptions()
        options.reduceOp = op
        work = self._run("agreement", lambda: self._gloo.allreduce([tensor], options))

        def wait() -> list[int]:
            self._run("agreement", work.wait)
            found: list[int] = tensor.tolist()
            return found

        return wait

    @override
    def global_rank(self, rank: int) -> int:
        return self._ranks[rank]

    @override
    def close(self) -> None:
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
            raise _failed(what, self.size, self._timeout, error) from error


LET_GO_S = 1.0
"""More than a thread takes to get the GIL; a collective that never ended would keep its tensors for ever."""

_num_groups: Counter[str] = Counter()
"""By name of a process group: the groups made over it. All its ranks make them in the same order."""


def connect(over: dist.ProcessGroup, timeout: timedelta) -> dist.ProcessGroup:
    """gloo connections of our own among the ranks of `over`; collective over it. Raises AgreementFailed.

    Not `new_group`: that is collective over the world, and with local synchronisation it hangs when its members are in
    different numbers of groups, since the name it makes of that number differs then.
    """
    _num_groups[over.group_name] += 1
    try:
        store = PrefixStore(f"groups/{_num_groups[over.group_name]}", _store(over, timeout))
    except AgreementFailed as error:
        raise AgreementFailed(f"connecting on rank {dist.get_rank()}: {error}") from error
    try:
        gloo = dist.ProcessGroupGloo(store, over.rank(), over.size(), timeout)
    except RuntimeError as error:
        raise _failed("connecting", over.size(), timeout, error) from error
    return cast(dist.ProcessGroup, gloo)  # it has the same methods; torch's stub leaves them out


def disconnect(gloo: dist.ProcessGroup) -> None:
    """Closes what `connect` made. torch 2.6 does so only when nobody refers to it any more."""
    if hasattr(gloo, "shutdown"):
        gloo.shutdown()


def _failed(what: str, size: int, timeout: timedelta, error: RuntimeError) -> AgreementFailed:
    return AgreementFailed(
        f"{what} among {size} ranks failed on rank {dist.get_rank()}: a rank is gone, or did not come within "
        f"{timeout.total_seconds():.0f} s: {error}"
    )


_stores: dict[str, tuple[Store, Store]] = {}
"""By name of a process group: the store by which torch.distributed was initialised, and what of it is the group's."""


def _store(over: dist.ProcessGroup, timeout: timedelta) -> Store:
    """Keys and values that the ranks of a process group share, and that no rank has written before this incarnation.

    Raises AgreementFailed.
    """
    whole = dist.distributed_c10d._get_default_store()
    known = _stores.get(over.group_name)
    if known is None or known[0] is not whole:
        place = PrefixStore(f"ckptlib/{over.group_name}", whole)
        name = incarnation.agree(place, dist.get_process_group_ranks(over), over.rank(), timeout)
        known = _stores[over.group_name] = (whole, PrefixStore(name, place))
    return known[1]


def together(group: Group, what: str, call: Callable[[], Result]) -> Result:
    """What `call` returns, if it succeeds on every rank; collective.

    All ranks raise an error of the same class, since callers act on it: that of the first rank that failed, or what it
    derives from, where that is ckptlib's. A rank that failed so itself raises its own. No rank goes on alone, and none
    waits for one that gave up.
    """
    own: Exception | None = None
    try:
        result = call()
    except Exception as error:
        own = error
    told = group.gather(b"" if own is None else f"{_known(own)}: {own}".encode(errors="backslashreplace"))
    failures = {rank: text.decode() for rank, text in enumerate(told) if text}
    if not failures:
        return result
    rank, text = min(failures.items())
    name, _, message = text.partition(": ")
    if own is not None and _known(own) == name:
        raise own
    cls = getattr(errors, name, AgreementFailed)
    raise cls(f"{what} failed on {len(failures)} of {group.size} ranks; on rank {rank}: {message}") from own


def _known(error: Exception) -> str:
    """The name of the class by which every rank knows an error: a store of the user's may raise a class of its own."""
    own = type(error)
    known = (cls.__name__ for cls in own.__mro__ if cls.__module__ == errors.__name__)
    return next(known, f"{own.__module__}.{own.__qualname__}")


def together_at_length(group: Group, what: str, call: Callable[[], Result]) -> Result:
    """As `together`, for what may take one rank longer than the others wait for it in a collective.

    It runs in a thread; the ranks meet now and then, so that one that takes long is waited for, and one that is gone is
    not. Returns, and raises, when nothing runs here any more.
    """
    if group.size == 1:
        return together(group, what, call)
    with ThreadPoolExecutor(1, "ckptlib-at-length") as executor:
        work = executor.submit(call)
        while group.any(not wait([work], group.patience_s).done):
            pass
        return together(group, what, work.result)


def group_or_world(over: dist.ProcessGroup | None) -> dist.ProcessGroup | None:
    """The one given, else the world; None where torch.distributed is not initialised.

    Raises AgreementFailed in a process that was forked from a rank: to use the rank's connections would break them.
    """
    if not (dist.is_available() and dist.is_initialized()):
        return None
    if dist.group.WORLD is _inherited_world:
        raise AgreementFailed(
            f"process {os.getpid()} was forked from rank {dist.get_rank()} of the job, and is no rank itself; save and "
            "load in the ranks, or in a process that is started anew (multiprocessing's spawn or forkserver)"
        )
    return over if over is not None else dist.group.WORLD


_inherited_world: dist.ProcessGroup | None = None
"""Of the rank that this process was forked from."""


def _in_child() -> None:
    global _inherited_world
    if dist.is_available() and dist.is_initialized():
        _inherited_world = dist.group.WORLD


if hasattr(os, "register_at_fork"):  # Windows does not fork
    os.register_at_fork(after_in_child=_in_child)


def group_of(over: dist.ProcessGroup | None, timeout: timedelta) -> Group:
    """The group over a process group; a job of one where torch.distributed is not initialised."""
    found = group_or_world(over)
    return SoloGroup() if found is None else TorchGroup(found, timeout)


# Meetings: before what one rank may call alone by mistake


_meetings: Counter[str] = Counter()
"""By process group and place: the meetings that this process has seen the end of."""


def meet(over: dist.ProcessGroup | None, place: str, what: str, timeout: timedelta) -> None:
    """Returns when every rank of `over` has come to `place`, for the same `what`.

    No collective, which would be left half done: a rank that waits in vain gives the meeting up for all, and who comes
    later goes to the next one, so that ranks find each other again. Raises AgreementFailed that names the ranks that
    did not come within `timeout`, or came for something else.
    """
    group = group_or_world(over)
    if group is None or group.size() == 1:
        return
    name, attended = f"{group.group_name}/{place}", False
    try:
        store = PrefixStore(f"meetings/{place}", _store(group, timeout))
    except AgreementFailed as error:
        raise _nobody_came(what, str(error)) from error
    while not attended:
        number = _meetings[name]
        _meetings[name] += 1
        attended = _attend(store, number, group, what, timeout)


def _attend(store: Store, number: int, group: dist.ProcessGroup, what: str, timeout: timedelta) -> bool:
    """Whether the meeting takes place; False when it was over before this rank came."""
    verdict, count = f"{number}/verdict", f"{number}/count"
    if store.check([verdict]):
        return False
    store.set(f"rank{group.rank()}", f"{number} {what}")
    if store.add(count, 1) == group.size():
        store.compare_set(verdict, "", _differing(_came(store, number, group)) or _MET)
        for key in ("verdict", "count"):  # all have left the one before
            store.delete_key(f"{number - 1}/{key}")
    else:
        try:
            store.wait([verdict], timeout)
        except dist.DistNetworkError:
            raise
        except RuntimeError:  # a time-out; only TCPStore has a class for it
            missing = sorted(set(dist.get_process_group_ranks(group)) - _came(store, number, group).keys())
            reason = f"rank(s) {missing} did not come within {timeout.total_seconds():.0f} s"
            store.compare_set(verdict, "", reason)
    found = store.get(verdict).decode()
    if found != _MET:
        raise _nobody_came(what, found)
    return True


def _nobody_came(what: str, why: str) -> AgreementFailed:
    return AgreementFailed(
        f"{what} on rank {dist.get_rank()}: {why}. Call it on every rank of the process group, alike"
    )


_MET = "met"


def _came(store: Store, number: int, group: dist.ProcessGroup) -> dict[int, str]:
    """By rank of the world: what it came to this meeting for."""
    found = {}
    for rank, rank_of_world in enumerate(dist.get_process_group_ranks(group)):
        if store.check([f"rank{rank}"]):
            last, _, what = store.get(f"rank{rank}").decode().partition(" ")
            if int(last) == number:
                found[rank_of_world] = what
    return found


def _differing(came: dict[int, str]) -> str:
    """Who came for what; nothing when all came for the same."""
    first = {what: rank for rank, what in sorted(came.items(), reverse=True)}
    return "; ".join(f"rank {rank} called {what}" for what, rank in first.items()) if len(first) > 1 else ""
