"""Saves that follow one another: what was looked up at one and kept for the next is never what is copied by mistake."""

from __future__ import annotations

import gc
import random
import weakref
from pathlib import Path

import numpy as np
import pytest
import torch
from onerank import Root, bits, opened
from test_memo import CHANGES, State, make_state, weight
from torch.multiprocessing.reductions import StorageWeakRef

import ckptlib
from ckptlib import PerRank
from ckptlib.devices import accelerator
from ckptlib.state.flatten import flatten
from ckptlib.state.rng import RngState

LOADED = [
    change
    for change in CHANGES
    # what load refuses, since the state does not say what it is
    if change not in ("an object that cuts", "a number added", "an entry that became a number")
]


class Own(torch.optim.Optimizer):
    """Of somebody's own: nothing is known of what its state has to be, so that all changes are ones that load takes."""


def data_of(state: State) -> dict[str, bytes]:
    return {leaf.name: b"".join(bits(tensor) for _, tensor in leaf.pieces) for leaf in flatten(state).leaves}


@torch.no_grad()
def overwrite(state: State) -> None:
    for leaf in flatten(state).leaves:
        for _, tensor in leaf.pieces:
            tensor.zero_()


@torch.no_grad()
def go_on(state: State) -> None:
    """Every tensor gets other content, where it is."""
    for leaf in flatten(state).leaves:
        for _, tensor in leaf.pieces:
            tensor += 1


def check(root: Root, state: State) -> None:
    go_on(state)
    root.save(state)
    expected = data_of(state)
    overwrite(state)
    root.load(state)
    assert data_of(state) == expected


@pytest.mark.parametrize("change", LOADED)
def test_what_changes_between_two_saves_is_in_the_second(root: Root, change: str) -> None:
    state = make_state()
    state["o"].__class__ = Own
    for _ in range(3):  # each slot has been used
        go_on(state)
        root.save(state)
    CHANGES[change](state)
    check(root, state)
    check(root, state)


def test_memory_that_changes_again_and_again(tmp_path: Path) -> None:
    state = make_state()
    with opened(tmp_path) as root:
        for _ in range(5):
            check(root, state)
            weight(state).data = weight(state).data.clone()


class Averages:
    """Gives copies, as many do."""

    def __init__(self) -> None:
        self.content = torch.arange(50_000.0)
        self.given: list[weakref.ref[torch.Tensor]] = []

    def state_dict(self) -> dict[str, torch.Tensor]:
        made = self.content.clone()
        self.given.append(weakref.ref(made))
        return {"average": made}

    def load_state_dict(self, state: dict[str, torch.Tensor]) -> None:
        self.content.copy_(state["average"])


@pytest.mark.parametrize("on_device", [False, True])
def test_copies_that_a_state_dict_gives_do_not_stay(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, on_device: bool
) -> None:
    """On a device none of them; on the host one, until the next is there."""
    averages = Averages()
    if on_device:  # a thread that looks for one finds it on the host, where it is

        def device_of(tensor: torch.Tensor) -> torch.device | None:
            return torch.device("cpu", 0) if tensor.numel() == 50_000 else None

        monkeypatch.setattr(accelerator, "device_of", device_of)
    state = {"averages": averages, "w": torch.nn.Linear(100, 100)}
    with ckptlib.Checkpointer(tmp_path, state, every=1, arena=tmp_path) as ckpt:
        for step in range(1, 6):
            averages.content += 1
            ckpt.save(step).wait_staged()
            del step
            gc.collect()
            assert sum(ref() is not None for ref in averages.given) == (0 if on_device else 1)
    expected = averages.content.clone()
    averages.content.zero_()
    ckptlib.load(tmp_path, state)
    assert torch.equal(averages.content, expected)


def test_generators_are_saved_as_they_are_at_each_save(tmp_path: Path) -> None:
    state: State = {"all": PerRank(RngState()), "x": torch.ones(1)}
    with opened(tmp_path) as root:
        draws = []
        for _ in range(3):
            root.save(state)
            draws.append((torch.rand(1).item(), random.random(), np.random.rand()))
        for step, expected in enumerate(draws, 1):
            root.step = step
            root.load(state)
            assert (torch.rand(1).item(), random.random(), np.random.rand()) == expected


class Clones:
    """Gives new tensors each time."""

    def __init__(self) -> None:
        self.given: list[weakref.ref[torch.Tensor]] = []

    def state_dict(self) -> dict[str, torch.Tensor]:
        made = torch.ones(1000)
        self.given.append(weakref.ref(made))
        return {"made": made}

    def load_state_dict(self, state: dict[str, torch.Tensor]) -> None: ...


def test_construction_keeps_nothing_that_was_made_for_it(tmp_path: Path) -> None:
    clones = Clones()
    state = {"clones": clones, "model": torch.nn.Linear(2, 2)}
    with ckptlib.Checkpointer(tmp_path / "root", state, every=10**6) as ckpt:
        gc.collect()
        assert [made() for made in clones.given] == [None]
        ckpt.save(1)
    assert len(clones.given) == 2


def test_memory_that_a_state_has_left_is_free(tmp_path: Path) -> None:
    """Of a program that moves its state elsewhere between two saves, once it has said so."""
    model = torch.nn.Sequential(torch.nn.Linear(512, 512), torch.nn.BatchNorm1d(512))
    optimizer = torch.optim.Adam(model.parameters())
    state = {"model": model, "optim": optimizer, "plain": [torch.ones(50_000)]}

    def train() -> None:
        optimizer.zero_grad()
        model(torch.randn(2, 512)).sum().backward()
        optimizer.step()

    with ckptlib.Checkpointer(tmp_path / "root", state, every=1) as ckpt:
        for step in range(1, 4):
            train()
            ckpt.after_step(step)
            ckpt.pending.wait_committed(60)  # type: ignore[union-attr]
        ckpt.drain()
        left = []
        for tensor in [*model.parameters(), *model.buffers(), state["plain"][0]]:  # type: ignore[index]
            left.append(StorageWeakRef(tensor.untyped_storage()))
            tensor.data = tensor.data.clone()
        for moments in optimizer.state.values():
            left += [StorageWeakRef(moment.untyped_storage()) for moment in moments.values()]
            moments |= {name: moment.clone() for name, moment in moments.items()}
        del tensor
        gc.collect()
        assert [ref.expired() for ref in left] == [True] * len(left)
        train()
        ckpt.after_step(4)
    expected = data_of(state)
    overwrite(state)
    ckptlib.load(tmp_path / "root", state, 4)
    assert data_of(state) == expected
