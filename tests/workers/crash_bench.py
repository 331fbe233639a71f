"""A root behind a FaultStore, and the trainers that work on it."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

from helpers.fault_log import operations
from workers import crash_jobs
from workers.crash_jobs import NUMEL, Job, holds, run, start, train, train_when_told
from workers.crash_oracle import read_root, slots_of


class Bench:
    """A root behind a FaultStore, and the jobs that work on it."""

    def __init__(self, directory: Path, root: Path | None = None) -> None:
        self.directory = directory
        self.root = root or directory / "root"
        self.plan = directory / "plan.json"
        self.gates = directory / "gates"
        self.gates.mkdir(parents=True)
        self.url = f"fault+file://{self.root}?plan={self.plan}"

    def fault(self, *rules: dict[str, Any]) -> None:
        """From now on; none: no more."""
        temporary = self.plan.with_suffix(".new")
        temporary.write_text(json.dumps(rules))
        temporary.rename(self.plan)
        for path in self.directory.glob("plan.json.fired-*"):
            path.unlink()

    def operations(self, pid: int) -> list[dict[str, Any]]:
        """What a process asked of the store, in order."""
        return [line for line in operations(self.plan) if line["pid"] == pid]

    def faults(self) -> int:
        """How many operations met a fault."""
        return sum(bool(line["fault"]) for line in operations(self.plan))

    def wait_for_fault(self, count: int) -> None:
        deadline = time.monotonic() + crash_jobs.WAIT_S
        while self.faults() < count:
            assert time.monotonic() < deadline, "the fault was not met"
            time.sleep(crash_jobs.POLL_S)

    def start(self, size: int = 1, **kwargs: Any) -> list[Job]:
        """A trainer that waits for its gates."""
        for path in self.gates.iterdir():
            path.unlink()
        return start(train_when_told, self.directory, size, url=self.url, gates=str(self.gates), **kwargs)

    def open(self, step: int, then: str) -> None:
        """Lets the trainers take this step."""
        temporary = self.gates / f"{step}.new"
        temporary.write_text(then)
        temporary.rename(self.gates / str(step))

    def listed(self) -> list[int]:
        """The steps that are there; each is whole, and is the state of its step."""
        steps = read_root(self.root)
        assert all(holds(step, NUMEL) for step in steps)
        return [step.number for step in steps]

    def go_on(self, size: int = 1, steps: int = 1) -> int:
        """Another incarnation: restores the newest step, saves more, and leaves nothing behind. Returns that step."""
        newest = max(self.listed(), default=0)
        for told in run(train, self.directory, size, url=self.url, steps=steps):
            assert [line["what"] for line in told] == ["restored", *["saving", "committed"] * steps, "closed"], told
            step = told[0]["step"]
            assert step >= newest, "a listed step was not restored"
        assert max(self.listed()) == step + steps
        left = {path.name: path.stat().st_size for path in slots_of(self.root)}
        assert not any(left.values()), f"slots stay: {left}"  # one without bytes: killed before it was allocated
        return int(step)
