"""Staging: bit for bit, ready only when whole, and a thread that lives on when a snapshot fails."""

from __future__ import annotations

import gc
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
import xxhash
from helpers.stage import held, is_copied
from hypothesis import given, settings
from hypothesis import strategies as st
from workers.torn import SLOT_BYTES, Rig, params_of, prepared, raw, state_of, step_with_gradients

from ckptlib.errors import NoRoom, WaitTimeout
from ckptlib.format.documents import decode
from ckptlib.slots.slot import Slot
from ckptlib.staging.pair import OVERLAP_FROM_BYTES
from ckptlib.staging.stager import Staging

DTYPES = [
    torch.float32,
    torch.float64,
    torch.bfloat16,
    torch.float16,
    torch.float8_e4m3fn,
    torch.float8_e5m2,
    torch.int64,
    torch.uint8,
    torch.bool,
    torch.complex64,
]


@pytest.fixture(scope="module")
def rig(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Rig]:
    rig = Rig(tmp_path_factory.mktemp("slots"))
    yield rig
    rig.close()


def staged(rig: Rig, state: dict[str, object]) -> Staging:
    staging = rig.begin(state)
    staging.wait_sealed(60)
    return staging


def random_bits(shape: list[int], dtype: torch.dtype, seed: int) -> torch.Tensor:
    """Any bits at all: NaNs with payloads, infinities, denormals."""
    draw = torch.Generator().manual_seed(seed)
    if dtype == torch.bool:
        return torch.randint(0, 2, shape, generator=draw).bool()
    bytes_ = torch.randint(0, 256, [*shape, dtype.itemsize], dtype=torch.uint8, generator=draw)
    return bytes_.view(dtype).reshape(shape)


def reshaped(tensor: torch.Tensor, how: str) -> torch.Tensor:
    """The same tensor, lying otherwise in memory."""
    if how == "transposed":
        return tensor.t().contiguous().t() if tensor.ndim == 2 else tensor
    if how == "strided":
        wide = torch.zeros([*tensor.shape, 3], dtype=tensor.dtype)
        wide[..., 1] = tensor
        return wide[..., 1]
    if how == "expanded":
        return tensor[:1].expand(tensor.shape) if tensor.ndim and tensor.shape[0] else tensor
    return tensor


TENSORS = st.builds(
    lambda shape, dtype, seed, how: reshaped(random_bits(shape, dtype, seed), how),
    st.lists(st.integers(0, 40), max_size=3),
    st.sampled_from(DTYPES),
    st.integers(0, 1000),
    st.sampled_from(["", "transposed", "strided", "expanded"]),
)


@settings(max_examples=60, deadline=None)
@given(st.lists(TENSORS, min_size=1, max_size=6))
def test_every_bit_of_every_tensor(rig: Rig, tensors: list[torch.Tensor]) -> None:
    staging = staged(rig, {"all": dict(enumerate(tensors))})
    assert rig.holds_the_oracle(staging)
    assert rig.slot.read_header().ready


def test_views_with_a_pending_operation_are_resolved(rig: Rig) -> None:
    z = torch.randn(100, dtype=torch.complex64)
    staging = staged(rig, {"conj": z.conj(), "imag of conj": z.conj().imag})
    held_bytes = bytes(rig.slot.body[: staging.content.header.body_nbytes])
    assert raw(z.conj().resolve_conj()) in held_bytes
    assert raw(-z.imag) in held_bytes


def test_digests_and_documents(rig: Rig) -> None:
    staging = staged(rig, {"large": torch.randn(3 << 18), "small": torch.arange(7)})
    table, header = staging.content.table, rig.slot.read_header()
    snapshot = decode("snapshot", rig.slot.read_document(header, "snapshot"), "here")
    expected = "".join(
        xxhash.xxh3_128_hexdigest(bytes(rig.slot.body[o : o + n]))
        for o, n in zip(table.offsets, table.nbytes, strict=True)
    )
    assert snapshot.text("digests") == expected
    assert rig.slot.read_document(header, "table").decode() == table.encoded
    assert rig.slot.read_document(header, "layout") == staging.content.layout


def test_the_trainings_thread_does_not_put_the_table_into_words(rig: Rig) -> None:
    """It is a tenth of the stall of a first save of thousands of tensors; the thread that seals needs it."""
    staging = rig.begin({"x": torch.arange(7)}, go=False)
    assert "encoded" not in vars(staging.content.table)
    staging.go()
    staging.wait_sealed(60)
    assert "encoded" in vars(staging.content.table)


def test_not_ready_until_whole(rig: Rig) -> None:
    """Also when the slot held a whole snapshot before."""
    staged(rig, {"w": torch.randn(1000)})
    before = rig.slot.read_header()
    with held(rig.stager):
        staging = rig.begin({"w": torch.randn(1000)})
        during = rig.slot.read_header()
        assert not during.ready
        assert not staging.done
        with pytest.raises(WaitTimeout, match=f"step {staging.step}"):
            staging.wait_sealed(0.01)
    staging.wait_sealed(60)
    after = rig.slot.read_header()
    assert (before.ready, after.ready) == (True, True)
    assert before.sequence < during.sequence < after.sequence


def test_what_is_small_is_copied_at_once(rig: Rig) -> None:
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.randn(OVERLAP_FROM_BYTES // 4 - 1))], lr=0.1)
    rig.fence.install([optimizer])
    step_with_gradients(optimizer)
    with held(rig.stager):
        staging = rig.begin(state_of(optimizer))
        staging.wait_copied()
        step_with_gradients(optimizer)
    staging.wait_sealed(60)
    assert rig.holds_the_oracle(staging)


def test_sources_live_until_they_are_copied(rig: Rig) -> None:
    optimizer = prepared("sgd-foreach", 3)
    rig.fence.install([optimizer])
    step_with_gradients(optimizer)
    with held(rig.stager):
        staging = rig.begin(state_of(optimizer))
        assert not is_copied(staging)
        for p in params_of(optimizer):
            p.data = torch.zeros(1)  # nobody else holds the old memory now
        gc.collect()
        overwritten = [torch.full((OVERLAP_FROM_BYTES,), 7.0) for _ in range(20)]
    staging.wait_sealed(60)
    assert rig.holds_the_oracle(staging)
    assert overwritten


def test_a_failed_snapshot_is_told_and_the_thread_lives_on(tmp_path: Path) -> None:
    rig = Rig(tmp_path)
    with held(rig.stager):
        failed = rig.begin({"w": torch.randn(10)})
        rig.slot.close()
    with pytest.raises(NoRoom, match="bytes of layout cannot be written: Bad file descriptor"):
        failed.wait_sealed(60)
    rig.slot = Slot.create(tmp_path, "another", SLOT_BYTES)
    whole = staged(rig, {"w": torch.randn(10)})
    assert rig.holds_the_oracle(whole)
    rig.close()
    assert rig.told == [failed, whole]


def test_a_slot_that_cannot_be_begun_keeps_what_it_holds(tmp_path: Path) -> None:
    """Its header may still say that it is ready; and the snapshot fails as one that the thread found bad does."""
    rig = Rig(tmp_path)
    whole = staged(rig, {"w": torch.randn(10), "large": torch.randn(OVERLAP_FROM_BYTES)})
    before = rig.slot.path.read_bytes()
    rig.slot.close()
    failed = rig.begin({"w": torch.randn(10), "large": torch.randn(OVERLAP_FROM_BYTES)})
    with pytest.raises(NoRoom, match=r"bytes of header cannot be written: Bad file descriptor; .*arena="):
        failed.wait_sealed(60)
    failed.wait_copied()
    assert rig.slot.path.read_bytes() == before
    assert rig.told == [whole, failed]
    rig.close()


def test_close_waits_for_what_is_under_way(tmp_path: Path) -> None:
    rig = Rig(tmp_path)
    with held(rig.stager) as gate:
        staging = rig.begin({"w": torch.randn(1000)})
        closing = threading.Thread(target=rig.stager.close)
        closing.start()
        closing.join(0.05)
        assert closing.is_alive()
        gate.set()
        closing.join(60)
    assert staging.done
    assert staging.error is None
    rig.slot.close()
