"""A training on a device that is not there, whose host may not wait for it once a first save is made.

By itself, or `torchrun unwaiting.py <directory>`: ranks that hold the same. The state is digested on the device then.
"""

from __future__ import annotations

import faulthandler
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

sys.path.insert(0, str(Path(__file__).parent.parent))

from helpers.hostwaits import PATIENCE_S, HostWaits
from helpers.inside import has_spare_memory
from helpers.runtime import Runtime
from helpers.schedules import shrink
from helpers.streams import Simulation

import ckptlib
from ckptlib.saving import session
from ckptlib.staging import spare_memory, stager, tensor_digests
from ckptlib.staging.spare_memory import Figures

NUM_SAVES = 8
"""Each slot has been used, and used again; the ranks have digested a sample, and the whole."""

MOST_STEPS = 60
"""Of which each may find no slot free."""


@contextmanager
def device(monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[Simulation, HostWaits]]:
    """One whose host memory is registered, a thousand times smaller than any."""
    shrink(monkeypatch)
    runtime = Runtime()
    runtime.patch(monkeypatch)
    simulation = Simulation(runtime)
    simulation.patch(monkeypatch)
    monkeypatch.setattr(spare_memory, "figures", lambda device: Figures(1 << 30, 0, 0, 0))
    monkeypatch.setattr(spare_memory, "MARGIN_BYTES", 0)
    monkeypatch.setattr(session, "WHOLE_EVERY", 3)
    for kept in (tensor_digests._weights, tensor_digests._more_weights):
        kept.cache_clear()  # they were another device's
    monkeypatch.setattr(stager, "COPY_TIMEOUT_S", 5.0)  # only what is wrong takes as long
    waits = HostWaits(simulation)
    with simulation, waits:
        yield simulation, waits


class Training:
    """Tensors small and large: of a fused AdamW, its steps among them; frozen; written by the forward pass; lent."""

    def __init__(self, simulation: Simulation) -> None:
        torch.manual_seed(0)
        self.model = torch.nn.Sequential(torch.nn.Linear(64, 60), torch.nn.BatchNorm1d(60), torch.nn.Linear(60, 3))
        self.model.register_buffer("table", torch.randn(50, 40))
        self.model.register_buffer("turned", torch.randn(30, 70).t())
        self.model.register_parameter("frozen", torch.nn.Parameter(torch.randn(70, 20), requires_grad=False))
        for tensor in (*self.model.parameters(), *self.model.buffers()):
            simulation.to_device(tensor.detach())
        self.trained = [p for p in self.model.parameters() if p.requires_grad]
        self.optimizer = torch.optim.AdamW(self.trained, lr=1e-3, fused=True)
        for p in self.trained:
            p.grad = torch.full_like(p, 0.5)
        self.state = {"model": self.model, "optim": self.optimizer, "host": torch.zeros(100), "lent": self}

    def state_dict(self) -> dict[str, torch.Tensor]:
        return {"copy": self.trained[0].detach().clone()}

    def load_state_dict(self, state: dict[str, torch.Tensor]) -> None:
        pass

    @torch.no_grad()
    def body(self) -> None:
        for buffer in self.model.buffers():
            buffer.add_(1)
        self.optimizer.step()

    def steps_on(self, simulation: Simulation) -> bool:
        """Whether the optimizer counts its steps in the device's memory."""
        return all(simulation.holds(self.optimizer.state[p]["step"]) for p in self.trained)


def train(directory: Path, memory: str) -> list[int]:
    """The steps that were saved, all but the first without a wait of the host. Raises HostWait."""
    with pytest.MonkeyPatch.context() as monkeypatch, device(monkeypatch) as (simulation, waits):
        training, saved = Training(simulation), list[int]()
        training.body()
        assert training.steps_on(simulation)
        peers = ckptlib.Peers(copies=0, every=1, memory=memory)
        with ckptlib.Checkpointer(directory / "root", training.state, every=1, peers=peers, arena=directory) as ckpt:
            ckpt.after_step(1)  # all ranks compare all that they hold, which waits for the devices
            for step in range(2, MOST_STEPS):
                wait_for_last(ckpt, saved)
                if len(saved) == NUM_SAVES:
                    break
                with waits.refused():
                    training.body()
                    ckpt.after_step(step)
                    with ckpt.updating():  # what was begun is under way still, here and before the next step
                        training.body()
            assert has_spare_memory(ckpt) is (memory == "device")
        assert simulation.violations == []
        assert [info.step for info in ckptlib.checkpoints(directory / "root")] == saved
        return saved


def wait_for_last(ckpt: ckptlib.Checkpointer, saved: list[int]) -> None:
    """Until nobody but the training's thread has a use for the device."""
    pending = ckpt.pending
    if pending is not None and pending.step not in saved:
        pending.wait_committed(PATIENCE_S)
        saved.append(pending.step)


def main(directory: Path) -> None:
    faulthandler.dump_traceback_later(PATIENCE_S * 2)
    dist.init_process_group("gloo")
    for memory in ("host", "device"):
        (directory / memory).mkdir(exist_ok=True)
        saved = train(directory / memory, memory)
        assert len(saved) == NUM_SAVES, saved
    dist.destroy_process_group()


if __name__ == "__main__":
    main(Path(sys.argv[1]))
