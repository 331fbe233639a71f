"""The copies of a device, as far as a machine without one shows them: on the host, where streams run at once."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from support import ROOT_ID
from workers.torn import Rig, step_with_gradients

import ckptlib
from ckptlib import cuda
from ckptlib.arena import Arena
from ckptlib.cuda import DeviceCopies, DeviceWork
from ckptlib.errors import TornSnapshot
from ckptlib.keys import GenerationId
from ckptlib.pairs import Pair, Source, work_of
from ckptlib.peer.peers import Peers
from ckptlib.stage import Stager

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
    monkeypatch.setattr(torch.cuda, "device", lambda device: nullcontext())
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


def test_the_host_waits_on_the_device_and_the_stream_of_the_copies(
    compute: InOrder, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On the staging thread, which has chosen neither."""
    _, pairs = shards()
    current: list[object] = []

    @contextmanager
    def choose(what: object) -> Iterator[None]:
        current.append(what)
        yield
        current.pop()

    monkeypatch.setattr(torch.cuda, "device", choose)
    monkeypatch.setattr(torch.cuda, "stream", choose)
    stream = InOrder()
    at_wait: list[object] = []
    event = SimpleNamespace(synchronize=lambda: at_wait.extend(current))
    monkeypatch.setattr(stream, "record_event", lambda: event)
    assert DeviceCopies(stream, [work_of(pairs, DEVICE, None)]).finish() == []  # type: ignore[arg-type]
    assert at_wait == [DEVICE, stream]


class Runtime:
    """Of CUDA: registers host memory, until there is no more to be had."""

    def __init__(self, room: int) -> None:
        self.room = room
        self.registered: dict[int, int] = {}
        self.callers: set[str] = set()

    def cudaHostRegister(self, address: int, nbytes: int, flags: int) -> int:
        self.callers.add(threading.current_thread().name)
        assert flags == 1, "for all devices"
        if nbytes + sum(self.registered.values()) > self.room:
            return 2
        self.registered[address] = nbytes
        return 0

    def cudaHostUnregister(self, address: int) -> int:
        self.callers.add(threading.current_thread().name)
        del self.registered[address]
        return 0


@pytest.mark.parametrize("fits", [True, False])
def test_memory_is_pinned_in_pieces_on_the_trainers_device_or_not_at_all(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, fits: bool
) -> None:
    """By a thread that ends with it: what goes wrong there is not raised by the next kernel of the training."""
    runtime, devices = Runtime(1 << 20 if fits else 9000), list[int]()
    monkeypatch.setattr(cuda, "PIN_BYTES", 4096)
    monkeypatch.setattr(torch.cuda, "cudart", lambda: runtime)
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 3)
    monkeypatch.setattr(torch.cuda, "device", lambda index: devices.append(index) or nullcontext())
    arena = Arena(ROOT_ID, GenerationId(1, "0" * 8), tmp_path, 1)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)  # what any other thread has
    arena.warm(10_000)
    (slot,) = [arena.take(10_000, -1, ())]
    assert slot is not None
    assert list(runtime.registered.items()) == (
        [(slot.address(), 4096), (slot.address() + 4096, 4096), (slot.address() + 8192, 1808)] if fits else []
    )
    assert ("copies from the device will be slow" in caplog.text) is not fits
    arena.close(unlink=True)
    assert not runtime.registered
    assert (set(devices), runtime.callers) == ({3}, {"ckptlib-pin"})


@pytest.mark.parametrize("written_to", [[], ["w"]])
def test_the_copies_of_all_devices_have_ended_before_a_torn_snapshot_gives_its_slot_free(
    tmp_path: Path, written_to: list[str]
) -> None:
    rig = Rig(tmp_path)
    weight = torch.nn.Parameter(torch.zeros(300, 300))
    optimizer = torch.optim.SGD([weight], lr=1.0)
    state = {"w": weight, "o": optimizer}
    rig.begin(state).wait_sealed(60)
    step_with_gradients(optimizer)
    ended: list[str] = []
    copies = [
        SimpleNamespace(finish=lambda: ended.append("first") or written_to),
        SimpleNamespace(finish=lambda: ended.append("second") or []),
    ]
    staging = rig.begin(state, go=False)
    staging.device_copies = copies
    if not written_to:
        with torch.no_grad():
            weight.add_(1.0)  # what the host copies is torn
    staging.go()
    with pytest.raises(TornSnapshot, match="w was written to"):
        staging.wait_sealed(60)
    assert ended == ["first", "second"]
    rig.close()


def test_memory_of_the_device_is_not_taken_before_the_training_has_shown_its_peak(
    compute: InOrder, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A restart keeps what it restored in memory before its first iteration."""
    asked: list[bool] = []
    begin = Stager.begin

    def watched(*args: Any) -> Any:
        asked.append(args[-1])
        return begin(*args)

    monkeypatch.setattr(Stager, "begin", watched)
    peers = Peers(copies=0, every=1, memory="device")
    state = {"w": torch.ones(10)}
    with ckptlib.Checkpointer(tmp_path / "root", state, every=1, peers=peers, arena=tmp_path) as ckpt:
        ckpt.save(1)
        ckpt.after_step(2)
        ckpt.after_step(3)
        ckpt.save(4)
    assert asked == [False, True, True, True]
    with ckptlib.Checkpointer(tmp_path / "root", state, every=9, peers=peers, arena=tmp_path) as ckpt:
        ckpt.restore()
        ckpt.after_step(5)
    assert asked[4:] == [False, True]


def test_memory_is_of_the_host_or_of_the_device() -> None:
    with pytest.raises(ValueError, match=r"memory is 'host' or 'device', got '/nvme'; .* arena="):
        Peers(memory="/nvme")
