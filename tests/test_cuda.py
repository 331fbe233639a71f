"""The copies of a device, as far as a machine without one shows them: on the host, where streams run at once."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from types import SimpleNamespace

import pytest
import torch

from ckptlib import cuda
from ckptlib.cuda import DeviceCopies, DeviceWork
from ckptlib.pairs import Pair, Source, work_of
from ckptlib.peer.peers import Peers

DEVICE = torch.device("cpu")


class InOrder:
    """A stream whose work is done as soon as it is enqueued."""

    device = torch.device("cpu")

    def __init__(self) -> None:
        self.waits = 0
        self.when_waited: Callable[[], None] = lambda: None

    def wait_stream(self, other: InOrder) -> None:
        pass

    def record_event(self) -> SimpleNamespace:
        return SimpleNamespace(synchronize=lambda: None)

    def wait_event(self, event: SimpleNamespace) -> None:
        self.waits += 1
        self.when_waited()


@pytest.fixture
def compute(monkeypatch: pytest.MonkeyPatch) -> InOrder:
    stream = InOrder()
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: stream)
    monkeypatch.setattr(torch.cuda, "stream", lambda stream: nullcontext())
    return stream


def shards() -> tuple[torch.Tensor, list[Pair]]:
    """A body, and in it a large shard that waits at the fence, a small one that does not, and one of another device."""
    body = torch.zeros(1 << 20, dtype=torch.uint8)
    sources = [
        Source("w", torch.randn(300, 300), True),
        Source("b", torch.randn(5), True),
        Source("s", torch.ones(1), False),
    ]
    pairs = [Pair(source, body, offset) for source, offset in zip(sources, (0, 1 << 19, 1 << 18), strict=True)]
    for pair in pairs[:2]:
        pair.device = DEVICE
    return body, pairs


@pytest.mark.parametrize("by_spare_memory", [False, True])
def test_all_arrive(compute: InOrder, by_spare_memory: bool) -> None:
    body, pairs = shards()
    work = work_of(pairs, DEVICE, torch.zeros_like(body) if by_spare_memory else None)
    copies = DeviceCopies(InOrder(), [work])  # type: ignore[arg-type]
    copies.hold_compute()
    assert compute.waits == 2, "for what is copied at once, and at the fence"
    expected = [pair.source.tensor.clone() for pair in pairs]
    assert copies.finish() == []
    assert [torch.equal(pair.target, tensor) for pair, tensor in zip(pairs, expected, strict=True)] == [
        True,
        True,
        False,
    ]


@pytest.mark.parametrize("by_spare_memory", [False, True])
def test_what_is_written_to_meanwhile_is_named(compute: InOrder, by_spare_memory: bool) -> None:
    body, pairs = shards()
    compute.when_waited = lambda: pairs[0].source.tensor.zero_()
    work = work_of(pairs, DEVICE, torch.zeros_like(body) if by_spare_memory else None)
    assert DeviceCopies(InOrder(), [work]).finish() == ["w"]  # type: ignore[arg-type]


def test_one_slot_by_spare_memory_and_another_without(compute: InOrder, monkeypatch: pytest.MonkeyPatch) -> None:
    """What goes to the host arrives when the host waits for it, and is not looked at before."""
    (body, first), (_, second) = shards(), shards()
    works = [work_of(first, DEVICE, torch.zeros_like(body)), work_of(second, DEVICE, None)]
    on_its_way: list[cuda.Copy] = []
    hosts = {pair.target.data_ptr() for pair in second}
    enqueue = cuda._enqueue

    def slow_link(copies: list[cuda.Copy]) -> None:
        to_host = [copy for copy in copies if copy[0].data_ptr() in hosts]
        on_its_way.extend(to_host)
        enqueue([copy for copy in copies if copy[0].data_ptr() not in hosts])

    monkeypatch.setattr(cuda, "_enqueue", slow_link)
    stream = InOrder()
    monkeypatch.setattr(stream, "record_event", lambda: SimpleNamespace(synchronize=lambda: enqueue(on_its_way)))
    assert DeviceCopies(stream, works).finish() == []  # type: ignore[arg-type]
    for pair in (*first[:2], *second[:2]):
        assert torch.equal(pair.target, pair.source.tensor)


def test_a_copy_that_went_wrong_is_named(compute: InOrder, monkeypatch: pytest.MonkeyPatch) -> None:
    _, pairs = shards()
    work = work_of(pairs, DEVICE, None)
    assert DeviceCopies(InOrder(), [work, DeviceWork([], [], [], [])]).finish() == []  # type: ignore[arg-type]
    monkeypatch.setattr(cuda, "_enqueue", lambda copies: None)
    assert DeviceCopies(InOrder(), [work]).finish() == []  # type: ignore[arg-type]
    pairs[0].source.tensor.add_(1.0)
    assert DeviceCopies(InOrder(), [work]).finish() == ["w"]  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("free", "reserved", "peak", "fits"),
    [
        (4 << 30, 2 << 30, 2 << 30, True),
        (4 << 30, 2 << 30, 3 << 30, True),  # a gigabyte of the free is for the peak, one for what fragments
        (4 << 30, 2 << 30, (3 << 30) + 1, False),
        (1 << 30, 9 << 30, 1 << 30, True),  # what the training has left in its allocator
    ],
)
def test_beside_the_peak(monkeypatch: pytest.MonkeyPatch, free: int, reserved: int, peak: int, fits: bool) -> None:
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (free, 80 << 30))
    monkeypatch.setattr(torch.cuda, "memory_reserved", lambda device: reserved)
    monkeypatch.setattr(torch.cuda, "max_memory_allocated", lambda device: peak)
    assert (cuda.spare_nbytes(DEVICE) >= 2 << 30) is fits


def test_memory_is_of_the_host_or_of_the_device() -> None:
    with pytest.raises(ValueError, match=r"memory is 'host' or 'device', got '/nvme'; .* arena="):
        Peers(memory="/nvme")
