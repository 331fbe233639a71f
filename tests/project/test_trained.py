"""The training that benchmarks of codecs take their states from."""

from __future__ import annotations

import copy
import tempfile
from pathlib import Path

import pytest
import torch

from benchmarks.trained import KINDS, TOY, State, Training, states


def bits(state: State) -> dict[tuple[str, str], bytes]:
    return {
        (kind, name): tensor.view(torch.uint8).numpy().tobytes()
        for kind, tensors in state.items()
        for name, tensor in tensors.items()
    }


def test_trains_once_and_reads_the_same_bits_then(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    made = states(TOY, [3, 2])
    assert sorted(made) == [2, 3]
    (place,) = tmp_path.glob("ckptlib-*")
    files = {path.name: path.stat().st_mtime_ns for path in place.iterdir()}
    assert len(files) == 2, "nothing but the two states"
    monkeypatch.setattr(Training, "advance", None)
    read = states(TOY, [2, 3])
    assert {path.name: path.stat().st_mtime_ns for path in place.iterdir()} == files
    for step in (2, 3):
        assert bits(read[step]) == bits(made[step])
    assert bits(made[2]) != bits(made[3])


def test_a_state_is_of_each_kind_and_parameter() -> None:
    training = Training(TOY)
    training.advance(1)
    state = training.state()
    assert tuple(state) == KINDS
    weights = dict(training.model.named_parameters())
    for kind, tensors in state.items():
        assert {name: tensor.shape for name, tensor in tensors.items()} == {n: w.shape for n, w in weights.items()}
        assert {tensor.dtype for tensor in tensors.values()} == {torch.bfloat16 if kind == "bf16" else torch.float32}
    assert all(bool((tensor >= 0).all()) for tensor in state["exp_avg_sq"].values())
    before = bits(state)
    training.advance(1)
    assert bits(state) == before, "copies"


def test_it_learns_and_a_fork_goes_on_alike() -> None:
    first = Training(TOY)
    untrained = first.held_out_loss(4)
    first.advance(60)
    assert first.held_out_loss(4) < untrained - 0.5
    second, third = copy.deepcopy(first), Training(TOY)
    third.advance(60)
    assert first.advance(3) == second.advance(3) == third.advance(3)
    assert bits(first.state()) == bits(second.state()) == bits(third.state())


def test_seeds_differ_and_leave_torch_alone() -> None:
    before = torch.random.get_rng_state()
    losses = {Training(TOY, seed=seed).advance(1)[0] for seed in range(3)}
    assert len(losses) == 3
    assert torch.equal(torch.random.get_rng_state(), before)
