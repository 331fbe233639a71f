"""Loads and saves inside `torch.inference_mode()`, and of what was made in it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from onerank import Root, same
from rankthreads import run_ranks
from torch import nn

import ckptlib
from ckptlib.format.box import Box
from ckptlib.loading.read_once import Bucket, spread
from ckptlib.ranks.group import Group
from ckptlib.reading.reader import Want


class Average:
    """Holds a tensor, which a load writes to, or replaces."""

    def __init__(self, inplace: bool) -> None:
        self.mean = torch.zeros(6)[::2]
        self._inplace = inplace

    def state_dict(self) -> dict[str, Any]:
        return {"mean": self.mean}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        if self._inplace:
            self.mean.copy_(state["mean"])
        else:
            self.mean = state["mean"].clone()


def job(seed: int, device: str = "cpu") -> dict[str, Any]:
    torch.manual_seed(seed)
    with torch.device(device):
        model = nn.Linear(3, 4)
    state = {"m": model, "t": torch.randn(4), "strided": torch.randn(6, 6)[::2, 1::2], "average": Average(False)}
    return state if device == "meta" else {**state, "o": torch.optim.AdamW(model.parameters(), amsgrad=True)}


def train(state: dict[str, Any]) -> None:
    state["m"](torch.ones(2, 3)).square().sum().backward()
    if "o" in state:
        state["o"].step()
        state["o"].zero_grad()
    state["t"].add_(1.0)
    state["strided"].add_(1.0)
    state["average"].mean.add_(1.0)


def tensors(state: dict[str, Any]) -> list[torch.Tensor]:
    found = [*state["m"].parameters(), state["t"], state["strided"], state["average"].mean]
    return [*found, *(t for kept in state["o"].state.values() for t in kept.values())] if "o" in state else found


@pytest.mark.parametrize("stepped", [False, True])
def test_what_is_loaded_in_it_can_be_trained(root: Root, stepped: bool) -> None:
    saved, loaded = job(0), job(1)
    train(saved)
    root.save(saved)
    if stepped:
        train(loaded)
    with torch.inference_mode():
        root.load(loaded)
        assert torch.is_inference_mode_enabled()
    assert not any(tensor.is_inference() for tensor in tensors(loaded))
    assert all(p.requires_grad for p in loaded["m"].parameters())
    train(saved)
    train(loaded)
    assert same(tensors(loaded), tensors(saved))


def test_state_that_was_made_in_it_is_made_anew(root: Root) -> None:
    """By a load of an earlier version, say, or by the user."""
    saved, loaded = job(0), job(1)
    train(saved)
    train(loaded)
    for kept in loaded["o"].state.values():
        with torch.inference_mode():
            kept |= {key: value.clone() for key, value in kept.items()}
    root.move(saved, loaded)
    train(saved)
    train(loaded)
    assert same(tensors(loaded), tensors(saved))


def test_modules_on_meta_become_trainable(root: Root) -> None:
    saved, loaded = job(0), job(1, "meta")
    del saved["o"]
    root.save(saved)
    with torch.inference_mode():
        root.load(loaded)
    train(saved)
    train(loaded)
    assert same(tensors(loaded), tensors(saved))


@pytest.mark.parametrize("inside", [True, False])
def test_targets_that_were_made_in_it_are_filled(root: Root, inside: bool) -> None:
    """As of an evaluation that makes its model there; strided ones are written to by torch, and on a GPU all are."""
    saved = job(0)
    saved["average"] = Average(True)
    with torch.inference_mode():
        loaded = job(1)
        loaded["average"] = Average(True)
    del saved["o"], loaded["o"]
    train(saved)
    root.save(saved)
    with torch.inference_mode(inside):
        root.load(loaded)
    assert same(tensors(loaded), tensors(saved))
    with torch.inference_mode():
        root.save(loaded)
    again = job(2)
    del again["o"]
    root.load(again)
    assert same(tensors(again), tensors(saved))


@pytest.mark.parametrize("inside", [True, False])
def test_such_targets_that_share_memory_are_filled(root: Root, inside: bool) -> None:
    """With each other, or elements of one with each other."""

    def state(flat: torch.Tensor) -> dict[str, torch.Tensor]:
        return {"flat": flat, "left": flat[:3], "wide": flat[4:, None].expand(4, 3)}

    saved = torch.randn(8)
    with torch.inference_mode():
        loaded = torch.zeros(8)
    root.save(state(saved))
    with torch.inference_mode(inside):
        root.load(state(loaded))
    assert torch.equal(loaded, saved)


def test_a_checkpointer_in_it(tmp_path: Path) -> None:
    state = job(0)
    with torch.inference_mode():
        with ckptlib.Checkpointer(tmp_path / "root", state, every=1, arena=tmp_path) as ckpt:
            for _ in ckpt.loop(0, 2):
                state["t"].add_(1.0)
        other = job(1)
        with ckptlib.Checkpointer(tmp_path / "root", other, every=1, arena=tmp_path) as ckpt:
            assert ckpt.restore().step == 2
    assert same(other["t"], state["t"])


@pytest.mark.parametrize("inside", [True, False])
def test_what_ranks_share_is_spread_into_such_targets(inside: bool) -> None:
    """One rank has read them, others are sent them: alone, or several at once."""

    def on_rank(group: Group) -> list[torch.Tensor]:
        with torch.inference_mode():
            found = [torch.zeros(4), torch.zeros(4, 4)[::2, ::2], torch.zeros(3)]
        with torch.inference_mode():
            for tensor in found:
                tensor.add_(5.0 * (group.rank == 0))
        wants = [Want(str(i), ((Box.whole(tensor.shape), tensor),), True) for i, tensor in enumerate(found)]
        with torch.inference_mode(inside):
            spread([Bucket(0, wants[:1]), Bucket(0, wants[1:])], group, by_links=True)
        return found

    for found in run_ranks(2, on_rank):
        assert all(torch.equal(tensor, torch.full_like(tensor, 5.0)) for tensor in found)
