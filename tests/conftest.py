"""What tests of several rooms are given."""

from __future__ import annotations

import socket
import subprocess
import sys
import time
from collections.abc import Iterator

import boto3
import pytest
from helpers.s3 import S3_KEYS


def _answers(port: int) -> bool:
    with socket.socket() as probe:
        return probe.connect_ex(("127.0.0.1", port)) == 0


pytest_plugins = ["helpers.servers"]


@pytest.fixture(scope="session")
def s3_endpoint() -> Iterator[str]:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    command = [sys.executable, "-m", "moto.server", "-H", "127.0.0.1", "-p", str(port)]
    server = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        endpoint = f"http://127.0.0.1:{port}"
        while not _answers(port):
            assert server.poll() is None, "moto's server did not start"
            time.sleep(0.05)
        client = boto3.client("s3", endpoint_url=endpoint, region_name="us-east-1", **S3_KEYS)
        client.create_bucket(Bucket="bucket")
        yield endpoint
    finally:
        server.terminate()
        server.wait(30)
