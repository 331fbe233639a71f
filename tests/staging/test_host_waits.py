"""Training never waits for a device because of a save: not in `after_step`, and not at the fence.

The first save of a job compares what the ranks hold, and waits. So does what goes by way of the ring, where slots could
not be registered, and is not copied behind the fence: the device here has all slots registered.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from helpers.hostwaits import HostWait, HostWaits
from helpers.stage import read_event
from helpers.streams import DEVICE, Simulation
from launch import fork_ranks
from workers.unwaiting import NUM_SAVES, Training, device, train

from ckptlib.devices import accelerator
from ckptlib.staging import device_copies, replica_digests, tensor_digests
from ckptlib.staging.device_copies import DeviceCopies
from ckptlib.staging.fence import Fence
from ckptlib.staging.replica_digests import Replica, ReplicaDigests, Way
from ckptlib.staging.stager import Stager, Staging


@pytest.mark.parametrize("memory", ["host", "device"])
def test_after_step_and_the_fence_wait_for_nothing(tmp_path: Path, memory: str) -> None:
    assert len(train(tmp_path, memory)) == NUM_SAVES


def test_nor_do_two_ranks_that_digest_what_both_hold(tmp_path: Path) -> None:
    """Snapshots in the memory of the host, and then of the device."""
    fork_ranks("unwaiting.py", 2, tmp_path, timeout_s=240)


@pytest.fixture
def simulated(monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[Simulation, HostWaits]]:
    with device(monkeypatch) as found:
        yield found


@pytest.mark.parametrize("way", Way)
@pytest.mark.parametrize("whole", [False, True])
def test_digests_are_not_waited_for(simulated: tuple[Simulation, HostWaits], way: Way, whole: bool) -> None:
    simulation, waits = simulated
    training = Training(simulation)
    there = {**dict(training.model.named_parameters()), **dict(training.model.named_buffers())}
    digests = ReplicaDigests([Replica((0, 1), name, t, False, way) for name, t in sorted(there.items())])
    tensor_digests.digests_of([*there.values()])  # as the first save does: what they are multiplied by is the host's
    for number in range(1, 4):
        with waits.refused():
            reading = digests.begin(number, whole)
        assert reading.finish(0).number == number


def test_digests_of_many_sizes_are_not_waited_for(
    simulated: tuple[Simulation, HostWaits], monkeypatch: pytest.MonkeyPatch
) -> None:
    """What they are multiplied by stays on the device, however many tensors differ in size."""
    monkeypatch.setattr(tensor_digests, "_ROW_WORDS", 64)
    simulation, waits = simulated
    tensors = [simulation.to_device(torch.randn(64 * n)) for n in range(20, 120)]
    digests = ReplicaDigests([Replica((0, 1), f"{n:03}", t, False, Way.WHOLE) for n, t in enumerate(tensors)])
    tensor_digests.digests_of(tensors)
    with waits.refused():
        digests.begin(1, whole=False)


# What would wait, put in, is found


def one_of(stager: Stager, staging: Any, sources: Any) -> torch.Tensor:
    return next(source.tensor for source in sources if accelerator.device_of(source.tensor) is not None)


def before(call: Callable[..., object]) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """What calls something else first, with the same arguments."""

    def wrap(method: Callable[..., Any]) -> Callable[..., Any]:
        def both(*args: Any, **kwargs: Any) -> Any:
            call(*args[:3])
            return method(*args, **kwargs)

        return both

    return wrap


PUT_IN: dict[str, tuple[object, str, Callable[[Any], Any]]] = {
    "a number is read": (Stager, "copy", before(lambda *args: one_of(*args).sum().item())),
    "a tensor is brought": (Stager, "copy", before(lambda *args: one_of(*args).cpu())),
    "a copy blocks": (
        device_copies,
        "_enqueue",
        lambda enqueue: lambda across: [target.copy_(source) for target, source in across.moves()],
    ),
    "the fence holds up the host": (
        DeviceCopies,
        "hold_compute",
        lambda hold: lambda copied: accelerator.wait(read_event(copied)),
    ),
    "the fence waits for a stream": (
        Fence,
        "wait",
        before(lambda fence: accelerator.current_stream(DEVICE).synchronize()),  # type: ignore[attr-defined]
    ),
}


@pytest.mark.parametrize("memory", ["host", "device"])
@pytest.mark.parametrize("what", PUT_IN)
def test_what_waits_is_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, what: str, memory: str) -> None:
    owner, name, wrap = PUT_IN[what]
    monkeypatch.setattr(owner, name, wrap(getattr(owner, name)))
    with pytest.raises(HostWait):
        train(tmp_path, memory)


def test_a_wait_for_a_thread_that_waits_is_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As if sources counted as copied when all of the snapshot is on the host."""
    monkeypatch.setattr(Staging, "wait_copied", lambda staging: staging.wait_done(1))
    with pytest.raises(Exception, match="was not ready within 1 s"):
        train(tmp_path, "device")


@pytest.mark.parametrize("way", Way)
def test_digests_that_are_waited_for_are_found(
    simulated: tuple[Simulation, HostWaits], monkeypatch: pytest.MonkeyPatch, way: Way
) -> None:
    def bring(data: torch.Tensor, device: torch.device) -> Callable[[], torch.Tensor]:
        there = data.cpu()
        return lambda: there

    simulation, waits = simulated
    table = simulation.to_device(torch.randn(50, 40))
    tensor_digests.digests_of([table])
    monkeypatch.setattr(replica_digests.accelerator, "bring", bring)
    with pytest.raises(HostWait), waits.refused():
        ReplicaDigests([Replica((0, 1), "table", table, False, way)]).begin(1, whole=False)


# What the guard knows

WAITING: dict[str, Callable[[torch.Tensor, torch.Tensor], object]] = {
    "item": lambda there, host: there[0].item(),
    "float": lambda there, host: float(there[0]),
    "bool": lambda there, host: bool(there[0] > 0),
    "tolist": lambda there, host: there.tolist(),
    "numpy": lambda there, host: there.numpy(),
    "numpy's own": lambda there, host: np.asarray(there),
    "cpu": lambda there, host: there.cpu(),
    "to": lambda there, host: there.to("cpu"),
    "to, by keyword": lambda there, host: there.to(device=torch.device("cpu"), dtype=torch.float64),
    "to another": lambda there, host: there.to(host),
    "nonzero": lambda there, host: there.nonzero(),
    "a mask": lambda there, host: there[there > 0],
    "unique": lambda there, host: there.unique(),
    "masked_select": lambda there, host: there.masked_select(there > 0),
    "equal": lambda there, host: torch.equal(there, there),
    "allclose": lambda there, host: torch.allclose(there, there),
    "is_nonzero": lambda there, host: torch.is_nonzero(there[0]),
    "a copy to the host": lambda there, host: host.copy_(there),
    "a copy to memory that is not pinned": lambda there, host: host.copy_(there, non_blocking=True),
    "a copy from the host": lambda there, host: there.copy_(host),
    "to the device": lambda there, host: host.to(there.device),
    "many copies": lambda there, host: torch._foreach_copy_([host], [there]),
    "a blocking copy to pinned memory": lambda there, host: accelerator.pinned(12).view(torch.float32).copy_(there),
    "an event": lambda there, host: accelerator.current_stream(DEVICE).record_event().synchronize(),
    "a stream": lambda there, host: accelerator.current_stream(DEVICE).synchronize(),  # type: ignore[attr-defined]
    "a wait of ckptlib": lambda there, host: accelerator.wait(accelerator.current_stream(DEVICE).record_event()),
    "the device": lambda there, host: torch.accelerator.synchronize(),
    "CUDA": lambda there, host: torch.cuda.synchronize(),
    "digests": lambda there, host: tensor_digests.digests_of([there]),
}


@pytest.mark.parametrize("what", WAITING)
def test_what_waits_is_refused(simulated: tuple[Simulation, HostWaits], what: str) -> None:
    simulation, waits = simulated
    there, host = simulation.to_device(torch.ones(3)), torch.zeros(3)
    there.add_(1)
    with pytest.raises(HostWait), waits.refused():
        WAITING[what](there, host)
    WAITING[what](there, host)  # and may be done elsewhere


def test_what_was_refused_is_told_even_where_it_was_swallowed(simulated: tuple[Simulation, HostWaits]) -> None:
    simulation, waits = simulated
    there = simulation.to_device(torch.ones(3))
    with pytest.raises(HostWait), waits.refused(), pytest.raises(HostWait):
        there.cpu()


def test_what_is_read_beside_the_guard_is_what_the_device_computed(simulated: tuple[Simulation, HostWaits]) -> None:
    simulation, _ = simulated
    there = simulation.to_device(torch.ones(3))
    there.add_(torch.ones(3).to(there.device))
    assert there.device == DEVICE
    assert there.tolist() == there.cpu().tolist() == there.numpy().tolist() == [2, 2, 2]


def test_what_does_not_wait_is_let_through(simulated: tuple[Simulation, HostWaits]) -> None:
    simulation, waits = simulated
    there, host = simulation.to_device(torch.ones(3)), torch.full((3,), 2.0)
    with waits.refused():
        there.add_(1)
        stream = accelerator.current_stream(DEVICE)
        assert not stream.record_event().query()
        found = accelerator.pinned(12).view(torch.float32)
        found.copy_(there, non_blocking=True)
        brought = accelerator.bring(there.view(torch.uint8), DEVICE)
        assert host[host > 1].tolist() == [2, 2, 2]
        assert there.shape == (3,)
        there.clone().zero_()
    accelerator.wait(stream.record_event())
    assert found.tolist() == brought().view(torch.float32).tolist() == [2, 2, 2]
