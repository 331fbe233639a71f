"""Snapshots of a state on whatever accelerator torch finds: to the host at once, and by way of the device's memory."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from helpers.inside import has_spare_memory
from places import TESTS
from workers.accelerated import Training, device_of_rank, give_figures

import ckptlib
from ckptlib.devices import accelerator
from ckptlib.staging import spare_memory
from ckptlib.staging.spare_memory import Figures

pytestmark = [pytest.mark.accelerator, pytest.mark.gpu]


@pytest.mark.parametrize("pinned", [True, False])
@pytest.mark.parametrize("memory", ["host", "device"])
def test_every_snapshot_is_of_its_own_step(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, memory: str, pinned: bool
) -> None:
    """While training overwrites what was copied; and where slots could not be registered."""
    device = device_of_rank(0)
    give_figures(device)
    if not pinned:
        monkeypatch.setattr(ckptlib.devices.cuda, "is_pinned", lambda address: False)
    training = Training(device)
    peers = ckptlib.Peers(copies=0, every=1, memory=memory)
    expected = {}
    with ckptlib.Checkpointer(tmp_path / "root", training.state, every=4, peers=peers, arena=tmp_path) as ckpt:
        for step in ckpt.loop(ckpt.restore().step, 12):
            training.body()
            expected[step + 1] = training.tensors()
        assert ckpt.coverage is not None
        assert has_spare_memory(ckpt) is (memory == "device")
    steps = [info.step for info in ckptlib.checkpoints(tmp_path / "root")]
    assert len(steps) > 1, "a save waits for a slot, if need be, and may be some steps late"
    assert steps[-1] == 12
    for step in steps:
        other = Training(device)
        ckptlib.load(tmp_path / "root", other.state, step=step)
        found = other.tensors()
        assert found.keys() == expected[step].keys()
        for name, tensor in found.items():
            assert torch.equal(tensor, expected[step][name]), (step, name)


def test_no_room_on_the_device(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(spare_memory, "figures", lambda device: Figures(1000, 0, 0, 0))
    training = Training(device_of_rank(0))
    peers = ckptlib.Peers(copies=0, every=1, memory="device")
    with ckptlib.Checkpointer(tmp_path / "root", training.state, every=1, peers=peers, arena=tmp_path) as ckpt:
        for _ in ckpt.loop(0, 3):
            training.body()
    assert caplog.text.count("has no room for a snapshot of") == 1
    other = Training(device_of_rank(0))
    ckptlib.load(tmp_path / "root", other.state)
    found, expected = other.tensors(), training.tensors()
    assert [name for name in expected if not torch.equal(found[name], expected[name])] == []


def test_a_stream_of_its_own() -> None:
    device = device_of_rank(0)
    if not accelerator.has_streams(device):
        pytest.skip(f"{device} has no streams")
    before = accelerator.current_stream(device)
    stream = accelerator.new_stream(device)
    host = accelerator.pinned(1 << 20)
    source = torch.arange(1 << 18, dtype=torch.int32).to(device)
    stream.wait_stream(before)
    with accelerator.on(stream):
        assert accelerator.current_stream(device) == stream
        host.copy_(source.view(torch.uint8), non_blocking=True)
        event = stream.record_event()
    assert accelerator.current_stream(device) == before
    accelerator.wait(event)
    assert torch.equal(host.view(torch.int32), torch.arange(1 << 18, dtype=torch.int32))
    assert not accelerator.capturing(device)


@pytest.mark.parametrize("memory", ["host", "device"])
def test_two_ranks_killed_and_restored(tmp_path: Path, memory: str) -> None:
    """Each on its own device, where there are two: bit by bit, from memory and from the store, on one rank or two."""

    def run(num_ranks: int, what: str) -> list[dict[str, object]]:
        launch = "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(num_ranks)
        done = subprocess.run(
            [sys.executable, *launch, "workers/accelerated.py", str(tmp_path), memory, what],
            cwd=TESTS,
            capture_output=True,
            text=True,
            timeout=240,
        )
        if what == "die":
            assert done.returncode != 0
            return []
        assert done.returncode == 0, done.stderr
        return [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]

    run(2, "die")
    (restored,) = run(2, "restore")
    assert restored == {"step": 7, "exact": True, "tier": "memory"}
    for num_ranks in (2, 1):
        (loaded,) = run(num_ranks, "load")
        assert loaded == {"step": 10, "exact": True, "tier": "store"}
