"""A Loader of torchdata.nodes goes into the state as it is."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any

import pytest
import torch
from onerank import Root
from torch.utils.data import Sampler
from typing_extensions import override

import ckptlib

nodes = pytest.importorskip("torchdata.nodes", reason="pip install torchdata")

ITEMS = 26
PER_EPOCH = 6


class Shuffled(Sampler[int]):
    """Another order in each epoch."""

    def __init__(self) -> None:
        self.epoch = 0

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    @override
    def __iter__(self) -> Iterator[int]:
        return iter(torch.randperm(ITEMS, generator=torch.Generator().manual_seed(self.epoch)).tolist())


class Squares:
    """A data set with a place of its own, part of which is a tensor."""

    def __init__(self) -> None:
        self.place = torch.zeros((), dtype=torch.int64)

    def __iter__(self) -> Iterator[int]:
        self.place %= ITEMS
        while self.place < ITEMS:
            self.place += 1
            yield int(self.place) ** 2

    def state_dict(self) -> dict[str, torch.Tensor]:
        return {"place": self.place.clone()}

    def load_state_dict(self, state: dict[str, torch.Tensor]) -> None:
        self.place = state["place"].clone()


def augmented(item: int) -> tuple[int, float]:
    return item, torch.rand(()).item()


def doubled(item: int) -> int:
    return 2 * item


def plain() -> Any:
    return nodes.Batcher(nodes.Mapper(nodes.SamplerWrapper(Shuffled()), augmented), 4)


def ahead() -> Any:
    mapped = nodes.ParallelMapper(nodes.SamplerWrapper(Shuffled()), doubled, num_workers=2, method="thread")
    return nodes.Prefetcher(nodes.Batcher(mapped, 4), prefetch_factor=3, snapshot_frequency=2)


def stream() -> Any:
    return nodes.Batcher(nodes.IterableWrapper(Squares()), 4)


def endless(loader: Any) -> Iterator[Any]:
    while True:
        yield from loader


def train(root: Path, make: Callable[[], Any], totals: list[int], *, begun: bool = False, restores: int = 1) -> Any:
    """One incarnation per total; what all of them trained on. `begun`: the iterator is made before the restore."""
    torch.manual_seed(1)
    seen: list[Any] = []
    for total in totals:
        loader = nodes.Loader(make())
        batches = iter(loader) if begun else endless(loader)
        with ckptlib.Checkpointer(root, {"data": loader, "weight": torch.zeros(3)}, every=1, arena=root) as ckpt:
            for _ in range(restores):
                start = ckpt.restore().step
            seen += [batch for _, batch in zip(ckpt.loop(start, total), batches, strict=False)]
        torch.rand(7)
    return seen


def whole(make: Callable[[], Any], total: int) -> list[Any]:
    """The batches of a run that nobody has stopped."""
    torch.manual_seed(1)
    return [*islice(endless(nodes.Loader(make())), total)]


@pytest.mark.parametrize("make", [plain, ahead, stream])
def test_goes_on_behind_the_last_batch(tmp_path: Path, make: Callable[[], Any]) -> None:
    """Also where an epoch has ended, and behind that."""
    totals = [2, PER_EPOCH, PER_EPOCH + 2, 2 * PER_EPOCH + 4]
    assert train(tmp_path, make, totals) == whole(make, totals[-1])


def test_a_step_is_restored_twice(tmp_path: Path) -> None:
    assert train(tmp_path, plain, [PER_EPOCH, PER_EPOCH + 2], restores=2) == whole(plain, PER_EPOCH + 2)


def test_an_iterator_from_before_the_restore_goes_on_from_the_step(tmp_path: Path) -> None:
    assert train(tmp_path, plain, [2, 5], begun=True) == whole(plain, 5)


def test_a_loader_that_is_in_use_goes_back(root: Root) -> None:
    """To the step, whatever it has given since; then its epochs go on."""
    loader = nodes.Loader(stream())
    batches = iter(loader)
    given = [next(batches)]
    root.save({"data": loader})
    given += batches
    next(iter(loader))
    root.load({"data": loader})
    assert list(loader) == given[1:]
    assert list(loader) == given
    root.load({"data": loader})
    assert list(batches) == given[1:]
    assert list(loader) == given


def test_a_place_that_the_program_loads_behind_the_restore_counts(root: Root) -> None:
    """For the next iterator, as torchdata has it; and for no later one."""
    loader = nodes.Loader(plain())
    batches = iter(loader)
    next(batches), root.save({"data": loader}), next(batches), next(batches)
    place = loader.state_dict()
    other = nodes.Loader(plain())
    root.load({"data": other})
    other.load_state_dict(place)
    assert [item for batch in list(other) for item, _ in batch] == [*Shuffled()][12:24]
    assert len(list(other)) == PER_EPOCH


def test_what_is_saved_before_the_first_batch_is_the_place_that_was_loaded(root: Root) -> None:
    loader = nodes.Loader(plain())
    next(iter(loader))
    place = loader.state_dict()
    root.save({"data": loader})
    other = nodes.Loader(plain())
    next(iter(other)), next(iter(other))
    root.load({"data": other})
    assert other.state_dict() == place


def test_a_loader_that_ends_where_its_epoch_does(root: Root) -> None:
    make = partial(nodes.Loader, restart_on_stop_iteration=False)
    loader = make(plain())
    given = len(list(loader))
    root.save({"data": loader})
    other = make(plain())
    root.load({"data": other})
    assert list(other) == []
    assert len(list(other)) == given == PER_EPOCH


def test_a_loader_that_changes_its_batches(root: Root) -> None:
    """As one that moves them to a device: its iterator is a generator around torchdata's."""

    class Moving(nodes.Loader):  # type: ignore[misc, name-defined]
        @override
        def __iter__(self) -> Iterator[Any]:
            for batch in super().__iter__():
                yield "moved", batch

    loader = Moving(nodes.IterableWrapper(range(5)))
    batches = iter(loader)
    next(batches)
    root.save({"data": loader})
    rest = [*batches]
    other = Moving(nodes.IterableWrapper(range(5)))
    root.load({"data": other})
    assert [*other] == rest
    assert len([*other]) == len(rest) + 1


@pytest.mark.parametrize("wrong", [False, True])
def test_a_batch_before_the_first_body_is_told(tmp_path: Path, caplog: pytest.LogCaptureFixture, wrong: bool) -> None:
    loader = nodes.Loader(plain())
    with ckptlib.Checkpointer(tmp_path / "root", {"data": loader}, every=1, arena=tmp_path) as ckpt:
        steps = ckpt.loop(0, 2)
        for _ in zip(loader, steps) if wrong else zip(steps, loader):  # noqa: B905
            pass
    assert caplog.text.count("a batch was asked for before the first body of loop") == int(wrong)
