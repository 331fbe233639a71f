"""What asks for no gradient overlaps the training once it has shown that it stays, and its bytes prove each copy."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from helpers.inside import await_room, stager_of
from helpers.stage import held, is_copied
from torch import nn

import ckptlib
from ckptlib.errors import SaveFailed, TornSnapshot
from ckptlib.saving.sources import FROZEN_AFTER
from ckptlib.staging.pair import OVERLAP_FROM_BYTES

WAIT_S = 60.0


def nothing() -> None:
    pass


class Training:
    """Frozen weights, and small ones that are trained. Each save is held until `meanwhile` has run, and compared."""

    def __init__(self, root: Path) -> None:
        self.root = root
        weights = [torch.randn(OVERLAP_FROM_BYTES) for _ in range(2)]
        self.base = nn.ParameterList([nn.Parameter(weight, requires_grad=False) for weight in weights])
        self.head = nn.Linear(8, 8)
        self.optimizer = torch.optim.AdamW(self.head.parameters())
        self.state = {"base": self.base, "head": self.head, "optimizer": self.optimizer}
        self.oracle: dict[int, list[torch.Tensor]] = {}
        self.overlapped: list[int] = []

    def tensors(self) -> list[torch.Tensor]:
        return [tensor.detach().clone() for tensor in (*self.base.parameters(), *self.head.parameters())]

    def body(self) -> None:
        self.optimizer.zero_grad()
        self.head(torch.randn(4, 8)).sum().backward()
        self.optimizer.step()

    def save(self, ckpt: ckptlib.Checkpointer, step: int, meanwhile: Callable[[], None] = nothing) -> ckptlib.Pending:
        self.body()
        await_room(ckpt)
        self.oracle[step] = self.tensors()
        with held(stager_of(ckpt)):
            ckpt.after_step(step)
            pending = ckpt.pending
            assert pending is not None
            if not is_copied(pending.staging):
                self.overlapped.append(step)
            meanwhile()
        return pending

    def check(self, steps: list[int]) -> None:
        """Exactly these were committed, with the values that the state had."""
        assert [info.step for info in ckptlib.checkpoints(self.root)] == steps
        for step in steps:
            saved = ckptlib.open(self.root, step)
            names = ("base/0", "base/1", "head/weight", "head/bias")
            assert all(map(torch.equal, map(saved.get_tensor, names), self.oracle[step]))


@pytest.fixture
def training(tmp_path: Path) -> Training:
    return Training(tmp_path / "root")


def checkpointer(training: Training, tmp_path: Path) -> ckptlib.Checkpointer:
    return ckptlib.Checkpointer(training.root, training.state, every=1, arena=tmp_path)


def test_what_stays_overlaps(training: Training, tmp_path: Path) -> None:
    with checkpointer(training, tmp_path) as ckpt:
        for step in range(1, 8):
            training.save(ckpt, step).wait_committed(WAIT_S)
    assert training.overlapped == [*range(FROZEN_AFTER + 1, 8)]
    training.check([*range(1, 8)])


@pytest.mark.parametrize("late", [False, True], ids=["between saves", "during a copy"])
def test_a_few_elements_that_change_after_all(training: Training, tmp_path: Path, late: bool) -> None:
    """Though no sample shows it, and torch does not count it. From then on what has changed is copied at once."""

    def write() -> None:
        training.base[1].data[-1] += 1

    with checkpointer(training, tmp_path) as ckpt:
        for step in range(1, 6):
            training.save(ckpt, step).wait_committed(WAIT_S)
        if not late:
            write()
        torn = training.save(ckpt, 6, write if late else nothing)
        with pytest.raises(TornSnapshot, match="base/1 asks for no gradient, but has changed since the save before"):
            torn.wait_staged(WAIT_S)
        with pytest.raises(SaveFailed):
            torn.wait_committed(WAIT_S)
        for step in range(7, 13):
            write()
            training.save(ckpt, step).wait_committed(WAIT_S)
    assert [step for step in training.overlapped if step < 10] == [4, 5, 6]
    assert training.overlapped[-1] == 12, "base/0 does again"
    committed = [info.step for info in ckptlib.checkpoints(training.root)]
    assert {1, 2, 3, 4, 5, 7, 12} <= {*committed} <= {*training.oracle} - {6}
    training.check(committed)


def test_what_changes_at_every_save_never_overlaps(training: Training, tmp_path: Path) -> None:
    """As a teacher with averaged weights does: none of its saves may fail for that."""
    with checkpointer(training, tmp_path) as ckpt:
        for step in range(1, 8):
            for weight in training.base:
                weight.data.mul_(0.99)
            training.save(ckpt, step).wait_committed(WAIT_S)
    assert training.overlapped == []
    training.check([*range(1, 8)])


def test_what_is_trained_later_and_frozen_again(training: Training, tmp_path: Path) -> None:
    with checkpointer(training, tmp_path) as ckpt:
        for step in range(1, 16):
            if step == 6:
                training.base[0].requires_grad_(True)
                training.optimizer.add_param_group({"params": [training.base[0]]})
            if step == 9:
                training.base[0].requires_grad_(False)
            if 6 <= step < 9:
                training.base[0].grad = torch.randn(OVERLAP_FROM_BYTES)
            training.save(ckpt, step).wait_committed(WAIT_S)
    training.check([*range(1, 16)])


def test_the_last_save_does_not_rely_on_it(training: Training, tmp_path: Path) -> None:
    """If it came to nothing, no other would follow."""
    with checkpointer(training, tmp_path) as ckpt:
        for before in ckpt.loop(0, 7):
            if ckpt.pending is not None:
                ckpt.pending.wait_committed(WAIT_S)
            training.body()
            if before == 6:
                training.base[1].data[-1] += 1
            training.oracle[before + 1] = training.tensors()
    training.check([*range(1, 8)])


def test_small_ones_that_change_after_all_fail_no_save(training: Training, tmp_path: Path) -> None:
    """They are copied at once. What shares a chunk with them, as random state, keeps no large one from overlap."""
    small = [nn.Parameter(torch.randn(OVERLAP_FROM_BYTES // 16), requires_grad=False) for _ in range(12)]
    training.base.extend(small)
    with checkpointer(training, tmp_path) as ckpt:
        for step in range(1, 9):
            if step == 6:
                for weight in small:
                    weight.data.add_(1)
            training.save(ckpt, step).wait_committed(WAIT_S)
    assert training.overlapped == [*range(FROZEN_AFTER + 1, 9)]
    saved = ckptlib.open(training.root, 6)
    assert all(torch.equal(saved.get_tensor(f"base/{i}"), weight) for i, weight in enumerate(training.base))


def test_what_a_forward_writes_without_a_change_is_copied_at_once_from_then_on(
    training: Training, tmp_path: Path
) -> None:
    """As it clamps weights, or looks rows up in a frozen embedding with `max_norm`: no digest ever shows that."""

    def write() -> None:
        with torch.no_grad():
            training.base[1].clamp_(-100, 100)

    def write_late() -> None:
        if training.overlapped[-1] > FROZEN_AFTER + 1:
            write()

    with checkpointer(training, tmp_path) as ckpt:
        for step in range(1, FROZEN_AFTER + 1):
            training.save(ckpt, step).wait_committed(WAIT_S)
        with pytest.raises(TornSnapshot):
            training.save(ckpt, FROZEN_AFTER + 1, write).wait_staged(WAIT_S)
        for step in range(FROZEN_AFTER + 2, FROZEN_AFTER + 8):
            training.save(ckpt, step, write_late).wait_committed(WAIT_S)
    assert training.overlapped[-1] > FROZEN_AFTER + 1, "base/0 does again"


def test_a_write_between_saves_that_torch_counts_fails_none(training: Training, tmp_path: Path) -> None:
    """As a target network gets the weights of another, even just before the last save."""
    with checkpointer(training, tmp_path) as ckpt:
        for step in range(1, 13):
            if step in (6, 12):
                training.base[step == 12].detach().mul_(2)
            training.save(ckpt, step).wait_committed(WAIT_S)
    assert training.overlapped == [4, 5, 6, 10, 11], "base/1 alone from 6 on"
    training.check([*range(1, 13)])


def test_what_is_written_without_a_change_keeps_no_other_from_overlap(training: Training, tmp_path: Path) -> None:
    """As an average over all weights of a model writes to those that are frozen, at every step."""
    with checkpointer(training, tmp_path) as ckpt:
        for step in range(1, 9):
            with torch.no_grad():
                training.base[1].lerp_(training.base[1].clone(), 0.1)
            training.save(ckpt, step).wait_committed(WAIT_S)
    assert training.overlapped == [*range(FROZEN_AFTER + 1, 9)], "base/0 does"
    training.check([*range(1, 9)])


def test_a_load_between_saves_fails_none(training: Training, tmp_path: Path) -> None:
    """As a reference policy gets the weights of another run."""
    other = nn.ParameterList([nn.Parameter(torch.randn(OVERLAP_FROM_BYTES)) for _ in range(2)])
    ckptlib.save(tmp_path / "other", {"base": other}, step=1)
    with checkpointer(training, tmp_path) as ckpt:
        for step in range(1, 9):
            if step == 6:
                ckptlib.load(tmp_path / "other", {"base": training.base})
            training.save(ckpt, step).wait_committed(WAIT_S)
    assert training.overlapped == [4, 5]
    training.check([*range(1, 9)])
