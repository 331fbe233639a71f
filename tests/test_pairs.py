"""Shards and their places: by way of spare memory of a device, which host memory stands for here."""

from __future__ import annotations

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from ckptlib.memory import bytes_of
from ckptlib.pairs import OVERLAP_FROM_BYTES, Pair, Source, work_of

DEVICE = torch.device("cuda")

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
        sources.append(Source(f"t{n}", tensor, late))
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
        for target, source in (*work.now, *work.later):
            target.copy_(source)
        for pair in pairs:  # training goes on
            pair.source.tensor.zero_()
        late = [p for p in pairs if p.device == DEVICE and p.late]
        assert work.names == [p.source.name for p in late]
        assert all(p.nbytes >= OVERLAP_FROM_BYTES for p in late)
        for target, source in work.then:
            target.copy_(source)
        places = sorted((p.offset, p.device == DEVICE) for p in pairs if p.nbytes)
        edges = [b for (_, a), (_, b) in zip([(0, False), *places], places, strict=False) if b and not a]
        assert len(work.then) == len(edges), "one copy for all that lies side by side"

    for pair in pairs:
        assert torch.equal(bytes_of(pair.target), bytes_of(expected[pair.source.name].contiguous()))


def test_without_spare_memory_each_goes_to_its_place() -> None:
    body = torch.zeros(1 << 20, dtype=torch.uint8)
    pairs = [
        Pair(Source("w", torch.ones(200, 200), True), body, 0),
        Pair(Source("b", torch.ones(3), True), body, 1 << 18),
    ]
    for pair in pairs:
        pair.device = DEVICE
    work = work_of(pairs, DEVICE, None)
    assert [target.data_ptr() for target, _ in work.now] == [pairs[1].target_address]
    assert [target.data_ptr() for target, _ in work.later] == [pairs[0].target_address]
    assert (work.then, work.names) == ([], ["w"])
