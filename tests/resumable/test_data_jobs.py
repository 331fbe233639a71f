"""Whole jobs, killed in any step and resumed on other numbers of ranks: each item once per epoch."""

from __future__ import annotations

import signal
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from launch import forked
from places import WORKERS
from workers.data_jobs import Options, told

KILLED = -signal.SIGKILL


class Run:
    """A job and its incarnations, and what remains of what they trained on."""

    def __init__(self, directory: Path, **options: Any) -> None:
        directory.mkdir()
        self.directory, self.options = directory, Options(str(directory), **options)
        self.sizes: list[int] = []

    def start(self, ranks: int, **options: Any) -> None:
        """One incarnation, until its end or the kill that `options` ask for."""
        wanted = replace(self.options, session=len(self.sizes), **options)
        self.sizes.append(ranks)
        codes, output = forked(WORKERS / "data_jobs.py", ranks, wanted.argument(), timeout_s=100)
        if wanted.kill_at is None:
            assert codes == [0] * ranks, output
        else:
            assert codes[wanted.kill_rank] == KILLED, (codes, output)

    def restored(self, session: int) -> int:
        steps = {next(told(self.directory, session, rank))["restored"] for rank in range(self.sizes[session])}
        assert len(steps) == 1
        return steps.pop()

    def batches(self) -> list[tuple[int, list[list[list[float]]]]]:
        """By step: the session, and what each rank trained on. Steps that a later session repeated are discarded."""
        found: dict[int, tuple[int, list[list[list[float]]]]] = {}
        for session, ranks in enumerate(self.sizes):
            begun = self.restored(session)
            found = {step: batches for step, batches in found.items() if step < begun}
            lines = [
                {line["step"]: line["items"] for line in told(self.directory, session, rank) if "step" in line}
                for rank in range(ranks)
            ]
            for step in {*lines[0]}.intersection(*lines):
                assert step not in found
                found[step] = session, [own[step] for own in lines]
        assert sorted(found) == list(range(len(found))), "no step is missing"
        return [found[step] for step in sorted(found)]

    def items(self) -> list[int]:
        """In the order of steps."""
        return [int(item[0]) for _, ranks in self.batches() for own in ranks for item in own]

    def weights(self) -> list[str]:
        *_, last = told(self.directory, len(self.sizes) - 1, 0)
        return list(last["weights"])


def check_once_per_epoch(items: list[int], length: int, total: int) -> None:
    """What is over belongs to an epoch that is not complete. An epoch ends inside a batch, whose order is not known
    here: so the counts are looked at, and never differ by more than one while a batch is added."""
    counts = Counter(items)
    assert len(items) == total
    assert {*counts} == {*range(length)}
    whole, over = divmod(total, length)
    assert Counter(counts.values()) == Counter({whole: length - over, **({whole + 1: over} if over else {})})


def check_batches(run: Run) -> None:
    counts = Counter(range(run.options.length))  # once each, so that none is missing below
    for _, ranks in run.batches():
        assert {len(own) for own in ranks} == {run.options.global_batch // len(ranks)}, "none is empty, or smaller"
        counts.update(int(item[0]) for own in ranks for item in own)
        assert max(counts.values()) - min(counts.values()) <= 1, "an item came again before all others had come"
    assert sum(counts.values()) == run.options.length + len(run.items())


def check(run: Run) -> None:
    check_batches(run)
    check_once_per_epoch(run.items(), run.options.length, run.options.total * run.options.global_batch)


@pytest.mark.timeout(240)
@pytest.mark.parametrize("num_workers", [0, 2])
def test_other_numbers_of_ranks_within_epochs(tmp_path: Path, num_workers: int) -> None:
    run = Run(tmp_path / "run", num_workers=num_workers)
    run.start(4, kill_at=3, kill_rank=3)
    run.start(2, kill_at=6, trained=True)
    run.start(3)
    check(run)
    assert 0 < run.restored(1) <= 3
    assert run.restored(1) < run.restored(2) <= 6
    assert [session for session, _ in run.batches()] == sorted(session for session, _ in run.batches())
    assert {session for session, _ in run.batches()} == {0, 1, 2}


@pytest.mark.timeout(240)
@pytest.mark.parametrize("num_workers", [pytest.param(0, marks=pytest.mark.slow), 2])
def test_same_number_of_ranks_goes_on_bit_for_bit(tmp_path: Path, num_workers: int) -> None:
    """The order, what the items drew at random, and the weights."""
    whole, parted = (Run(tmp_path / name, num_workers=num_workers) for name in ("whole", "parted"))
    whole.start(2)
    parted.start(2, kill_at=5, kill_rank=1)
    parted.start(2)
    assert 0 < parted.restored(1) <= 5
    check(whole)
    assert [batch for _, batch in parted.batches()] == [batch for _, batch in whole.batches()]
    assert parted.weights() == whole.weights()


@pytest.mark.timeout(240)
def test_a_loop_over_epochs(tmp_path: Path) -> None:
    run = Run(tmp_path / "run", num_workers=2, length=36, total=9, by_epoch=True)
    run.start(2, kill_at=7, trained=True)
    run.start(3)
    check(run)
    assert Counter(run.items()) == Counter(3 * [*range(36)])


@pytest.mark.timeout(240)
@pytest.mark.parametrize("num_workers", [pytest.param(0, marks=pytest.mark.slow), 2])
def test_a_stream_goes_on_at_the_same_world_size_only(tmp_path: Path, num_workers: int) -> None:
    whole, parted = (
        Run(tmp_path / name, stream=True, num_workers=num_workers, length=48, total=12) for name in ("whole", "parted")
    )
    whole.start(2)
    parted.start(2, kill_at=7, kill_rank=1)
    other = replace(parted.options, session=9)
    codes, output = forked(WORKERS / "data_jobs.py", 1, other.argument(), timeout_s=100)
    assert codes == [1]
    assert "StateMismatch" in output
    assert "world size 1, and the checkpoint was saved with 2" in output
    parted.start(2)
    assert 0 < parted.restored(1) <= 7
    assert [batch for _, batch in parted.batches()] == [batch for _, batch in whole.batches()]
    assert parted.weights() == whole.weights()
    assert Counter(whole.items()) == Counter(3 * [*range(48)])


@pytest.mark.slow
@pytest.mark.timeout(3000)
@pytest.mark.parametrize("num_workers", [0, 2])
def test_killed_in_every_step(tmp_path: Path, num_workers: int) -> None:
    """4 ranks, then 2, then 3; and 2 ranks, then 2, against a run that nobody disturbed."""
    whole = Run(tmp_path / "whole", num_workers=num_workers)
    whole.start(2)
    for step in range(whole.options.total):
        trained = bool(step % 2)
        run = Run(tmp_path / f"elastic {step}", num_workers=num_workers)
        run.start(4, kill_at=step, kill_rank=step % 4, trained=trained)
        if step < 8:
            run.start(2, kill_at=step + 2, kill_rank=step % 2, trained=not trained)
        run.start(3)
        check(run)
        parted = Run(tmp_path / f"same {step}", num_workers=num_workers)
        parted.start(2, kill_at=step, kill_rank=step % 2, trained=trained)
        parted.start(2)
        assert [batch for _, batch in parted.batches()] == [batch for _, batch in whole.batches()]
        assert parted.weights() == whole.weights()
