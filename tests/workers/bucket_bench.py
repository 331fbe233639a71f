"""Trainers that save to a bucket behind a proxy that breaks requests; and what is in the bucket, whatever they say."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from helpers.limits import hand_limits_on
from helpers.servers import ObjectStorage, s3_client
from workers import crash_jobs
from workers.crash_jobs import NUMEL, Job, Teller, holds, start
from workers.crash_oracle import read_root
from workers.outage_jobs import step_on

from ckptlib.testing import FaultProxy


def with_limits(tell: Teller, rank: int, *, job: Callable[..., None], limits: Mapping[str, str], **more: Any) -> None:
    """A rank whose writers have other limits of requests; see `helpers.limits`."""
    os.environ.update(limits)
    hand_limits_on()
    job(tell, rank, **more)


class BucketBench:
    """A root in a bucket, and the ranks of one job after the other."""

    def __init__(
        self,
        storage: ObjectStorage,
        proxy: FaultProxy,
        directory: Path,
        client: str = "s3fs",
        limits: Mapping[str, str] | None = None,
    ) -> None:
        self.storage, self.proxy, self.directory = storage, proxy, directory
        self._limits = limits or {}
        self.url = storage.url()
        self.options = {"client": client, **storage.options(proxy.url)}
        self.jobs: list[Job] = []
        self._prefix = self.url.split("/", 3)[3] + "/"
        self._client: Any = s3_client(storage)

    def start(self, size: int = 2, function: Callable[..., None] = step_on, **kwargs: Any) -> list[Job]:
        given = {"url": self.url, "storage_options": self.options, "limits": self._limits, **kwargs}
        self.jobs = start(with_limits, self.directory, size, job=function, **given)
        return self.jobs

    def run(self, function: Callable[..., None], **kwargs: Any) -> list[list[dict[str, Any]]]:
        """What each of two ranks told; they must end well."""
        jobs = self.start(2, function, **kwargs)
        assert [job.join() for job in jobs] == [0, 0], [job.told() for job in jobs]
        for job in jobs:
            job.join_writers()
        return [job.told() for job in jobs]

    def breaks(self, *rules: Mapping[str, object]) -> None:
        """From now on; none: no more."""
        self.proxy.rules([*rules])  # type: ignore[list-item]

    def num_met(self) -> int:
        """How many requests met a fault."""
        return sum(request.fault is not None for request in self.proxy.requests)

    def until(self, true: Callable[[], bool], limit_s: float = crash_jobs.WAIT_S) -> None:
        deadline = time.monotonic() + limit_s
        while not true():
            assert time.monotonic() < deadline, [job.log()[-3000:] for job in self.jobs]
            assert all(job.process.is_alive() for job in self.jobs), [job.told()[-1:] for job in self.jobs]
            time.sleep(0.02)

    def steps(self) -> list[int]:
        """The last one of each rank."""
        return [max((t["step"] for t in job.told() if t["what"] == "step"), default=0) for job in self.jobs]

    def said(self, text: str, rank: int = 0) -> int:
        """In how many lines of its log."""
        return sum(text in line for line in self.jobs[rank].log().splitlines())

    def stop(self) -> int:
        """All ranks save once more and end, as such that are not done. Returns that step."""
        os.kill(self.jobs[-1].pid, signal.SIGTERM)
        assert [job.join() for job in self.jobs] == [75] * len(self.jobs), [job.told()[-1] for job in self.jobs]
        for job in self.jobs:
            job.join_writers()
        (step,) = {job.told()[-1]["step"] for job in self.jobs}
        return int(step)

    def kill(self) -> None:
        """Trainers and writers, as a host that loses its power."""
        for job in self.jobs:
            job.kill_writers()
            job.kill()
            job.join()
            job.join_writers()

    # the bucket, by Amazon's own client

    def keys(self, prefix: str = "") -> list[str]:
        pages = self._client.get_paginator("list_objects_v2").paginate(
            Bucket=self.storage.bucket, Prefix=self._prefix + prefix
        )
        return [found["Key"].removeprefix(self._prefix) for page in pages for found in page.get("Contents", ())]

    def committed(self) -> int:
        """The last step that is there."""
        return max((step_of(key) for key in self.keys("steps/")), default=0)

    def uploads(self) -> Sequence[object]:
        found = self._client.list_multipart_uploads(Bucket=self.storage.bucket, Prefix=self._prefix)
        return found.get("Uploads", ())

    def bytes_of(self, key: str) -> bytes:
        return bytes(self._client.get_object(Bucket=self.storage.bucket, Key=self._prefix + key)["Body"].read())

    def listed(self) -> list[int]:
        """The steps that are there; each is whole, and is the state of its step. Read from a copy of the bucket."""
        copy = self.directory / "copy"
        for key in self.keys():
            path = copy / key
            if not path.exists():
                path.parent.mkdir(parents=True, exist_ok=True)
                path.write_bytes(self.bytes_of(key))
        found = read_root(copy)
        assert all(holds(step, NUMEL) for step in found)
        return [step.number for step in found]


def step_of(key: str) -> int:
    return int(key.split("/")[1].split("-")[0])
