"""ckptlib.data.resumable over torch's DataLoader: what training has is counted, not what workers have read ahead."""

from __future__ import annotations

import copy
import os
import random
import signal
from collections.abc import Iterator
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from helpers import typed
from places import ROOT
from torch.utils.data import BatchSampler, DataLoader, Dataset, DistributedSampler, SequentialSampler
from typing_extensions import override

import ckptlib
from ckptlib.data import ResumableLoader, ResumableSampler, resumable
from ckptlib.errors import StateError, StateMismatch

LENGTH, BATCH = 22, 4


class Numbers(Dataset[list[float]]):
    """Each item: its own number, and what it draws from the three generators. Notes what was read."""

    def __init__(self, notes: Path | None = None, length: int = LENGTH) -> None:
        self.notes, self.length = notes, length

    def __len__(self) -> int:
        return self.length

    @override
    def __getitem__(self, item: int) -> list[float]:
        if self.notes is not None:
            with self.notes.open("a") as file:
                file.write(f"{item}\n")
        return [item, random.random(), np.random.random(), torch.rand(()).item()]


def make(data: Dataset[Any] | None = None, *, batch: int = BATCH, seed: int = 0, **options: Any) -> ResumableLoader:
    data = Numbers() if data is None else data
    sampler = ResumableSampler(len(data), batch, seed=seed)  # type: ignore[arg-type]
    return resumable(DataLoader(data, batch_sampler=sampler, collate_fn=list, **options))


def items(batches: Iterator[Any], num_batches: int) -> list[int]:
    return [int(item[0]) for batch in islice(batches, num_batches) for item in batch]


WORKERS = [
    pytest.param({}, id="no-workers"),
    pytest.param({"num_workers": 2, "prefetch_factor": 3}, id="fork"),
    pytest.param({"num_workers": 2, "persistent_workers": True}, id="persistent"),
    pytest.param({"num_workers": 1, "multiprocessing_context": "spawn"}, id="spawn", marks=pytest.mark.slow),
]


@pytest.mark.parametrize("options", WORKERS)
def test_goes_on_behind_the_last_batch(options: dict[str, Any]) -> None:
    """Also over the end of an epoch: 22 items are five and a half batches."""
    whole = items(make().endless(), 12)
    assert [sorted(whole[:22]), sorted(whole[22:44])] == [list(range(22))] * 2
    for stop in (1, 5, 6, 7):
        first, second = make(**options), make(**options)
        before = items(first.endless(), stop)
        second.load_state_dict(first.state_dict())
        assert before + items(second.endless(), 8 - stop) == whole[: 8 * BATCH]
        if "multiprocessing_context" in options:
            break  # its workers import torch


class Whole(Numbers):
    """Reads whole batches, without a loop over their indices, and draws before it looks at them."""

    def __getitems__(self, indices: list[int]) -> list[list[float]]:
        drawn = [torch.rand(len(indices)), torch.from_numpy(np.random.random(len(indices)))]
        mine = torch.tensor([random.random() for _ in range(len(indices))])
        return torch.stack([torch.arange(self.length)[indices], mine, *drawn], 1).tolist()


class WholeWithItems(Numbers):
    """Copies the indices and goes through them twice, and draws both times."""

    def __getitems__(self, indices: list[int]) -> list[list[float]]:
        noise = [random.random() for _ in copy.copy(indices)]
        return [[*self[item][:3], draw] for item, draw in zip(indices, noise, strict=True)]


@pytest.mark.parametrize("kind", [Numbers, Whole, WholeWithItems])
@pytest.mark.parametrize("options", WORKERS[1:])
def test_what_workers_draw_is_the_same_after_a_restart(options: dict[str, Any], kind: type[Numbers]) -> None:
    """And is another thing in each batch, epoch and rank."""
    whole = list(islice(make(kind(), **options).endless(), 9))
    first, second = make(kind(), **options), make(kind(), **options)
    before = list(islice(first.endless(), 3))
    second.load_state_dict(first.state_dict())
    assert before + list(islice(second.endless(), 6)) == whole
    draws = [draw for batch in whole for item in batch for draw in item[1:]]
    assert len({*draws}) == len(draws) == 9 * BATCH * 3
    other = DataLoader(kind(), batch_sampler=ResumableSampler(LENGTH, 8, rank=1, world_size=2), **options)
    other_draws = {draw.item() for batch in other for column in batch[1:] for draw in column}
    assert not other_draws & {*draws}


@pytest.mark.parametrize("options", WORKERS[:3])
def test_the_trainers_own_generators_are_left_alone(options: dict[str, Any]) -> None:
    class Silent(Numbers):
        @override
        def __getitem__(self, item: int) -> list[float]:
            return [item]

    before = random.getstate(), np.random.get_state(legacy=False), torch.get_rng_state()
    items(make(Silent(), **options).endless(), 12)
    after = random.getstate(), np.random.get_state(legacy=False), torch.get_rng_state()
    assert before[0] == after[0]
    assert str(before[1]) == str(after[1])
    assert torch.equal(before[2], after[2])


@pytest.mark.parametrize("options", WORKERS[:2])
def test_a_resume_reads_nothing_of_what_it_skips(tmp_path: Path, options: dict[str, Any]) -> None:
    first = make(**options)
    skipped = items(iter(first), 3)
    notes = tmp_path / "notes"
    second = make(Numbers(notes), **options)
    second.load_state_dict(first.state_dict())
    rest = items(iter(second), 3)
    assert sorted(map(int, notes.read_text().split())) == sorted(rest)
    assert len(rest) == 12
    assert not {*rest[:10]} & {*skipped}


def test_a_loop_over_epochs() -> None:
    loader = make()
    seen = []
    while loader.epoch < 2:
        seen.append(len(list(loader)))
    assert seen == [6, 5]
    assert (loader.epoch, len(loader)) == (2, 6)
    assert loader.state_dict()["consumed"] == 0


def test_a_loop_over_epochs_as_the_documents_have_it(tmp_path: Path) -> None:
    """Told to stop within an epoch, it ends with the step that is saved, and goes on bit for bit."""
    page = (ROOT / "docs" / "data.md").read_text()
    [sketch] = [block.text for block in typed.blocks(page) if "loader.epoch < 3" in block.text]
    code = compile(sketch.replace("...", "train(batch)"), "data.md", "exec")
    seen: list[list[list[float]]] = []

    def run(root: str, told_at: int) -> list[float]:
        torch.manual_seed(0)
        random.seed(0)
        np.random.seed(0)
        model, loader = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Dropout()), make()
        optim = torch.optim.SGD(model.parameters(), lr=1e-4)

        def train(batch: list[list[float]]) -> None:
            seen.append(batch)
            model(torch.tensor(batch)).square().mean().backward()
            optim.step()
            optim.zero_grad()
            if len(seen) == told_at:
                os.kill(os.getpid(), signal.SIGTERM)

        state = {"model": model, "optim": optim, "data": loader}
        with ckptlib.Checkpointer(tmp_path / root, state, every=10**6, arena=tmp_path) as ckpt:
            exec(code, {"loader": loader, "ckpt": ckpt, "train": train})
        return [value for param in model.parameters() for value in param.flatten().tolist()]

    weights = run("whole", told_at=0)
    whole = [*seen]
    seen.clear()
    with pytest.raises(ckptlib.Preempted):
        run("parted", told_at=7)
    assert [info.step for info in ckptlib.checkpoints(tmp_path / "parted")] == [8]
    assert len(seen) == 8
    assert run("parted", told_at=0) == weights
    assert seen == whole


def test_leaving_the_loop_in_an_epoch() -> None:
    """What `for` has left behind is consumed; the next iteration goes on there."""
    for options in ({}, {"num_workers": 2, "persistent_workers": True}):
        loader = make(**options)
        for _ in loader:
            break
        seen = items(iter(loader), 5)
        assert items(make().endless(), 6)[BATCH:] == seen


def test_an_iterator_from_before_the_load_is_out_of_date() -> None:
    for options in ({}, {"num_workers": 2, "persistent_workers": True}):
        loader = make(**options)
        old = iter(loader)
        next(old)
        loader.load_state_dict(make().state_dict())
        with pytest.raises(
            StateError, match=r"out of date: since it began, the loader's state was loaded.*after resto"
        ):
            next(old)
        assert items(iter(loader), 6) == items(make().endless(), 6)
        late = loader.endless()  # made before the load, and not begun
        loader.load_state_dict(make().state_dict())
        assert items(late, 6) == items(make().endless(), 6)


def test_two_iterators_do_not_share_the_data() -> None:
    loader = make()
    one, other = iter(loader), iter(loader)
    next(one)
    next(other)
    with pytest.raises(StateError, match="another iteration was begun"):
        next(one)


def test_in_a_checkpoint(tmp_path: Path) -> None:
    """The batch in hand when `loop` saves behind a step has been trained on."""
    seen = []
    for total in (4, 9):
        loader = make(num_workers=2)
        with ckptlib.Checkpointer(tmp_path, {"data": loader, "weight": torch.zeros(3)}, every=3) as ckpt:
            start = ckpt.restore().step
            for _, batch in zip(ckpt.loop(start, total), loader.endless(), strict=False):
                seen += [int(item[0]) for item in batch]
    assert seen == items(make().endless(), 9)


def test_another_data_set_under_another_name(tmp_path: Path) -> None:
    """The remedy that the error names."""
    with ckptlib.Checkpointer(tmp_path, {"data": make(), "weight": torch.ones(3)}, every=1) as ckpt:
        ckpt.restore()
        ckpt.save(1)
    longer, weight = make(Numbers(length=30)), torch.zeros(3)
    with (
        ckptlib.Checkpointer(tmp_path, {"data": longer, "weight": weight}, every=1) as ckpt,
        pytest.raises(StateMismatch, match=r"data set has 30 items and had 22 .*restore\(strict=False\)"),
    ):
        ckpt.restore()
    with ckptlib.Checkpointer(tmp_path, {"longer": longer, "weight": weight}, every=1) as ckpt:
        assert ckpt.restore(strict=False).step == 1
    assert weight.tolist() == [1, 1, 1]
    assert longer.state_dict()["consumed"] == 0


# -- what is refused


def refused(*args: Any, **options: Any) -> DataLoader[Any]:
    return DataLoader(Numbers(), *args, **options)


@pytest.mark.parametrize(
    ("loader", "message"),
    [
        (
            refused(shuffle=True),
            r"from a RandomSampler.*leave out batch_size, shuffle.*ResumableSampler\(dataset",
        ),
        (refused(batch_size=4), r"from a SequentialSampler"),
        (refused(sampler=DistributedSampler(Numbers(), 2, 0)), r"from a DistributedSampler"),
        (refused(batch_sampler=BatchSampler(SequentialSampler(Numbers()), 2, False)), r"from a BatchSampler"),
        (refused(batch_size=None), r"from a SequentialSampler"),
        (refused(sampler=ResumableSampler(22, 2), batch_size=None), r"pass it as batch_sampler=, not as sampler="),
        (refused(batch_sampler=ResumableSampler(21, 2)), r"has 22 items, and its ResumableSampler was made for 21"),
        (refused(batch_sampler=ResumableSampler(22, 2), generator=torch.Generator()), r"leave out generator="),
    ],
)
def test_loaders_that_cannot_be_resumed(loader: DataLoader[Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        resumable(loader)


def test_what_is_no_loader() -> None:
    with pytest.raises(TypeError, match=r"expected a torch.utils.data.DataLoader, got a list"):
        resumable([1, 2])  # type: ignore[arg-type]
    with pytest.raises(TypeError, match=r"MapStyleLoader has a state of its own; put it into the Checkpointer's state"):
        resumable(make())  # type: ignore[arg-type]


def test_batches_in_no_order() -> None:
    loader = refused(batch_sampler=ResumableSampler(22, 2), num_workers=2)
    loader.in_order = False
    with pytest.raises(ValueError, match="in_order=False gives batches as workers finish"):
        resumable(loader)
