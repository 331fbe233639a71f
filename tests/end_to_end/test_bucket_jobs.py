"""Whole jobs on buckets of real servers: killed, resumed, on fewer ranks, and through faults that pass.

The oracle is the same training on a local disk that nothing befell: bit for bit the same weights.
"""

from __future__ import annotations

import json
import signal
from collections.abc import Sequence
from pathlib import Path

import pytest
from helpers.limits import short_limits
from helpers.servers import ObjectStorage, s3_client
from launch import forked
from places import WORKERS

from ckptlib.catalog.catalog import Catalog
from ckptlib.stores import open_store
from ckptlib.testing import FaultProxy
from ckptlib.verify.root import verify_save

TIMEOUT_S = 150.0
UNTIL = 12


@pytest.fixture(params=["s3", pytest.param("juicefs", marks=pytest.mark.slow)])
def storage(request: pytest.FixtureRequest) -> ObjectStorage:
    found: ObjectStorage = request.getfixturevalue(request.param)
    return found


@pytest.fixture(scope="module")
def weights(tmp_path_factory: pytest.TempPathFactory) -> str:
    """What the training comes to when nothing befalls it."""
    directory = tmp_path_factory.mktemp("oracle")
    return train(directory, str(directory / "root"), {}, 2, UNTIL)[1]


def train(directory: Path, url: str, options: object, num_ranks: int, until: int) -> tuple[int, str]:
    """The step that it resumed from, and a digest of the weights in the end."""
    result = directory / "result.json"
    order = json.dumps([url, options, until, None, str(result)])
    codes, output = forked(WORKERS / "bucket_job.py", num_ranks, order, timeout_s=TIMEOUT_S, variables=short_limits())
    assert codes == [0] * num_ranks, output[-20000:]
    found = json.loads(result.read_text())
    return found["start"], found["weights"]


def killed(url: str, options: object, num_ranks: int, at: int) -> None:
    order = json.dumps([url, options, UNTIL, at, "/nowhere"])
    codes, output = forked(WORKERS / "bucket_job.py", num_ranks, order, timeout_s=TIMEOUT_S)
    assert -signal.SIGKILL in codes, output[-20000:]


def steps_there(storage: ObjectStorage, url: str) -> list[int]:
    """By Amazon's own client; each is whole, and nothing half-sent lies around."""
    client, prefix = s3_client(storage), url.rpartition("/")[2]
    found = client.list_objects_v2(Bucket=storage.bucket, Prefix=f"{prefix}/steps/").get("Contents", ())
    uploads = client.list_multipart_uploads(Bucket=storage.bucket, Prefix=f"{prefix}/").get("Uploads", ())
    assert [*uploads] == []
    with open_store(url, storage.options()) as store:
        catalog = Catalog(store)
        for save in catalog.saves():
            assert [*verify_save(catalog, save)] == []
    return sorted(int(entry["Key"].rpartition("/")[2].split("-")[0]) for entry in found)


def test_killed_resumed_and_resharded(storage: ObjectStorage, tmp_path: Path, weights: str) -> None:
    url, options = storage.url(), storage.options()
    killed(url, options, 2, at=7)
    start, _ = train(tmp_path, url, options, 2, 9)
    assert start >= 4, "step 4 was committed before the kill, or its writers finished it"
    assert steps_there(storage, url) == [8, 9]
    assert train(tmp_path, url, options, 1, UNTIL) == (9, weights)
    assert steps_there(storage, url) == [10, 12]


FAULTS: dict[str, Sequence[dict[str, object]]] = {
    "swallowed": [
        {"match": "^PutObject .*/packs/", "fault": "blackhole", "nth": 1},
        {"match": "^PutObject .*/packs/", "fault": "stall_up", "nth": 4, "after": 1000},
        {"match": "^PutObject .*/steps/", "fault": "hang_reply", "nth": 1},
        {"match": "^GetObject .*/parts/", "fault": "stall_down", "nth": 1},
    ],
    "refused": [
        {"fault": "503", "nth": 20, "count": 5},
        {"fault": "500", "nth": 40, "count": 5},
        {"fault": "429", "nth": 60, "count": 2},
        {"fault": "refuse", "nth": 70, "count": 2},
    ],
    "broken": [
        {"match": "^PutObject .*/packs/", "fault": "reset_up", "nth": 0, "after": 1000},
        {"match": "^PutObject .*/parts/", "fault": "lost_reply", "nth": 2},
        {"match": "^PutObject .*/packs/", "fault": "flip_up", "nth": 5, "after": 5000},
        {"match": "^GetObject", "fault": "truncate", "nth": 3},
    ],
}

COMING_DOWN: Sequence[dict[str, object]] = [
    {"match": "^GetObject .*/packs/", "fault": fault, "nth": number, "after": 1000}
    for number, fault in enumerate(("flip_down", "stall_down", "reset_down", "truncate"))
] + [{"match": "^List", "fault": "503", "nth": 0, "count": 2}]


@pytest.mark.slow
@pytest.mark.parametrize("faults", [*FAULTS])
def test_faults_that_pass_cost_no_save(storage: ObjectStorage, tmp_path: Path, weights: str, faults: str) -> None:
    url = storage.url()
    with FaultProxy(upstream=storage.endpoint) as proxy:
        options = storage.options(proxy.url)
        proxy.rules(FAULTS[faults])  # type: ignore[arg-type]
        assert train(tmp_path, url, options, 2, UNTIL) == (0, weights)
        met = [request.fault for request in proxy.requests if request.fault]
        parts = {r.path.partition("?")[0] for r in proxy.requests if r.op == "PutObject" and "/parts/" in r.path}
    assert {*met} == {rule["fault"] for rule in FAULTS[faults]}
    assert all("-ok-" in part for part in parts), "no save failed, on any rank"
    assert steps_there(storage, url)[-1] == UNTIL


@pytest.mark.slow
def test_faults_while_a_job_resumes_cost_no_step(storage: ObjectStorage, tmp_path: Path, weights: str) -> None:
    """Bits that flip on the way down, too: the newest step is what it goes on from, and not the one before."""
    url = storage.url()
    assert train(tmp_path, url, storage.options(), 2, 8)[0] == 0
    with FaultProxy(upstream=storage.endpoint) as proxy:
        proxy.rules(COMING_DOWN)  # type: ignore[arg-type]
        assert train(tmp_path, url, storage.options(proxy.url), 2, UNTIL) == (8, weights)
        met = {request.fault for request in proxy.requests if request.fault}
    assert met == {rule["fault"] for rule in COMING_DOWN}
