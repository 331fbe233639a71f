"""ckptlib.testing: stores that are slow, or fail as planned."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from helpers.objects import wrapped_by
from store_conformance import StoreConformance, keys

from ckptlib.errors import StoreError, StoreFull
from ckptlib.stores import Store, open_store
from ckptlib.stores.testing import FaultStore, LatencyStore, flip_bit, truncate, write_plan


class TestLatencyStore(StoreConformance):
    @pytest.fixture
    def store(self, tmp_path: Path) -> Store:
        return open_store(f"latency+file://{tmp_path}?latency=0.0001")


class TestStoreOfALimitedBandwidth(StoreConformance):
    @pytest.fixture
    def store(self, tmp_path: Path) -> Store:
        return open_store(f"latency+file://{tmp_path}?latency=0.0001&bandwidth=1e9")


class TestFaultStoreWithoutFaults(StoreConformance):
    @pytest.fixture
    def store(self, tmp_path: Path) -> Store:
        return open_store(f"fault+file://{tmp_path}/run?plan={tmp_path}/plan.json")


def faulty(tmp_path: Path, *rules: dict[str, object]) -> Store:
    write_plan(tmp_path / "plan.json", rules)
    return open_store(f"fault+file://{tmp_path}/run?plan={tmp_path}/plan.json")


def test_wrappers_nest(tmp_path: Path) -> None:
    store = open_store(f"latency+fault+file://{tmp_path}/run?plan={tmp_path}/plan.json&latency=0")
    assert isinstance(store, LatencyStore)
    assert isinstance(wrapped_by(store), FaultStore)
    assert store.url == f"latency+fault+file://{tmp_path}/run"
    with pytest.raises(ValueError, match="latency="):
        open_store("latency+memory://x")


def test_requests_share_the_bandwidth_of_a_process(tmp_path: Path) -> None:
    """Four puts at once, through two stores of one URL, then four gets: none is faster than all of them together."""
    url = f"latency+file://{tmp_path}?latency=0&bandwidth=4e6"
    stores = [open_store(url), open_store(url)]
    data, into = bytes(100_000), [memoryview(bytearray(100_000)) for _ in range(2)]
    with ThreadPoolExecutor(4) as threads:
        began = time.monotonic()
        list(threads.map(lambda n: stores[n % 2].put(str(n), data), range(4)))
        put_s = time.monotonic() - began
        assert put_s >= 0.1
        began = time.monotonic()
        gets = [threads.submit(stores[n].get, str(n)) for n in range(2)]
        gets_into = [threads.submit(stores[n].get_into, str(n), 0, into[n]) for n in range(2)]
        assert [get.result() for get in gets] == [data, data]
        assert [get.result() for get in gets_into] == [None, None]
        assert time.monotonic() - began >= 0.1


def test_an_upload_takes_the_bandwidth_and_nothing_else_does(tmp_path: Path) -> None:
    store = open_store(f"latency+file://{tmp_path}?bandwidth=1e6&latency=0")
    began = time.monotonic()
    store.put("a", bytes(1000), [bytes(50_000), bytes(49_000)])
    assert time.monotonic() - began >= 0.1
    slow = open_store(f"latency+file://{tmp_path}?bandwidth=1e-3&latency=0")  # a byte would take a quarter of an hour
    assert keys(slow) == ["a"]
    assert slow.get("a", 0, 0) == b""
    slow.put("empty", b"")
    slow.delete("a")


def test_what_has_a_bandwidth_is_not_local(tmp_path: Path) -> None:
    assert open_store(f"latency+file://{tmp_path}?latency=0").is_local
    assert not open_store(f"latency+file://{tmp_path}?latency=0&bandwidth=1e9").is_local
    for wrong in ("0", "-1", "nan"):
        with pytest.raises(ValueError, match="bandwidth="):
            open_store(f"latency+file://{tmp_path}?latency=0&bandwidth={wrong}")


def test_the_nth_operation_fails(tmp_path: Path) -> None:
    store = faulty(tmp_path, {"op": "put", "key": "^a/", "nth": 1, "action": "error"})
    store.put("b/0", b"")
    store.put("a/1", b"")
    with pytest.raises(StoreError, match="as planned"):
        store.put("a/2", b"")
    faulty_again = open_store(f"fault+file://{tmp_path}/run?plan={tmp_path}/plan.json")
    faulty_again.put("a/3", b"")
    assert keys(store) == ["a/1", "a/3", "b/0"]
    log = [json.loads(line) for line in (tmp_path / "plan.json.log").read_text().splitlines()]
    assert [(line["n"], line["op"], line["key"], line["fault"]) for line in log] == [
        (0, "put", "b/0", None),
        (1, "put", "a/1", None),
        (2, "put", "a/2", "error"),
        (3, "put", "a/3", None),
        (4, "scan", "", None),
    ]
    assert {line["pid"] for line in log} == {os.getpid()}


def test_a_plan_may_change_during_operations(tmp_path: Path) -> None:
    """None meets a file that is cut, or half of one: that ended the writer that it was called by."""
    store, plan, done = faulty(tmp_path), tmp_path / "plan.json", threading.Event()

    def change() -> None:
        while not done.is_set():
            write_plan(plan, [])

    writer = threading.Thread(target=change)
    writer.start()
    try:
        for _ in range(2000):
            assert not store.scan("a")
    finally:
        done.set()
        writer.join()


def test_a_plan_may_change(tmp_path: Path) -> None:
    store = faulty(tmp_path, {"op": "commit", "action": "full"})
    with pytest.raises(StoreFull):
        store.put("a", b"", [b"data"])
    assert keys(store) == []
    faulty(tmp_path)
    store.put("a", b"", [b"data"])
    assert keys(store) == ["a"]


def test_flip_and_stall(tmp_path: Path) -> None:
    store = faulty(tmp_path, {"op": "put", "action": "flip"}, {"op": "get", "action": "stall", "seconds": 0.01})
    store.put("a", b"1234")
    assert store.get("a") == b"1224"


def test_an_operation_is_held_until_the_plan_lets_it_go(tmp_path: Path) -> None:
    store = faulty(tmp_path, {"op": "put", "key": "^a", "action": "hold"})
    with ThreadPoolExecutor(1) as threads:
        put = threads.submit(store.put, "a", b"1234")
        while not (tmp_path / "plan.json.log").exists():
            time.sleep(0.01)
        store.put("b", b"")
        assert not put.done()
        assert keys(store) == ["b"]
        faulty(tmp_path)
        put.result(150)
    assert keys(store) == ["a", "b"]


@pytest.mark.parametrize(("action", "kept"), [("kill-before", []), ("kill-after", ["a"])])
def test_kill_and_once(tmp_path: Path, action: str, kept: list[str]) -> None:
    store = faulty(tmp_path, {"op": "commit", "action": action, "once": True})
    script = """
import sys
import threading
from ckptlib.stores import open_store
open_store(sys.argv[1]).put(sys.argv[2], b"", [b"data"])
"""
    url = f"fault+file://{tmp_path}/run?plan={tmp_path}/plan.json"
    assert subprocess.run([sys.executable, "-c", script, url, "a"], check=False).returncode == -signal.SIGKILL
    assert keys(store) == kept
    subprocess.run([sys.executable, "-c", script, url, "b"], check=True)
    assert keys(store) == [*kept, "b"]


@pytest.mark.parametrize(
    "rule",
    [
        {"op": "comit", "action": "error"},
        {"op": "put", "action": "die"},
        {"op": "get", "action": "flip"},
        {"op": "get", "action": "stall"},
        {"op": "put", "action": "error", "nht": 1},
    ],
)
def test_a_wrong_rule_is_refused(tmp_path: Path, rule: dict[str, object]) -> None:
    with pytest.raises(ValueError, match=r"rule|flipped|stall"):
        faulty(tmp_path, rule)


def test_damage(tmp_path: Path) -> None:
    path = tmp_path / "file"
    path.write_bytes(b"\x00\x00\x00")
    flip_bit(path, 1)
    flip_bit(path, -1)
    assert path.read_bytes() == b"\x00\x01\x01"
    truncate(path, 2)
    assert path.read_bytes() == b"\x00\x01"
