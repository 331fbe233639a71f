"""Loops with Accelerate that are saved at the last batch of an epoch, and go on in each way that loops do."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from accelerate.state import AcceleratorState
from accelerate.utils import DataLoaderConfiguration
from helpers.registry import close_sessions
from torch.utils.data import DataLoader

from ckptlib.adapters.accelerate import CkptlibAccelerator

BATCHES = 3
EPOCHS = 4


@pytest.fixture(autouse=True)
def _alone() -> Iterator[None]:
    """Accelerate keeps its state for the life of a process."""
    state = torch.get_rng_state()
    AcceleratorState._reset_state(reset_partial_state=True)
    yield
    close_sessions()
    for kept in (CkptlibAccelerator._under_way, CkptlibAccelerator._folders, CkptlibAccelerator._whose):
        kept.clear()
    AcceleratorState._reset_state(reset_partial_state=True)
    torch.set_rng_state(state)


def next_epoch(step: int) -> tuple[int, int | None]:
    """As accelerate's examples have it: the epoch that comes, of which no batch is skipped."""
    return step // BATCHES, step % BATCHES


def same_epoch(step: int) -> tuple[int, int | None]:
    """The epoch that the checkpoint was in, of which maybe all batches are skipped."""
    return (step - 1) // BATCHES, (step - 1) % BATCHES + 1


def without_skip(step: int) -> tuple[int, int | None]:
    """The loader itself, where no batch is to be skipped."""
    epoch, batches = next_epoch(step)
    return epoch, batches or None


def batches_of(
    directory: Path, how: Any, tells: bool, resumed: int = 0, ends: int = -1, **loading: Any
) -> list[tuple[list[int], float]]:
    """The batches of a loop, each with what is drawn in its body. Ends with a checkpoint of the step `ends`.

    `tells`: whether the loop tells the loader of each epoch, as Accelerate allows.
    """
    AcceleratorState._reset_state(reset_partial_state=True)
    config = DataLoaderConfiguration(**{"use_seedable_sampler": True, "data_seed": 7, **loading})
    accelerator = CkptlibAccelerator(cpu=True, dataloader_config=config)
    torch.manual_seed(0)
    data: Any = torch.arange(4 * BATCHES)
    loader = accelerator.prepare(DataLoader(data, batch_size=4, shuffle=True))
    seen, step, first, skip = [], resumed, 0, None
    if resumed:
        accelerator.load_state(directory / str(resumed))
        first, skip = how(resumed)
    for epoch in range(first, EPOCHS):
        if tells:
            loader.set_epoch(epoch)
        batches = loader
        if epoch == first and skip is not None:
            batches = accelerator.skip_first_batches(loader, skip)
        for batch in batches:
            step += 1
            seen.append((batch.tolist(), torch.rand(()).item()))
            if step == ends:
                accelerator.save_state(directory / str(step))
                accelerator.end_training()
                return seen
    accelerator.end_training()
    return seen


@pytest.mark.parametrize("how", [next_epoch, same_epoch, without_skip])
@pytest.mark.parametrize("tells", [False, True])
def test_each_batch_comes_once(tmp_path: Path, caplog: pytest.LogCaptureFixture, how: Any, tells: bool) -> None:
    """Saved at the last batch of an epoch that was begun by this run, or resumed by it, and in mid-epoch."""
    whole = batches_of(tmp_path, how, tells)
    assert len(whole) == EPOCHS * BATCHES
    seen, resumed = [], 0
    for ends in (3, 5, 6, 9, -1):
        seen += batches_of(tmp_path, how, tells, resumed, ends)
        resumed = ends
    assert seen == whole
    assert "drawn anew" not in caplog.text


@pytest.mark.parametrize("ends", [5, 6])
def test_each_batch_of_a_dispatcher_comes_once(tmp_path: Path, ends: int) -> None:
    """Its loader with skipped batches tells the sampler of no epoch, and refuses to skip all batches."""
    whole = batches_of(tmp_path, next_epoch, False, dispatch_batches=True)
    seen = batches_of(tmp_path, next_epoch, False, ends=ends, dispatch_batches=True)
    assert seen + batches_of(tmp_path, next_epoch, False, ends, dispatch_batches=True) == whole


@pytest.mark.parametrize("how", [next_epoch, same_epoch])
@pytest.mark.parametrize("ends", [2, 3])
def test_an_order_that_is_drawn_anew_is_told(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, how: Any, ends: int
) -> None:
    """As by Accelerate's default. At the end of an epoch nothing is left of it."""
    batches_of(tmp_path, how, False, ends=ends, use_seedable_sampler=False)
    batches_of(tmp_path, how, False, ends, use_seedable_sampler=False)
    said = "skip_first_batches: the RandomSampler of this DataLoaderShard has no state, so its order may be drawn anew"
    assert (said in caplog.text) == (ends == 2)
