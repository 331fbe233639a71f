"""A server that is there and reads nothing, as a gateway whose disk hangs: no try leaves a connection behind."""

from __future__ import annotations

import errno
import os
import socket
import time
from pathlib import Path

import pytest
from botocore.exceptions import ParamValidationError
from helpers.s3_bucket import scale_limits

from ckptlib.errors import StoreError, StoreTimeout
from ckptlib.stores import io_limits, open_store, s3_client

DATA = bytes(30 << 20)
"""More than the kernel takes."""
WAIT_S = 60.0


def connections_to(port: int) -> int:
    """That a process holds."""
    rows = map(str.split, Path("/proc/net/tcp").read_text().splitlines()[1:])
    return sum(int(row[2].partition(":")[2], 16) == port and row[9] != "0" for row in rows)


@pytest.mark.parametrize("client", ["s3fs", "obstore"])
def test_no_try_leaves_a_connection_behind(client: str, monkeypatch: pytest.MonkeyPatch) -> None:
    scale_limits(monkeypatch, idle_s=0.3, retry_s=1.0)
    monkeypatch.setattr(io_limits, "PART_NBYTES", 2 * len(DATA))  # by one request
    with socket.create_server(("127.0.0.1", 0), backlog=100) as frozen:
        port = frozen.getsockname()[1]
        options = {"key": "somebody", "secret": "s3cr3t", "endpoint_url": f"http://127.0.0.1:{port}", "client": client}
        with open_store("s3://bucket/run", options) as store:
            with pytest.raises(StoreTimeout, match="cannot put"):
                store.put("p", b"", [DATA])
            end = time.monotonic() + WAIT_S
            while connections_to(port):
                assert time.monotonic() < end
                time.sleep(0.05)


def test_versions_that_do_not_ask_how_sockets_are_made(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(**options: object) -> None:
        raise ParamValidationError(report="invalid connector_arg:socket_factory")

    assert "connector_args" in s3_client._config({"max_pool_connections": 80})
    assert s3_client._config({"connector_args": {"keepalive_timeout": 5}})["connector_args"]["keepalive_timeout"] == 5
    monkeypatch.setattr(s3_client, "AioConfig", refuse)
    assert "connector_args" not in s3_client._config(None)


def test_options_that_are_wrong_are_told_of_by_the_first_request() -> None:
    """Each rank has opened its store by then: all of them learn of it."""
    options = {"key": "somebody", "secret": "s3cr3t", "client": "s3fs", "config_kwargs": {"bogus": 1}}
    with open_store("s3://bucket/run", options) as store, pytest.raises(StoreError, match="bogus"):
        store.get("p")


def test_a_kernel_that_does_not_know_the_option(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*given: object) -> None:
        raise OSError(errno.ENOPROTOOPT, os.strerror(errno.ENOPROTOOPT))

    monkeypatch.setattr(socket.socket, "setsockopt", refuse, raising=False)
    s3_client._socket((socket.AF_INET, socket.SOCK_STREAM, 0)).close()
