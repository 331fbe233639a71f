"""Several ranks, and a store that misbehaves towards one of them: all go on, or all end, at the same step."""

from __future__ import annotations

import json
import os
import signal
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from helpers.fault_log import operations
from workers import crash_jobs
from workers.crash_jobs import NUMEL, Job, holds, start
from workers.crash_oracle import read_root, slots_of
from workers.outage_jobs import step_on

FOR_EVER_S = 1e9
DEADLINE_S = 6.0
"""Of a save; the last one, too, has to be committed by then."""

FREE_STEPS = 10
"""More than there would be if one of them waited for what is never answered."""


class Ranks:
    """Two of them, each with faults of its own."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.root = directory / "root"
        self.url = f"fault+file://{self.root}?plan={directory}/plan{{rank}}.json"
        self.jobs: list[Job] = []

    def start(self, **kwargs: Any) -> list[Job]:
        self.jobs = start(step_on, self.directory, 2, **{"url": self.url, **kwargs})
        return self.jobs

    def fault(self, rank: int, *rules: dict[str, Any]) -> None:
        """From now on; none: no more."""
        path = self.directory / f"plan{rank}.json"
        path.with_suffix(".new").write_text(json.dumps(rules))
        path.with_suffix(".new").rename(path)

    def met(self, rank: int) -> bool:
        return any(line["fault"] for line in operations(self.directory / f"plan{rank}.json"))

    def steps(self) -> list[int]:
        """The last one of each rank."""
        return [max((t["step"] for t in job.told() if t["what"] == "step"), default=0) for job in self.jobs]

    def committed(self) -> int:
        """The last step that is there."""
        return max((int(path.name.split("-")[0]) for path in self.root.glob("steps/*.json")), default=0)

    def until(self, true: Callable[[], bool]) -> None:
        deadline = time.monotonic() + crash_jobs.WAIT_S
        while not true():
            assert time.monotonic() < deadline, [job.log() for job in self.jobs]
            time.sleep(0.02)

    def stop(self) -> None:
        """All ranks save once more and end, as such that are not done."""
        os.kill(self.jobs[1].pid, signal.SIGTERM)
        assert [job.join() for job in self.jobs] == [75, 75], [job.told()[-1] for job in self.jobs]
        for job in self.jobs:
            job.join_writers()

    def listed(self) -> list[int]:
        """Each is whole, and the state of its step."""
        found = read_root(self.root)
        assert all(holds(step, NUMEL) for step in found)
        return [step.number for step in found]


@pytest.fixture
def ranks(tmp_path: Path) -> Iterator[Ranks]:
    ranks = Ranks(tmp_path)
    yield ranks
    crash_jobs.end_all(ranks.root)


@pytest.mark.parametrize(
    ("rank", "op", "key"),
    [
        pytest.param(1, "commit", "^packs/", marks=pytest.mark.slow),
        pytest.param(1, "put", "^parts/", marks=pytest.mark.slow),
        pytest.param(0, "commit", "^packs/", marks=pytest.mark.slow),
        (0, "put", "^steps/"),
    ],
    ids=["pack-of-1", "part-of-1", "pack-of-0", "manifest"],
)
def test_a_request_of_one_rank_is_swallowed(ranks: Ranks, rank: int, op: str, key: str) -> None:
    ranks.start(save_deadline=DEADLINE_S)
    ranks.until(lambda: ranks.committed() > 0)
    ranks.fault(rank, {"op": op, "key": key, "action": "stall", "seconds": FOR_EVER_S})
    ranks.until(lambda: ranks.met(rank))
    before = ranks.steps()
    failed = f"the store has not answered put {key[1:]}"
    in_doubt = "may be committed all the same"
    told = in_doubt if key == "^steps/" else "never be committed"
    own = in_doubt if key == "^parts/" else told  # for all that this one knows it is there
    ranks.until(lambda: any(own in line and failed in line for line in lines(ranks.jobs[rank])))
    ranks.until(lambda: all(now - then >= FREE_STEPS for then, now in zip(before, ranks.steps(), strict=True)))
    ranks.until(lambda: any(told in line for line in lines(ranks.jobs[0])))
    lost = ranks.committed()
    ranks.fault(rank)
    ranks.until(lambda: ranks.committed() > lost)
    ranks.stop()
    (last,) = {job.told()[-2]["step"] for job in ranks.jobs}
    assert ranks.listed()[-1] == last, "the last save"
    assert slots_of(ranks.root) == []


def lines(job: Job) -> list[str]:
    return job.log().splitlines()


def test_an_outage_that_lasts_ends_all_ranks_at_the_same_step(ranks: Ranks) -> None:
    jobs = ranks.start(max_outage=2)
    ranks.until(lambda: ranks.committed() > 0)
    ranks.fault(1, {"op": "commit", "key": "^packs/", "action": "error"})
    assert [job.join() for job in jobs] == [1, 1]
    for job in jobs:
        assert (job.told()[-1]["what"], job.told()[-1]["kind"]) == ("error", "SaveFailed")
        assert "saves in a row failed on some rank" in job.told()[-1]["text"]
    assert "an error, as planned" in jobs[1].told()[-1]["text"]
    assert len({*ranks.steps()}) == 1
    for job in jobs:
        job.join_writers()
    assert ranks.listed()


def test_a_short_outage_of_one_rank_ends_none(ranks: Ranks) -> None:
    ranks.start(max_outage=300)
    ranks.until(lambda: ranks.committed() > 0)
    ranks.fault(1, {"op": "commit", "key": "^packs/", "action": "error"})
    ranks.until(lambda: len([line for line in lines(ranks.jobs[0]) if "never be committed" in line]) > 5)
    before = ranks.committed()
    ranks.fault(1)
    ranks.until(lambda: ranks.committed() > before)
    ranks.stop()
    assert ranks.listed()


# -- the beginning


@pytest.mark.parametrize(("rank", "op"), [(0, "put"), (0, "scan"), (1, "get")])
def test_a_store_that_does_not_answer_one_rank_is_opened_by_none(ranks: Ranks, rank: int, op: str) -> None:
    ranks.fault(rank, {"op": op, "action": "stall", "seconds": FOR_EVER_S})
    jobs = ranks.start(timeout=6)
    assert [job.join() for job in jobs] == [1, 1]
    for job in jobs:
        assert job.told()[-1]["kind"] == "StoreTimeout"
        assert "was not answered within 3 s" in job.told()[-1]["text"]
    assert read_root(ranks.root) == [] if ranks.root.exists() else True


def test_ranks_that_do_not_share_a_store_are_told_so(ranks: Ranks) -> None:
    jobs = ranks.start(url=f"{ranks.directory}/own{{rank}}")
    assert [job.join() for job in jobs] == [1, 1]
    for job in jobs:
        assert job.told()[-1]["kind"] == "StoreError"
        assert "is the path on storage that all hosts share?" in job.told()[-1]["text"]


def test_only_one_rank_tries_the_store(ranks: Ranks) -> None:
    ranks.start()
    ranks.until(lambda: min(ranks.steps()) > 1)
    ranks.stop()
    asked = []
    for rank, job in enumerate(ranks.jobs):
        log = (ranks.directory / f"plan{rank}.json.log").read_text().splitlines()
        asked.append([(o["op"], o["key"].split("/")[0]) for o in map(json.loads, log) if o["pid"] == job.pid])
    assert ("put", "probe") in asked[0]
    assert asked[1] == [("get", "ckptlib.json")]
