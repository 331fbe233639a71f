"""A step that was loaded into what is saved next is gone back to; one that was only looked at is not."""

from __future__ import annotations

import gc
import logging
import resource
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers.registry import num_loads
from onerank import Root, opened
from torch import nn
from torch.multiprocessing.reductions import StorageWeakRef

import ckptlib
from ckptlib.errors import NoRoom, StateError, UnsupportedState

State = Callable[[], dict[str, object]]


@pytest.fixture
def root(tmp_path: Path) -> Iterator[Root]:
    with opened(tmp_path / "root") as made:
        yield made


def steps(root: Root) -> list[int]:
    return [info.step for info in ckptlib.checkpoints(root.url)]


def net() -> nn.Module:
    return nn.Sequential(nn.Linear(4, 6), nn.BatchNorm1d(6), nn.Linear(6, 2))


class App:
    """As DCP's tutorial has it: made for each save and each load."""

    def __init__(self, model: nn.Module, optim: torch.optim.Optimizer) -> None:
        self.model, self.optim = model, optim

    def state_dict(self) -> dict[str, Any]:
        return {"model": self.model.state_dict(), "optim": self.optim.state_dict()}

    def load_state_dict(self, content: dict[str, Any]) -> None:
        self.model.load_state_dict(content["model"])
        self.optim.load_state_dict(content["optim"])


def training(kind: str) -> tuple[State, Callable[[], None]]:
    """What is saved, made anew for each call, and a step of training."""
    model = net()
    optim = torch.optim.AdamW(model.parameters())
    loose = torch.zeros(5)

    def train() -> None:
        loose.add_(1)
        model(torch.randn(3, 4)).sum().backward()
        optim.step()
        optim.zero_grad()
        model[1].running_mean = model[1].running_mean.clone()  # type: ignore[union-attr]  # a buffer that is replaced

    states: dict[str, State] = {
        "tensors": lambda: {"w": loose, "views": [loose[:2], loose.t()], "rng": torch.get_rng_state()[:4].clone()},
        "modules": lambda: {"model": model, "optim": optim, "loss": torch.rand(300), "epoch": 1},
        "weights alone": lambda: {"model": model},
        "wrapped": lambda: {"model": nn.Sequential(model), "optim": optim},
        "state_dicts": lambda: {"model": model.state_dict(), "loss": torch.rand(())},
        "object": lambda: {"app": App(model, optim)},
    }
    return states[kind], train


KINDS = ["tensors", "modules", "weights alone", "wrapped", "state_dicts", "object"]


@pytest.mark.parametrize("kind", KINDS)
def test_training_that_goes_back_leaves_the_later_steps(root: Root, kind: str) -> None:
    state, train = training(kind)
    if kind == "object":  # one that is made for each save is known by most of its tensors alone
        train()
    for step in (1, 2, 3):
        ckptlib.save(root.url, state(), step)
        train()  # the optimizer's state comes into being after step 1, and is gone again with it
    ckptlib.load(root.url, state(), 1)
    train()
    gc.collect()
    ckptlib.save(root.url, state(), 4)
    assert steps(root) == [1, 4]
    ckptlib.save(root.url, state(), 5)
    assert steps(root) == [1, 4, 5]


@pytest.mark.parametrize("kind", ["tensors", pytest.param("modules", marks=pytest.mark.slow), "object"])
def test_to_evaluate_an_older_step_changes_no_history(root: Root, kind: str, caplog: pytest.LogCaptureFixture) -> None:
    state, train = training(kind)
    for step in (1, 2, 3):
        ckptlib.save(root.url, state(), step)
        train()
    for _ in range(3):  # what was filled is gone each time, and its memory is used again
        ckptlib.load(root.url, training(kind)[0](), 1)
        gc.collect()
    other, _ = training(kind)
    ckptlib.load(root.url, other(), 2)
    with caplog.at_level(logging.WARNING):
        ckptlib.save(root.url, state(), 4)
    assert steps(root) == [1, 2, 3, 4]
    assert "was loaded" not in caplog.text


def test_who_comes_back_to_the_newest_step_has_gone_nowhere(root: Root) -> None:
    state, train = training("modules")
    for step in (1, 2, 3):
        ckptlib.save(root.url, state(), step)
        train()
    ckptlib.load(root.url, state(), 1)
    ckptlib.load(root.url, state())
    ckptlib.load(root.url, training("modules")[0](), 2)
    ckptlib.save(root.url, state(), 4)
    assert [(info.step, info.generation) for info in ckptlib.checkpoints(root.url)] == [(1, 1), (2, 1), (3, 1), (4, 1)]


@pytest.mark.parametrize(
    "options", [{"only": "model"}, {"only": ["*"]}, {"strict": False, "map": {"optim": "none"}}], ids=str
)
def test_part_of_a_step_is_not_gone_back_to_but_told_of(
    root: Root, caplog: pytest.LogCaptureFixture, options: dict[str, Any]
) -> None:
    model, optim = net(), torch.optim.SGD([nn.Parameter(torch.zeros(1))])
    for step in (1, 2, 3):
        ckptlib.save(root.url, {"model": model, "optim": optim}, step)
    ckptlib.load(root.url, {"model": model, "optim": optim}, 1, **options)
    with caplog.at_level(logging.WARNING):
        ckptlib.save(root.url, {"model": model, "optim": optim}, 4)
    assert steps(root) == [1, 2, 3, 4]
    assert "step 1 was loaded into only a part of the state that is saved as step 4" in caplog.text


def test_weights_alone_do_not_take_the_optimizer_back(root: Root, caplog: pytest.LogCaptureFixture) -> None:
    state, train = training("modules")
    for step in (1, 2, 3):
        ckptlib.save(root.url, state(), step)
        train()
    ckptlib.load(root.url, {"model": state()["model"]}, 1, strict=False)
    with caplog.at_level(logging.WARNING):
        ckptlib.save(root.url, state(), 4)
    assert steps(root) == [1, 2, 3, 4]
    assert "step 1 was loaded into only a part" in caplog.text


def test_nothing_that_was_loaded_is_kept_alive(root: Root) -> None:
    weight, target = torch.ones(3), torch.zeros(3)
    ckptlib.save(root.url, {"w": weight}, 1)
    held = StorageWeakRef(target.untyped_storage())  # by torch's own count: its objects in Python may outlive theirs
    ckptlib.load(root.url, {"w": target})
    del target
    gc.collect()
    assert held.expired()
    for _ in range(5):
        ckptlib.load(root.url, {"w": weight})
        ckptlib.load(root.url, {"w": torch.zeros(3)})
    assert num_loads(root.url) <= 2


@pytest.mark.parametrize("options", [{"only": "model"}, {"optional": "more"}, {}], ids=str)
def test_a_service_that_loads_for_ever_remembers_one_load(root: Root, options: dict[str, Any]) -> None:
    model = net()
    ckptlib.save(root.url, {"model": model, "loss": torch.zeros(300)}, 1)
    for _ in range(3):  # whose loss is made anew each time
        more = {"more": torch.zeros(2)} if options else {}
        ckptlib.load(root.url, {"model": model, "loss": torch.zeros(300), **more}, **options)
        assert num_loads(root.url) == 1


def test_a_part_displaces_no_whole_step_that_was_loaded_before(root: Root) -> None:
    model = net()
    for step in (1, 2, 3):
        ckptlib.save(root.url, {"model": model}, step)
    ckptlib.load(root.url, {"model": model}, 1)
    for _ in range(2):
        ckptlib.load(root.url, {"model": model}, 2, only="model/0.*")
        assert num_loads(root.url) == 2
    ckptlib.save(root.url, {"model": model}, 4)
    assert steps(root) == [1, 4]


# -- a process that has not saved yet


def test_a_new_process_goes_on_from_what_it_loaded_into_its_state_whatever_it_looked_at(root: Root) -> None:
    for step in (1, 2, 3):
        ckptlib.save(root.url, {"w": torch.full((3,), float(step))}, step)
    root.close()
    target = torch.zeros(3)
    ckptlib.load(root.url, {"w": target})
    ckptlib.load(root.url, {"w": torch.zeros(3)}, 1)
    ckptlib.save(root.url, {"w": target}, 4)
    assert steps(root) == [1, 2, 3, 4]
    root.close()
    ckptlib.load(root.url, {"w": torch.zeros(3)}, 3)
    ckptlib.load(root.url, {"w": target}, 1)
    ckptlib.save(root.url, {"w": target}, 5)
    assert steps(root) == [1, 5]


def test_a_new_process_may_have_copied_what_it_loaded(root: Root) -> None:
    for step in (1, 2, 3):
        ckptlib.save(root.url, {"w": torch.full((3,), float(step))}, step)
    root.close()
    ckptlib.load(root.url, {"w": torch.zeros(3)}, 2)
    ckptlib.load(root.url, {"w": torch.zeros(3)}, 1)  # it may be either; no step is lost by the later one
    ckptlib.save(root.url, {"w": torch.ones(3)}, 4)
    assert steps(root) == [1, 2, 4]


def test_a_new_process_that_counts_anew_does_not_mix_with_what_it_loaded(root: Root) -> None:
    for step in (1, 2, 3):
        ckptlib.save(root.url, {"w": torch.full((3,), float(step))}, step)
    root.close()
    target = torch.zeros(3)
    ckptlib.load(root.url, {"w": target})
    ckptlib.save(root.url, {"w": target}, 2)
    assert steps(root) == [1, 2]
    assert ckptlib.load(root.url, {"w": target}).step == 2


# -- a save that was refused is none


def refused(root: Root, step: int) -> None:
    with pytest.raises(UnsupportedState):
        ckptlib.save(root.url, {"w": object()}, step)


def refused_memory(root: Root, step: int) -> None:
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 20, limits[1]))
    try:
        with pytest.raises(NoRoom):
            ckptlib.save(root.url, {"w": torch.zeros(1 << 19)}, step)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)


def saved(root: Root, *some: int) -> None:
    for step in some:
        ckptlib.save(root.url, {"w": torch.full((3,), float(step))}, step)


def test_what_was_loaded_behind_a_refused_save_is_gone_on_from(root: Root) -> None:
    saved(root, 1, 2, 3, 4)
    root.close()
    refused(root, 9)
    ckptlib.load(root.url, {"w": torch.zeros(3)}, 1)  # and copied
    ckptlib.save(root.url, {"w": torch.full((3,), 3.5)}, 3)
    assert steps(root) == [1, 3]
    target = torch.zeros(3)
    assert ckptlib.load(root.url, {"w": target}).step == 3
    assert target.tolist() == [3.5] * 3


@pytest.mark.parametrize("refused", [refused, refused_memory])
def test_a_run_begins_with_its_first_save_that_is_not_refused(root: Root, refused: Callable[[Root, int], None]) -> None:
    """What it goes on from comes before that: else the newest step would be one of the run before."""
    saved(root, 1, 2, 3, 4)
    root.close()
    refused(root, 9)
    ckptlib.save(root.url, {"w": torch.full((3,), 2.5)}, 2)
    assert steps(root) == [1, 2]
    target = torch.zeros(3)
    assert ckptlib.load(root.url, {"w": target}).step == 2
    assert target.tolist() == [2.5] * 3


@pytest.mark.parametrize("fresh", [False, True])
def test_a_refused_save_is_no_reason_to_go_back_further(root: Root, fresh: bool) -> None:
    """To a step that was only looked at: behind one that was gone back to, or, with fresh options, behind what this
    process had saved by others."""
    target, options = torch.zeros(3), {"storage_options": {"key": "b"}} if fresh else {}
    saved(root, 1, 2, 3, 4)
    if not fresh:
        ckptlib.load(root.url, {"w": target}, 2)
    with pytest.raises(UnsupportedState):
        ckptlib.save(root.url, {"w": target, "x": object()}, 5, **options)
    ckptlib.load(root.url, {"w": torch.zeros(3)}, 1)
    ckptlib.save(root.url, {"w": target}, 5, **options)
    assert steps(root) == ([1, 2, 3, 4, 5] if fresh else [1, 2, 5])


# -- beside a Checkpointer


def test_a_checkpointer_is_not_taken_back_under_its_feet(tmp_path: Path) -> None:
    model, look = net(), net()
    with ckptlib.Checkpointer(tmp_path, {"model": model}, every=1) as ckpt:
        for step in (1, 2, 3):
            ckpt.save(step).wait_committed(60)
        before = model[0].weight.detach().clone()
        with torch.no_grad():
            model[0].weight.add_(1)
        with pytest.raises(StateError, match="To go back, close it, load, and create another"):
            ckptlib.load(tmp_path, {"model": model}, 1)
        assert torch.equal(model[0].weight, before + 1)
        ckptlib.load(tmp_path, {"model": look}, 1)
        ckptlib.load(tmp_path, {"model": model}, 3)  # its own last save: what follows does follow from there
        ckptlib.load(tmp_path, {"model": model}, 1, only="model/0.*")
        ckpt.save(4).wait_committed(60)
    assert [info.step for info in ckptlib.checkpoints(tmp_path)] == [1, 2, 3, 4]
    ckptlib.load(tmp_path, {"model": model}, 1)  # closed: what it kept is free


@pytest.mark.parametrize("before", [True, False])
def test_a_checkpointer_goes_on_from_the_step_that_was_loaded_into_its_state(tmp_path: Path, before: bool) -> None:
    model = net()
    for step in (1, 2, 3):
        ckptlib.save(tmp_path, {"model": model}, step)
    root = Root(tmp_path)
    root.close()
    if before:
        ckptlib.load(tmp_path, {"model": model}, 1)
    with ckptlib.Checkpointer(tmp_path, {"model": model}, every=1) as ckpt:
        if not before:
            ckptlib.load(tmp_path, {"model": model}, 1)
            ckptlib.load(tmp_path, {"model": net()}, 2)
        ckpt.save(7).wait_committed(60)
    assert steps(root) == [1, 7]
    ckptlib.save(tmp_path, {"model": model}, 8)  # what was loaded before is long behind
    assert steps(root) == [1, 7, 8]
    root.close()
