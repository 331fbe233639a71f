"""A read whose bytes come one by one ends at its deadline, whatever the client: each of them is progress."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator

import pytest
from helpers.s3_bucket import at_most, scale_limits
from helpers.servers import ObjectStorage

from ckptlib.errors import StoreTimeout
from ckptlib.stores import Store, open_store
from ckptlib.testing import FaultProxy

DATA = os.urandom(4 << 20)
BANDWIDTH = 64 << 10
MOST_S = 25.0
"""Of a call with a deadline of one second. Without, the bytes take a minute, and no answer half of one."""


@pytest.fixture
def proxy(s3: ObjectStorage) -> Iterator[FaultProxy]:
    with FaultProxy(s3.endpoint) as proxy:
        yield proxy


@pytest.fixture(params=["s3fs", "obstore", "fsspec"])
def store(
    request: pytest.FixtureRequest, s3: ObjectStorage, proxy: FaultProxy, monkeypatch: pytest.MonkeyPatch
) -> Iterator[Store]:
    scale_limits(monkeypatch)
    client = {} if request.param == "s3fs" else {"client": request.param}
    with open_store(s3.url(), {**s3.options(proxy.url), **client}) as store:
        yield store


def ends_in_time(store: Store, proxy: FaultProxy, nbytes: int) -> None:
    """And nothing of it goes on: neither requests nor writes to the buffer."""
    into = bytearray(nbytes)
    with at_most(MOST_S), pytest.raises(StoreTimeout, match=r"/p: cannot get"):
        store.get_into("p", 0, memoryview(into), deadline=time.monotonic() + 1)
    num, seen = len(proxy.requests), bytes(into)
    proxy.rules([])
    time.sleep(1.0)
    assert into == seen
    assert len(proxy.requests) == num
    store.get_into("p", 0, memoryview(into))
    assert into == DATA[:nbytes]


def test_a_body_that_trickles(store: Store, proxy: FaultProxy) -> None:
    store.put("p", DATA)
    proxy.rules([{"match": "^GetObject ", "fault": "bandwidth", "bandwidth": BANDWIDTH}])
    ends_in_time(store, proxy, len(DATA))


@pytest.mark.parametrize("nbytes", [0, len(DATA)])
def test_whatever_is_asked_first(store: Store, proxy: FaultProxy, nbytes: int) -> None:
    """For the size of what is read, where a client asks for it."""
    store.put("p", DATA)
    proxy.rules([{"match": "^(HeadObject|GetObject|ListObjects.*) ", "fault": "blackhole"}])
    ends_in_time(store, proxy, nbytes)
