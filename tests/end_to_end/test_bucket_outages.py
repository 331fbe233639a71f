"""Training on a bucket whose requests meet faults that last: it steps on, is told, and commits again when they end.

Two ranks, each a trainer and a writer; a real server behind a proxy. What is in the bucket is read by an oracle.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator, Mapping
from pathlib import Path

import pytest
from helpers.limits import short_limits
from helpers.servers import ObjectStorage, start_seaweedfs
from workers import crash_jobs
from workers.bucket_bench import BucketBench

from ckptlib.testing import FaultProxy

FREE_STEPS = 10
"""More than there would be if one of them waited for what is never answered."""

RETRY_S = 3.0
DEADLINE_S = 12.0
"""Of a save: what fails by itself does so before, and a writer that is started again has time to."""

SLOW_STEP_S = 0.1
"""For minutes: others use this machine, too."""

PACKS, PARTS, MANIFESTS = ("^PutObject .*/packs/", "^PutObject .*/parts/", "^PutObject .*/steps/")
READS, LISTS = "^GetObject .*/parts/", "^List"
FAILED = "earlier steps are untouched"


def lasting(fault: str, match: str, **more: object) -> Mapping[str, object]:
    return {"fault": fault, "match": match, **more}


def up(*kinds: str) -> list[Mapping[str, object]]:
    return [lasting(kind, PACKS, **({"after": 1000} if kind.endswith("_up") else {})) for kind in kinds]


FAULTS: dict[str, list[Mapping[str, object]]] = {
    "some": [*up("stall_up"), lasting("503", "")],
    "stalls": [*up("blackhole", "hang_reply"), lasting("blackhole", PARTS), lasting("hang_reply", LISTS)],
    "refusals": [*up("503", "500", "429", "refuse", "403")],
    "breaks": [*up("reset_up", "flip_up", "lost_reply"), lasting("reset_up", PARTS)],
    "down": [lasting(kind, READS) for kind in ("stall_down", "reset_down", "truncate", "flip_down", "500")],
}


@pytest.fixture(params=["s3fs", pytest.param("obstore", marks=pytest.mark.slow)])
def bench(s3: ObjectStorage, tmp_path: Path, request: pytest.FixtureRequest) -> Iterator[BucketBench]:
    if request.param == "obstore":
        pytest.importorskip("obstore")
    with FaultProxy(s3.endpoint) as proxy:
        yield BucketBench(s3, proxy, tmp_path, request.param, short_limits(RETRY_S=RETRY_S))
        crash_jobs.end_all(tmp_path)


def goes_on(bench: BucketBench, rule: Mapping[str, object]) -> None:
    """Steps are taken while it lasts, a save fails and that is told, and later ones are committed when it is over."""
    failures, met, before = bench.said(FAILED), bench.num_met(), bench.keys("steps/")
    bench.breaks(rule)
    bench.until(lambda: bench.num_met() > met)
    steps = bench.steps()
    bench.until(lambda: bench.said(FAILED) > failures)
    bench.until(lambda: all(now - then >= FREE_STEPS for then, now in zip(steps, bench.steps(), strict=True)))
    assert {*before} <= {*bench.keys("steps/")}
    bench.breaks()
    newest = bench.committed()
    bench.until(lambda: bench.committed() > newest)


@pytest.mark.slow
@pytest.mark.parametrize("faults", FAULTS)
def test_training_goes_on_through_faults_that_last(bench: BucketBench, faults: str) -> None:
    bench.start(save_deadline=DEADLINE_S)
    bench.until(lambda: bench.committed() > 0)
    for rule in FAULTS[faults]:
        goes_on(bench, rule)
    last = bench.stop()
    assert bench.listed()[-1] == last
    assert list(bench.uploads()) == []


@pytest.mark.slow
def test_a_commit_whose_answer_is_held_back_is_a_whole_step_whatever_is_told(bench: BucketBench) -> None:
    bench.start(save_deadline=DEADLINE_S)
    bench.until(lambda: bench.committed() > 0)
    newest, met, steps = bench.committed(), bench.num_met(), bench.steps()
    bench.breaks(lasting("hang_reply", MANIFESTS))
    bench.until(lambda: bench.num_met() > met + 1)
    bench.until(lambda: all(now - then >= FREE_STEPS for then, now in zip(steps, bench.steps(), strict=True)))
    bench.breaks()
    assert bench.committed() > newest, "the server has it"
    newest = bench.committed()
    bench.until(lambda: bench.committed() > newest)
    last = bench.stop()
    assert bench.listed()[-1] == last


@pytest.mark.slow
def test_a_server_is_killed_in_the_middle_of_an_upload_and_comes_back(tmp_path: Path) -> None:
    """With what it had, on the same port."""
    with start_seaweedfs(tmp_path) as storage, FaultProxy(storage.endpoint) as proxy:
        bench = BucketBench(storage, proxy, tmp_path, limits=short_limits(RETRY_S=RETRY_S))
        try:
            server_killed(storage, bench)
        finally:
            crash_jobs.end_all(tmp_path)


def server_killed(storage: ObjectStorage, bench: BucketBench) -> None:
    bench.start(save_deadline=DEADLINE_S)
    bench.until(lambda: len(bench.keys("steps/")) > 1)
    before = bench.listed()
    met, steps = bench.num_met(), bench.steps()
    bench.breaks(lasting("stall_up", PACKS, after=1000))
    bench.until(lambda: bench.num_met() > met)
    storage.process.kill()
    bench.breaks()
    failures = bench.said(FAILED)
    bench.until(lambda: bench.said(FAILED) > failures)
    bench.until(lambda: all(now - then >= FREE_STEPS for then, now in zip(steps, bench.steps(), strict=True)))
    storage.process.start()
    assert {*before} <= {*bench.listed()}
    newest = bench.committed()
    bench.until(lambda: bench.committed() > newest)
    last = bench.stop()
    assert bench.listed()[-1] == last


@pytest.mark.slow
@pytest.mark.timeout(1200)
def test_ten_minutes_of_503(s3: ObjectStorage, tmp_path: Path) -> None:
    """With the limits that users have: neither the training nor its writers end, and nothing is asked of anybody."""
    with FaultProxy(s3.endpoint) as proxy:
        bench = BucketBench(s3, proxy, tmp_path)
        bench.start(pause_s=SLOW_STEP_S)
        bench.until(lambda: bench.committed() > 0)
        before, steps = bench.listed(), bench.steps()
        bench.breaks(lasting("503", ""))
        over = threading.Event()
        threading.Timer(600.0, over.set).start()
        while not over.wait(10.0):
            now = bench.steps()
            assert all(then < later for then, later in zip(steps, now, strict=True)), "no step in ten seconds"
            steps = now
        assert bench.said(FAILED) + bench.said("no save for two intervals") > 0
        bench.breaks()
        newest = bench.committed()
        bench.until(lambda: bench.committed() > newest, 300.0)
        last = bench.stop()
        listed = bench.listed()
        assert listed[-1] == last
        assert {*before} <= {*listed}
        crash_jobs.end_all(tmp_path)
