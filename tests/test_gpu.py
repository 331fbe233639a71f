"""Snapshots of a state on a GPU: to the host at once, and by way of the GPU's own memory."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

import ckptlib
from ckptlib import cuda

pytestmark = pytest.mark.gpu


class Training:
    def __init__(self) -> None:
        torch.manual_seed(0)
        layers = [torch.nn.Linear(512, 512, device="cuda") for _ in range(8)]
        self.model = torch.nn.Sequential(*layers)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-3)
        self.state: dict[str, object] = {"model": self.model, "optim": self.optimizer}

    def body(self) -> None:
        self.model(torch.randn(16, 512, device="cuda")).pow(2).mean().backward()
        self.optimizer.step()
        self.optimizer.zero_grad()

    def tensors(self) -> dict[str, torch.Tensor]:
        found = {name: p.detach().clone() for name, p in self.model.named_parameters()}
        for name, p in self.model.named_parameters():
            found |= {f"{name}.{key}": value.clone() for key, value in self.optimizer.state[p].items()}
        return found


@pytest.mark.parametrize("memory", ["host", "device"])
def test_every_snapshot_is_of_its_own_step(tmp_path: Path, memory: str) -> None:
    """While training overwrites what was copied."""
    training = Training()
    peers = ckptlib.Peers(copies=0, every=1, memory=memory)
    expected = {}
    with ckptlib.Checkpointer(tmp_path / "root", training.state, every=4, peers=peers, arena=tmp_path) as ckpt:
        for step in ckpt.loop(ckpt.restore().step, 12):
            training.body()
            expected[step + 1] = training.tensors()
        assert ckpt.coverage is not None
    for info in ckptlib.checkpoints(tmp_path / "root"):
        other = Training()
        ckptlib.load(tmp_path / "root", other.state, step=info.step)
        found = other.tensors()
        assert found.keys() == expected[info.step].keys()
        for name, tensor in found.items():
            assert torch.equal(tensor, expected[info.step][name]), (info.step, name)


def test_no_room_on_the_device(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(cuda, "spare_nbytes", lambda device: 1000)
    training = Training()
    peers = ckptlib.Peers(copies=0, every=1, memory="device")
    with ckptlib.Checkpointer(tmp_path / "root", training.state, every=1, peers=peers, arena=tmp_path) as ckpt:
        for _ in ckpt.loop(0, 3):
            training.body()
    assert caplog.text.count("has no room for a snapshot of") == 1
    other = Training()
    ckptlib.load(tmp_path / "root", other.state)
    assert all(torch.equal(a, b) for a, b in zip(other.tensors().values(), training.tensors().values(), strict=True))
