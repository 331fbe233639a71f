"""Connections and meetings of ranks whose store does not answer, or is gone: an error in time, of ckptlib's own."""

from __future__ import annotations

import gc
import threading
import time
import weakref
from collections.abc import Iterator
from contextlib import suppress
from datetime import timedelta
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch.distributed as dist
from helpers.forkserver import context, start_server
from helpers.writers import stop
from launch import be_rank, environment, fork_ranks
from places import WORKERS
from workers.no_threads import NO_STACK

from ckptlib.errors import AgreementFailed
from ckptlib.ranks.connections import ask_store, connect, disconnect

PATIENCE_S = 150


class Server(NamedTuple):
    process: Any
    port: int


@pytest.fixture
def server(tmp_path: Path) -> Iterator[Server]:
    """A process that has a store."""
    start_server()
    port = tmp_path / "port"
    args = (str(tmp_path / "log"), environment(), WORKERS / "store_server.py", [str(port)])
    process = context.Process(target=be_rank, args=args)
    process.start()
    deadline = time.monotonic() + PATIENCE_S
    while not port.exists():
        assert time.monotonic() < deadline
        time.sleep(0.01)
    yield Server(process, int(port.read_text()))
    process.kill()
    process.join()


@pytest.fixture
def stored(server: Server) -> Iterator[Any]:
    """The process that has the store of this one's process group."""
    store = dist.TCPStore("127.0.0.1", server.port, is_master=False)
    dist.init_process_group("gloo", store=store, rank=0, world_size=1)
    yield server.process
    dist.destroy_process_group()


def test_a_system_that_has_no_thread_more_is_no_store_that_is_gone(stored: Any) -> None:
    world, before = dist.group.WORLD, threading.stack_size(NO_STACK)
    assert world is not None
    try:
        with pytest.raises(AgreementFailed, match=r"torch.distributed was not asked: can't start new thread. .*ulimit"):
            connect(world, timedelta(seconds=PATIENCE_S))
    finally:
        threading.stack_size(before)
    disconnect(connect(world, timedelta(seconds=PATIENCE_S)))


def test_a_store_that_does_not_answer_or_is_gone(stored: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    world = dist.group.WORLD
    assert world is not None
    disconnect(connect(world, timedelta(seconds=PATIENCE_S)))
    stop(stored.pid)
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "lo")
    with pytest.raises(AgreementFailed, match=r"the store .* has not answered within 6 s.*listens at the interface lo"):
        connect(world, timedelta(seconds=1))
    stored.kill()
    stored.join()
    with pytest.raises(AgreementFailed, match=r"rank 0 could not connect .*the store .* is gone"):
        connect(world, timedelta(seconds=PATIENCE_S))


@pytest.mark.slow
def test_a_meeting_whose_store_does_not_answer_or_is_gone(server: Server) -> None:
    """Who gives up is not counted by those who come, and ranks find each other again."""
    output = fork_ranks("silent_store.py", 2, server.port, server.process.pid, timeout_s=PATIENCE_S)
    assert sorted(line for line in output.splitlines() if line.endswith("done")) == ["rank 0 done", "rank 1 done"]


def test_what_the_caller_had_goes_with_the_error_before_garbage_is_collected() -> None:
    """A restart within the process that did not find its ranks kept the model of whoever tried it."""

    class Model:
        pass

    def gone() -> None:
        raise RuntimeError("connection refused")

    def restart() -> weakref.ref[Model]:
        model = Model()
        with suppress(AgreementFailed):
            ask_store(timedelta(seconds=PATIENCE_S), gone)
            pytest.fail("nothing was raised")
        return weakref.ref(model)

    deadline = time.monotonic() + PATIENCE_S
    gc.disable()
    try:
        left = restart()
        while left() is not None and time.monotonic() < deadline:  # the thread that asked may be about to let go
            time.sleep(0.01)
        assert left() is None
    finally:
        gc.enable()
