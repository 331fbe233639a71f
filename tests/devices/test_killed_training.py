"""Real trainings of one rank, killed while the device is at work, and resumed: as if nothing had happened, bit for bit.

On the accelerator that torch finds, with its own collectives; on the host, which is slow, the same.
"""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from places import TESTS
from workers.killed_training import DIES, EVERY, NEED_ACCELERATOR, STEPS, WAYS

DEVICES = [
    pytest.param("cpu", marks=pytest.mark.slow),
    pytest.param("accelerator", marks=[pytest.mark.accelerator, pytest.mark.gpu]),
]


@pytest.mark.parametrize("memory", ["host", "device"])
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("device", DEVICES)
def test_a_killed_training_goes_on_as_if_it_had_not_been(tmp_path: Path, device: str, way: str, memory: str) -> None:
    if device == "cpu" and way in NEED_ACCELERATOR:
        pytest.skip("torch does that with an accelerator only")
    found = torch.accelerator.current_accelerator()
    on = f"{found.type}:0" if device == "accelerator" and found is not None else "cpu"

    def run(what: str, status: int = 0) -> list[dict[str, object]]:
        command = [sys.executable, "workers/killed_training.py", way, on, str(tmp_path), memory, what]
        done = subprocess.run(command, cwd=TESTS, capture_output=True, text=True, timeout=240)
        assert done.returncode == status, done.stderr
        return [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]

    whole = {line["step"]: line for line in run("whole")}
    assert [*whole] == [*range(1, STEPS + 1)]
    run("killed", -9)
    began, *told = run("resumed")
    assert 0 < began["step"] <= DIES
    saved = {line["step"] for line in told}
    assert STEPS in saved
    assert any(EVERY <= step < STEPS for step in saved), "a save waits for a slot, if need be, and may be a step late"
    for line in (began, *told):
        assert line == {key: whole[line["step"]][key] for key in line}
