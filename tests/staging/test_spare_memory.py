"""Memory of the device for snapshots: never so much that the training runs out of it, by an allocator's own figures."""

from __future__ import annotations

import gc
import random

import pytest
import torch
from helpers.runtime import Allocator
from helpers.stage import granted

from ckptlib.staging import spare_memory
from ckptlib.staging.spare_memory import Body, Figures, Room, Spares

DEVICE = torch.device("cpu", 0)
MARGIN = 10


class Device:
    """The allocator of a device, whose memory is not there: `torch.zeros` of it costs what it says."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, total: int) -> None:
        self.allocator = Allocator(total)
        self.in_pieces = False
        monkeypatch.setattr(spare_memory, "MARGIN_BYTES", MARGIN)
        monkeypatch.setattr(spare_memory, "figures", self.figures)
        monkeypatch.setattr(spare_memory, "_rooms", {})
        monkeypatch.setattr(torch, "zeros", self.zeros)

    def figures(self, device: torch.device) -> Figures:
        a = self.allocator
        return Figures(a.free, a.reserved, a.peak, a.private)

    def zeros(self, nbytes: int, **options: object) -> torch.Tensor:
        if self.in_pieces:
            raise torch.OutOfMemoryError("in pieces")
        self.allocator.allocate(nbytes)
        return torch.empty(nbytes, dtype=torch.uint8, device="meta")


@pytest.mark.parametrize(
    ("free", "reserved", "peak", "private", "room"),
    [
        (40, 20, 20, 0, 40),
        (40, 20, 30, 0, 30),  # ten of the free are for the peak
        (10, 90, 10, 0, 10),  # what the allocator has was a peak, which was measured anew since
        (10, 90, 10, 60, 10),
        (5, 0, 0, 0, 5),
        (5, 0, 50, 0, -45),
    ],
)
def test_beside_the_peak(
    monkeypatch: pytest.MonkeyPatch, free: int, reserved: int, peak: int, private: int, room: int
) -> None:
    monkeypatch.setattr(spare_memory, "MARGIN_BYTES", MARGIN)
    monkeypatch.setattr(spare_memory, "figures", lambda device: Figures(free, reserved, peak, private))
    assert Room(DEVICE).nbytes() == max(room - MARGIN, 0)


def test_what_is_granted_is_not_granted_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """Before the next peak neither the driver nor the allocator shows that it is gone."""
    device, room = Device(monkeypatch, 100), Room(DEVICE)
    device.allocator.allocate(20)  # the state
    device.allocator.iterate(20)
    assert room.take([40]) is not None
    assert room.take([40]) is None
    assert room.nbytes() == 100 - 40 - 40 - MARGIN
    device.allocator.iterate(20)  # which shows a peak with all that was granted in it
    assert room.nbytes() == 100 - 40 - 40 - MARGIN


def test_no_device_that_cannot_say_gives_any(monkeypatch: pytest.MonkeyPatch) -> None:
    assert spare_memory.figures(DEVICE) is None
    assert Room(DEVICE).take([1]) is None


def test_random_trainings_never_run_out(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever is taken and given back between iterations, and though torch's peak is reset now and then."""
    for seed in range(1000):
        draw = random.Random(seed)
        with monkeypatch.context() as patch:
            device, room = Device(patch, 1000), Room(DEVICE)
            device.allocator.allocate(draw.randrange(200))
            most = draw.randrange(100, 400)
            device.allocator.iterate(most)
            granted: list[int] = []
            for _ in range(12):
                what = draw.random()
                if what < 0.5:
                    size = draw.randrange(1, 400)
                    if room.take([size]) is not None:
                        granted.append(size)
                elif what < 0.7 and granted:
                    size = granted.pop(draw.randrange(len(granted)))
                    device.allocator.release(size)
                    room.give_back(size)
                elif what < 0.8:
                    device.allocator.peak = device.allocator.allocated
                    device.allocator.iterate(most)
                else:
                    device.allocator.iterate(draw.randrange(most + 1))
                device.allocator.reserved = max(
                    device.allocator.allocated, draw.randrange(device.allocator.reserved + 1)
                )  # torch gives back what it has no use for
                assert room.granted == sum(granted)
            device.allocator.iterate(most)  # raises where there is no room any more


@pytest.fixture
def device(monkeypatch: pytest.MonkeyPatch) -> Device:
    return Device(monkeypatch, 1000)


def bodies(*sizes: int) -> dict[int, Body]:
    return {rank: Body(object(), size) for rank, size in enumerate(sizes)}


def test_two_that_take_turns(device: Device) -> None:
    lots, made = bodies(100, 50), Spares(DEVICE)
    first = made.take(lots)
    assert first is not None
    assert {rank: memory.numel() for rank, memory in first.memory.items()} == {0: 100, 1: 50}
    assert made.ready
    second = made.take(lots)
    assert second is not None
    assert second is not first
    assert not made.ready, "a third snapshot has to wait"
    first.busy = False
    assert made.ready
    assert made.take(lots) is first
    assert device.allocator.allocated == 300


@pytest.mark.parametrize("peaks", [False, True])
def test_what_was_collected_is_given_back(device: Device, peaks: bool) -> None:
    """As of a Checkpointer that nobody closed: its memory was free, and counted as granted as long as the process."""
    device.allocator.allocate(300)  # the state
    for _ in range(4):
        made = Spares(DEVICE)
        assert made.take(bodies(300)) is not None
        if peaks:
            device.allocator.iterate(50)
        assert granted(made) == 600
        for _ in range(2):
            device.allocator.release(300)
        del made
        gc.collect()
    assert spare_memory._rooms[DEVICE].nbytes() == 1000 - 300 - (50 if peaks else 0) - MARGIN


@pytest.mark.parametrize("measured_anew", [False, True])
def test_the_peak_before_the_first_snapshot_counts(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, measured_anew: bool
) -> None:
    """Also where the program resets what torch has measured, as one that logs it for each step does."""
    device, made = Device(monkeypatch, 100), Spares(DEVICE)
    device.allocator.allocate(20)  # the state
    device.allocator.iterate(40)
    if measured_anew:
        device.allocator.peak = device.allocator.allocated
    assert made.take(bodies(20)) is not None
    assert (
        "has no room for a second snapshot of 20 bytes on top of the training's peak (10 bytes to spare)" in caplog.text
    )
    device.allocator.iterate(40)  # raises where there is no room any more


def test_a_peak_that_came_before_the_layout_changed_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    """It was reached with all that is given back now."""
    device, made = Device(monkeypatch, 150), Spares(DEVICE)
    device.allocator.allocate(20)
    device.allocator.iterate(40)
    assert made.take(bodies(20)) is not None
    device.allocator.iterate(80)
    device.allocator.release(20)  # of the two, the one that is not busy goes at once
    assert made.take(bodies(50)) is None
    device.allocator.iterate(80)


def test_for_all_that_a_snapshot_copies_or_for_none(device: Device, caplog: pytest.LogCaptureFixture) -> None:
    lots, made = bodies(500, 500), Spares(DEVICE)
    for _ in range(3):
        assert made.take(lots) is None
        assert made.ready, "there is none to wait for"
    assert device.allocator.allocated == 0
    assert caplog.text.count("has no room for a snapshot of 1,000 bytes") == 1


def test_room_for_one(device: Device, caplog: pytest.LogCaptureFixture) -> None:
    lots, made = bodies(600), Spares(DEVICE)
    spare = made.take(lots)
    assert spare is not None
    assert not made.ready
    assert caplog.text.count("has no room for a second snapshot of 600 bytes") == 1


def test_fewer_slots_than_before_take_what_is_there(device: Device) -> None:
    """The replicas of a rank whose receiver is busy are not copied this time."""
    lots, made = bodies(100, 50), Spares(DEVICE)
    first = made.take(lots)
    second = made.take({0: lots[0]})
    assert first is not second
    assert device.allocator.allocated == 300


def test_another_layout_gives_back_before_it_takes(device: Device) -> None:
    """But not what is still on its way to the host, which counts until it has arrived."""
    made = Spares(DEVICE)
    first = made.take(bodies(200))
    assert first is not None
    device.allocator.release(200)  # of the two, the one that is not busy goes at once
    again = made.take(bodies(250))
    assert again is not None
    assert granted(made) == 200 + 2 * 250
    device.allocator.release(200 + 250)
    first.busy = False
    assert made.take(bodies(300)) is not None
    assert granted(made) == 250 + 2 * 300


def test_what_was_on_its_way_is_given_back_with_the_next_snapshot(device: Device) -> None:
    """It was kept until the layout changed once more, which is never in most jobs."""
    made, lots = Spares(DEVICE), bodies(250)
    first = made.take(bodies(200))
    assert first is not None
    device.allocator.release(200)
    second = made.take(lots)
    assert second is not None
    assert granted(made) == 200 + 2 * 250
    first.busy = False
    device.allocator.release(200)
    assert made.take(lots) is not None
    assert granted(made) == 2 * 250


def test_what_was_on_its_way_makes_room_for_a_second_one(device: Device, caplog: pytest.LogCaptureFixture) -> None:
    made, lots = Spares(DEVICE), bodies(450)
    first = made.take(bodies(300))
    assert first is not None
    device.allocator.release(300)
    second = made.take(lots)
    assert second is not None
    assert not made.ready
    second.busy = False
    assert made.take(lots) is second, "the other one is on its way yet"
    assert granted(made) == 300 + 450
    first.busy = second.busy = False
    device.allocator.release(300)
    assert made.take(lots) is not None
    assert made.ready
    assert granted(made) == device.allocator.allocated == 2 * 450
    assert caplog.text.count("has no room") == 1


def test_memory_in_pieces_is_none(device: Device) -> None:
    device.in_pieces = True
    assert Spares(DEVICE).take(bodies(10)) is None


def test_what_an_earlier_checkpointer_was_granted_is_no_peak_of_the_training(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of one process: it is in the peak that torch has measured, and the next one is granted it again."""
    device, lots = Device(monkeypatch, 300), bodies(100)
    device.allocator.allocate(20)
    device.allocator.iterate(40)
    for _ in range(3):
        made = Spares(DEVICE)
        assert [made.take(lots) is not None, made.take(lots) is not None] == [True, True]
        device.allocator.iterate(40)
        made.close()
        device.allocator.release(200)


def test_two_checkpointers_at_once_share_what_is_there(monkeypatch: pytest.MonkeyPatch) -> None:
    device, first, second = Device(monkeypatch, 500), Spares(DEVICE), Spares(DEVICE)
    device.allocator.allocate(20)
    device.allocator.iterate(40)
    assert first.take(bodies(100)) is not None
    device.allocator.iterate(40)
    assert second.take(bodies(150)) is not None
    assert not second.ready, "there is room for one of them"
    first.close()
    device.allocator.release(200)
    assert second.take(bodies(100)) is not None, "what the first had is there for it"
    device.allocator.iterate(40)
