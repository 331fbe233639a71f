"""A certificate that becomes a wrong one while a job runs: the sentence says what is wrong with it and what to do, and
the job goes on when it is right again.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from datetime import timedelta
from pathlib import Path

import pytest
from helpers.certificates import Authority
from helpers.limits import short_limits
from helpers.s3_bucket import scale_limits
from helpers.servers import ObjectStorage
from helpers.tls_front import TlsFront
from workers import crash_jobs
from workers.bucket_bench import BucketBench

from ckptlib.errors import StoreDenied, StoreError
from ckptlib.stores import open_store
from ckptlib.testing import FaultProxy

RETRY_S = 2.0
DEADLINE_S = 12.0
FREE_STEPS = 10
SENTENCES = {
    "expired": "certificate has expired, or is not valid yet: who runs the server must renew it",
    "elsewhere": "certificate is for another name: correct the endpoint_url",
    "stranger": r"certificate is not trusted: .*(AWS_CA_BUNDLE|verify).* Where it was replaced",
}


@pytest.fixture(params=["s3fs", "obstore"])
def client(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture
def authority(tmp_path: Path) -> Authority:
    return Authority(tmp_path / "authority.pem")


@pytest.fixture
def wrong(authority: Authority, tmp_path: Path) -> Mapping[str, Path]:
    stranger = Authority(tmp_path / "another.pem", "another authority")
    return {
        "expired": authority.certificate(tmp_path / "expired.pem", life=timedelta(hours=-1)),
        "elsewhere": authority.certificate(tmp_path / "elsewhere.pem", host="elsewhere"),
        "stranger": stranger.certificate(tmp_path / "stranger.pem"),
    }


@pytest.fixture
def right(authority: Authority, tmp_path: Path) -> Path:
    return authority.certificate(tmp_path / "right.pem")


@pytest.fixture
def front(s3: ObjectStorage, right: Path) -> Iterator[TlsFront]:
    with TlsFront(s3.endpoint, right) as front:
        yield front


def options(s3: ObjectStorage, front: TlsFront, client: str, authority: Authority) -> dict[str, object]:
    return {**s3.options(front.url), "client": client, "client_kwargs": {"verify": str(authority.path)}}


@pytest.mark.parametrize("client", ["s3fs", pytest.param("obstore", marks=pytest.mark.slow)], indirect=True)
def test_each_call_says_what_to_do_and_the_same_store_goes_on(
    s3: ObjectStorage,
    front: TlsFront,
    client: str,
    authority: Authority,
    right: Path,
    wrong: Mapping[str, Path],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    scale_limits(monkeypatch, retry_s=RETRY_S / 2)
    with open_store(s3.url(), options(s3, front, client, authority)) as store:
        store.put("a", b"before")
        for name, certificate in wrong.items():
            front.replace(certificate)
            for call in (lambda: store.put("b", b"data"), lambda: store.get("a"), lambda: store.scan("")):
                with pytest.raises(StoreError, match=SENTENCES[name]) as told:
                    call()
                assert isinstance(told.value, StoreDenied), "waiting would not help"
                assert str(s3.secrets["secret"]) not in str(told.value)
        front.replace(right)
        assert [entry.key for entry in store.scan("")] == ["a"], "nothing was sent to whom it could not trust"
        store.put("b", b"after")
        assert store.get("b") == b"after"


@pytest.mark.slow
@pytest.mark.parametrize("client", ["s3fs", "obstore"], indirect=True)
def test_a_job_is_told_trains_on_and_commits_again(
    s3: ObjectStorage,
    front: TlsFront,
    client: str,
    authority: Authority,
    right: Path,
    wrong: Mapping[str, Path],
    tmp_path: Path,
) -> None:
    with FaultProxy(s3.endpoint) as unused:
        bench = BucketBench(s3, unused, tmp_path, client, short_limits(RETRY_S=RETRY_S))
        bench.options = options(s3, front, client, authority)
        try:
            bench.start(save_deadline=DEADLINE_S)
            bench.until(lambda: bench.committed() > 0)
            for name in ("expired", "stranger"):
                front.replace(wrong[name])
                bench.until(lambda name=name: any(says(bench, rank, SENTENCES[name]) for rank in (0, 1)))
                steps = bench.steps()
                bench.until(lambda steps=steps: min(bench.steps()) > max(steps) + FREE_STEPS)
                front.replace(right)
                newest = bench.committed()
                bench.until(lambda newest=newest: bench.committed() > newest)
            last = bench.stop()
            assert bench.listed()[-1] == last
        finally:
            crash_jobs.end_all(tmp_path)


def says(bench: BucketBench, rank: int, sentence: str) -> bool:
    """In a line that says that a save failed."""
    lines = [line for line in bench.jobs[rank].log().splitlines() if "will never be committed" in line]
    return any(re.search(sentence, line) for line in lines)
