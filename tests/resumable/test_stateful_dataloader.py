"""torchdata's StatefulDataLoader goes into the state as it is."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import chain, islice
from pathlib import Path
from typing import Any

import pytest
import torch
from onerank import Root
from torch.utils.data import (
    BatchSampler,
    Dataset,
    IterableDataset,
    RandomSampler,
    WeightedRandomSampler,
    get_worker_info,
)
from typing_extensions import override

import ckptlib
from ckptlib.data import ResumableSampler, resumable
from ckptlib.errors import StateError

torchdata = pytest.importorskip("torchdata.stateful_dataloader", reason="pip install torchdata")


class Numbers(Dataset[list[float]]):
    def __len__(self) -> int:
        return 26

    @override
    def __getitem__(self, item: int) -> list[float]:
        return [item, 0.0 if get_worker_info() else torch.rand(()).item()]


def make(num_workers: int) -> Any:
    options = {"batch_size": 4, "shuffle": True, "collate_fn": list, "generator": torch.Generator().manual_seed(5)}
    return torchdata.StatefulDataLoader(Numbers(), num_workers=num_workers, **options)


def train(root: Path, num_workers: int, totals: list[int]) -> list[Any]:
    """One incarnation per total; what all of them trained on."""
    torch.manual_seed(1)
    seen = []
    for total in totals:
        loader = make(num_workers)
        with ckptlib.Checkpointer(root, {"data": loader, "weight": torch.zeros(3)}, every=2) as ckpt:
            start = ckpt.restore().step
            seen += [batch for _, batch in zip(ckpt.loop(start, total), loader, strict=False)]
        torch.rand(7)
    return seen


@pytest.mark.parametrize("num_workers", [pytest.param(0, marks=pytest.mark.slow), 2])
def test_goes_on_behind_the_last_batch(tmp_path: Path, num_workers: int) -> None:
    whole = train(tmp_path / "whole", num_workers, [6])
    parted = train(tmp_path / "parted", num_workers, [2, 3, 6])
    assert parted == whole
    items = [int(item[0]) for batch in whole for item in batch]
    assert len({*items}) == len(items) == 24


def test_goes_on_over_epochs_with_a_generator_of_the_samplers_own(root: Root) -> None:
    """With `shuffle=True` the order would come from the generator that the loader draws a seed from in each epoch."""
    sampler_of = pytest.importorskip("torchdata.stateful_dataloader.sampler").RandomSampler

    def batches_of(loader: Any) -> Iterator[list[int]]:
        return (batch for _ in range(4) for batch in loader)

    def loader() -> Any:
        order, seeds = (torch.Generator().manual_seed(seed) for seed in (5, 6))
        options = {"sampler": sampler_of(range(12), generator=order), "generator": seeds}
        return torchdata.StatefulDataLoader(range(12), batch_size=4, collate_fn=list, **options)

    whole = list(islice(batches_of(loader()), 10))
    resumed, parted = loader(), []
    for end in (2, 7):
        parted += islice(batches_of(resumed), end - len(parted))
        root.save({"data": resumed})
        resumed = loader()
        root.load({"data": resumed})
    parted += islice(batches_of(resumed), 3)
    assert parted == whole
    assert [sorted(chain(*whole[n : n + 3])) for n in (0, 3, 6)] == [list(range(12))] * 3


def test_needs_no_wrapper() -> None:
    with pytest.raises(TypeError, match="StatefulDataLoader has a state of its own; put it into the Checkpointer's st"):
        resumable(make(0))


def test_not_around_a_resumable_sampler() -> None:
    """Both would count."""
    loader = torchdata.StatefulDataLoader(Numbers(), batch_sampler=ResumableSampler(26, 4))
    batches = iter(loader)
    next(batches)
    with pytest.raises(StateError, match=r"none was counted as trained on.*Wrap torch's DataLoader"):
        loader.state_dict()


@pytest.mark.parametrize("wrong", [False, True])
@pytest.mark.parametrize("num_workers", [pytest.param(0, marks=pytest.mark.slow), 2])
def test_the_order_of_zip(tmp_path: Path, caplog: pytest.LogCaptureFixture, num_workers: int, wrong: bool) -> None:
    for total in (2, 4):
        loader = make(num_workers)
        with ckptlib.Checkpointer(tmp_path / "root", {"data": loader}, every=1, arena=tmp_path) as ckpt:
            steps = ckpt.loop(ckpt.restore().step, total)
            for _ in zip(loader, steps) if wrong else zip(steps, loader):  # noqa: B905
                pass
    said = "a batch was asked for before the first body of loop"
    assert caplog.text.count(said) == int(wrong), "on the fresh run: what a resumed one has asked for, it does not tell"


@pytest.mark.parametrize("held", [True, False], ids=["held", "left"])
def test_an_iterator_from_before_the_load_is_told(root: Root, caplog: pytest.LogCaptureFixture, held: bool) -> None:
    """torchdata gives the loaded place to the next iterator, and tells that place whatever the first one gives."""
    loader = make(0)
    batches = iter(loader)
    next(batches), next(batches)
    root.save({"data": loader})
    third = [int(item[0]) for item in next(batches)]
    resumed = make(0)
    batches = iter(resumed)
    next(batches)
    if not held:
        del batches
    root.load({"data": resumed})
    assert ("was made before its place was loaded" in caplog.text) == held
    assert [int(item[0]) for item in next(iter(resumed))] == third


@pytest.mark.parametrize("ended", [False, True])
@pytest.mark.parametrize("kind", ["shuffle", "sampler", "batch_sampler"])
def test_an_order_that_is_drawn_anew_is_told(
    root: Root, caplog: pytest.LogCaptureFixture, kind: str, ended: bool
) -> None:
    """At the end of an epoch nothing is left of it."""

    def loader() -> Any:
        options: dict[str, Any] = {
            "shuffle": {"shuffle": True, "batch_size": 4},
            "sampler": {"sampler": WeightedRandomSampler([1.0] * 64, 64, replacement=False), "batch_size": 4},
            "batch_sampler": {"batch_sampler": BatchSampler(RandomSampler(range(64)), 4, drop_last=False)},
        }
        return torchdata.StatefulDataLoader(range(64), collate_fn=list, **options[kind])

    saved = loader()
    seen = list(islice(saved, None if ended else 5))
    root.save({"data": saved})
    resumed = loader()
    root.load({"data": resumed})
    once = {*chain(*[] if ended else seen, *resumed)} == {*range(64)}
    assert once == (ended or kind == "shuffle")
    assert ("so its order may be drawn anew" in caplog.text) == (not once)


class Stream(IterableDataset[int]):
    @override
    def __iter__(self) -> Iterator[int]:
        return iter(range(64))


def test_batches_of_an_order_without_a_length(root: Root, caplog: pytest.LogCaptureFixture) -> None:
    """torch gives an iterable data set such a one."""
    saved = torchdata.StatefulDataLoader(Stream(), batch_size=4, collate_fn=list)
    assert len(list(islice(saved, 5))) == 5
    root.save({"data": saved})
    resumed = torchdata.StatefulDataLoader(Stream(), batch_size=4, collate_fn=list)
    root.load({"data": resumed})
    assert next(iter(resumed)) == [20, 21, 22, 23]
    assert "so its order may be drawn anew" not in caplog.text
