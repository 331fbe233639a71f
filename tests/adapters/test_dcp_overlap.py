"""`async_save(overlap=)`: the optimizer waits for the copy; what writes past it costs the save, never its truth."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as torch_dcp
from helpers.registry import close_sessions
from torch import nn
from torch.distributed.checkpoint.state_dict import get_state_dict
from typing_extensions import override

import ckptlib
from ckptlib import dcp
from ckptlib.errors import SaveFailed
from ckptlib.staging.host_copies import HostCopies
from ckptlib.staging.stager import Staging

State = dict[str, Any]


@pytest.fixture(autouse=True)
def _sessions_close() -> Iterator[None]:
    yield
    close_sessions()


@pytest.fixture
def gate(monkeypatch: pytest.MonkeyPatch) -> threading.Event:
    """Copies beside the training wait for it."""
    opened, move = threading.Event(), HostCopies.move

    def held(copies: HostCopies) -> None:
        assert opened.wait(60)
        move(copies)

    monkeypatch.setattr(HostCopies, "move", held)
    return opened


class Alike(torch.optim.AdamW):
    """Equal to each other one, and without a hash."""

    @override
    def __eq__(self, other: object) -> bool:
        return isinstance(other, Alike)


class Training:
    def __init__(self, kind: type[torch.optim.AdamW] = torch.optim.AdamW) -> None:
        torch.manual_seed(0)
        self.model = nn.Linear(256, 128)
        self.optim = kind(self.model.parameters(), lr=0.1)

    def step(self) -> None:
        self.model(torch.randn(4, 256)).square().sum().backward()
        self.optim.step()
        self.optim.zero_grad()

    def state(self) -> State:
        model, optim = get_state_dict(self.model, self.optim)
        return {"model": model, "optim": optim, "buffer": torch.ones(1 << 15)}

    def copied(self) -> State:
        model, optim = get_state_dict(self.model, self.optim)
        return {"model": clone(model), "optim": clone(optim)}


def clone(node: Any) -> Any:
    if isinstance(node, dict):
        return {key: clone(value) for key, value in node.items()}
    return node.clone() if isinstance(node, torch.Tensor) else node


def same(one: Any, other: Any) -> bool:
    if isinstance(one, dict):
        return one.keys() == other.keys() and all(same(one[key], other[key]) for key in one)
    return torch.equal(one, other) if isinstance(one, torch.Tensor) else one == other


def earned(directory: Path, gate: threading.Event, kind: type[torch.optim.AdamW] = torch.optim.AdamW) -> Training:
    """A training whose optimizer has stepped behind a first save, which copied all at once."""
    training = Training(kind)
    training.step()
    first = dcp.async_save(training.state(), checkpoint_id=directory / "step-1", overlap=training.optim)
    assert first.pending.staging.copied, "nothing overlaps before the hook was seen to fire"
    gate.set()
    first.result(60)
    gate.clear()
    training.step()
    return training


def loaded(directory: Path, step: int) -> State:
    fresh = Training()
    fresh.step()
    state = fresh.copied()
    dcp.load(state, checkpoint_id=directory / f"step-{step}")
    return state


def in_thread(call: Callable[[], object]) -> threading.Thread:
    thread = threading.Thread(target=call, daemon=True)
    thread.start()
    thread.join(0.3)
    return thread


@pytest.mark.parametrize("kind", [torch.optim.AdamW, Alike])
def test_the_optimizer_waits_for_the_copy(tmp_path: Path, gate: threading.Event, kind: type[torch.optim.AdamW]) -> None:
    training = earned(tmp_path, gate, kind)
    before = training.copied()
    state = training.state()
    future = dcp.async_save(state, checkpoint_id=tmp_path / "step-2", overlap=[training.optim])
    assert not future.pending.staging.copied
    state["buffer"].zero_()  # no optimizer's: it was copied at once
    stepping = in_thread(training.step)
    assert stepping.is_alive()
    assert same(training.copied(), before)
    gate.set()
    stepping.join(60)
    assert not same(training.copied(), before)
    assert future.result(60) == 2
    assert same(loaded(tmp_path, 2), before)
    assert ckptlib.read(tmp_path / "step", 2)["buffer"].tolist() == [1] * (1 << 15)


def test_without_it_all_is_copied_at_once(tmp_path: Path, gate: threading.Event) -> None:
    training = earned(tmp_path, gate)
    before = training.copied()
    future = dcp.async_save(training.state(), checkpoint_id=tmp_path / "step-2")
    assert future.pending.staging.copied
    with torch.no_grad():
        training.model.weight.zero_()
    gate.set()
    future.result(60)
    assert same(loaded(tmp_path, 2), before)


@pytest.mark.parametrize("write", [lambda p: p.data.add_(1), lambda p: p.detach().numpy().fill(3)])
def test_a_write_past_the_fence_fails_the_save(
    tmp_path: Path, gate: threading.Event, write: Callable[[nn.Parameter], object]
) -> None:
    training = earned(tmp_path, gate)
    future = dcp.async_save(training.state(), checkpoint_id=tmp_path / "step-2", overlap=training.optim)
    write(training.model.weight)
    gate.set()
    with pytest.raises(SaveFailed, match="model/weight was modified while it was being copied"):
        future.result(60)
    assert [info.step for info in ckptlib.checkpoints(tmp_path / "step")] == [1]

    gate.clear()  # from now on it copies at once, whatever the optimizer does
    training.step()
    before = training.copied()
    again = dcp.async_save(training.state(), checkpoint_id=tmp_path / "step-3", overlap=training.optim)
    assert again.pending.staging.copied
    write(training.model.weight)
    gate.set()
    assert again.result(60) == 3
    assert same(loaded(tmp_path, 3), before)


def test_a_parameter_that_asks_for_no_gradient_is_copied_at_once(tmp_path: Path, gate: threading.Event) -> None:
    """Its optimizer does not write to it, but a forward may."""
    training = earned(tmp_path, gate)
    training.model.weight.requires_grad_(False)
    before = training.copied()
    future = dcp.async_save(training.state(), checkpoint_id=tmp_path / "step-2", overlap=training.optim)
    training.model.weight[:3] += 1
    gate.set()
    future.result(60)
    assert same(loaded(tmp_path, 2), before)


def test_others_can_wait_for_the_copy(tmp_path: Path, gate: threading.Event) -> None:
    """`wait_copied`, and a load into what is being copied."""
    training = earned(tmp_path, gate)
    before = training.copied()
    future = dcp.async_save(training.state(), checkpoint_id=tmp_path / "step-2", overlap=training.optim)
    waiting = in_thread(future.wait_copied)
    loading = in_thread(lambda: dcp.load(training.state(), checkpoint_id=tmp_path / "step-1"))
    assert waiting.is_alive()
    assert loading.is_alive()
    assert same(training.copied(), before)
    gate.set()
    waiting.join(60)
    loading.join(60)
    assert not same(training.copied(), before)
    future.result(60)
    assert same(loaded(tmp_path, 2), before)


LOADS: dict[str, Callable[[State, Path, int], object]] = {
    "ckptlib.load": lambda state, root, step: ckptlib.load(root, state, step, only="model"),
    "StorageReader": lambda state, root, step: torch_dcp.load(
        state, storage_reader=dcp.StorageReader(root.with_name(f"step-{step}"))
    ),
}


@pytest.mark.parametrize("load", LOADS)
def test_whatever_loads_waits_for_the_copy(
    tmp_path: Path, gate: threading.Event, monkeypatch: pytest.MonkeyPatch, load: str
) -> None:
    """The copy begins when it is waited for, or else behind the load."""
    training = earned(tmp_path, gate)
    before = training.copied()
    future = dcp.async_save(training.state(), checkpoint_id=tmp_path / "step-2", overlap=training.optim)
    waits = Staging.wait_copied

    def opening(staging: Staging) -> None:
        gate.set()
        waits(staging)

    monkeypatch.setattr(Staging, "wait_copied", opening)
    LOADS[load]({"model": training.state()["model"]}, tmp_path / "step", 1)
    assert not same(training.copied(), before)
    gate.set()
    future.result(60)
    assert same(loaded(tmp_path, 2), before)


def test_an_optimizer_that_did_not_step_earns_nothing(tmp_path: Path, gate: threading.Event) -> None:
    """Another one, or none at all, may have written: an optimizer without hooks fires none."""
    training = earned(tmp_path, gate)
    gate.set()
    dcp.async_save(training.state(), checkpoint_id=tmp_path / "step-2", overlap=training.optim).result(60)
    gate.clear()
    future = dcp.async_save(training.state(), checkpoint_id=tmp_path / "step-3", overlap=training.optim)
    assert future.pending.staging.copied
    gate.set()
    future.result(60)


def test_what_is_no_optimizer_is_refused(tmp_path: Path) -> None:
    with pytest.raises(TypeError, match="overlap="):
        dcp.async_save({"w": torch.ones(2)}, checkpoint_id=tmp_path / "step-1", overlap=[nn.Linear(2, 2)])  # type: ignore[list-item]
