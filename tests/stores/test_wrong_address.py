"""A server that was never there is told soon; one that is away is waited for."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator

import pytest
from helpers.server_process import free_ports
from helpers.servers import ObjectStorage

from ckptlib.errors import StoreTimeout
from ckptlib.stores import Store, io_limits, open_store
from ckptlib.testing import FaultProxy

NOWHERE_S = 0.5
AWAY_S = 4 * NOWHERE_S
RETRY_S = 120.0

TOLD = {
    "s3fs": "nobody listens there: check the endpoint_url and its port, whether the server runs, and proxies",
    "obstore": "is the endpoint right, and up?",
}


@pytest.fixture(params=TOLD)
def client(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    monkeypatch.setattr(io_limits, "RETRY_S", RETRY_S)
    monkeypatch.setattr(io_limits, "NOWHERE_S", NOWHERE_S)
    return str(request.param)


def test_where_nobody_listens(client: str) -> None:
    (port,) = free_ports(1)
    options = {"client": client, "endpoint_url": f"http://127.0.0.1:{port}", "key": "key", "secret": "hidden"}
    began = time.monotonic()
    with open_store("s3://bucket/run", options) as store, pytest.raises(StoreTimeout) as caught:
        store.put("probe/1", b"1")
    assert TOLD[client] in str(caught.value)
    assert time.monotonic() - began < RETRY_S / 2


@pytest.fixture
def proxied(client: str, s3: ObjectStorage) -> Iterator[tuple[Store, FaultProxy]]:
    options = {"client": client}
    with FaultProxy(s3.endpoint) as proxy, open_store(s3.url(), {**options, **s3.options(proxy.url)}) as store:
        yield store, proxy


@pytest.mark.parametrize("how", ["answered", "refused", "told"])
def test_who_was_there_is_waited_for(proxied: tuple[Store, FaultProxy], how: str) -> None:
    store, proxy = proxied
    if how == "answered":
        store.put("a", b"1")
    elif how == "refused":
        proxy.rules([{"fault": "503", "count": 1}])
        store.put("a", b"1")
    else:
        store.trust_address()
    proxy.rules([{"fault": "down"}])
    back = threading.Timer(AWAY_S, lambda: proxy.rules([]))
    back.start()
    store.put("b", b"2")
    back.join()
    assert store.get("b") == b"2"


def test_who_is_busy_when_first_asked_is_waited_for(proxied: tuple[Store, FaultProxy]) -> None:
    store, proxy = proxied
    proxy.rules([{"fault": "503"}])
    back = threading.Timer(AWAY_S, lambda: proxy.rules([]))
    back.start()
    store.put("a", b"1")
    back.join()
    assert store.get("a") == b"1"
