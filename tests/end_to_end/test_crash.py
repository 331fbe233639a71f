"""SIGKILL at each row of the crash table, to real trainers and real writers.

After each: every step that is listed is whole (read without ckptlib), a step that failed is not listed, the next
incarnation restores the newest one, saves the next, and leaves neither slots nor processes behind.
"""

from __future__ import annotations

import random
import signal
import time
from collections import Counter
from collections.abc import Iterator
from itertools import takewhile
from pathlib import Path
from typing import Any

import pytest
from workers.crash_bench import Bench
from workers.crash_jobs import holds, run, start, train, train_for_ever
from workers.crash_oracle import failed_parts, read_root, slots_of

MUTATING = {"put", "write", "commit", "delete"}


def points(operations: list[dict[str, Any]], after: bool = True) -> Iterator[dict[str, Any]]:
    """A rule for each operation: death before it; and behind it, where it changes something."""
    seen: Counter[tuple[str, str]] = Counter()
    for operation in operations:
        op, prefix = operation["op"], operation["key"].split("/")[0]
        rule = {"op": op, "key": f"^{prefix}", "nth": seen[op, prefix], "once": True}
        seen[op, prefix] += 1
        yield {**rule, "action": "kill-before"}
        if after and op in MUTATING:
            yield {**rule, "action": "kill-after"}


def operations_of_a_save(bench: Bench) -> list[dict[str, Any]]:
    """All that a writer asks of the store for one save with a layout that the store has not seen."""
    (job,) = bench.start()
    bench.open(1, "settle")
    job.wait_for("committed")
    writer = job.wait_for("waiting")["writer"]
    count = len(bench.operations(writer))
    bench.open(2, "settle")
    job.wait_for("committed", 2)
    bench.open(3, "end")
    assert job.join() == 0
    whole = bench.operations(writer)[count:]
    *found, look = takewhile(lambda line: not line["key"].endswith(".account"), whole)  # which is put as the job ends
    assert (look["op"], look["key"]) == ("scan", "ckptlib.json"), "whether the root is there for the account"
    did = [(line["op"], line["key"].split("/")[0]) for line in found]
    assert {("write", "packs"), ("commit", "packs"), ("put", "layouts"), ("put", "parts"), ("put", "steps")} <= {*did}
    return found


# -- the writer dies


def test_writer_killed_at_every_operation_is_started_again_and_the_step_commits(bench: Bench) -> None:
    cases = [*points(operations_of_a_save(bench))]
    assert len(cases) >= 15
    (job,) = bench.start()
    first = job.wait_for("restored")["step"] + 1
    for i, rule in enumerate(cases):
        step = first + i
        bench.fault(rule)
        bench.open(step, "settle")
        told = job.wait_for("waiting", i + 2)
        assert [line["what"] for line in job.told()][-2:] == ["committed", "waiting"], (rule, job.told())
        assert told["step"] == step + 1
        assert bench.listed()[-1] == step
    assert bench.faults() == len(cases), "not every operation was met"
    bench.open(first + len(cases), "end")
    assert job.join() == 0
    job.join_writers()
    assert slots_of(bench.root) == []
    bench.fault()
    bench.go_on()


@pytest.mark.slow
def test_writer_that_dies_each_time_fails_the_save_and_training_goes_on(bench: Bench) -> None:
    cases = [rule for rule in points(operations_of_a_save(bench), after=False) if rule["op"] != "get"]
    (job,) = bench.start()
    step = job.wait_for("restored")["step"] + 1
    waits = 1
    for rule in cases:
        bench.fault({name: value for name, value in rule.items() if name != "once"})
        before = bench.faults()
        bench.open(step, "settle")
        waits += 1
        job.wait_for("waiting", waits)
        outcome = job.told()[-2]
        if bench.faults() < before + 3:  # a second writer knows the layout to be there, and asks less
            assert outcome["what"] == "committed", (rule, outcome)
        else:
            assert (outcome["what"], outcome["kind"]) == ("failed", "SaveFailed"), (rule, outcome)
            assert "died 3 times in a row" in outcome["text"]
            # behind the manifest nobody knows, and each of them died as it looked
            is_in_doubt = "`ckptlib ls` tells whether the step is there" in outcome["text"]
            assert step not in bench.listed() or is_in_doubt, (rule, outcome)
        bench.fault()
        bench.open(step + 1, "settle")  # training goes on, and the next save is as good as any
        waits += 1
        job.wait_for("waiting", waits)
        assert job.told()[-2]["what"] == "committed", (rule, job.told()[-2])
        assert bench.listed()[-1] == step + 1
        step += 2
    bench.open(step, "end")
    assert job.join() == 0
    job.join_writers()
    assert slots_of(bench.root) == []


def test_trainer_and_writer_killed_at_every_operation(bench: Bench) -> None:
    cases = [*points(operations_of_a_save(bench))]
    for rule in cases:
        before = max(bench.listed())
        (job,) = bench.start()
        newest = job.wait_for("restored")["step"]
        assert bench.listed() == [*range(1, newest + 1)]
        assert newest in (before, before + 1), "a save whose parts are all there is committed by the next incarnation"
        step = newest + 1
        bench.fault(rule)
        count = bench.faults()
        bench.open(step, "sleep")
        bench.wait_for_fault(count + 1)
        job.join_writers()
        assert slots_of(bench.root) != [], "the trainer is alive, and so are its slots"
        job.kill()
        assert job.join() == -signal.SIGKILL
        bench.fault()
        whole = rule["op"] == "put" and rule["key"] == "^steps" and rule["action"] == "kill-after"
        assert (step in bench.listed()) >= whole
        assert bench.listed()[:newest] == [*range(1, newest + 1)], "a step that was listed is gone"
    # slots of all the dead lie there; the next one reclaims them
    bench.go_on()


# -- the trainer dies


@pytest.mark.slow
def test_trainer_killed_at_every_operation_of_its_own(bench: Bench) -> None:
    assert bench.go_on() == 0
    (job,) = bench.start()
    bench.open(2, "settle")
    job.wait_for("committed")
    bench.open(3, "end")
    assert job.join() == 0
    mine = bench.operations(job.pid)
    did = {(line["op"], line["key"].split("/")[0]) for line in mine}
    assert {("put", "probe"), ("get", "steps"), ("get_into", "packs")} <= did
    for rule in points(mine, after=False):
        newest = max(bench.listed())
        bench.fault(rule)
        (job,) = bench.start()
        bench.open(newest + 1, "settle")
        assert job.join() == -signal.SIGKILL, (rule, job.told())
        job.join_writers()
        assert bench.listed() == [*range(1, newest + 1)]
    bench.fault()
    bench.go_on()


def test_what_was_staged_is_committed_after_the_trainer_was_killed(bench: Bench) -> None:
    for step in range(1, 6):
        (job,) = bench.start()
        bench.open(step, "die")
        assert job.join() == -signal.SIGKILL
        job.join_writers()
        assert bench.listed() == [*range(1, step + 1)]
        assert slots_of(bench.root) == [], "the writer unlinks the slots when it is done"
        assert not Path(job.wait_for("waiting")["log"]).exists(), "it had nothing to say"
    bench.go_on()


@pytest.mark.parametrize(
    ("seed", "count"), [(1, 5), pytest.param(2, 200, marks=[pytest.mark.slow, pytest.mark.timeout(1200)])]
)
def test_trainer_killed_at_random(bench: Bench, seed: int, count: int) -> None:
    """Anywhere, in the middle of copies, seals and persists; 24 MB take long enough for each to be hit."""
    numel = 1_500_000
    chance = random.Random(seed)
    newest = 0
    for _ in range(count):
        (job,) = start(train_for_ever, bench.directory, url=str(bench.root), numel=numel)
        assert job.wait_for("restored")["step"] == newest, "the newest listed step was not restored"
        if chance.random() < 0.8:
            job.wait_for("saving", chance.randint(1, 3))
        time.sleep(chance.uniform(0, 0.05))  # no assertion depends on where this ends
        job.kill()
        assert job.join() == -signal.SIGKILL
        saved = [line["step"] for line in job.told() if line["what"] == "saving"]
        job.join_writers()
        steps = read_root(bench.root)
        assert all(holds(step, numel) for step in steps[-2:])
        found = max((step.number for step in steps), default=0)
        assert found >= newest
        assert found in {newest, *saved} or found > max(saved, default=0), "killed before it could tell"
        newest = found
        _forget_all_but_the_last(bench.root)
    assert newest > 0
    told = run(train, bench.directory, url=str(bench.root), numel=numel, steps=1)[0]
    assert told[0]["step"] == newest
    assert [path for path in slots_of(bench.root) if path.stat().st_size] == []


def _forget_all_but_the_last(root: Path) -> None:
    """So that 24 MB do not become many GB."""
    names = sorted(path.stem for path in root.glob("steps/*"))
    if not names:
        return
    for name in names[:-1]:
        (root / "steps" / f"{name}.json").unlink()
    for path in [*root.glob("packs/*/*"), *root.glob("parts/*/*")]:
        if path.parent.name not in names[-1:]:
            path.unlink()


# -- several ranks


@pytest.mark.slow
def test_writers_of_two_ranks_killed(bench: Bench) -> None:
    """Each rank's part has its own writer; rank 0's commits."""
    cases = [
        {"op": op, "key": f"^{prefix}/.*{where}", "action": action, "once": True}
        for op, prefix, where in (
            ("commit", "packs", "/000000-"),
            ("commit", "packs", "/000001-"),
            ("put", "parts", "/000000-"),
            ("put", "parts", "/000001-"),
            ("put", "steps", ""),
        )
        for action in ("kill-before", "kill-after")
    ]
    jobs = bench.start(2)
    for step, rule in enumerate(cases, 1):
        bench.fault(rule)
        bench.open(step, "settle")
        for job in jobs:
            job.wait_for("waiting", step + 1)
            assert job.told()[-2]["what"] == "committed", (rule, job.told())
        assert bench.listed() == [*range(1, step + 1)]
    assert bench.faults() == len(cases)
    bench.open(len(cases) + 1, "end")
    assert [job.join() for job in jobs] == [0, 0]
    bench.fault()
    bench.go_on(size=2)


def test_both_ranks_killed_and_one_part_is_missing(bench: Bench) -> None:
    """Whichever part is missing: the step is never listed, and the next incarnation of any size goes on."""
    bench.go_on(size=2)
    for dead, size in ((0, 2), (1, 1), (1, 2)):
        newest = max(bench.listed())
        jobs = bench.start(2)
        for job in jobs:
            job.wait_for("waiting")
        bench.fault({"op": "put", "key": f"^parts/.*/00000{dead}-", "action": "kill-before"})
        count = bench.faults()
        bench.open(newest + 1, "sleep")
        bench.wait_for_fault(count + 1)
        for job in jobs:
            job.kill()
        assert [job.join() for job in jobs] == [-signal.SIGKILL] * 2
        if dead == 1:
            jobs[0].kill_writers()  # they would wait a minute for the part that does not come
        for job in jobs:
            job.join_writers()
        bench.fault()
        assert bench.listed() == [*range(1, newest + 1)]
        assert bench.go_on(size=size) == newest
    assert failed_parts(bench.root) == []
