"""Wrappers of other frameworks: what is inside is saved, and resumed. Look-alikes, and the real ones where they are."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from itertools import islice
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from helpers.inside import fence_of
from helpers.stage import is_installed
from onerank import Holder, Root, same
from torch import nn, optim

import ckptlib
from ckptlib import UnsupportedState
from ckptlib.staging.fence import Fence
from ckptlib.state.frameworks import warn_of_order


class Wrapper(optim.Optimizer):
    """An optimizer around another; never runs `Optimizer.__init__`."""

    def __init__(self, optimizer: Any) -> None:
        self.optimizer = optimizer

    state = property(lambda self: self.optimizer.state)  # type: ignore[assignment]
    param_groups = property(lambda self: self.optimizer.param_groups)  # type: ignore[assignment]
    defaults = property(lambda self: self.optimizer.defaults)  # type: ignore[assignment]

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        self.optimizer.step()

    def zero_grad(self, set_to_none: bool = True) -> None:
        self.optimizer.zero_grad(set_to_none)

    def state_dict(self) -> dict[str, Any]:
        return self.optimizer.state_dict()  # type: ignore[no-any-return]


def look_alike(base: type, module: str, name: str) -> type:
    return type(name, (base,), {"__module__": module})


def accelerated(optimizer: object) -> Any:
    return look_alike(Wrapper, "accelerate.optimizer", "AcceleratedOptimizer")(optimizer)


def made(wrap: Callable[[Any], Any], seed: int) -> tuple[nn.Module, Any]:
    torch.manual_seed(seed)
    model = nn.Linear(200, 100)
    return model, wrap(optim.AdamW(model.parameters(), lr=0.1))


def train(model: nn.Module, optimizer: Any, step: int) -> None:
    optimizer.zero_grad()
    model(torch.randn(4, 200, generator=torch.Generator().manual_seed(step))).square().mean().backward()
    optimizer.step()


@pytest.mark.parametrize("wrap", [accelerated, lambda o: accelerated(accelerated(o))], ids=["once", "twice"])
@pytest.mark.parametrize("resumed_wrapped", [True, False])
def test_a_wrapped_optimizer_is_the_one_inside(tmp_path: Path, wrap: Any, resumed_wrapped: bool) -> None:
    """What a wrapper saves goes into a wrapper and into a plain optimizer, and the other way round."""
    model, optimizer = made(wrap if not resumed_wrapped else lambda o: o, 0)
    with ckptlib.Checkpointer(tmp_path / "root", {"m": model, "o": optimizer}, every=1, arena=tmp_path) as ckpt:
        for step in ckpt.loop(0, 3):
            train(model, optimizer, step)
    other, resumed = made(wrap if resumed_wrapped else lambda o: o, 1)
    with ckptlib.Checkpointer(tmp_path / "root", {"m": other, "o": resumed}, every=100, arena=tmp_path) as ckpt:
        assert ckpt.restore().step == 3
    for step in range(3, 5):
        train(model, optimizer, step)
        train(other, resumed, step)
    assert same(list(other.parameters()), list(model.parameters()))


def test_the_fence_is_in_the_optimizer_inside(tmp_path: Path) -> None:
    """Whose hooks fire when the wrapper steps, so that overlap is earned."""
    model, optimizer = made(accelerated, 0)
    with ckptlib.Checkpointer(tmp_path / "root", {"m": model, "o": optimizer}, every=1, arena=tmp_path) as ckpt:
        train(model, optimizer, 0)
        assert fence_of(ckpt).fired(optimizer.optimizer)
        ckpt.after_step(1)
    assert not is_installed(fence_of(ckpt))


def test_a_wrapper_that_nobody_knows_goes_without_overlap(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    model, optimizer = made(Wrapper, 0)
    root = tmp_path / "root"
    with ckptlib.Checkpointer(root, {"m": model, "o": optimizer}, every=1, arena=tmp_path) as ckpt:
        for step in ckpt.loop(0, 3):
            train(model, optimizer, step)
            assert not fence_of(ckpt).fired(optimizer)
    told = [record for record in caplog.records if "does not accept a step hook" in record.message]
    assert [record.levelno for record in told] == [logging.WARNING], "said once"
    assert "Wrapper" in told[0].message
    other, resumed = made(Wrapper, 1)
    ckptlib.load(root, {"m": other, "o": resumed})
    train(model, optimizer, 3)
    train(other, resumed, 3)
    assert same(list(other.parameters()), list(model.parameters()))


def test_a_fence_without_hooks_is_removed() -> None:
    fence = Fence()
    fence.install([made(Wrapper, 0)[1]])
    fence.wait()
    fence.remove()


@pytest.mark.parametrize(
    ("inside", "message"),
    [
        (Holder(), "o: this AcceleratedOptimizer wraps a onerank.Holder, which is no torch.optim.Optimizer"),
        (
            look_alike(Holder, "deepspeed.runtime.zero.stage3", "DeepSpeedZeroOptimizer_Stage3")(),
            "o: DeepSpeedZeroOptimizer_Stage3 divides",
        ),
    ],
    ids=["unknown", "deepspeed"],
)
def test_what_is_wrapped_may_be_refused(root: Root, inside: object, message: str) -> None:
    with pytest.raises(UnsupportedState, match=message):
        root.save({"o": accelerated(inside)})
    weight = nn.Parameter(torch.ones(1))
    root.save({"o": optim.SGD([weight])})
    with pytest.raises(UnsupportedState, match=message):
        root.load({"o": accelerated(inside)})


class Adapter:
    """As accelerate's: its state is that of the last batch, and is not there where the loader inside has none."""

    def __init__(self, position: int | None) -> None:
        if position is not None:
            self.dl_state_dict = {"yielded": position}
        self.iteration, self.end_of_dataloader = 0, False
        self.gradient_state = SimpleNamespace(dataloader_references=[None])
        self.given: object = None

    def state_dict(self) -> object:
        return self.dl_state_dict

    def load_state_dict(self, state: object) -> None:
        self.given = state


def adapter(position: int | None) -> Any:
    base = look_alike(Adapter, "accelerate.data_loader", "DataLoaderAdapter")
    return type("DataLoaderShard", (base,), {})(position)


def test_a_data_loader_without_state_is_refused_by_name(root: Root) -> None:
    with pytest.raises(UnsupportedState, match=r"data: accelerate's DataLoaderShard has no state.*use_stateful_datal"):
        root.save({"data": adapter(None)})
    root.save({"data": adapter(3)})
    with pytest.raises(UnsupportedState, match=r"data: accelerate's DataLoaderShard has no state.*skip_first_batches"):
        root.load({"data": adapter(None)})


def test_a_data_loader_without_state_is_refused_by_name_behind_a_load(root: Root) -> None:
    """A save behind a load asks first whether the state is what was loaded."""
    root.move({"data": adapter(3)}, {"data": adapter(0)})
    with pytest.raises(UnsupportedState, match="data: accelerate's DataLoaderShard has no state"):
        root.save({"data": adapter(None)})


def test_a_data_loader_tells_its_state_before_the_first_batch(root: Root) -> None:
    loader = adapter(0)
    root.move({"data": adapter(3)}, {"data": loader})
    assert loader.given == {"yielded": 3}
    loader.given["yielded"] = 4
    again = adapter(0)
    root.move({"data": loader}, {"data": again})
    assert again.given == {"yielded": 3}


def test_accelerate(tmp_path: Path, root: Root) -> None:
    accelerate = pytest.importorskip("accelerate")
    pytest.importorskip("torchdata.stateful_dataloader")
    configuration = accelerate.utils.DataLoaderConfiguration(use_stateful_dataloader=True)
    accelerator = accelerate.Accelerator(cpu=True, dataloader_config=configuration)

    def job(seed: int) -> dict[str, Any]:
        model, optimizer = made(lambda o: o, seed)
        schedule = optim.lr_scheduler.StepLR(optimizer, 2)
        data = torch.utils.data.DataLoader(torch.arange(32.0), batch_size=4)
        names = ("m", "o", "s", "data")
        return dict(zip(names, accelerator.prepare(model, optimizer, schedule, data), strict=True))

    mine = job(0)
    batches = iter(mine["data"])
    with ckptlib.Checkpointer(tmp_path / "root", mine, every=1, arena=tmp_path) as ckpt:
        for step in ckpt.loop(0, 3):
            next(batches)
            train(mine["m"], mine["o"], step)
            mine["s"].step()
    theirs = job(1)
    ckptlib.load(tmp_path / "root", theirs, 3)
    assert same(next(iter(theirs["data"])), next(batches))
    assert theirs["s"].get_last_lr() == mine["s"].get_last_lr()
    for step in range(3, 5):
        train(mine["m"], mine["o"], step)
        train(theirs["m"], theirs["o"], step)
    assert same(list(theirs["m"].parameters()), list(mine["m"].parameters()))
    plain = accelerate.Accelerator(cpu=True).prepare(torch.utils.data.DataLoader(torch.arange(4.0)))
    with pytest.raises(UnsupportedState, match="DataLoaderShard has no state"):
        root.save({"data": plain})


@pytest.mark.parametrize("stops_at", [None, 2, 3, 4, 6])
def test_a_loader_of_accelerate_goes_on_in_its_epoch(root: Root, stops_at: int | None) -> None:
    """Three batches are an epoch, which a seeded sampler orders. Stops at a batch, or behind the first epoch."""
    accelerate = pytest.importorskip("accelerate")
    pytest.importorskip("torchdata.stateful_dataloader")
    given = {"use_stateful_dataloader": True, "use_seedable_sampler": True, "data_seed": 3}
    configuration = accelerate.utils.DataLoaderConfiguration(**given)

    def loader() -> Any:
        data = torch.utils.data.DataLoader(torch.arange(12.0), batch_size=4, shuffle=True)  # type: ignore[arg-type]
        return accelerate.Accelerator(cpu=True, dataloader_config=configuration).prepare(data)

    def batches(loader: Any) -> Iterator[list[float]]:
        return (batch.tolist() for _ in range(3) for batch in loader)

    whole, saved = [*batches(loader())], loader()
    taken = batches(saved)
    seen = [batch.tolist() for batch in saved] if stops_at is None else [*islice(taken, stops_at)]
    root.save({"data": saved})
    resumed = loader()
    root.load({"data": resumed})
    assert [*seen, *islice(batches(resumed), 9 - len(seen))] == whole


def test_a_data_loader_of_torch_is_refused_with_the_remedy(root: Root) -> None:
    state = {"data": torch.utils.data.DataLoader(torch.arange(4.0))}
    with pytest.raises(
        UnsupportedState, match=r"data: torch's DataLoader does not tell.*save ckptlib\.data\.resumable"
    ):
        root.save(state)


def test_a_sampler_that_refers_back_to_what_holds_it_ends_the_search(caplog: pytest.LogCaptureFixture) -> None:
    sampler, batches = SimpleNamespace(), SimpleNamespace()
    sampler.batch_sampler, batches.sampler = batches, sampler
    warn_of_order(SimpleNamespace(batch_sampler=batches), "data", "advice")
    assert not caplog.records
