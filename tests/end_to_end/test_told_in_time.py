"""A bucket that swallows a put, never ends a listing, or refuses for a while: who trains is told before two idle limits
are over, and no step waits for a request.

How long is measured by `benchmarks bucket_faults`; here time only tells what waits for a request from what does not.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Iterator, Mapping, Sequence
from itertools import pairwise
from pathlib import Path

import pytest
from helpers.limits import short_limits
from helpers.servers import ObjectStorage
from workers import crash_jobs
from workers.bucket_bench import BucketBench

from ckptlib.testing import FaultProxy

IDLE_S = 3.0
"""Long, beside what a step takes on a busy machine; a step that waits for a request takes as long."""

DEADLINE_S = 90.0
"""Of a save: no save fails before the fault is over."""

STEP_S = 0.02
FREE_STEPS = 20
SETTLED = 4
"""Steps behind a fault, after which none is under way that has met it: what waits is told of once for a step."""

TOLD, FAILED = "has not answered", "earlier steps are untouched"
LATEST = 2
"""How many times later than two idle limits it may be told, on a busy machine."""

PACKS, PARTS = "^PutObject .*/packs/", "^PutObject .*/parts/"

FAULTS: Sequence[tuple[str, Mapping[str, object]]] = (
    (f"{TOLD} ", {"fault": "503", "match": ""}),
    (f"{TOLD} ", {"fault": "500", "match": ""}),
    (f"{TOLD} put packs/", {"fault": "blackhole", "match": PACKS}),
    (f"{TOLD} put packs/", {"fault": "stall_up", "match": PACKS, "after": 1000}),
    (f"{TOLD} put packs/", {"fault": "reset_up", "match": PACKS, "after": 1000}),
    (f"{TOLD} put parts/", {"fault": "blackhole", "match": PARTS}),
    (f"{TOLD} get parts/", {"fault": "stall_down", "match": "^GetObject .*/parts/", "after": 10}),
    (f"{TOLD} list ", {"fault": "hang_reply", "match": "^List"}),
)
"""What is told, and of which fault."""


@pytest.fixture(params=["s3fs", pytest.param("obstore", marks=pytest.mark.slow)])
def bench(s3: ObjectStorage, tmp_path: Path, request: pytest.FixtureRequest) -> Iterator[BucketBench]:
    if request.param == "obstore":
        pytest.importorskip("obstore")
    with FaultProxy(s3.endpoint) as proxy:
        yield BucketBench(s3, proxy, tmp_path, request.param, short_limits(IDLE_S))
        crash_jobs.end_all(tmp_path)


def step_times(bench: BucketBench, since: float) -> list[float]:
    """Of all ranks, by the clock that their trainers share with this process."""
    found: list[float] = []
    for job in bench.jobs:
        at = [line["at"] for line in job.told() if line["what"] == "step" and line["at"] >= since]
        found += [later - then for then, later in pairwise(at)]
    return found


@pytest.mark.slow
def test_told_within_two_idle_limits_and_no_step_waits(bench: BucketBench) -> None:
    began = time.monotonic()
    bench.start(save_deadline=DEADLINE_S, pause_s=STEP_S)
    bench.until(lambda: bench.committed() > 0)
    bench.until(lambda: min(bench.steps()) > 20)
    before = step_times(bench, began)
    for text, rule in FAULTS:
        goes_through(bench, text, rule, before)
    last = bench.stop()
    assert bench.listed()[-1] == last


def goes_through(bench: BucketBench, text: str, rule: Mapping[str, object], before: Sequence[float]) -> None:
    told, seen, began = said(bench, text), len(bench.proxy.requests), time.monotonic()
    bench.breaks(rule)
    bench.until(lambda: said(bench, text) > told)
    met = min(request.started for request in bench.proxy.requests[seen:] if request.fault is not None)
    assert time.time() - met < LATEST * 2 * IDLE_S
    unstalled(before, step_times(bench, began))
    assert said(bench, FAILED) == 0, "it is told long before anything fails"
    bench.breaks()
    num = len(bench.keys("steps/"))
    bench.until(lambda: len(bench.keys("steps/")) >= num + SETTLED)
    assert said(bench, FAILED) == 0, "and nothing does, where it passes"


def said(bench: BucketBench, text: str) -> int:
    return sum(bench.said(text, rank) for rank in range(len(bench.jobs)))


def unstalled(before: Sequence[float], during: Sequence[float]) -> None:
    assert len(during) > FREE_STEPS
    assert max(during) < IDLE_S, "a step has waited for a request"
    assert statistics.median(during) < 2 * statistics.median(before)
