"""Faults, each met with a clear error within its time-out, and with the steps before it untouched.

Full disks and memories, ranks that are gone or never come, damaged slots, two jobs on one root. Real files and real
processes throughout. Damaged objects are in test_damage.py, forged documents in test_forged.py.
"""

from __future__ import annotations

import os
import re
import signal
import subprocess
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from workers.crash_bench import Bench
from workers.crash_jobs import Job, come_alone, start, train, train_without_memory
from workers.crash_oracle import failed_parts, read_root, slots_of

from ckptlib.stores.testing import flip_bit

root_only = [
    pytest.mark.root,
    pytest.mark.skipif(os.geteuid() != 0, reason="needs root: mounts a small tmpfs"),
]


def outcomes(job: Job) -> list[dict[str, Any]]:
    return [line for line in job.told() if line["what"] in ("committed", "failed")]


class TestNoRoom:
    pytestmark = root_only

    def test_full_disk(self, tmp_path: Path, small_disk: Path) -> None:
        bench = Bench(tmp_path, small_disk / "root")
        (job,) = bench.start()
        step = 0
        while not outcomes(job) or outcomes(job)[-1]["what"] == "committed":
            step += 1
            assert step < 10, "1.5 MB hold no ten steps"
            bench.open(step, "settle")
            job.wait_for("waiting", step + 1)
        failure = outcomes(job)[-1]
        assert failure["kind"] == "SaveFailed"
        assert re.search(r"No space left on device .* bytes are free on its file system; make room", failure["text"])
        assert bench.listed() == [*range(1, step)]
        assert len(bench.listed()) >= 2
        subprocess.run(["mount", "-o", "remount,size=20m", small_disk], check=True)
        bench.open(step + 1, "settle")
        job.wait_for("waiting", step + 2)
        assert outcomes(job)[-1] == {**outcomes(job)[-1], "what": "committed", "step": step + 1}
        bench.open(step + 2, "end")
        assert job.join() == 0
        job.join_writers()
        assert bench.listed() == [*range(1, step), step + 1]
        assert bench.go_on() == step + 1

    def test_arena_without_room(self, bench: Bench, small_disk: Path) -> None:
        (job,) = start(train, bench.directory, url=bench.url, numel=500_000, arena=str(small_disk))
        assert job.join() == 1
        error = job.told()[-1]
        assert (error["what"], error["kind"]) == ("error", "NoRoom")
        assert f"{small_disk} has no room for a slot of" in error["text"]
        assert "give another directory: arena=" in error["text"]
        job.join_writers()
        assert [path.name for path in small_disk.iterdir()] == []
        assert bench.listed() == []
        bench.go_on()

    def test_full_memory_falls_back_to_a_file(self, bench: Bench) -> None:
        (job,) = start(train_without_memory, bench.directory, url=bench.url)
        assert job.join() == 0, job.told()
        assert [line["what"] for line in job.told()] == ["restored", *["saving", "committed"] * 2, "closed"]
        assert "/dev/shm has no room for a slot of" in job.log()
        assert f"using a file in {tempfile.gettempdir()}, which is slower" in job.log()
        job.join_writers()
        assert bench.listed() == [1, 2]
        assert slots_of(bench.root) == []


# -- ranks


def test_a_rank_that_dies_in_a_save_fails_it_within_the_deadline(bench: Bench) -> None:
    bench.go_on(size=2)
    _forget_deadline(bench)
    jobs = bench.start(2, save_deadline=6)
    for job in jobs:
        job.wait_for("waiting")
    bench.fault({"op": "put", "key": "^parts/.*/000001-", "action": "kill-before"})
    bench.open(2, "settle")
    bench.wait_for_fault(1)
    jobs[1].kill()
    failure = jobs[0].wait_for("failed")
    assert failure["kind"] == "SaveFailed"
    assert "no part came from 1 of 2 ranks: 1" in failure["text"]
    jobs[0].kill()
    for job in jobs:
        job.join()
        job.join_writers()
    assert bench.listed() == [1]
    bench.fault()
    _forget_deadline(bench)  # a busy machine may need longer
    assert bench.go_on(size=2) == 1


def _forget_deadline(bench: Bench) -> None:
    """The next job makes the root's document anew, with its own deadline for saves."""
    for key in ("ckptlib.json", "copies/ckptlib.json"):
        bench.root.joinpath(key).unlink(missing_ok=True)


def test_a_rank_whose_writer_keeps_dying_says_so_and_nobody_waits_for_it(bench: Bench) -> None:
    jobs = bench.start(2)
    for job in jobs:
        job.wait_for("waiting")
    bench.fault({"op": "put", "key": "^parts/.*/000001-.*-ok-", "action": "kill-before"})
    bench.open(1, "settle")
    for job in jobs:
        failure = job.wait_for("failed")
        assert failure["kind"] == "SaveFailed"
        assert "the writer process died 3 times in a row" in failure["text"]
    assert bench.listed() == []
    bench.fault()
    bench.open(2, "settle")
    for job in jobs:
        job.wait_for("committed")
    bench.open(3, "end")
    assert [job.join() for job in jobs] == [0, 0]
    assert bench.listed() == [2]
    assert "died 3 times in a row" in failed_parts(bench.root)[0]


@pytest.mark.parametrize("how", ["Checkpointer", "save"])
def test_a_rank_that_never_comes(bench: Bench, how: str) -> None:
    jobs = start(come_alone, bench.directory, 2, url=bench.url, how=how, gate=str(bench.gates / "gate"))
    refused = jobs[0].wait_for("refused")
    assert refused["seconds"] < 100, "the time-out was 2 s"
    for job in jobs:
        job.join()
        job.join_writers()
    assert read_root(bench.root) == []


# -- a snapshot that is damaged in memory


def test_a_slot_that_changed_is_not_persisted(bench: Bench) -> None:
    """While the writer is stopped, each kind of byte of a ready slot is flipped."""
    (job,) = bench.start()
    places: dict[str, Callable[[bytes], int]] = {
        "body": lambda slot: 4096,
        "header": lambda slot: slot.index(b'"rank"') + 8,
        "layout": lambda slot: slot.index(b'"kind":"layout"') + 100,
        "table": lambda slot: slot.rindex(b'"chunks":{"pack"') + 40,
        "snapshot": lambda slot: slot.rindex(b'"digests":"') + 15,
    }
    step = 1
    for what, find in places.items():
        waiting = job.wait_for("waiting", step)
        os.kill(waiting["writer"], signal.SIGSTOP)
        bench.open(step, "settle")
        job.wait_for("staged", step)
        (slot,) = [
            path for path in slots_of(bench.root) if f'"save":"{step:012d}-'.encode() in path.read_bytes()[:4096]
        ]
        flip_bit(slot, find(slot.read_bytes()))
        os.kill(waiting["writer"], signal.SIGCONT)
        job.wait_for("waiting", step + 1)
        failure = outcomes(job)[-1]
        assert (failure["what"], failure["kind"]) == ("failed", "SaveFailed"), (what, failure)
        assert str(slot) in failure["text"]
        if what == "body":
            assert "changed in memory after it was sealed" in failure["text"]
            assert re.search(r"slot: \S+\[[0-9:, ]*\] at \[", failure["text"]), "names the tensor"
        bench.open(step + 1, "settle")
        job.wait_for("waiting", step + 2)
        assert outcomes(job)[-1]["what"] == "committed"
        assert bench.listed()[-1] == step + 1
        step += 2
    bench.open(step, "end")
    assert job.join() == 0
    assert bench.listed() == [2, 4, 6, 8, 10]


# -- two jobs on one root


def test_a_second_job_on_the_same_root_supersedes_the_first(bench: Bench) -> None:
    (old,) = bench.start()
    bench.open(1, "settle")
    old.wait_for("committed")
    other = Bench(bench.directory / "other", bench.root)
    (new,) = other.start(orphans_timeout_s=0.2)
    new.wait_for("waiting")
    bench.open(2, "settle")  # until the newer one has saved, the older one may
    old.wait_for("committed", 2)
    other.open(2, "settle")
    new.wait_for("committed")
    bench.open(3, "settle")
    failure = old.wait_for("failed")
    assert failure["kind"] == "Superseded"
    assert "Two jobs use one root" in failure["text"]
    bench.open(4, "settle")
    assert old.join() == 1, "it is told at once from now on"
    assert old.told()[-1]["kind"] == "Superseded"
    other.open(3, "settle")
    new.wait_for("committed", 2)
    other.open(4, "end")
    assert new.join() == 0
    for job in (old, new):
        job.join_writers()
    steps = [(step.number, step.generation) for step in read_root(bench.root)]
    assert steps == [(1, 1), (2, 1), (2, 2), (3, 2)]
    assert bench.go_on() == 3
