"""ckptlib.data.resumable over an IterableDataset: a place per worker, for the ranks and workers that there were."""

from __future__ import annotations

import random
from collections.abc import Iterator
from itertools import islice
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader, IterableDataset, get_worker_info
from typing_extensions import override

import ckptlib
from ckptlib.data import ResumableLoader, resumable
from ckptlib.errors import StateMismatch


class Stream(IterableDataset[list[float]]):
    """Each worker gives its own numbers, in an order that it draws, and something random with each. Workers end at
    different times."""

    def __init__(self, length: int = 30) -> None:
        self.length = length

    @override
    def __iter__(self) -> Iterator[list[float]]:
        info = get_worker_info()
        worker, num_workers = (0, 1) if info is None else (info.id, info.num_workers)
        own = [i for i in range(self.length) if (i // 7) % num_workers == worker]
        if info is not None:
            random.shuffle(own)
        for item in own:
            yield [item, torch.rand(()).item()]


def make(length: int = 30, seed: int = 0, **options: Any) -> ResumableLoader:
    generator = torch.Generator().manual_seed(seed)
    options = {"batch_size": 4, "generator": generator, **options}
    return resumable(DataLoader(Stream(length), collate_fn=list, **options))


def test_goes_on_behind_the_last_batch() -> None:
    whole = list(islice(make(num_workers=2).endless(), 20))
    epochs = [[int(item[0]) for batch in whole[i : i + 8] for item in batch] for i in (0, 8)]
    assert [sorted(epoch) for epoch in epochs] == [list(range(30))] * 2
    assert epochs[0] != epochs[1]
    for stop in (1, 7, 8, 9):
        first, second = make(num_workers=2), make(num_workers=2)
        before = list(islice(first.endless(), stop))
        second.load_state_dict(first.state_dict())
        assert before + list(islice(second.endless(), 12 - stop)) == whole[:12]


def test_an_epoch_that_was_read_to_its_end() -> None:
    """Only asking for more tells that there is none."""
    first, second = make(), make()
    assert len(list(islice(iter(first), 8))) == 8
    assert first.epoch == 0
    second.load_state_dict(first.state_dict())
    assert list(second) == []
    assert second.epoch == 1
    assert len(list(second)) == 8


def test_in_a_checkpoint(tmp_path: Path) -> None:
    """Without workers the items draw from this process's generators, which ckptlib restores."""
    whole = []
    for name, totals in [("whole", (9,)), ("parted", (4, 9))]:
        torch.manual_seed(3)
        seen = []
        for total in totals:
            loader = make()
            with ckptlib.Checkpointer(tmp_path / name, {"data": loader}, every=3) as ckpt:
                start = ckpt.restore().step
                seen += [b for _, b in zip(ckpt.loop(start, total), loader.endless(), strict=False)]
            torch.rand(5)
        whole.append(seen)
    assert whole[0] == whole[1]
    assert len(whole[0]) == 9


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (
            {"num_workers": 2},
            r"num_workers 2, and the checkpoint was saved with 0.*place per worker.*Resume with num_w",
        ),
        ({"batch_size": 5}, r"batch_size 5, and the checkpoint was saved with 4"),
        ({"drop_last": True}, r"drop_last True, and the checkpoint was saved with False"),
        ({"seed": 1}, r"seed 1, and the checkpoint was saved with 0"),
    ],
)
def test_what_must_not_change(options: dict[str, Any], message: str) -> None:
    first, second = make(), make(**options)
    next(iter(first))
    with pytest.raises(StateMismatch, match=message):
        second.load_state_dict(first.state_dict())
    assert second.state_dict()["batches"] == 0


def test_another_world_size() -> None:
    state = {**make().state_dict(), "batches": 3, "world size": 4}
    with pytest.raises(StateMismatch, match=r"world size 1, and the checkpoint was saved with 4.*nobody can divide it"):
        make().load_state_dict(state)


def test_a_stream_that_got_shorter() -> None:
    first, second = make(), make(length=10)
    list(islice(iter(first), 6))
    second.load_state_dict(first.state_dict())
    with pytest.raises(StateMismatch, match=r"ended after 3 batches of epoch 0; 6 were consumed.*less than it gave"):
        next(iter(second))


def test_a_stream_of_nothing() -> None:
    with pytest.raises(ValueError, match="gave no batch in epoch 0"):
        next(make(length=0).endless())


def test_persistent_workers() -> None:
    with pytest.raises(ValueError, match=r"persistent_workers=True.*leave persistent_workers out"):
        make(num_workers=1, persistent_workers=True)
