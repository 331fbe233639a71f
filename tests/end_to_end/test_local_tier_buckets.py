"""A local tier before a real bucket, through both clients: hosts that are lost, a bucket that is away, full disks.

Two ranks with a disk each. What is in the bucket is read by Amazon's own client and an oracle.
"""

from __future__ import annotations

import shutil
import time
from collections.abc import Iterator, Mapping
from pathlib import Path

import pytest
from helpers.limits import short_limits
from helpers.servers import ObjectStorage
from workers import crash_jobs
from workers.bucket_bench import BucketBench
from workers.crash_jobs import train, train_when_told

from ckptlib.testing import FaultProxy

MANY_STEPS = 100
"""Several saves."""


class Disks:
    """Of the hosts of the ranks."""

    def __init__(self, directory: Path) -> None:
        self.path = str(directory / "disk-{rank}")

    def of(self, rank: int) -> Path:
        return Path(self.path.replace("{rank}", str(rank)))

    def objects(self) -> Mapping[str, bytes]:
        """Packs and parts of all of them, by key."""
        found = {}
        for rank in (0, 1):
            for path in self.of(rank).glob("pa*s/*/*"):
                found[str(path.relative_to(self.of(rank)))] = path.read_bytes()
        return found

    def steps(self, rank: int) -> list[int]:
        return sorted(int(path.name.split("-")[0]) for path in self.of(rank).glob("parts/*"))

    def whole(self) -> list[int]:
        """Those of which both ranks have their share."""
        shares = [
            {int(path.parent.name.split("-")[0]) for path in self.of(rank).glob("parts/*/*-ok-*")} for rank in (0, 1)
        ]
        return sorted(set.intersection(*shares))


@pytest.fixture
def disks(tmp_path: Path) -> Disks:
    return Disks(tmp_path)


@pytest.fixture(params=["s3fs", pytest.param("obstore", marks=pytest.mark.slow)])
def bench(s3: ObjectStorage, tmp_path: Path, request: pytest.FixtureRequest) -> Iterator[BucketBench]:
    if request.param == "obstore":
        pytest.importorskip("obstore")
    with FaultProxy(s3.endpoint) as proxy:
        yield BucketBench(s3, proxy, tmp_path, request.param, short_limits(RETRY_S=3.0))
        crash_jobs.end_all(tmp_path)


def trained(bench: BucketBench, disks: Disks, steps: int) -> int:
    """Two ranks that restore, and save so many steps more; each is committed. Returns the step they came from."""
    first, second = bench.run(train, local=disks.path, steps=steps)
    for told in (first, second):
        assert [line["what"] for line in told] == ["restored", *["saving", "committed"] * steps, "closed"], told
    assert first[0]["step"] == second[0]["step"]
    return int(first[0]["step"])


def same_bytes(bench: BucketBench, disks: Disks) -> int:
    """How many objects both disks and bucket have; each has the same bytes in both."""
    objects, keys = disks.objects(), bench.keys()
    both = [key for key in keys if key in objects]
    assert all(bench.bytes_of(key) == objects[key] for key in both)
    return len(both)


def until_on_disk(disks: Disks, step: int) -> None:
    deadline = time.monotonic() + crash_jobs.WAIT_S
    while not all(step in disks.steps(rank) for rank in (0, 1)):
        assert time.monotonic() < deadline
        time.sleep(0.02)


LOST = {
    "before": {"fault": "503", "match": "^PutObject .*/packs/"},
    "in": {"fault": "blackhole", "match": "^PutObject .*/parts/"},
    "after": None,
}


@pytest.mark.parametrize("when", ["in", "before", "after"])
@pytest.mark.slow
def test_a_host_is_lost(bench: BucketBench, disks: Disks, when: str) -> None:
    """Before its share is drained, while it is, or after that: all ranks go on from one step, which is whole."""
    assert trained(bench, disks, 2) == 0
    assert same_bytes(bench, disks) >= 4
    gates = bench.directory / "gates"
    gates.mkdir()
    (gates / "3").write_text("sleep")
    jobs = bench.start(2, train_when_told, gates=str(gates), local=disks.path)
    for job in jobs:
        assert job.wait_for("restored")["step"] == 2
        if when != "after" and job is jobs[0]:
            bench.breaks(LOST[when] or {})
    until_on_disk(disks, 3)
    bench.until(lambda: bench.committed() == 3 if when == "after" else bench.num_met() > 1)
    bench.kill()
    bench.breaks()
    shutil.rmtree(disks.of(1))
    if when == "after":
        shutil.rmtree(disks.of(0))  # all ranks come to other hosts
    expected = 3 if when == "after" else 2
    assert trained(bench, disks, 1) == expected
    assert bench.listed() == [*range(1, expected + 2)]
    assert same_bytes(bench, disks) >= 2


def train_on(bench: BucketBench) -> None:
    """Until each rank has made so many steps more."""
    first = bench.steps()
    bench.until(lambda: all(now - then > MANY_STEPS for then, now in zip(first, bench.steps(), strict=True)))


def away(bench: BucketBench, disks: Disks, at_least_s: float, **options: object) -> None:
    """The bucket, for so long at least; training goes on, and what was to be drained is drained when it is back."""
    bench.start(local=disks.path, **options)
    bench.until(lambda: bench.committed() > 0)
    began, steps = time.monotonic(), bench.steps()
    bench.breaks({"fault": "down"})
    bench.until(lambda: bench.said("stays on local disks") > 0)
    while time.monotonic() < began + at_least_s:
        time.sleep(min(10.0, at_least_s))
        now = bench.steps()
        assert all(then < later for then, later in zip(steps, now, strict=True)), "training stands still"
        steps = now
    train_on(bench)  # what was under way as it went has come to its end
    before = bench.committed()
    train_on(bench)
    assert bench.committed() == before
    waiting = {step for step in disks.steps(0) if step > before}
    bench.breaks()
    bench.until(lambda: bench.committed() >= min(waiting), 120.0)
    bench.until(lambda: bench.committed() > max(waiting), 120.0)
    bench.kill()  # not in the middle of a commit only: what is listed is whole
    assert min(waiting) in bench.listed(), "what had been taken for draining, and stayed on the disks for that"
    assert same_bytes(bench, disks) >= 2


@pytest.mark.slow
def test_the_bucket_is_away(bench: BucketBench, disks: Disks) -> None:
    away(bench, disks, 0.0)
    assert len(disks.steps(0)) <= 8
    newest = max(*disks.whole(), bench.committed())
    assert trained(bench, disks, 1) >= newest
    assert same_bytes(bench, disks) >= 2


@pytest.mark.slow
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("bench", ["s3fs"], indirect=True)
def test_the_bucket_is_away_for_half_an_hour(bench: BucketBench, disks: Disks) -> None:
    away(bench, disks, 1800.0, pause_s=0.2)
