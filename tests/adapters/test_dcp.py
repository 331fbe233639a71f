"""`ckptlib.dcp` beside torch.distributed.checkpoint, whose results are the oracle. One process."""

from __future__ import annotations

import concurrent.futures
import warnings
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as torch_dcp
from helpers.registry import close_sessions
from torch import nn
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner, DefaultSavePlanner
from torch.distributed.checkpoint.state_dict import get_model_state_dict, get_state_dict, set_state_dict

import ckptlib
from ckptlib import dcp

State = dict[str, Any]


@pytest.fixture(autouse=True)
def _sessions_close() -> Iterator[None]:
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="torch.distributed is disabled")
        yield
    close_sessions()


def trained(seed: int, steps: int = 2) -> tuple[nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(4, 6), nn.BatchNorm1d(6), nn.Linear(6, 2))
    optim = torch.optim.AdamW(model.parameters(), lr=0.1)
    for _ in range(steps):
        model(torch.randn(8, 4)).square().sum().backward()
        optim.step()
        optim.zero_grad()
    return model, optim


class App:
    """As in PyTorch's own tutorial."""

    def __init__(self, seed: int) -> None:
        self.model, self.optim = trained(seed)

    def state_dict(self) -> State:
        model, optim = get_state_dict(self.model, self.optim)
        return {"model": model, "optim": optim}

    def load_state_dict(self, state: State) -> None:
        set_state_dict(self.model, self.optim, model_state_dict=state["model"], optim_state_dict=state["optim"])


class Counter:
    def __init__(self, n: int) -> None:
        self.n = n

    def state_dict(self) -> State:
        return {"n": self.n, "history": [self.n, {"before": self.n - 1}]}

    def load_state_dict(self, state: State) -> None:
        assert state["history"] == [state["n"], {"before": state["n"] - 1}]
        self.n = state["n"]


def of_state_dicts(seed: int) -> State:
    model, optim = get_state_dict(*trained(seed))
    return {"model": model, "optim": optim, "step": seed}


def nested(seed: int) -> State:
    torch.manual_seed(seed)
    return {
        "lists": [torch.randn(3), [torch.randn(2, 2), torch.tensor(seed)]],
        "deep": {"a": {"b.c": {"d/e": torch.randn(2).bfloat16()}}, "lr": 0.1 * seed, "name": f"n{seed}"},
        "flags": torch.tensor([True, False]),
        "empty": torch.empty(0, 3),
        "none": None,
        "tuple": (1, seed),
    }


def flat_model(seed: int) -> State:
    return dict(get_model_state_dict(trained(seed)[0]))


STATES: list[Callable[[int], State]] = [
    of_state_dicts,
    nested,
    flat_model,
    lambda seed: {"app": App(seed)},
    lambda seed: {"counter": Counter(seed), "w": torch.full((3,), float(seed))},
    lambda seed: {"model": trained(seed)[0]},
    lambda seed: {"raw": trained(seed)[1].state_dict()},
    lambda seed: {"sched": torch.optim.lr_scheduler.StepLR(trained(seed)[1], seed)},
]


def bits(value: Any) -> Any:
    """What two states have in common when they are equal."""
    if isinstance(value, torch.Tensor):
        return value.dtype, tuple(value.shape), value.detach().reshape(-1).view(torch.uint8).tolist()
    if isinstance(value, Mapping):
        return {key: bits(entry) for key, entry in value.items()}
    if isinstance(value, list | tuple):
        return [bits(entry) for entry in value]
    if hasattr(value, "state_dict"):
        return bits(value.state_dict())
    return value


@pytest.mark.parametrize("state_of", STATES)
def test_loads_what_dcp_loads(tmp_path: Path, state_of: Callable[[int], State]) -> None:
    torch_dcp.save(state_of(1), checkpoint_id=tmp_path / "theirs")
    dcp.save(state_of(1), checkpoint_id=tmp_path / "step-1")
    theirs, ours = state_of(2), state_of(2)
    assert bits(ours) != bits(state_of(1))
    torch_dcp.load(theirs, checkpoint_id=tmp_path / "theirs")
    dcp.load(ours, checkpoint_id=tmp_path / "step-1")
    assert bits(ours) == bits(theirs) == bits(state_of(1))


def test_tensors_are_filled_in_place(tmp_path: Path) -> None:
    dcp.save({"w": torch.arange(4.0), "n": 3}, checkpoint_id=tmp_path / "step-1")
    target = torch.zeros(4)
    state: State = {"w": target, "n": 0}
    dcp.load(state, checkpoint_id=tmp_path / "step-1")
    assert state["w"] is target
    assert target.tolist() == [0, 1, 2, 3]
    assert state["n"] == 3


def test_tensors_of_the_meta_device_get_memory(tmp_path: Path) -> None:
    """As `model.load_state_dict(state, assign=True)` expects; those that nothing fills stay without. None is saved."""
    model, _ = trained(1)
    dcp.save({"model": model.state_dict()}, checkpoint_id=tmp_path / "step-1")
    with torch.device("meta"):
        empty = nn.Sequential(nn.Linear(4, 6), nn.BatchNorm1d(6), nn.Linear(6, 2))
    state: State = {"model": empty.state_dict(), "more": torch.empty(3, device="meta")}
    inside = state["model"]
    partial = DefaultLoadPlanner(allow_partial_load=True)
    dcp.load(state, checkpoint_id=tmp_path / "step-1", planner=partial)
    assert state["model"] is inside
    assert state["more"].is_meta
    empty.load_state_dict(inside, assign=True)
    assert bits(empty) == bits(model)
    with pytest.raises(ckptlib.UnsupportedState, match="meta device"):
        dcp.save({"w": torch.empty(3, device="meta")}, checkpoint_id=tmp_path / "step-2")


@pytest.mark.parametrize("steps", [0, 1])
def test_named_state_goes_into_an_optimizer(tmp_path: Path, steps: int) -> None:
    """What get_state_dict gave loads into a module and an optimizer as they are, whether this has stepped or not."""
    model, optim = trained(1)
    dcp.save(App(1).state_dict(), checkpoint_id=tmp_path / "step-1")
    other_model, other_optim = trained(2, steps)
    dcp.load({"model": other_model, "optim": other_optim}, checkpoint_id=tmp_path / "step-1")
    assert bits(other_model) == bits(model)
    assert bits(other_optim) == bits(optim)
    with pytest.raises(ckptlib.StateMismatch, match="lacks optim"):
        dcp.load({"optim": other_optim}, checkpoint_id=tmp_path / "step-1")


def test_a_future(tmp_path: Path) -> None:
    w = torch.ones(1000)
    future = dcp.async_save({"w": w}, checkpoint_id=tmp_path / "step-5")
    w.zero_()
    told: list[Future[int]] = []
    future.add_done_callback(told.append)
    assert isinstance(future, Future)
    assert not future.cancel()
    assert future.result(60) == 5
    assert future.done()
    assert future.exception() is None
    assert told == [future]
    state = {"w": torch.empty(1000)}
    dcp.load(state, checkpoint_id=tmp_path / "step-5")
    assert state["w"].eq(1).all()


def test_what_concurrent_futures_cannot_wait_for_is_said(tmp_path: Path) -> None:
    future = dcp.async_save({"w": torch.ones(1000)}, checkpoint_id=tmp_path / "step-1")
    other = Future[int]()
    other.set_result(1)
    if not future.done():  # else it was quick
        with pytest.raises(ckptlib.StateError, match=r"save of step 1: .*result\(timeout\)"):
            concurrent.futures.wait([future, other], timeout=60)
    assert future.result(60) == 1
    assert concurrent.futures.wait([future, other], timeout=60).done == {future, other}
    assert {*concurrent.futures.as_completed([future, other], timeout=60)} == {future, other}


def test_plain_values_that_only_the_checkpoint_has(tmp_path: Path) -> None:
    saved = {"cfg": {"x": {"y": 1, "z": 2}, "more": [1]}, "w": torch.ones(2)}
    dcp.save(saved, checkpoint_id=tmp_path / "step-1")
    state = {"cfg": {"x": {"y": 0}}, "w": torch.zeros(2)}
    dcp.load(state, checkpoint_id=tmp_path / "step-1")
    assert state["cfg"] == {"x": {"y": 1}}
    assert state["w"].eq(1).all()


def test_a_step_again(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """The steps up to it stay; those behind it are abandoned, as a new generation goes on from there."""
    for step in (1, 2, 3):
        dcp.save({"w": torch.tensor(float(step))}, checkpoint_id=tmp_path / f"step-{step}")
    dcp.save({"w": torch.tensor(20.0)}, checkpoint_id=tmp_path / "step-2")
    assert "step 2 is saved after step 3; the steps behind it are abandoned" in caplog.text
    assert [info.step for info in ckptlib.checkpoints(tmp_path / "step")] == [1, 2]
    for step, value in ((1, 1.0), (2, 20.0)):
        state = {"w": torch.zeros(())}
        dcp.load(state, checkpoint_id=tmp_path / f"step-{step}")
        assert state["w"] == value
    dcp.save({"w": torch.tensor(3.5)}, checkpoint_id=tmp_path / "step-3")
    assert [info.step for info in ckptlib.checkpoints(tmp_path / "step")] == [1, 2, 3]


@pytest.mark.parametrize("asynchronous", [False, True])
def test_one_checkpoint_that_is_replaced(tmp_path: Path, asynchronous: bool) -> None:
    where = tmp_path / "last"
    for n in range(4):
        if asynchronous:
            dcp.async_save({"w": torch.tensor(float(n))}, checkpoint_id=where).result()
        else:
            dcp.save({"w": torch.tensor(float(n))}, checkpoint_id=where)
        state = {"w": torch.zeros(())}
        dcp.load(state, checkpoint_id=where)
        assert state["w"] == n
    close_sessions()
    assert [info.step for info in ckptlib.checkpoints(where)][-1] == 3
    assert len([*ckptlib.checkpoints(where)]) <= 2, "older ones are dropped"
    dcp.save({"w": torch.tensor(9.0)}, checkpoint_id=where)  # as another process would
    dcp.load(state, checkpoint_id=where)
    assert state["w"] == 9


@pytest.mark.parametrize("count", [1, 3, 6])
@pytest.mark.parametrize("save", [dcp.save, dcp.async_save])
def test_the_steps_of_a_run_are_not_replaced(tmp_path: Path, count: int, save: Callable[..., object]) -> None:
    for step in range(count):
        ckptlib.save(tmp_path / "run", {"w": torch.tensor(float(step))}, step, keep=ckptlib.Keep(last=6))
    close_sessions()
    told = f"has {count} steps, of which {count} are of a run that keeps them, step {count - 1} the last one"
    with pytest.raises(ckptlib.StateError, match=told):
        save({"w": torch.ones(())}, checkpoint_id=tmp_path / "run")
    assert len([*ckptlib.checkpoints(tmp_path / "run")]) == count
    save({"w": torch.ones(())}, checkpoint_id=tmp_path / "run", keep=ckptlib.Keep(last=10))
    close_sessions()
    assert len([*ckptlib.checkpoints(tmp_path / "run")]) == count + 1


def test_who_says_once_that_one_step_stays_need_not_say_it_again(tmp_path: Path) -> None:
    for step in range(3):
        ckptlib.save(tmp_path / "last", {"w": torch.ones(())}, step)
    close_sessions()
    for keep in (ckptlib.Keep(last=1), None, None):
        dcp.save({"w": torch.ones(())}, checkpoint_id=tmp_path / "last", keep=keep)
        close_sessions()
    assert [info.step for info in ckptlib.checkpoints(tmp_path / "last")] == [5]


def test_a_number_of_steps_to_keep_is_refused_with_what_to_give(tmp_path: Path) -> None:
    with pytest.raises(TypeError, match=r"keep=3: expected Keep, such as Keep\(last=3\)"):
        dcp.save({"w": torch.ones(())}, checkpoint_id=tmp_path / "run/step-1", keep=3)  # type: ignore[arg-type]


def test_a_step_whose_record_is_lost_may_be_of_a_run(tmp_path: Path) -> None:
    """Nothing tells whether it is to be kept; whoever says it need not have the record."""
    where = tmp_path / "last"
    dcp.save({"w": torch.ones(())}, checkpoint_id=where)
    close_sessions()
    for record in where.rglob("generations/*.json"):  # and its copy
        record.chmod(0o600)
        record.write_bytes(b"lost")
    with pytest.raises(ckptlib.StateError, match="with keep= which ones stay"):
        dcp.save({"w": torch.ones(())}, checkpoint_id=where)
    dcp.save({"w": torch.ones(())}, checkpoint_id=where, keep=ckptlib.Keep(last=1))
    close_sessions()
    assert [info.step for info in ckptlib.checkpoints(where)] == [1]


def test_a_run_that_goes_on_from_what_was_replaced_is_a_run(tmp_path: Path) -> None:
    for _ in range(3):
        dcp.save({"w": torch.ones(())}, checkpoint_id=tmp_path / "last")
        close_sessions()
    ckptlib.save(tmp_path / "last", {"w": torch.ones(())}, 7)
    close_sessions()
    with pytest.raises(ckptlib.StateError, match="of which 1 are of a run that keeps them, step 7 the last one"):
        dcp.save({"w": torch.ones(())}, checkpoint_id=tmp_path / "last")


def test_names_of_one_side(tmp_path: Path) -> None:
    dcp.save({"a": torch.ones(2), "b": torch.ones(2)}, checkpoint_id=tmp_path / "step-1")
    state = {"a": torch.zeros(2)}
    dcp.load(state, checkpoint_id=tmp_path / "step-1")
    assert state["a"].tolist() == [1, 1]
    more = {"a": torch.zeros(2), "c": torch.zeros(2)}
    with pytest.raises(ckptlib.StateMismatch, match="lacks c, which the state dict has"):
        dcp.load(more, checkpoint_id=tmp_path / "step-1")
    dcp.load(more, checkpoint_id=tmp_path / "step-1", planner=DefaultLoadPlanner(allow_partial_load=True))
    assert more["a"].tolist() == [1, 1]
    with pytest.raises(ckptlib.StateMismatch, match=r"float32\[3\], checkpoint has float32\[2\]"):
        dcp.load({"a": torch.zeros(3)}, checkpoint_id=tmp_path / "step-1")
    with pytest.raises(ckptlib.CheckpointNotFound):
        dcp.load({"a": torch.zeros(2)}, checkpoint_id=tmp_path / "step-2")


def test_lists_without_tensors_are_replaced(tmp_path: Path) -> None:
    """Whatever length they have by then, as a list of losses that grows."""
    saved = {"losses": [0.5, 0.25], "best": {"step": 3, "names": ("a", "b")}, "rows": [torch.ones(2), [1, 2, 3]]}
    for save, name in ((torch_dcp.save, "theirs"), (dcp.save, "step-1")):
        save(saved, checkpoint_id=tmp_path / name)
    for load, name in ((torch_dcp.load, "theirs"), (dcp.load, "step-1")):
        state: State = {"losses": [], "best": {"step": 0, "names": ()}, "rows": [torch.zeros(2), [0]]}
        load(state, checkpoint_id=tmp_path / name)
        assert bits(state) == bits(saved)


def test_what_is_refused(tmp_path: Path) -> None:
    state = {"w": torch.ones(1)}
    where = tmp_path / "step-1"
    for given in (
        {"storage_writer": torch_dcp.FileSystemWriter(where)},
        {"planner": object()},
        {"use_collectives": False},
    ):
        with pytest.raises(ValueError, match=next(iter(given))):
            dcp.save(state, checkpoint_id=where, **given)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="async_stager"):
        dcp.async_save(state, checkpoint_id=where, async_stager=object())
    with pytest.raises(ValueError, match="storage_reader"):
        dcp.load(state, checkpoint_id=where, storage_reader=torch_dcp.FileSystemReader(where))
    with pytest.raises(ValueError, match="checkpoint_id is needed"):
        dcp.save(state)
    with pytest.raises(ckptlib.UnsupportedState, match="thing"):
        dcp.save({"thing": object()}, checkpoint_id=where)
    dcp.save(state, checkpoint_id=where, planner=DefaultSavePlanner(), no_dist=True)
