"""Shards and their places: by way of spare memory of a device, which host memory stands for here."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from helpers.stage import num_gathered, window_of
from hypothesis import given, settings
from hypothesis import strategies as st

from ckptlib.staging import copies as module
from ckptlib.staging import prepared_copies
from ckptlib.staging.copies import work_of
from ckptlib.staging.pair import OVERLAP_FROM_BYTES, CopySource, Pair
from ckptlib.staging.prepared_copies import Across
from ckptlib.state.raw_bytes import bytes_of

DEVICE = torch.device("cpu", 0)
"""Of which memory can be had."""


@pytest.fixture(autouse=True, scope="module")
def few_registrations() -> Iterator[None]:
    """A body may lie in two registrations of the usual length, by chance; then there is a copy more."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(prepared_copies, "MOVE_BYTES", 1 << 62)
        yield


SHARDS = st.tuples(
    st.sampled_from([(), (3,), (0, 4), (130, 130), (7, 5)]),
    st.sampled_from([torch.float32, torch.bfloat16, torch.bool]),
    st.booleans(),  # on the device
    st.booleans(),  # behind the fence
    st.integers(0, 2),  # gap, in units of 64 bytes
)


@settings(max_examples=150, deadline=None)
@given(st.lists(SHARDS, min_size=1, max_size=12), st.randoms(use_true_random=False))
def test_a_frozen_copy_reaches_the_host(shards: list[tuple], random: object) -> None:
    sources, offsets, end = [], [], 0
    for n, (shape, dtype, _, late, gap) in enumerate(shards):
        offsets.append(end + 64 * gap)
        tensor = torch.randn(shape).t().to(dtype) if n % 3 == 0 and len(shape) == 2 else torch.randn(shape).to(dtype)
        sources.append(CopySource(f"t{n}", tensor, late))
        end = offsets[-1] + (tensor.nbytes + 63) // 64 * 64
    body = torch.randint(0, 256, (max(end, 1),), dtype=torch.uint8)
    pairs = [Pair(source, body, offset) for source, offset in zip(sources, offsets, strict=True)]
    for pair, (_, _, on_device, _, _) in zip(pairs, shards, strict=True):
        pair.device = DEVICE if on_device else None
    random.shuffle(pairs)  # type: ignore[attr-defined]
    expected = {pair.source.name: pair.source.tensor.clone() for pair in pairs}
    on_host = [pair for pair in pairs if pair.device is None]
    for pair in on_host:
        pair.target.copy_(pair.source.tensor)

    if any(pair.device == DEVICE and pair.nbytes for pair in pairs):
        work = work_of(pairs, DEVICE, torch.zeros_like(body))
        assert not work.across_now
        assert not work.across_later
        work.inside_now.enqueue()
        for pair in pairs:  # which are not waited for by the fence
            if not pair.late:
                pair.source.tensor.zero_()
        work.inside_later.enqueue()
        for pair in pairs:  # training goes on
            pair.source.tensor.zero_()
        late = [p for p in pairs if p.device == DEVICE and p.late]
        assert work.samples.names == [p.source.name for p in late]
        assert all(p.nbytes >= OVERLAP_FROM_BYTES for p in late)
        copy(work.then)
        places = sorted((p.offset, p.device == DEVICE) for p in pairs if p.nbytes)
        edges = [b for (_, a), (_, b) in zip([(0, False), *places], places, strict=False) if b and not a]
        assert len(list(work.then.moves())) == len(edges), "one copy for all that lies side by side"

    for pair in pairs:
        assert torch.equal(bytes_of(pair.target), bytes_of(expected[pair.source.name].contiguous()))


def copy(across: Across) -> None:
    for target, source in across.moves():
        target.copy_(source)


def make_pairs(sizes: list[int], late: bool = True) -> tuple[torch.Tensor, list[Pair]]:
    """On a device, each in a MiB of its own as far as it fits."""
    begins = [sum(-(-4 * n // (1 << 20)) << 20 for n in sizes[:i]) for i in range(len(sizes))]
    body = torch.zeros(begins[-1] + (8 << 20), dtype=torch.uint8)
    tensors = [torch.randn(n) for n in sizes]
    pairs = [
        Pair(CopySource(f"t{n}", t, late), body, at) for n, (t, at) in enumerate(zip(tensors, begins, strict=True))
    ]
    for pair in pairs:
        pair.device = DEVICE
    return body, pairs


def test_without_spare_memory_what_is_large_goes_to_its_place(monkeypatch: pytest.MonkeyPatch) -> None:
    """And in no piece that another registration has a part of."""
    monkeypatch.setattr(prepared_copies, "MOVE_BYTES", 4096 * 16)
    _, (large, small) = make_pairs([300_000, 3])
    small.late = False
    work = work_of([large, small], DEVICE, None)
    assert (work.samples.names, bool(work.across_now)) == (["t0"], False)
    moves = list(work.across_later.moves())
    assert moves[0][0].data_ptr() == large.target_address
    assert sum(target.numel() for target, _ in moves) == large.nbytes
    assert len({target.data_ptr() // (4096 * 16) for target, _ in moves}) == len(moves)
    work.inside_now.enqueue()
    copy(work.across_later)
    copy(work.then)
    assert torch.equal(large.target, large.source.tensor)
    assert torch.equal(small.target, small.source.tensor)


def test_what_is_small_is_gathered_before_training_goes_on() -> None:
    """One transfer for all of it, and no sample: nobody can write to it any more."""
    body, pairs = make_pairs([5, 100_000, 7, 200_000, 9, 400_000, 11])
    tight = [
        Pair(pair.source, body, at) for pair, at in zip(pairs, [0, 64, 500_000, 600_000, 0, 2_000_000, 0], strict=True)
    ]
    some = [pair for pair in tight if pair.source.name in ("t0", "t1", "t2", "t3", "t5")]
    for pair in some:
        pair.device = DEVICE
    expected = {pair.source.name: pair.source.tensor.clone() for pair in some}
    work = work_of(some, DEVICE, None)
    assert work.samples.names == ["t5"]
    work.inside_now.enqueue()
    for pair in some[:4]:
        pair.source.tensor.zero_()
    copy(work.across_later)
    copy(work.then)
    assert len(list(work.then.moves())) == 1
    for pair in some:
        assert torch.equal(pair.target, expected[pair.source.name])


def test_what_is_gathered_may_begin_anywhere() -> None:
    """An address that a wide number may have, in a storage where it may not, and the other way round."""
    raw = torch.arange(4096, dtype=torch.uint8)
    skip = -raw.data_ptr() % 8
    for at in range(skip, skip + 9):
        tensor = torch.frombuffer(raw.numpy().data[at:], dtype=torch.uint8)[3 : 3 + 64]
        pair = Pair(CopySource("t", tensor, False), torch.zeros(1 << 12, dtype=torch.uint8), at)
        pair.device = DEVICE
        work = work_of([pair], DEVICE, None)
        work.inside_now.enqueue()
        copy(work.then)
        assert torch.equal(pair.target, tensor)


def test_stretches_begin_where_their_numbers_may() -> None:
    """However many bytes lie before: an odd mask, and numbers behind what is too large to be gathered."""
    sizes = {"mask": (300_001, torch.uint8), "large": (600_000, torch.float32), "count": (1, torch.int64)}
    sizes |= {"larger": (700_000, torch.float32), "z": (3, torch.complex128)}
    body, pairs, end = torch.full((8 << 20,), 7, dtype=torch.uint8), list[Pair](), 0
    for name, (size, dtype) in sizes.items():
        end += -end % dtype.itemsize
        pairs.append(Pair(CopySource(name, torch.arange(size).to(dtype), False), body, end))
        pairs[-1].device = DEVICE
        end += size * dtype.itemsize
    work = work_of(pairs, DEVICE, None)
    work.inside_now.enqueue()
    copy(work.across_now)
    copy(work.then)
    assert all(torch.equal(pair.target, pair.source.tensor) for pair in pairs)


def test_shards_that_are_copied_apart_are_not_written_over(monkeypatch: pytest.MonkeyPatch) -> None:
    """They lie between those that are gathered: at once, in rounds, and in spare memory."""
    monkeypatch.setattr(module, "PACKED_BYTES", 1000)
    for spare in (False, True):
        body, pairs, end = torch.full((1 << 16,), 7, dtype=torch.uint8), list[Pair](), 0
        for n in range(60):
            pairs.append(Pair(CopySource(f"t{n}", torch.randn(1 + 37 * n % 91), False), body, end))
            pairs[-1].device = DEVICE
            end += pairs[-1].nbytes
        memory = torch.zeros_like(body) if spare else None
        halves = pairs[0::2], pairs[1::2]
        works = [
            work_of(some, DEVICE, memory, [pair.offset for pair in others])
            for some, others in (halves, reversed(halves))
        ]
        for work in works:
            work.inside_now.enqueue()
        for across in (*(work.across_now for work in works), *(work.then for work in works)):
            copy(across)
        assert all(torch.equal(pair.target, pair.source.tensor) for pair in pairs)


def test_no_more_is_gathered_than_there_is_room_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "PACKED_BYTES", 1000)
    _, pairs = make_pairs([200, 100, 200, 40], late=False)
    work = work_of(pairs, DEVICE, None)
    gathered = num_gathered(work.inside_now)
    assert gathered <= 1000
    copy(work.across_now)
    assert [torch.equal(pair.target, pair.source.tensor) for pair in pairs] == [False, True, True, True]


@pytest.mark.parametrize("late", [False, True])
def test_what_is_small_and_beyond_that_takes_turns(monkeypatch: pytest.MonkeyPatch, late: bool) -> None:
    """A few copies over the link for hundreds of tensors, by way of memory that is no more than a round's."""
    monkeypatch.setattr(module, "PACKED_BYTES", 200_000)
    monkeypatch.setattr(module, "ROUND_BYTES", 500_000)
    scalars = [] if late else [1]  # which no optimizer is waited for
    sizes = [40_000, *scalars, 20_000, *scalars, 17_000, 30_001, *scalars] * 25 + [5, 3] * 20
    body, pairs, end = torch.full((12 << 20,), 7, dtype=torch.uint8), list[Pair](), 4096
    for n, size in enumerate(sizes):
        pairs.append(Pair(CopySource(f"t{n}", torch.randn(size), late), body, end))
        pairs[-1].device = DEVICE
        end += 4 * size + (4 if n % 9 == 0 else 0)
    theirs = Pair(CopySource("host", torch.randn(9), False), body, end)
    made = list[int]()
    zeros = torch.zeros
    monkeypatch.setattr(torch, "zeros", lambda *size, **options: made.append(size[0]) or zeros(*size, **options))
    work = work_of([*pairs, theirs], DEVICE, None)
    assert sum(size for size in made if isinstance(size, int)) <= 700_000 + 500
    assert bool(work.samples.names) == late
    work.inside_now.enqueue()
    moves = 0
    for across in (work.across_now, work.across_later, work.then):
        for target, source in across.moves():
            target.copy_(source)
            moves += 1
    assert moves <= 2 * (end // 500_000 + 2)
    assert all(torch.equal(pair.target, pair.source.tensor) for pair in pairs)
    covered = torch.zeros_like(body, dtype=torch.bool)
    for pair in pairs:
        covered[pair.offset : pair.offset + pair.nbytes] = True
    assert set(body[~covered].tolist()) <= {0, 7}, "no bytes of another round between them"
    assert set(body[end:].tolist()) == {7}


def test_a_device_that_is_full_gathers_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """It is no reason for the training to end."""
    zeros = torch.zeros

    def full(*size: int, **options: object) -> torch.Tensor:
        if options.get("device") == DEVICE and size[0] and isinstance(size[0], int):
            raise torch.OutOfMemoryError("full")
        return zeros(*size, **options)  # type: ignore[arg-type]

    _, pairs = make_pairs([200, 300_000, 5])
    monkeypatch.setattr(torch, "zeros", full)
    work = work_of(pairs, DEVICE, None)
    copy(work.across_now)
    copy(work.across_later)
    assert not list(work.then.moves())
    assert all(torch.equal(pair.target, pair.source.tensor) for pair in pairs)


@pytest.mark.parametrize("spare", [False, True])
@pytest.mark.parametrize("view", ["conj", "neg", "transposed", "expanded"])
def test_a_view_is_saved_as_its_value(view: str, spare: bool) -> None:
    """By bytes that are its value: what is pending of it is nothing that a copy of bytes would do."""
    whole = torch.randn(400, 400, dtype=torch.complex64)
    views = {
        "conj": whole.conj(),
        "neg": whole.conj().imag,
        "transposed": whole.t(),
        "expanded": whole[:1].expand(400, 400),
    }
    shown = views[view]
    body = torch.zeros(1 << 21, dtype=torch.uint8)
    pair = Pair(CopySource("v", shown, True), body, 0)
    pair.device = DEVICE
    work = work_of([pair], DEVICE, torch.zeros_like(body) if spare else None)
    assert work.samples.names == [], "not behind the fence"
    work.inside_now.enqueue()
    copy(work.across_now)
    copy(work.then)
    assert torch.equal(pair.target, shown.resolve_conj().resolve_neg().contiguous())


def test_samples_look_at_other_places_at_other_times() -> None:
    """A write to a part of a tensor that one snapshot does not see, another one does."""
    _, pairs = make_pairs([300_000])
    work = work_of(pairs, DEVICE, None)
    looked = set()
    for _ in range(100):
        work.samples.look_before()
        looked.add(window_of(work.samples).data_ptr())
    assert len(looked) == prepared_copies.NUM_WINDOWS
    addresses = sorted(address - pairs[0].source_address for address in looked)
    assert addresses[0] >= 0
    assert addresses[-1] <= pairs[0].nbytes - prepared_copies.SAMPLE_BYTES


def test_a_write_to_the_source_or_to_the_copy_is_seen() -> None:
    for what in ("nothing", "source", "copy"):
        _, (pair,) = make_pairs([300_000])
        work = work_of([pair], DEVICE, None)
        work.samples.look_before()
        copy(work.across_later)
        if what == "source":
            pair.source.tensor.add_(1.0)
        if what == "copy":
            pair.target.add_(1.0)
        work.samples.look_after()
        work.samples.take()
        assert work.samples.written() == ([] if what == "nothing" else ["t0"])
