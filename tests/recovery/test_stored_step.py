"""What a restore from the store spares the first save: what it has read is not asked again, and what it has not read
is looked at as it restores."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

import ckptlib

NUMEL = 300_000


class Job:
    """Of one rank, in a directory. Of its two tensors one never changes, so step 2 has it in the pack of step 1."""

    def __init__(self, directory: Path) -> None:
        self.root, self._log = directory / "root", directory / "plan.json.log"
        self._url = f"fault+file://{self.root}?plan={directory}/plan.json"
        with ckptlib.Checkpointer(self._url, self.state(1), every=1) as ckpt:
            ckpt.save(1)
        self.go_on(2)

    def state(self, step: int) -> dict[str, torch.Tensor]:
        return {"stays": torch.arange(NUMEL), "changes": torch.full((NUMEL,), step)}

    def go_on(self, step: int, only: str | None = None) -> list[str]:
        """Restores and saves in another start; returns what its restore asked."""
        state = self.state(0)
        if only is None:
            state["stays"].zero_()
        with ckptlib.Checkpointer(self._url, state, every=1) as ckpt:
            before = len(self._asked())
            ckpt.restore(only=only)
            asked = self._asked()[before:]
            state["changes"].fill_(step)
            ckpt.save(step).wait_committed()
        return asked

    def _asked(self) -> list[str]:
        lines = map(json.loads, self._log.read_text().splitlines())
        return [f"{line['op']} {line['key']}" for line in lines]

    def packs(self, step: int) -> list[Path]:
        return [*(self.root / "packs").glob(f"{step:012d}-*/*")]

    def nbytes(self, step: int) -> int:
        return sum(pack.stat().st_size for pack in self.packs(step))

    def check(self, step: int) -> None:
        found = self.state(0)
        ckptlib.load(self.root, found, step)
        assert all(torch.equal(found[name], tensor) for name, tensor in self.state(step).items())


@pytest.fixture
def job(tmp_path: Path) -> Job:
    job = Job(tmp_path)
    assert job.nbytes(2) < 0.6 * job.nbytes(1)
    return job


def listed(asked: list[str]) -> list[str]:
    return [line for line in asked if line.startswith("scan packs/")]


def test_packs_that_were_read_are_not_listed(job: Job) -> None:
    assert listed(job.go_on(3)) == []
    assert job.nbytes(3) == job.nbytes(2)
    job.check(3)


def test_packs_that_were_not_read_are_listed(job: Job) -> None:
    [first] = job.packs(1)
    assert listed(job.go_on(3, only="changes")) == [f"scan {first.relative_to(job.root)}"]
    assert job.nbytes(3) == job.nbytes(2)
    job.check(3)


@pytest.mark.parametrize("how", ["gone", "cut"])
def test_a_pack_that_is_not_as_it_was_is_not_referred_to(job: Job, how: str, caplog: pytest.LogCaptureFixture) -> None:
    """The step that is restored is lost in part, and the next one is whole."""
    [first] = job.packs(1)
    data = first.read_bytes()
    first.unlink()
    if how == "cut":
        first.write_bytes(data[:-1])
    job.go_on(3, only="changes")
    assert "the next save is written whole, since packs of step 2 cannot be used" in caplog.text
    assert job.nbytes(3) == len(data)
    job.check(3)
