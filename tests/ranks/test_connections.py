"""Connections among ranks whose store does not answer, or is gone: an error in time, of ckptlib's own."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist
from helpers.forkserver import context, start_server
from launch import be_rank, environment
from places import WORKERS

from ckptlib.errors import AgreementFailed
from ckptlib.ranks.connections import connect, disconnect

PATIENCE_S = 150


@pytest.fixture
def server(tmp_path: Path) -> Iterator[Any]:
    """The process that has the store of this one's process group."""
    start_server()
    port = tmp_path / "port"
    args = (str(tmp_path / "log"), environment(), WORKERS / "store_server.py", [str(port)])
    process = context.Process(target=be_rank, args=args)
    process.start()
    deadline = time.monotonic() + PATIENCE_S
    while not port.exists():
        assert time.monotonic() < deadline
        time.sleep(0.01)
    store = dist.TCPStore("127.0.0.1", int(port.read_text()), is_master=False)
    dist.init_process_group("gloo", store=store, rank=0, world_size=1)
    yield process
    process.kill()
    process.join()
    dist.destroy_process_group()


def test_a_store_that_does_not_answer_or_is_gone(server: Any) -> None:
    world = dist.group.WORLD
    assert world is not None
    disconnect(connect(world, timedelta(seconds=PATIENCE_S)))
    os.kill(server.pid, signal.SIGSTOP)
    with pytest.raises(AgreementFailed, match=r"the store .* has not answered within 2 s"):
        connect(world, timedelta(seconds=1))
    server.kill()
    server.join()
    with pytest.raises(AgreementFailed, match=r"rank 0 could not connect .*the store .* is gone"):
        connect(world, timedelta(seconds=PATIENCE_S))
