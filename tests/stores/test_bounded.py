"""Every call of a store behind fsspec ends in time, whether its backend can be interrupted or not."""

from __future__ import annotations

import asyncio
import contextlib
import threading
import time
import uuid
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from fsspec.asyn import AsyncFileSystem
from fsspec.implementations.memory import MemoryFileSystem
from helpers.objects import client_of
from store_conformance import keys

from ckptlib.errors import StoreTimeout
from ckptlib.stores import fsspec_client
from ckptlib.stores.bounded import in_thread, on_loop
from ckptlib.stores.fsspec import FsspecStore

IDLE_S = 0.05
SHORT_RETRY_S = 0.2
"""Of what is never answered."""

PATIENCE_S = 150.0
"""What is well may be asked again so long: on a busy machine its answer may take longer than IDLE_S."""


@pytest.fixture(autouse=True)
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fsspec_client, "IDLE_S", IDLE_S)
    monkeypatch.setattr(fsspec_client, "RETRY_S", PATIENCE_S)
    monkeypatch.setattr(fsspec_client, "SLOWEST_BPS", 1e12)


class Deaf:
    """Methods that do not answer: so often, or always."""

    def __init__(self, times: float) -> None:
        self.left = times
        self.asked = 0
        self.freed = threading.Event()

    def __call__(self, method: Callable[..., Any]) -> Callable[..., Any]:
        def maybe(*args: Any, **kwargs: Any) -> Any:
            self.asked += 1
            if self.asked <= self.left:
                self.freed.wait()
                raise OSError("far too late")
            return method(*args, **kwargs)

        return maybe


METHODS = {"put": "pipe_file", "get": "cat_file", "get_into": "cat_file", "scan": "find", "delete": "rm_file"}


def call(store: FsspecStore, op: str, **how: Any) -> Any:
    if op == "put":
        return store.put("a/b", b"5678", [b"9"], **how)
    if op == "get_into":
        into = bytearray(4)
        store.get_into("a/b", 0, memoryview(into), **how)
        return bytes(into)
    return getattr(store, op)("a/" if op == "scan" else "a/b")


@pytest.fixture
def store() -> Iterator[FsspecStore]:
    with FsspecStore(f"memory://{uuid.uuid4().hex}", {}) as store:
        store.put("a/b", b"1234")
        yield store


@pytest.mark.parametrize("op", METHODS)
def test_a_call_that_is_not_answered_once_is_made_again(
    store: FsspecStore, op: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    expected = call(store, op)
    store.put("a/b", b"1234")
    deaf = Deaf(1)
    monkeypatch.setattr(client_of(store), METHODS[op], deaf(getattr(client_of(store), METHODS[op])))
    found = call(store, op)
    deaf.freed.set()
    assert deaf.asked >= 2
    if op != "scan":  # its times differ
        assert found == expected
    assert keys(store) == ([] if op == "delete" else ["a/b"])


@pytest.mark.parametrize("op", METHODS)
def test_a_call_that_is_never_answered_ends(store: FsspecStore, op: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fsspec_client, "RETRY_S", SHORT_RETRY_S)
    deaf = Deaf(float("inf"))
    for method in {METHODS[op], "ls"}:  # each directory is listed where all of them cannot be
        monkeypatch.setattr(client_of(store), method, deaf(getattr(client_of(store), method)))
    until(lambda: asked_again(store, op, deaf))
    deaf.freed.set()


def asked_again(store: FsspecStore, op: str, deaf: Deaf) -> bool:
    """Whether a call that fails was made more than once: not where a thread stood still as long as it may be tried."""
    before = deaf.asked
    with pytest.raises(StoreTimeout, match=r"a/b?: cannot .*: no answer within .* s"):
        call(store, op)
    return deaf.asked > before + 1


def until(true: Callable[[], bool]) -> None:
    end = time.monotonic() + PATIENCE_S
    while not true():
        assert time.monotonic() < end


def test_what_is_too_much_for_one_listing_is_listed_by_directories(
    store: FsspecStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of some hundred thousand objects a listing takes minutes: no sweep would come to its end."""
    monkeypatch.setattr(fsspec_client, "RETRY_S", SHORT_RETRY_S)
    store.put("a/c/d", b"5")
    deaf = Deaf(float("inf"))
    monkeypatch.setattr(client_of(store), "find", deaf(client_of(store).find))

    def is_listed() -> bool:
        with contextlib.suppress(StoreTimeout):  # on a busy machine
            return keys(store, "a/") == ["a/b", "a/c/d"]
        return False

    until(is_listed)
    deaf.freed.set()


def test_nobody_is_asked_for_a_listing_who_was_never_there(monkeypatch: pytest.MonkeyPatch) -> None:
    """It may take minutes; a name that is not known is told by the client as late."""
    monkeypatch.setattr(fsspec_client, "RETRY_S", SHORT_RETRY_S)
    asked = {name: Deaf(float("inf")) for name in ("cat_file", "find", "ls")}
    with FsspecStore(f"memory://{uuid.uuid4().hex}", {}) as store:
        for name, deaf in asked.items():
            monkeypatch.setattr(client_of(store), name, deaf(getattr(client_of(store), name)))
        with pytest.raises(StoreTimeout, match=r"cannot list: .* not at this address: check the URL, .* and DNS"):
            store.scan("a/")
        for deaf in asked.values():
            deaf.freed.set()
        assert asked["cat_file"].asked
        assert not asked["find"].asked
        assert not asked["ls"].asked


def test_before_a_listing_the_bucket_is_not_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """gcsfs would list a bucket that may have millions of other objects."""
    with FsspecStore(f"memory://{uuid.uuid4().hex}", {}) as store:
        asked = {name: Deaf(0) for name in ("exists", "cat_file")}
        for name, method in asked.items():
            monkeypatch.setattr(client_of(store), name, method(getattr(client_of(store), name)))
        assert store.scan("a/") == []
    assert not asked["exists"].asked
    assert asked["cat_file"].asked


@pytest.mark.parametrize("op", ["put", "get_into"])
def test_nothing_is_asked_after_the_deadline(store: FsspecStore, op: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fsspec_client, "RETRY_S", 1e9)
    deaf = Deaf(float("inf"))
    monkeypatch.setattr(client_of(store), METHODS[op], deaf(getattr(client_of(store), METHODS[op])))
    others = {*threading.enumerate()}
    while not deaf.asked:  # a thread may stand still until its deadline is over
        with pytest.raises(StoreTimeout):
            call(store, op, deadline=time.monotonic() + 3 * IDLE_S)
    deaf.freed.set()
    for thread in {*threading.enumerate()} - others:  # those of its calls, be they begun or not
        thread.join(PATIENCE_S)
    asked = deaf.asked
    time.sleep(3 * IDLE_S)
    assert deaf.asked == asked


def test_what_may_take_longer_than_it_is_tried_again_is_tried_twice(
    store: FsspecStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As the put of a whole pack may, and the read of a document, whose size nobody knows beforehand."""
    monkeypatch.setattr(fsspec_client, "RETRY_S", IDLE_S / 10)
    deaf = Deaf(float("inf"))
    monkeypatch.setattr(client_of(store), "pipe_file", deaf(client_of(store).pipe_file))
    others = {*threading.enumerate()}
    with pytest.raises(StoreTimeout, match="a/b: cannot put: no answer within"):
        call(store, "put")
    deaf.freed.set()
    for thread in {*threading.enumerate()} - others:
        thread.join(PATIENCE_S)
    assert deaf.asked == 2


class Slow(AsyncFileSystem, MemoryFileSystem):
    """An object store's client, whose puts do not end by themselves."""

    protocol = "slow"
    cancelled = 0

    async def _pipe_file(self, path: str, value: bytes, **kwargs: Any) -> None:
        try:
            await asyncio.sleep(1e9)
        except asyncio.CancelledError:
            Slow.cancelled += 1
            raise


def test_what_can_be_interrupted_is(monkeypatch: pytest.MonkeyPatch) -> None:
    import fsspec

    fsspec.register_implementation("slow", Slow, clobber=True)
    monkeypatch.setattr(fsspec_client, "RETRY_S", SHORT_RETRY_S)

    def interrupted_again() -> bool:
        before = Slow.cancelled
        with pytest.raises(StoreTimeout):
            store.put("a", b"data")
        return Slow.cancelled > before + 1

    with FsspecStore(f"slow://{uuid.uuid4().hex}", {}) as store:
        until(interrupted_again)


class Paired(AsyncFileSystem, MemoryFileSystem):
    """An object store's client, whose deletions end when another one is under way as well."""

    protocol = "paired"
    under_way = 0

    async def _rm_file(self, path: str, **kwargs: Any) -> None:
        self.under_way += 1
        while self.under_way < 2:
            await asyncio.sleep(0.001)
        del self.store[path]


def test_objects_are_deleted_beside_one_another(monkeypatch: pytest.MonkeyPatch) -> None:
    """A large job has a hundred thousand in each step: one after the other, they would take hours."""
    import fsspec

    fsspec.register_implementation("paired", Paired, clobber=True)
    monkeypatch.setattr(fsspec_client, "IDLE_S", PATIENCE_S)
    with FsspecStore(f"paired://{uuid.uuid4().hex}", {}) as store:
        there = client_of(store).store
        names = ["a/1", "a/2", "b"]
        there.update({store._path(name): b"data" for name in names})
        store.delete(*names)
        assert there.keys().isdisjoint(map(store._path, names))


def test_what_is_called_in_time_returns_or_raises() -> None:
    loop = asyncio.new_event_loop()
    thread = threading.Thread(target=loop.run_forever, daemon=True)
    thread.start()

    async def fail() -> None:
        raise KeyError("its own")

    async def five() -> int:
        return 5

    assert on_loop(five, loop, 60) == in_thread(lambda: 5, 60) == 5
    with pytest.raises(KeyError, match="its own"):
        on_loop(fail, loop, 60)
    with pytest.raises(KeyError, match="its own"):
        in_thread(lambda: {}["its own"], 60)
    loop.call_soon_threadsafe(loop.stop)
    thread.join()


def test_a_loop_that_is_stuck_does_not_hold_the_caller(monkeypatch: pytest.MonkeyPatch) -> None:
    from ckptlib.stores import bounded

    monkeypatch.setattr(bounded, "LOOP_GRACE_S", 0.05)
    loop = asyncio.new_event_loop()  # nobody runs it

    async def never() -> None:
        raise AssertionError

    with pytest.raises(TimeoutError):
        on_loop(never, loop, 0.01)
    loop.close()
