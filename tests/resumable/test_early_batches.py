"""`zip` in the wrong order skips a batch at each restart, and is told."""

from __future__ import annotations

import logging
from pathlib import Path

import pytest
import torch
from torch.utils.data import DataLoader, TensorDataset

import ckptlib
from ckptlib.data import ResumableLoader, ResumableSampler, resumable

SAID = "a batch was asked for before the first body of loop"


def loader_of() -> ResumableLoader:
    dataset = TensorDataset(torch.arange(100))
    return resumable(DataLoader(dataset, batch_sampler=ResumableSampler(100, 2, shuffle=False)))


def train(root: Path, total: int, wrong: bool) -> list[int]:
    """The first item of each batch that was trained on."""
    loader, seen = loader_of(), []
    with ckptlib.Checkpointer(root, {"nested": [{"data": loader}]}, every=1, arena=root.parent) as ckpt:
        start = ckpt.restore().step
        batches, steps = loader.endless(), ckpt.loop(start, total)
        for pair in zip(batches, steps) if wrong else zip(steps, batches):  # noqa: B905
            (items,) = pair[0] if wrong else pair[1]
            seen.append(int(items[0]))
    return seen


@pytest.mark.parametrize("wrong", [False, True])
def test_the_order_of_zip(tmp_path: Path, caplog: pytest.LogCaptureFixture, wrong: bool) -> None:
    runs = [train(tmp_path / "root", total, wrong) for total in (2, 4)]
    assert runs == ([[0, 2], [6, 8]] if wrong else [[0, 2], [4, 6]])
    said = [r.getMessage() for r in caplog.records if r.levelno >= logging.WARNING]
    assert [SAID in line for line in said] == ([True, True] if wrong else [])


def test_a_loop_in_several_pieces_is_right(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    loader = loader_of()
    with ckptlib.Checkpointer(tmp_path / "root", {"data": loader}, every=1, arena=tmp_path) as ckpt:
        batches = loader.endless()
        for first in (0, 2):
            for _ in ckpt.loop(first, first + 2):
                next(batches)
    assert SAID not in caplog.text


def test_what_has_every_attribute_is_no_loader(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    class Anything:
        def __getattr__(self, name: str) -> object:
            return lambda *args: {"x": 1}

    with ckptlib.Checkpointer(tmp_path / "root", {"any": Anything()}, every=9, arena=tmp_path) as ckpt:
        for _ in ckpt.loop(0, 1):
            pass
    assert SAID not in caplog.text
