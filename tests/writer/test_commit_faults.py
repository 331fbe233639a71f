"""Whatever a store does to a commit, and whenever the writer dies: what is told as committed loads, and what is told as
never to be committed is never listed.

By real writers, one behind the other, and a trainer's end; see `workers/commit_faults.py`.
"""

from __future__ import annotations

import json
import os
import random
import subprocess
import sys
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
from launch import environment
from places import ROOT, WORKERS
from workers.commit_faults import ERRORS, EVENTS, HANG_DEADLINE_S, Case

REQUESTS = 8
"""Of a commit that meets no fault."""

PUT, LOOK = 4, 5
"""Of these: the manifest is put, and it is asked whether a sweep has taken something."""

TIMEOUT_S = 1500.0


def case(local: bool, *writers: Mapping[int, str]) -> Case:
    faults = [{str(number): fault for number, fault in met.items()} for met in writers]
    hangs = any("hangs" in fault for met in faults for fault in met.values())
    told = "; ".join(", ".join(f"{fault} {number}" for number, fault in met.items()) for met in writers)
    name = f"{told} ({'file system' if local else 'object store'})"
    return {"name": name, "local": local, "deadline_s": HANG_DEADLINE_S if hangs else 60.0, "writers": faults}


def outcomes(directory: Path, cases: Sequence[Case]) -> list[str]:
    """What became of step 2 in each. Asserts that nothing was told wrongly."""
    command = [sys.executable, str(WORKERS / "commit_faults.py"), str(directory), json.dumps(cases)]
    variables = {**environment(), "PYTHONPATH": os.pathsep.join([str(ROOT), environment()["PYTHONPATH"]])}
    done = subprocess.run(command, env=variables, capture_output=True, text=True, timeout=TIMEOUT_S)
    assert done.returncode == 0, done.stderr
    found: list[dict[str, Any]] = [json.loads(line) for line in done.stdout.splitlines()]
    assert [one["case"] for one in found] == [one["name"] for one in cases]
    assert [one for one in found if one["failures"]] == []
    return [one["outcomes"][1] for one in found]


DEAD = {PUT: "after dies"}

NO_ANSWER = {0: "before refused", 1: "after refused"}
"""To the first try, and to the second."""

TOLD = {
    "committed": [
        case(True),
        case(False, {PUT: "after full"}),
        case(True, {PUT: "after full"}),
        case(False, {PUT: "after late"}),
        case(False, {1: "before committed", 2: "after dies"}),
        case(False, {PUT: "before committed"}),
        case(True, DEAD),
        case(True, DEAD, {0: "before refused"}),
        case(False, DEAD, {1: "before full"}),
    ],
    "never": [
        case(True, {PUT: "before full"}),
        case(True, {3: "before swept"}),
        case(False, {0: "before refused"}),
    ],
    "in doubt": [
        case(False, {PUT: "after late", LOOK: "before refused"}),
        case(False, {PUT: "before committed", LOOK: "before taken back"}),
        case(False, DEAD, {1: "before taken back"}),
        case(True, DEAD, NO_ANSWER),
        case(False, DEAD, {0: "before full", 1: "before full"}),
        case(True, DEAD, {0: "before dies"}, {1: "after dies"}),
        case(True, {3: "before swept", PUT: "after dies"}),
        case(True, {3: "before swept", PUT: "after dies"}, NO_ANSWER),
    ],
}


def test_what_is_told(tmp_path: Path) -> None:
    """Where a writer hangs, a slow machine may take longer than the deadline for something else."""
    hang = [case(True, {PUT: "after hangs"}), case(True, DEAD, {0: "before hangs"})]
    cases = [one for some in TOLD.values() for one in some]
    found = dict(zip([one["name"] for one in cases], outcomes(tmp_path, [*cases, *hang]), strict=False))
    assert found == {one["name"]: told for told, some in TOLD.items() for one in some}


FAULTS = [f"{when} {what}" for when in ("before", "after") for what in [*ERRORS, *EVENTS]]


@pytest.mark.slow
@pytest.mark.parametrize("local", [True, False], ids=["file-system", "object-store"])
@pytest.mark.parametrize("behind", [(), (DEAD,)], ids=["first-writer", "second-writer"])
def test_one_fault_at_each_request(tmp_path: Path, local: bool, behind: tuple[Mapping[int, str], ...]) -> None:
    """And one more take-back makes sense only before the committer has looked."""
    faults = [fault for fault in FAULTS if "taken" not in fault]
    cases = [case(local, *behind, {number: fault}) for fault in faults for number in range(REQUESTS + 1)]
    told = Counter(outcomes(tmp_path, cases))
    assert told["committed"]
    assert told["in doubt"]
    assert bool(told["never"]) == (not behind)


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(4))
def test_drawn_faults(tmp_path: Path, seed: int) -> None:
    told = Counter(outcomes(tmp_path, [drawn(random.Random(f"{seed} {number}")) for number in range(60)]))
    assert {*told} == {"committed", "in doubt", "never"}


def drawn(chance: random.Random) -> Case:
    local, writers = chance.random() < 0.5, []
    faults = [fault for fault in FAULTS if "taken" not in fault]
    for _ in range(chance.randint(1, 4)):
        met = {chance.randrange(REQUESTS + 1): chance.choice(faults) for _ in range(chance.randint(1, 3))}
        if chance.random() < 0.6:
            met[chance.randrange(REQUESTS + 1)] = chance.choice(["before dies", "after dies"])
        writers.append(met)
    return case(local, *writers)
