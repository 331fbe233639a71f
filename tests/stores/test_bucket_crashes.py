"""A job that is killed at any of its requests to a bucket leaves whole steps, and nothing else that anybody sees.

Its requests are held back by a proxy, before the server sees one, or after the server has done it; then the job gets a
SIGKILL. What is there is told by Amazon's own client and by numpy.
"""

from __future__ import annotations

import signal
import time
from collections.abc import Iterator
from multiprocessing.connection import Connection
from pathlib import Path

import numpy as np
import pytest
from helpers.forkserver import context, start_server
from helpers.persists import OneRank
from helpers.servers import ObjectStorage, s3_client

from ckptlib.catalog.catalog import Catalog
from ckptlib.catalog.commit import Committer
from ckptlib.format.keys import SaveId, is_known
from ckptlib.stores import Store, io_limits, open_store
from ckptlib.testing import FaultProxy
from ckptlib.verify.root import verify_save

PATIENCE_S = 150.0

PART_NBYTES = 5 << 20
"""The least that S3 takes."""


def save_twice(url: str, options: dict[str, object], directory: str, told: Connection) -> None:
    """The second step when it is told to. In a process of its own."""
    io_limits.PART_NBYTES = PART_NBYTES
    job = OneRank(Path(directory), open_store(url, options), "planes")
    for step in (1, 2):
        told.recv()
        job.save(state(step))
        told.send("saved")


def state(step: int) -> dict[str, np.ndarray]:
    """Of several parts; half of it stays the same."""
    frozen = np.random.default_rng(0).standard_normal(1 << 18).astype(np.float32)
    trained = np.random.default_rng(step).standard_normal(7 << 18).astype(np.float32)
    noise = np.random.default_rng(-step % 1000).integers(0, 256, 6 << 20, dtype=np.uint8)
    return {"frozen": frozen, "noise": noise, "trained": trained}


class Job:
    """The first step is committed; the second is saved when it is told to."""

    def __init__(self, storage: ObjectStorage, proxy: FaultProxy, directory: Path) -> None:
        directory.mkdir()
        self.url, self.proxy = storage.url(), proxy
        self._told, told = context.Pipe()
        start_server()
        given = (self.url, storage.options(proxy.url), str(directory), told)
        self.process = context.Process(target=save_twice, args=given)
        self.process.start()
        told.close()
        self.go_on()
        self.wait()
        self.num_before = len(proxy.requests)

    def wait(self) -> None:
        assert self._told.poll(PATIENCE_S)
        assert self._told.recv() == "saved"

    def go_on(self) -> None:
        self._told.send("go")

    def kill(self) -> None:
        self.process.kill()
        self.process.join()
        assert self.process.exitcode == -signal.SIGKILL


@pytest.fixture
def proxy(storage: ObjectStorage) -> Iterator[FaultProxy]:
    with FaultProxy(upstream=storage.endpoint) as proxy:
        yield proxy


@pytest.fixture(params=["s3", pytest.param("juicefs", marks=pytest.mark.slow)])
def storage(request: pytest.FixtureRequest) -> ObjectStorage:
    found: ObjectStorage = request.getfixturevalue(request.param)
    return found


def objects(storage: ObjectStorage, url: str) -> dict[str, int]:
    """Sizes by key, as Amazon's client tells them."""
    client = s3_client(storage)
    prefix = url.rpartition("/")[2] + "/"
    pages = client.get_paginator("list_objects_v2").paginate(Bucket=storage.bucket, Prefix=prefix)
    return {found["Key"][len(prefix) :]: found["Size"] for page in pages for found in page.get("Contents", ())}


def uploads(storage: ObjectStorage, url: str) -> list[str]:
    found = s3_client(storage).list_multipart_uploads(Bucket=storage.bucket, Prefix=url.rpartition("/")[2] + "/")
    return [upload["Key"] for upload in found.get("Uploads", ())]


def check(storage: ObjectStorage, url: str, directory: Path) -> list[int]:
    """Every step that is listed is whole and gives back what was saved; packs are whole, too, committed or not."""
    store = open_store(url, storage.options())
    catalog = Catalog(store)
    saves = catalog.saves()
    found = objects(storage, url)
    assert sorted(save.manifest_key for save in saves) == sorted(key for key in found if key.startswith("steps/"))
    for save in saves:
        assert list(verify_save(catalog, save)) == []
        (name,) = catalog.manifest(save).parts
        part = catalog.part(name)
        assert all(found[pack.key] == pack.nbytes for pack in part.packs)
        assert read(directory, store, save) == {key: value.tobytes() for key, value in state(save.step).items()}
    return [save.step for save in saves]


def read(directory: Path, store: Store, save: SaveId) -> dict[str, bytes]:
    job = OneRank.__new__(OneRank)
    job.directory, job.store, job.catalog = directory, store, Catalog(store)
    (name,) = job.catalog.manifest(save).parts
    return job.read(job.catalog.part(name))


def num_requests(storage: ObjectStorage, directory: Path) -> int:
    """Of a save that nothing befalls."""
    with FaultProxy(upstream=storage.endpoint) as proxy:
        job = Job(storage, proxy, directory)
        job.go_on()
        job.wait()
        job.process.join()
        assert check(storage, job.url, directory) == [1, 2]
        assert uploads(storage, job.url) == []
        return len(proxy.requests) - job.num_before


@pytest.mark.parametrize(
    ("faults", "every"),
    [
        (("blackhole", "hang_reply"), 9),
        pytest.param(("blackhole", "hang_reply"), 1, marks=pytest.mark.slow),
        pytest.param(("hang_reply", "blackhole"), 1, marks=pytest.mark.slow),
    ],
)
@pytest.mark.timeout(1200)
def test_killed_at_every_request_of_a_save(
    storage: ObjectStorage, tmp_path: Path, faults: tuple[str, str], every: int
) -> None:
    total = num_requests(storage, tmp_path / "quiet")
    assert total > 8
    for n in sorted({*range(0, total, every), total - 2}):  # the last but one puts the manifest
        fault = faults[n % 2]
        with FaultProxy(upstream=storage.endpoint) as proxy:
            job = Job(storage, proxy, tmp_path / str(n))
            proxy.rules([{"fault": fault, "nth": n}])
            job.go_on()
            deadline = time.monotonic() + PATIENCE_S
            while not any(request.fault == fault for request in proxy.requests):
                assert time.monotonic() < deadline, f"request {n} of {total} was not made"
                assert job.process.exitcode is None
                time.sleep(0.005)
            job.kill()
        listed = check(storage, job.url, tmp_path / str(n))
        assert listed in ([[1]] if n < total - 2 else [[1], [1, 2]])
        store = open_store(job.url, storage.options())
        store.clean(time.time() + 3600, is_known)
        assert uploads(storage, job.url) == []
        assert [save.step for save in Catalog(store).saves()] == listed


def test_a_commit_that_was_answered_by_nobody_is_made_once(storage: ObjectStorage, tmp_path: Path) -> None:
    """Another committer finds the step there, and does not make it again."""
    with FaultProxy(upstream=storage.endpoint) as proxy:
        job = Job(storage, proxy, tmp_path / "job")
        proxy.rules([{"fault": "hang_reply", "match": "^PutObject .*/steps/"}])
        job.go_on()
        deadline = time.monotonic() + PATIENCE_S
        while not any(request.fault for request in proxy.requests):
            assert time.monotonic() < deadline
            time.sleep(0.005)
        job.kill()
    assert check(storage, job.url, tmp_path / "job") == [1, 2]
    before = objects(storage, job.url)
    catalog = Catalog(open_store(job.url, storage.options()))
    save = catalog.saves()[-1]
    Committer(catalog).commit_when_whole(save, 1, lambda: 10.0)
    assert objects(storage, job.url) == before
