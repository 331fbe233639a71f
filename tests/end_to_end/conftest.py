"""What tests of whole jobs are given."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from helpers.damage import NEWEST
from helpers.one_job import Job
from helpers.tmpfs import tmpfs
from workers import crash_jobs
from workers.crash_bench import Bench
from workers.crash_jobs import run, train
from workers.crash_oracle import read_root


@pytest.fixture
def job(tmp_path: Path) -> Job:
    return Job(tmp_path / "root")


@pytest.fixture
def bench(tmp_path: Path) -> Iterator[Bench]:
    bench = Bench(tmp_path)
    yield bench
    crash_jobs.end_all(bench.root)


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of 1.5 MB; a step takes 340 kB."""
    with tmpfs(tmp_path / "small", 1500 * 1024) as path:
        yield path


@pytest.fixture(scope="session")
def template(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A root of three steps, saved by two ranks; to be copied."""
    directory = tmp_path_factory.mktemp("template")
    run(train, directory, 2, url=str(directory / "root"), steps=NEWEST)
    assert [step.number for step in read_root(directory / "root")] == [1, 2, NEWEST]
    return directory / "root"
