"""SIGKILL of the writers and trainers of a job with a local tier; and ranks with disks of their own."""

from __future__ import annotations

import shutil
import signal
import time
from pathlib import Path
from typing import Any

import pytest
from workers import crash_oracle
from workers.crash_bench import Bench
from workers.crash_jobs import run, train

import ckptlib


def points() -> list[dict[str, Any]]:
    """What a drain asks of the bucket that changes something, and what comes before that."""
    return [
        {"op": op, "key": f"^{prefix}", "action": action, "once": True}
        for op, prefix, action in (
            ("scan", "steps", "kill-before"),
            ("scan", "generations", "kill-before"),
            ("write", "packs", "kill-before"),
            ("commit", "packs", "kill-before"),
            ("commit", "packs", "kill-after"),
            ("put", "parts", "kill-before"),
            ("put", "parts", "kill-after"),
            ("put", "steps", "kill-before"),
            ("put", "steps", "kill-after"),
        )
    ]


def go_on(bench: Bench, disk: str, size: int, step: int) -> None:
    """Another incarnation restores this step, saves one more, and all that is listed is whole."""
    for told in run(train, bench.directory, size, url=bench.url, steps=1, local=disk):
        assert [line["what"] for line in told] == ["restored", "saving", "committed", "closed"], told
        assert told[0]["step"] == step
        assert told[0]["skipped"] == []
    assert {step, step + 1} <= {*bench.listed()}, "what local disks alone had is in the bucket, too"


@pytest.mark.slow
@pytest.mark.parametrize("size", [1, 2])
def test_trainer_and_writer_killed_anywhere_in_a_drain_the_step_is_restored_from_disks(bench: Bench, size: int) -> None:
    """The snapshot was on the disks before anything was drained; so it is never lost, whatever the bucket has."""
    disk = str(bench.directory / "disk")
    (step,) = {told[0]["step"] for told in run(train, bench.directory, size, url=bench.url, steps=1, local=disk)}
    newest, missed = step + 1, list[str]()
    for rule in points()[:: 1 if size == 1 else 2]:
        jobs = bench.start(size, local=disk)
        for job in jobs:
            assert job.wait_for("restored")["step"] == newest
            job.wait_for("waiting")
        bench.fault(rule)
        count = bench.faults()
        bench.open(newest + 1, "sleep")
        for job in jobs:
            job.wait_for("staged")
        bench.wait_for_fault(count + 1)
        whole = _comes_to_disk(Path(disk), newest + 1, [job.pid for job in jobs])
        for job in jobs:
            job.kill_writers()
            job.kill()
        assert [job.join() for job in jobs] == [-signal.SIGKILL] * size
        for job in jobs:
            job.join_writers()
        bench.fault()
        newest += whole
        missed += [] if whole else [rule["op"]]
        go_on(bench, disk, size, newest)
        newest += 1
    assert {*missed} <= {"scan"}, "a writer that starts scans, too, and may meet the fault before there is any drain"


def _comes_to_disk(disk: Path, step: int, trainers: list[int]) -> bool:
    """Whether the shares of all of them do; not that of one whose writer was killed before that."""
    deadline = time.monotonic() + 150

    def is_there(rank: int) -> bool:
        return any(disk.glob(f"parts/{step:012d}-*/{rank:06d}-*"))

    for rank, pid in enumerate(trainers):
        while not is_there(rank) and crash_oracle.writers_of(pid):
            assert time.monotonic() < deadline
            time.sleep(0.01)
    return all(map(is_there, range(len(trainers))))


def _wait_on_disk(disk: Path, step: int, size: int) -> None:
    deadline = time.monotonic() + 150
    while len([*disk.glob(f"parts/{step:012d}-*/*")]) < size:
        assert time.monotonic() < deadline
        time.sleep(0.01)


def test_a_disk_that_is_lost_before_the_drain_is_a_step_that_never_was(bench: Bench) -> None:
    """Of two hosts with a disk each, one is gone: all ranks go back to the same step, which the bucket has."""
    disks = str(bench.directory / "disk-{rank}")
    run(train, bench.directory, 2, url=bench.url, steps=2, local=disks)
    bench.fault({"op": "commit", "key": "^packs", "action": "error"})
    jobs = bench.start(2, local=disks)
    for job in jobs:
        assert job.wait_for("restored")["step"] == 2
        job.wait_for("waiting")
    bench.open(3, "sleep")
    for rank, job in enumerate(jobs):
        job.wait_for("staged")
        _wait_on_disk(bench.directory / f"disk-{rank}", 3, 1)
    for job in jobs:
        job.kill_writers()
        job.kill()
        job.join()
    bench.fault()
    shutil.rmtree(bench.directory / "disk-1")
    for told in run(train, bench.directory, 2, url=bench.url, steps=1, local=disks):
        assert told[0]["step"] == 2
        assert [line["what"] for line in told] == ["restored", "saving", "committed", "closed"]
    assert bench.listed() == [1, 2, 3]


@pytest.mark.parametrize("size", [pytest.param(1, marks=pytest.mark.slow), 2])
def test_all_are_killed_before_the_record_is_in_the_bucket_and_the_step_is_restored_from_disks(
    bench: Bench, size: int
) -> None:
    """Of a job that began anew, and of one that had restored."""
    disks, step = str(bench.directory / ("disk" if size == 1 else "disk-{rank}")), 0
    for begun in range(2):
        bench.fault(*({"op": op, "key": "^generations", "action": "error"} for op in ("put", "write", "commit")))
        _killed_behind_a_step_on_disks(bench, disks, size, step)
        step += 1
        assert len([*bench.root.glob("generations/*.json")]) == 2 * begun
        bench.fault()
        for told in run(train, bench.directory, size, url=bench.url, steps=1, local=disks):
            assert (told[0]["step"], told[0]["skipped"]) == (step, [])
        step += 1
        assert bench.listed()[-2:] == [step - 1, step]
        assert len([*bench.root.glob("generations/*.json")]) == 2 * begun + 2


def test_steps_on_disks_of_a_job_without_a_record_are_nothing_once_another_job_went_on(bench: Bench) -> None:
    """Elsewhere, and not as far; a job that finds the disks again goes on from that one."""
    disk = str(bench.directory / "disk")
    run(train, bench.directory, 1, url=bench.url, steps=1, local=disk)
    bench.fault({"op": "put", "key": "^generations", "action": "error"})
    _killed_behind_a_step_on_disks(bench, disk, 1, 1, num_steps=3)
    bench.fault()
    (told,) = run(train, bench.directory, 1, url=bench.url, steps=1, local=str(bench.directory / "elsewhere"))
    assert told[0]["step"] == 1
    (told,) = run(train, bench.directory, 1, url=bench.url, steps=1, local=disk)
    assert (told[0]["step"], told[0]["skipped"]) == (2, [])
    assert bench.listed() == [1, 2, 3]


def test_steps_that_an_older_job_commits_beside_one_whose_record_never_came_are_restored(bench: Bench) -> None:
    """It stood still as its successor restored; that one saved to its disk, farther, and was killed."""
    disk, older = str(bench.directory / "disk"), Bench(bench.directory / "older", bench.root)
    (job,) = older.start()
    for step in range(1, 4):
        if step == 2:
            bench.fault({"op": "put", "key": "^generations", "action": "error"})
            _killed_behind_a_step_on_disks(bench, disk, 1, 1, num_steps=3)
            bench.fault()
        older.open(step, "settle")
        job.wait_for("committed", step)
    older.open(4, "end")
    assert job.join() == 0
    (told,) = run(train, bench.directory, 1, url=bench.url, steps=1, local=disk)
    assert (told[0]["step"], told[0]["skipped"]) == (3, [])
    assert [info.step for info in ckptlib.checkpoints(str(bench.root))] == bench.listed() == [1, 2, 3, 4]


def _killed_behind_a_step_on_disks(bench: Bench, disks: str, size: int, restored: int, num_steps: int = 1) -> None:
    """A job restores a step, saves some more, and all that belongs to it is killed."""
    jobs = bench.start(size, local=disks)
    for job in jobs:
        assert job.wait_for("restored")["step"] == restored
    for step in range(restored + 1, restored + 1 + num_steps):
        bench.open(step, "sleep" if step == restored + num_steps else "go on")
        for rank, job in enumerate(jobs):
            job.wait_for("staged", step - restored)
            _wait_on_disk(Path(disks.replace("{rank}", str(rank))), step, 1)
    for job in jobs:
        job.kill_writers()
        job.kill()
    for job in jobs:
        job.join()
        job.join_writers()


def test_ranks_with_disks_of_their_own_restore_from_them(bench: Bench) -> None:
    """Replicated tensors lie on one disk only, or in parts on both; they are read there, and spread."""
    disks = str(bench.directory / "disk-{rank}")
    run(train, bench.directory, 2, url=bench.url, steps=2, local=disks)
    for pack in bench.root.glob("packs/*2-*/*"):
        pack.unlink()
    for told in run(train, bench.directory, 2, url=bench.url, steps=1, local=disks):
        assert (told[0]["step"], told[0]["skipped"]) == (2, [])
    swapped = {rank: bench.directory / f"disk-{rank}" for rank in (0, 1)}
    swapped[0].rename(bench.directory / "aside")
    swapped[1].rename(swapped[0])
    (bench.directory / "aside").rename(swapped[1])
    for pack in bench.root.glob("packs/*3-*/*"):
        pack.unlink()
    for told in run(train, bench.directory, 2, url=bench.url, steps=1, local=disks):
        assert (told[0]["step"], told[0]["skipped"]) == (3, []), "ranks may come back on other hosts"


def test_another_world_size_on_one_host_restores_from_its_disk(bench: Bench) -> None:
    disk = str(bench.directory / "disk")
    run(train, bench.directory, 2, url=bench.url, steps=2, local=disk)
    for step, size in ((2, 1), (3, 2)):
        for pack in bench.root.glob(f"packs/{step:012d}-*/*"):
            pack.unlink()
        for told in run(train, bench.directory, size, url=bench.url, steps=1, local=disk):
            assert (told[0]["step"], told[0]["skipped"]) == (step, [])


def test_beside_snapshots_in_memory(bench: Bench) -> None:
    """What memory alone had is saved by the next job, through its disk, as anything else."""
    disk, peers = str(bench.directory / "disk-{rank}"), ckptlib.Peers(copies=0, every=1)
    run(train, bench.directory, 2, url=bench.url, steps=2, local=disk, peers=peers)
    jobs = bench.start(2, local=disk, peers=peers)
    for job in jobs:
        assert job.wait_for("restored")["step"] == 2
    deadline = time.monotonic() + 150
    while len([*bench.root.glob("generations/*.json")]) < 2:  # before that, nothing of this job counts
        assert time.monotonic() < deadline
        time.sleep(0.01)
    bench.open(3, "sleep")
    for job in jobs:
        job.wait_for("staged")
    for job in jobs:
        job.kill()
        job.join()
    for told in run(train, bench.directory, 2, url=bench.url, steps=1, local=disk, peers=peers):
        assert (told[0]["step"], told[0]["skipped"]) == (3, [])
    assert {3, 4} <= {*bench.listed()}
