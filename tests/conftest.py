"""What tests of several rooms are given, and how many of them run beside each other."""

from __future__ import annotations

import gc
import os
import signal
import sys
from collections.abc import Iterator
from typing import TYPE_CHECKING

import boto3
import pytest
from helpers.forked_writers import forked_writers
from helpers.s3 import S3_KEYS
from helpers.server_process import ServerProcess, answers, free_ports
from hypothesis import HealthCheck, settings

if TYPE_CHECKING:
    from onerank import Root

pytest_plugins = ["helpers.servers"]

# Before torch is imported; and for every process that tests start. The threads of its pool spin while they wait for one
# another: beside other work, a step of a small model took 53 ms of CPU and 330 ms; by one thread, 1.6 and 17 ms.
os.environ.setdefault("OMP_NUM_THREADS", "1")

# A shell ignores it for what it runs in the background, and so would all processes that tests start.
if signal.getsignal(signal.SIGINT) == signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)

# Before gcsfs is imported, by whichever test: unless told not to, it asks the real service about the kind of a bucket.
os.environ["GCSFS_EXPERIMENTAL_ZB_HNS_SUPPORT"] = "false"

# How long an example takes says how busy the machine is, not whether the code is right: that fails no test.
settings.register_profile("patient", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("patient")


@pytest.hookimpl(optionalhook=True)  # without pytest-xdist, one after the other
def pytest_xdist_auto_num_workers() -> int:
    """Of `-n auto`: one more than cores, since tests wait for servers and time-outs half of their time.

    Each takes a gigabyte, for torch twice and for servers of its own.
    """
    return min(len(os.sched_getaffinity(0)) + 1, 6)


LONGEST = (
    *("test_benchmarks_toy", "test_s3_faults", "test_agreement", "test_crash"),
    *("test_obstore_faults", "test_examples", "test_outages", "test_lost_hosts", "test_writer"),
)
"""These files begin first: the last of them, begun late, would keep one worker busy when all others are done.

In this order: those that wait most of their time, for faults of a store, begin beside such that compute.
"""


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    first = {name: place for place, name in enumerate(LONGEST)}
    items.sort(key=lambda item: first.get(item.path.stem, len(first)))  # stable: all else stays in the order of files


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Iterator[None]:
    """Imports and tests that are collected make no garbage to speak of: looking for some takes a fifth of the time."""
    gc.disable()
    try:
        return (yield)
    finally:
        gc.enable()


def pytest_collection_finish() -> None:
    """What was imported and collected is there to the end: a test that collects garbage, or starts a framework which
    does, need not look through a million objects for that."""
    gc.collect()
    gc.freeze()


@pytest.fixture(scope="module", autouse=True)
def writers(request: pytest.FixtureRequest) -> Iterator[None]:
    """Forked, but for the tests of the writer itself, and of what the project as a whole does."""
    if request.path.parent.name in ("writer", "project"):
        yield
    else:
        with forked_writers():
            yield


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Root]:
    """One for all tests of a file: the start of a writer takes ten times as long as a save and a load."""
    from onerank import opened  # and torch, which the process that hands out the tests does not need

    with opened(tmp_path_factory.mktemp("root")) as root:
        yield root


@pytest.fixture(scope="session")
def s3_endpoint(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    (port,) = free_ports(1)
    endpoint = f"http://127.0.0.1:{port}"
    command = [sys.executable, "-m", "moto.server", "-H", "127.0.0.1", "-p", str(port)]
    with ServerProcess(command, tmp_path_factory.mktemp("moto"), lambda: answers(port), {}):
        client = boto3.client("s3", endpoint_url=endpoint, region_name="us-east-1", **S3_KEYS)
        client.create_bucket(Bucket="bucket")
        yield endpoint
