"""What rank 0 leaves is found by the others, without a wait for anybody, and a store that is gone is no error."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from datetime import timedelta

import pytest
import torch.distributed as dist
from torch._C._distributed_c10d import Store

from ckptlib.ranks.notices import KEPT, Notices

PATIENCE_S = 150.0


def found(notices: Notices, expected: Callable[[tuple[str, ...]], bool]) -> tuple[str, ...]:
    """What is found as soon as it is what is expected."""
    deadline = time.monotonic() + PATIENCE_S
    while not expected(last := notices.look()):
        assert time.monotonic() < deadline, last
        time.sleep(0.001)
    return last


def test_what_one_leaves_all_find() -> None:
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    others = [dist.TCPStore("127.0.0.1", store.port, is_master=False) for _ in range(2)]
    rank0, *ranks = [Notices(one, "job", 3) for one in (store, *others)]
    assert [rank.look() for rank in ranks] == [(), ()]
    rank0.leave("first")
    rank0.leave("second")
    for rank in ranks:
        assert found(rank, lambda last: len(last) == 2) == ("first", "second")
    assert Notices(others[0], "another job", 3).look() == ()
    for number in range(100):
        rank0.leave(str(number))
    last = found(ranks[0], lambda last: "99" in last)
    assert last == tuple(str(number) for number in range(100 - KEPT, 100)), "a key does not grow with the job"
    for rank in (rank0, *ranks):
        rank.close()
        assert rank.look() == rank.look()


def test_one_rank_needs_no_store() -> None:
    notices = Notices(None, "job", 1)
    notices.leave("first")
    assert notices.look() == ()
    assert notices.lost
    notices.close()


class Gone(dist.HashStore):
    """A store whose host is gone: at first it does not answer, then the connection ends. As torch's, its client asks
    one thing at a time."""

    def __init__(self) -> None:
        super().__init__()
        self.ended = threading.Event()
        self.asks = threading.Lock()

    def check(self, keys: list[str]) -> bool:
        with self.asks:
            self.ended.wait(PATIENCE_S)
        raise dist.DistNetworkError("Connection reset by peer")

    def set(self, key: str, value: str) -> None:
        with self.asks:
            raise dist.DistNetworkError("Broken pipe")


def test_a_store_that_does_not_answer_holds_nobody_up() -> None:
    gone = Gone()
    notices = Notices(None, "job", 2)
    notices._store = gone  # type: ignore[assignment]  # a PrefixStore would not call what Python overrides
    began = time.monotonic()
    for _ in range(100):
        assert notices.look() == ()
    notices.leave("first")
    notices.give_up("a", "away")
    assert time.monotonic() - began < PATIENCE_S / 2
    assert not notices.lost
    gone.ended.set()
    found(notices, lambda _: notices.lost)
    notices.close()


class Python(dist.HashStore):
    """A store in Python, as torch's EtcdStore, which raises errors of its own."""

    def set(self, key: str, value: str) -> None:
        raise LookupError("no leader")


@pytest.mark.parametrize("store", [Gone, Python])
def test_a_rank_that_cannot_leave_a_notice_goes_on(store: type[dist.HashStore]) -> None:
    notices = Notices(None, "job", 2)
    notices._store = store()  # type: ignore[assignment]
    notices.leave("first")
    deadline = time.monotonic() + PATIENCE_S
    while not notices.lost:
        assert time.monotonic() < deadline
        time.sleep(0.001)
    notices.leave("second")
    notices.close()


def test_stores_of_other_kinds(tmp_path: object) -> None:
    stores: list[Store] = [dist.HashStore(), dist.FileStore(f"{tmp_path}/store", 2)]
    for store in stores:
        store.set_timeout(timedelta(seconds=PATIENCE_S))
        rank0, rank1 = Notices(store, "job", 2), Notices(store, "job", 2)
        rank0.leave("first")
        assert found(rank1, bool) == ("first",)
        for why in ("away", "full"):
            rank1.give_up("a", why)
        deadline = time.monotonic() + PATIENCE_S
        while len(told := rank0.given_up("a")) < 2:
            assert time.monotonic() < deadline
            time.sleep(0.001)
        assert told == ("away", "full")
        for rank in (rank0, rank1):
            rank.close()
