"""The servers that other tests run against: ready when they say so, gone with pytest."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import AbstractContextManager
from pathlib import Path

import psutil
import pytest
from helpers.server_process import ServerProcess, answers
from helpers.servers import (
    ObjectStorage,
    s3_client,
    start_azurite,
    start_gcs_emulator,
    start_juicefs,
    start_seaweedfs,
)
from places import ROOT

from ckptlib.stores import open_store

STARTS = [start_seaweedfs, start_juicefs, start_gcs_emulator, start_azurite]


@pytest.mark.parametrize("start", STARTS, ids=lambda start: start.__name__)
def test_a_killed_server_comes_back(
    start: Callable[[Path], AbstractContextManager[ObjectStorage]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("GCSFS_EXPERIMENTAL_ZB_HNS_SUPPORT", "false")
    with start(tmp_path) as storage:
        first, url = storage.process.pid, storage.url()
        with open_store(url, storage.options()) as store:
            store.put("a", b"data")
        storage.process.kill()
        assert not psutil.pid_exists(first)
        storage.process.start()
        with open_store(url, storage.options()) as store:
            if start is start_azurite:
                store.scan("")  # answers, but has nothing of what it was given in its last seconds
            else:
                assert store.get("a") == b"data"
        last = psutil.Process(storage.process.pid)
        listens = [c.laddr.ip for c in last.net_connections() if c.status == psutil.CONN_LISTEN]
        assert set(listens) == {"127.0.0.1"}
    assert not last.is_running()


def test_a_paused_server_goes_on_and_ends(tmp_path: Path) -> None:
    with start_juicefs(tmp_path) as storage:
        port = int(storage.endpoint.rpartition(":")[2])
        storage.process.pause()
        end = time.monotonic() + 150
        while psutil.Process(storage.process.pid).status() != psutil.STATUS_STOPPED:  # each thread stops when it runs
            assert time.monotonic() < end
            time.sleep(0.01)
        storage.process.resume()
        assert answers(port)
        storage.process.pause()  # and ends all the same


def test_the_bucket_is_there_and_no_other(s3: ObjectStorage) -> None:
    client = s3_client(s3)
    client.head_bucket(Bucket=s3.bucket)
    with pytest.raises(client.exceptions.ClientError, match="NoSuchBucket"):
        client.put_object(Bucket="no-such-bucket", Key="a", Body=b"1")


def test_a_server_that_ends_at_once_says_why(tmp_path: Path) -> None:
    command = [sys.executable, "-c", "raise SystemExit('no licence')"]
    with (
        pytest.raises(RuntimeError, match=r"(?s)ended with 1; its log ends with:.*no licence"),
        ServerProcess(command, tmp_path, lambda: False, {}),
    ):
        pass


OWNER = """
import sys, time
from pathlib import Path
sys.path.insert(0, "tests")
from helpers.server_process import ServerProcess
server = ServerProcess(["sleep", "600"], Path(sys.argv[1]), lambda: True, {})
server.start()
print(server.pid, flush=True)
time.sleep(600)
"""


@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGTERM])
def test_a_server_ends_with_who_started_it(how: signal.Signals, tmp_path: Path) -> None:
    command = [sys.executable, "-c", OWNER, str(tmp_path)]
    with subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, text=True) as owner:
        assert owner.stdout
        server = psutil.Process(int(owner.stdout.readline()))
        assert server.is_running()
        os.kill(owner.pid, how)
        owner.wait(30)
    end = time.monotonic() + 150
    while server.is_running() and server.status() != psutil.STATUS_ZOMBIE:
        assert time.monotonic() < end, "the server outlived its owner"
        time.sleep(0.05)
