"""ckptlib.data.ResumableSampler: each item once per epoch, through crashes and other numbers of ranks."""

from __future__ import annotations

import logging
from dataclasses import dataclass
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ckptlib.data import ResumableSampler
from ckptlib.errors import CkptError, StateError, StateMismatch


def samplers(length: int, global_batch: int, world_size: int, **options: object) -> list[ResumableSampler]:
    """One per rank."""
    return [
        ResumableSampler(length, global_batch, rank=rank, world_size=world_size, **options)  # type: ignore[arg-type]
        for rank in range(world_size)
    ]


def take(ranks: list[ResumableSampler]) -> list[int]:
    """The next global batch, in its order; all ranks train on it."""
    shares = [next(iter(sampler)) for sampler in ranks]
    assert {len(share) for share in shares} == {ranks[0].global_batch // len(ranks)}, "as many items on each rank"
    for sampler in ranks:
        sampler.advance()
    return [item for at in zip(*shares, strict=True) for item in at]


def undisturbed(length: int, num_items: int, **options: object) -> list[int]:
    return take(samplers(length, num_items, 1, **options)) if num_items else []


@dataclass
class Session:
    """One incarnation of a job: so many batches are trained on, and so many of them are in the last checkpoint."""

    world_size: int
    per_rank: int
    trained: int
    saved: int


sessions = st.builds(
    lambda world_size, per_rank, trained, lost: Session(world_size, per_rank, trained, max(0, trained - lost)),
    st.integers(1, 5),
    st.integers(1, 4),
    st.integers(0, 8),
    st.integers(0, 4),
)


@settings(max_examples=30, deadline=None)
@given(st.integers(1, 40), st.lists(sessions, min_size=1, max_size=5), st.booleans(), st.integers(0, 3))
def test_crashes_and_other_world_sizes(length: int, jobs: list[Session], shuffle: bool, seed: int) -> None:
    """What remains of all sessions is the order of one that nobody disturbed, and each epoch of it is every item."""
    state, consumed = None, list[int]()
    for job in jobs:
        ranks = samplers(length, job.world_size * job.per_rank, job.world_size, shuffle=shuffle, seed=seed)
        for sampler in ranks:
            if state is not None:
                sampler.load_state_dict(state)
        batches, saved = [], ranks[0].state_dict()
        for trained in range(1, job.trained + 1):
            batches.append(take(ranks))
            if trained == job.saved:
                saved = ranks[0].state_dict()
                assert all(sampler.state_dict() == saved for sampler in ranks), "plain values, alike on all ranks"
        state = saved
        consumed += [item for batch in batches[: job.saved] for item in batch]
    for first in range(0, len(consumed), length):
        epoch = consumed[first : first + length]
        assert len({*epoch}) == len(epoch)
    assert consumed == undisturbed(length, len(consumed), shuffle=shuffle, seed=seed)


@settings(max_examples=40, deadline=None)
@given(st.integers(1, 40), st.integers(1, 4), st.integers(1, 5), st.integers(1, 20))
def test_drop_last(length: int, world_size: int, per_rank: int, num_batches: int) -> None:
    """Every epoch has the same number of batches, of distinct items; what is over is not seen."""
    batch = world_size * per_rank
    if batch > length:
        return
    ranks = samplers(length, batch, world_size, drop_last=True)
    found = [take(ranks) for _ in range(num_batches)]
    per_epoch = len(ranks[0])
    assert per_epoch == length // batch
    for epoch in range(-(-num_batches // per_epoch)):
        items = [item for one in found[epoch * per_epoch : (epoch + 1) * per_epoch] for item in one]
        assert len({*items}) == len(items)
    assert ranks[0].epoch == num_batches // per_epoch


def test_an_iteration_ends_with_its_epoch() -> None:
    (sampler,) = samplers(10, 4, 1, shuffle=False)
    lengths = []
    for epoch in range(4):
        batches = list(sampler)
        for _ in batches:
            sampler.advance()
        lengths.append(len(batches))
        assert sampler.epoch > epoch
    assert lengths == [3, 2, 3, 2]  # the last batch of an odd one takes two items of the next
    assert len(sampler) == 3


def test_reading_ahead_consumes_nothing() -> None:
    (sampler,) = samplers(100, 10, 1)
    before = sampler.state_dict()
    sampler.counted = True
    ahead = iter(sampler)
    first = [next(ahead) for _ in range(5)]
    assert sampler.state_dict() == before
    assert [next(iter(sampler))] == first[:1]


def test_epochs_and_seeds_have_their_own_order() -> None:
    orders = {tuple(undisturbed(20, 20, seed=seed)) for seed in range(20)}
    two = undisturbed(20, 40)
    assert len(orders | {tuple(two[20:])}) == 21
    assert undisturbed(7, 14, shuffle=False) == [*range(7), *range(7)]


def test_a_batch_of_several_epochs() -> None:
    (sampler,) = samplers(3, 8, 1)
    items = take([sampler]) + take([sampler])
    assert [sorted(items[i : i + 3]) for i in range(0, 15, 3)] == [[0, 1, 2]] * 5
    assert (sampler.epoch, sampler.consumed) == (5, 1)


# -- what is refused


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"global_batch": 8, "rank": 0, "world_size": 3}, r"on 3 ranks: expected a multiple of 3.*use 6 or 9\. It may"),
        ({"global_batch": 2, "rank": 0, "world_size": 3}, r"multiple of 3.*use 3\. It may differ from the checkpoint"),
        ({"global_batch": 11, "drop_last": True}, r"with drop_last=True and 10 items: no epoch.*at most 10, or drop_"),
        ({"global_batch": 0}, r"global_batch=0: expected an integer of at least 1"),
        ({"data": 0}, r"length=0: expected an integer of at least 1"),
        ({"seed": -1}, r"seed=-1: expected an integer of at least 0"),
        ({"seed": None}, r"seed=None: expected an integer"),
        ({"data": 2**63}, r"expected at most 2\*\*62"),
        ({"rank": 1}, r"rank=1, world_size=None: pass both or neither"),
        ({"rank": 2, "world_size": 2}, r"rank=2: expected less than world_size=2"),
    ],
)
def test_arguments(options: dict[str, object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        ResumableSampler(**{"data": 10, "global_batch": 2, **options})  # type: ignore[arg-type]


def test_ranks_without_a_process_group(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each of them would be rank 0 of 1."""
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(ValueError, match=r"WORLD_SIZE is 2.*no process group.*init_process_group first, or pass rank"):
        ResumableSampler(10, 2)
    ResumableSampler(10, 2, rank=1, world_size=2)


def state_of(length: int = 10, global_batch: int = 4, **options: object) -> dict[str, object]:
    (sampler,) = samplers(length, global_batch, 1, **options)
    take([sampler])
    return dict(sampler.state_dict())


@pytest.mark.parametrize(
    ("state", "message"),
    [
        (
            state_of(12),
            r"10 items and had 12 .*in epoch 0 with 4 items consumed.*twice or never.*restore\(strict=False\)",
        ),
        (state_of(seed=1), r"seed 0, and the checkpoint was saved with 1.*Resume with seed 1"),
        (state_of(shuffle=False), r"order 'feistel-8', and the checkpoint was saved with 'in sequence'.*Resume with"),
        ({"epoch": 0, "consumed": 4}, r"lacks \['length', 'order', 'seed'\]: another kind.*Resume with that"),
        ({**state_of(), "consumed": 10}, r"consumed 10 of 10"),
        ({**state_of(), "consumed": -4}, r"expected integers from 0"),
        ({**state_of(), "epoch": 1.0}, r"expected integers from 0"),
        ({**state_of(), "epoch": True}, r"expected integers from 0"),
    ],
)
def test_states_of_others(state: dict[str, object], message: str) -> None:
    (sampler,) = samplers(10, 4, 1)
    with pytest.raises(StateMismatch, match=message):
        sampler.load_state_dict(state)
    assert (sampler.epoch, sampler.consumed) == (0, 0)


def test_batches_that_nobody_counts() -> None:
    (sampler,) = samplers(10, 2, 1)
    assert sampler.state_dict()["consumed"] == 0
    next(iter(sampler))
    with pytest.raises(StateError, match=r"none was counted as trained on.*resumable\(DataLoader.*sampler.advance\(\)"):
        sampler.state_dict()
    sampler.advance()
    assert sampler.state_dict()["consumed"] == 2
    assert issubclass(StateError, CkptError)


def test_what_is_dropped_is_said(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING, "ckptlib.data"):
        samplers(10, 4, 2, drop_last=True)
        samplers(8, 4, 2, drop_last=True)
    assert [record.getMessage() for record in caplog.records] == [
        "drop_last: the last 2 of 10 items are left out of each epoch"
    ]
    caplog.clear()
    (sampler,) = samplers(10, 5, 1, drop_last=True)
    sampler.load_state_dict(state_of(global_batch=6))
    assert (sampler.epoch, sampler.consumed) == (1, 0)
    assert "the last 4 items of epoch 0 are left out" in caplog.text


def test_a_data_set_tells_its_length_itself() -> None:
    assert [*ResumableSampler(range(10), 4, seed=3)] == [*ResumableSampler(10, 4, seed=3)]


@pytest.mark.parametrize("data", [10.0, None, iter([1]), object()])
def test_what_has_no_length(data: Any) -> None:
    with pytest.raises(TypeError, match=r"expected a data set with a length, .* ckptlib.data.resumable"):
        ResumableSampler(data, 4)
