"""Ranks of a job with a local tier that do not fare alike: they drain the same steps, and none waits for ever."""

from __future__ import annotations

from workers.crash_bench import Bench
from workers.crash_jobs import run
from workers.tier_jobs import (
    come_back_to_pieces,
    come_without,
    fail_in_the_bucket_first,
    save_what_is_local,
    train_with_a_slow_rank,
)


def test_all_ranks_drain_the_same_steps_though_only_one_of_them_cannot(bench: Bench) -> None:
    disk = str(bench.directory / "disk")
    options = {"url": bench.url, "disk": disk, "plan": str(bench.plan), "arena": "/dev/shm"}
    first, second = run(train_with_a_slow_rank, bench.directory, 2, **options)
    assert first[0]["drained"] == second[0]["drained"]
    assert 1 <= len(first[0]["drained"]) <= 3, "two, and one that was said a step before"
    assert first[-1]["drained"] == second[-1]["drained"]
    assert bench.listed() == [*first[-1]["drained"], first[-1]["step"]], "what was to be drained is in the bucket"


def test_a_step_that_is_on_local_disks_is_drained_by_all_ranks_or_none(bench: Bench) -> None:
    options = {"url": bench.url, "disk": str(bench.directory / "disk"), "arena": "/dev/shm"}
    for failed, *told in run(save_what_is_local, bench.directory, 2, **options):
        assert (failed["what"], failed["step"], failed["was_local"]) == ("failed", 1, True)
        assert "failed and will never be committed" in failed["text"]
        assert not any(line["what"] == "failed" and line["was_local"] for line in told)
        assert bench.listed() == [line["step"] for line in told if line["what"] == "committed"]


def test_a_step_that_rank_0_tells_as_failed_before_another_rank_has_it_on_its_disk_stays_there(bench: Bench) -> None:
    """It is on all disks in the end: a restart may need it. The next save swept it from them."""
    disk = str(bench.directory / "disk")
    options = {"url": bench.url, "disk": disk, "plan": str(bench.plan), "arena": "/dev/shm"}
    for told in run(fail_in_the_bucket_first, bench.directory, 2, **options):
        assert told[-1]["on_disk"] == [1, 2, 5]
    assert bench.listed() == [1, 5]


def test_a_disk_for_each_rank_has_pieces_and_replicas_that_other_ranks_want(bench: Bench) -> None:
    """Which ranks have a piece of what was cut by hand, only their parts tell. One of several replicas is on a disk.
    All of it comes from the disks, here to more ranks than before."""
    options = {"url": bench.url, "disk": str(bench.directory / "disk")}
    for step, size in enumerate((2, 3)):
        for (told,) in run(come_back_to_pieces, bench.directory, size, **options):
            assert (told["step"], told["skipped"], told["right"]) == (step, [], True)
            assert told["tier"] == "local" or not step


def test_a_tier_on_some_ranks_only_is_refused_on_all(bench: Bench) -> None:
    for told in run(come_without, bench.directory, 2, url=bench.url, disk=str(bench.directory / "disk")):
        assert "local= was given on some ranks only" in told[0]["text"]
