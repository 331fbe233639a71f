"""A server that is killed in the middle of a download, through each client: the read goes on where it broke off when
the server is back, or says that it gave up; and no byte is ever another than the object's.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch
from helpers.s3_bucket import scale_limits
from helpers.servers import ObjectStorage, start_seaweedfs

import ckptlib
from ckptlib.errors import StoreTimeout
from ckptlib.stores import Store, io_limits, open_store
from ckptlib.testing import FaultProxy

DATA = bytes(range(1, 256)) * 100_000
"""25.5 MB, more than sockets hold; none is zero, as what was not read is."""
BANDWIDTH = 12e6
BACK_S = 60.0
"""How long reads are sent again where the server comes back: it is back after a second, on a busy machine after ten."""
WAIT_S = 150.0


@pytest.fixture
def storage(tmp_path: Path) -> Iterator[ObjectStorage]:
    with start_seaweedfs(tmp_path) as storage:
        yield storage


@pytest.fixture
def proxy(storage: ObjectStorage) -> Iterator[FaultProxy]:
    """Slow enough to meet a download under way."""
    with FaultProxy(storage.endpoint, [{"match": "^GetObject", "fault": "bandwidth", "bandwidth": BANDWIDTH}]) as proxy:
        yield proxy


@pytest.fixture(params=["s3fs", "obstore"])
def client(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture
def store(storage: ObjectStorage, proxy: FaultProxy, client: str, monkeypatch: pytest.MonkeyPatch) -> Iterator[Store]:
    scale_limits(monkeypatch)
    monkeypatch.setattr(io_limits, "RUN_BYTES", len(DATA))
    monkeypatch.setattr(io_limits, "SLOWEST_BPS", 1e6)  # a whole download takes seconds here
    with open_store(storage.url(), {**storage.options(proxy.url), "client": client}) as store:
        yield store


def until_half_way(proxy: FaultProxy) -> None:
    deadline = time.monotonic() + WAIT_S
    while not any(r.op == "GetObject" and r.nbytes_down > 2 << 20 for r in proxy.requests):
        assert time.monotonic() < deadline, proxy.requests
        time.sleep(0.005)


class Download(threading.Thread):
    """Of the whole object, in a thread."""

    def __init__(self, store: Store) -> None:
        super().__init__(daemon=True)
        self.into = bytearray(len(DATA))
        self.error: Exception | None = None
        self._store = store
        self.start()

    def run(self) -> None:
        try:
            self._store.get_into("p", 0, memoryview(self.into))
        except Exception as error:
            self.error = error

    def ended(self) -> Exception | None:
        self.join(2 * BACK_S)
        assert not self.is_alive(), "hangs"
        return self.error


def test_it_goes_on_when_the_server_is_back(
    store: Store, storage: ObjectStorage, proxy: FaultProxy, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(io_limits, "RETRY_S", BACK_S)
    with open_store(store.url, {**storage.options(proxy.url), "client": client_of(store)}) as patient:
        patient.put("p", DATA)
        download = Download(patient)
        until_half_way(proxy)
        storage.process.kill()
        storage.process.start()
        error = download.ended()
        assert error is None, error
    assert download.into == DATA
    num_down = sum(request.nbytes_down for request in proxy.requests if request.op == "GetObject")
    assert num_down < 1.5 * len(DATA), "not from the beginning"


def client_of(store: Store) -> str:
    return "obstore" if "obstore" in type(store).__module__ else "s3fs"


@pytest.mark.slow
def test_it_says_that_it_gave_up_and_wrote_no_wrong_byte(
    store: Store, storage: ObjectStorage, proxy: FaultProxy
) -> None:
    store.put("p", DATA)
    download = Download(store)
    until_half_way(proxy)
    storage.process.kill()
    error = download.ended()
    assert isinstance(error, StoreTimeout), error
    assert "/p: cannot get" in str(error)
    got, wanted = np.frombuffer(bytes(download.into), np.uint8), np.frombuffer(DATA, np.uint8)
    assert np.array_equal(got[got != 0], wanted[got != 0])
    assert download.into != DATA, "or the server was killed too late"
    seen = bytes(download.into)
    storage.process.start()
    again = Download(store)
    assert again.ended() is None
    assert again.into == DATA
    assert download.into == seen, "nothing of what was given up goes on"


@pytest.mark.parametrize("client", ["s3fs", pytest.param("obstore", marks=pytest.mark.slow)], indirect=True)
def test_a_load_goes_on(
    storage: ObjectStorage, proxy: FaultProxy, client: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(io_limits, "RETRY_S", BACK_S)
    url, wanted = storage.url(), torch.frombuffer(bytearray(os.urandom(len(DATA))), dtype=torch.uint8)
    ckptlib.save(url, {"w": wanted}, step=1, storage_options=storage.options())
    state, errors = {"w": torch.zeros_like(wanted)}, list[Exception]()

    def load() -> None:
        try:
            ckptlib.load(url, state, storage_options={**storage.options(proxy.url), "client": client})
        except Exception as error:
            errors.append(error)

    thread = threading.Thread(target=load, daemon=True)
    thread.start()
    until_half_way(proxy)
    storage.process.kill()
    storage.process.start()
    thread.join(2 * BACK_S)
    assert not thread.is_alive()
    assert errors == []
    assert torch.equal(state["w"], wanted)
