"""The example of NVRx: called again in the same processes after an error, and started again after a kill of the job."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch
from helpers import held
from helpers.same import same
from helpers.server_process import free_ports

pytest.importorskip("nvidia_resiliency_ext.inprocess", reason="nvidia-resiliency-ext is not installed")

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]

STEPS = 30


def start(directory: Path, name: str, held_at: int, then: str, *more: object) -> held.Job:
    """Two ranks. NVRx takes the two ports behind that of torchrun."""
    out = directory / name
    out.mkdir(exist_ok=True)
    (port,) = free_ports(1, beside=2)
    launcher = ["-m", "torch.distributed.run", "--nproc-per-node", 2, "--master-port", port]
    script = held.held("nvrx_train.py", held_at, out / "ckptlib", then, out, STEPS, *more)
    return held.start(directory, [[*launcher, *script]])


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> dict[str, torch.Tensor]:
    """The weights of a job that nobody disturbs."""
    directory = tmp_path_factory.mktemp("whole")
    told = start(directory, "whole", 18, "on").end()
    assert [*map(int, re.findall(r"from step (\d+)", told))] == [0, 0]
    return final(directory / "whole")


def final(out: Path) -> dict[str, torch.Tensor]:
    found: dict[str, torch.Tensor] = torch.load(out / "final.pt", weights_only=True)
    return found


def test_called_again_after_an_error(tmp_path: Path, whole: dict[str, torch.Tensor]) -> None:
    told = start(tmp_path, "parted", 18, "on", "--fails-at", 18).end()
    assert sorted(re.findall(r"rank (\d), call 0: from step (\d+)", told)) == [("0", "0"), ("1", "0")]
    first, second = sorted(re.findall(r"rank (\d), call 1: from step (\d+)", told))
    start_step = int(first[1])
    assert (first[0], second) == ("0", ("1", first[1]))
    assert 0 < start_step <= 18
    made = {int(pid): int(steps) for pid, steps in re.findall(r"process (\d+) made (\d+) steps", told)}
    assert len(made) == 2
    assert max(made.values()) == 19 + STEPS - start_step  # the same process: what it made before the error, and behind
    assert same(final(tmp_path / "parted"), whole)


def test_killed_and_started_again(tmp_path: Path, whole: dict[str, torch.Tensor]) -> None:
    start(tmp_path, "parted", 18, "killed").kill(2)
    assert not (tmp_path / "parted" / "final.pt").exists()
    told = start(tmp_path, "parted", 1, "on").end()
    begun = sorted(re.findall(r"rank (\d), call 0: from step (\d+)", told))
    assert [rank for rank, _ in begun] == ["0", "1"]
    assert 0 < int(begun[0][1]) == int(begun[1][1]) < 18
    assert same(final(tmp_path / "parted"), whole)
