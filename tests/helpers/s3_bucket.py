"""A store on a real server behind a proxy that breaks requests, and an oracle that knows the server alone."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import pytest
from helpers.servers import ObjectStorage, s3_client

from ckptlib.stores import Store, io_limits, open_store
from ckptlib.stores.fault_proxy import Request
from ckptlib.testing import FaultProxy

PART_NBYTES = 5 << 20
"""The least that S3 takes."""

IDLE_S = 2.0
RETRY_S = 30.0


def scale_limits(monkeypatch: pytest.MonkeyPatch, idle_s: float = IDLE_S, retry_s: float = RETRY_S) -> None:
    """So that a fault costs seconds, and an upload is small."""
    monkeypatch.setattr(io_limits, "IDLE_S", idle_s)
    monkeypatch.setattr(io_limits, "RETRY_S", retry_s)
    monkeypatch.setattr(io_limits, "SLOWEST_BPS", 1e8)
    monkeypatch.setattr(io_limits, "PART_NBYTES", PART_NBYTES)


class Bucket:
    """A store behind a proxy, and what is in the bucket whatever the store says."""

    def __init__(self, storage: ObjectStorage, proxy: FaultProxy) -> None:
        self.storage, self.proxy = storage, proxy
        self.url = storage.url()
        self.store: Store = open_store(self.url, storage.options(proxy.url))
        self._client: Any = s3_client(storage)
        self._num_seen = 0
        self._prefix = self.url.split("/", 3)[3] + "/"

    def breaks(self, match: str, fault: str, count: int | None = None, **more: Any) -> None:
        """From now on."""
        rule: dict[str, Any] = {"match": match, "fault": fault, **more}
        self.proxy.rules([rule if count is None else {**rule, "count": count}])  # type: ignore[list-item]

    def heals(self) -> None:
        self.proxy.rules([])

    def empty(self) -> None:
        """As for a new test: no rules, no objects, no uploads, no requests so far."""
        self.heals()
        for key in self.listed():
            self._client.delete_object(Bucket=self.storage.bucket, Key=self._prefix + key)
        self.store.clean(time.time() + 60, lambda key: True)
        self._num_seen = len(self.proxy.requests)

    def requests(self) -> list[Request]:
        """All that the proxy saw."""
        return self.proxy.requests[self._num_seen :]

    def listed(self) -> Mapping[str, int]:
        """Sizes by key."""
        found = self._client.list_objects_v2(Bucket=self.storage.bucket, Prefix=self._prefix).get("Contents", [])
        return {entry["Key"].removeprefix(self._prefix): entry["Size"] for entry in found}

    def bytes_of(self, key: str) -> bytes:
        return bytes(self._client.get_object(Bucket=self.storage.bucket, Key=self._prefix + key)["Body"].read())

    def uploads(self) -> list[str]:
        """Keys of those that are neither complete nor aborted."""
        found = self._client.list_multipart_uploads(Bucket=self.storage.bucket, Prefix=self._prefix)
        return sorted(upload["Key"].removeprefix(self._prefix) for upload in found.get("Uploads", []))

    def begin_upload(self, key: str) -> None:
        """As a writer that crashes leaves it."""
        self._client.create_multipart_upload(Bucket=self.storage.bucket, Key=self._prefix + key)


@contextmanager
def bucket_of(storage: ObjectStorage) -> Iterator[Bucket]:
    with FaultProxy(storage.endpoint) as proxy:
        bucket = Bucket(storage, proxy)
        with bucket.store:
            yield bucket


@contextmanager
def at_most(seconds: float) -> Iterator[None]:
    """What is inside takes no longer. Only for what would take for ever or several times as long otherwise."""
    began = time.monotonic()
    yield
    assert time.monotonic() - began < seconds
