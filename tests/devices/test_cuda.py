"""What CUDA alone has, by a runtime that is not there: host memory registered in pieces, by the right device."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from helpers.inside import settle, stager_of
from helpers.runtime import Runtime
from helpers.stage import held, wait_pinned, wait_warm
from hypothesis import given
from hypothesis import strategies as st
from support import ROOT_ID
from workers.torn import Rig, step_with_gradients

import ckptlib
from ckptlib.devices import accelerator, cuda
from ckptlib.errors import TornSnapshot
from ckptlib.format.keys import GenerationId
from ckptlib.policy.peers import Peers
from ckptlib.staging import pinning
from ckptlib.staging.arena import Arena
from ckptlib.staging.device_copies import Devices
from ckptlib.staging.stager import Stager


@given(st.integers(0, 1 << 40), st.integers(0, 1 << 36), st.sampled_from([1 << 30, 64 << 20]))
def test_no_stretch_crosses_a_multiple(address: int, nbytes: int, most: int) -> None:
    found = list(cuda.stretches(address, nbytes, most))
    assert [stop for _, stop in found[:-1]] == [start for start, _ in found[1:]]
    assert sum(stop - start for start, stop in found) == nbytes
    for start, stop in found:
        assert 0 < stop - start <= most
        assert (address + start) // most == (address + stop - 1) // most


def make_arena(directory: Path, num_slots: int = 1, pin: bool = True) -> Arena:
    return Arena(ROOT_ID, GenerationId(1, "0" * 8), directory, num_slots, pin)


@pytest.fixture
def runtime(monkeypatch: pytest.MonkeyPatch) -> Runtime:
    made = Runtime(device=3)
    made.patch(monkeypatch)
    monkeypatch.setattr(cuda, "PIN_BYTES", 4096)
    monkeypatch.setattr(cuda, "pci_address", lambda device: None)
    return made


@pytest.mark.parametrize("refused", ["", "all", "the second", "what is large"])
def test_memory_is_pinned_in_pieces_on_the_trainers_device_or_not_at_all(
    tmp_path: Path, runtime: Runtime, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, refused: str
) -> None:
    """By a thread that ends with it: what goes wrong there is not raised by the next kernel of the training."""
    runtime.room = {"all": 0, "the second": 8000}.get(refused, runtime.room)
    runtime.largest = 4095 if refused == "what is large" else 4096
    made = make_arena(tmp_path)
    made.warm(10_000)
    slot = made.take(10_000, -1, ())
    assert slot is not None
    address = slot.address()
    assert all(nbytes <= 4096 for nbytes in runtime.registered.values())
    assert sum(runtime.registered.values()) == (0 if refused else 10_000)
    assert cuda.is_pinned(address) is not bool(refused)
    assert ("copies from the device go through a buffer" in caplog.text) is bool(refused)
    made.close(unlink=True)
    assert not runtime.registered
    assert not cuda.is_pinned(address)
    assert (runtime.contexts, runtime.callers) == ({3}, {"ckptlib-pin"})


@pytest.mark.parametrize("when", ["before the arena", "before it warms", "while it warms", "before the first snapshot"])
def test_no_thread_makes_a_context_on_the_first_device(
    tmp_path: Path, runtime: Runtime, monkeypatch: pytest.MonkeyPatch, when: str
) -> None:
    """Every rank of a host would have one there. The device is the trainer's, from when its process has one."""
    runtime.initialized = when == "before the arena"
    made = make_arena(tmp_path)
    if when == "before it warms":
        runtime.initialized = True
    make = made._make_somewhere

    def slowly(*args: Any) -> Any:
        if when == "while it warms":
            runtime.initialized = True
        return make(*args)

    monkeypatch.setattr(made, "_make_somewhere", slowly)
    made.warm(10_000)
    wait_warm(made)
    runtime.initialized = True
    slot = made.take(10_000, -1, ())
    assert slot is not None
    wait_pinned(made)
    assert cuda.is_pinned(slot.address()), "for the next snapshot, if not for this one"
    assert runtime.contexts == {3}
    made.close(unlink=True)
    assert runtime.contexts == {3}
    assert not runtime.registered


def test_slots_of_replicas_are_not_pinned(tmp_path: Path, runtime: Runtime) -> None:
    made = make_arena(tmp_path, pin=False)
    made.warm(10_000)
    thread = threading.Thread(target=lambda: made.take(10_000, -1, ()))  # as a receiver does
    thread.start()
    thread.join()
    made.close(unlink=True)
    assert not runtime.contexts


def test_a_slot_is_made_by_processors_beside_the_device(
    tmp_path: Path, runtime: Runtime, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[str] = []
    monkeypatch.setattr(cuda, "pci_address", lambda device: f"0000:0{device}:00.0")
    monkeypatch.setattr(pinning, "processors_near", lambda pci: asked.append(pci) or frozenset({0}))
    made = make_arena(tmp_path)
    made.warm(10_000)
    made.close(unlink=True)
    assert asked == ["0000:03:00.0"]


@pytest.mark.parametrize("how", ["wait", "work"])
def test_no_thread_asks_without_its_device(monkeypatch: pytest.MonkeyPatch, how: str) -> None:
    """The staging thread has chosen none, and would have a context on the first."""
    chosen: list[object] = []

    @contextmanager
    def choose(device: object) -> Iterator[None]:
        chosen.append(device)
        yield
        chosen.pop()

    asked: list[object] = []
    stream = SimpleNamespace(device=torch.device("cuda", 3))
    answers = iter([False, False, True])
    event = SimpleNamespace(device=stream.device, query=lambda: asked.append(chosen[-1]) or next(answers))
    monkeypatch.setattr(torch, "get_device_module", lambda device: SimpleNamespace(device=choose))
    monkeypatch.setattr(torch.accelerator, "current_stream", lambda device: asked.append(chosen[-1]))
    monkeypatch.setattr(torch.accelerator, "set_stream", lambda stream: asked.append(chosen[-1]))
    if how == "wait":
        accelerator.wait(event)  # type: ignore[arg-type]
    else:
        with accelerator.on(stream):  # type: ignore[arg-type]
            asked.append(chosen[-1])
    assert len(asked) >= 3
    assert set(asked) == {stream.device}
    assert not chosen


class Driver:
    """Of CUDA: which mode each thread captures in."""

    def __init__(self) -> None:
        self.relaxed: set[str] = set()

    def __call__(self, mode: Any) -> int:
        assert mode._obj.value == 2
        self.relaxed.add(threading.current_thread().name)
        return 0


def test_no_thread_of_ours_breaks_a_capture(tmp_path: Path, runtime: Runtime, monkeypatch: pytest.MonkeyPatch) -> None:
    """Threads that ask the driver for anything have said first that a capture elsewhere does not concern them."""
    driver = Driver()
    monkeypatch.setattr(cuda, "_exchange", lambda: driver)
    made = make_arena(tmp_path)
    made.warm(10_000)
    made.close(unlink=True)
    assert driver.relaxed == runtime.callers == {"ckptlib-pin"}


def test_a_capture_is_relaxed_on_the_device_that_a_thread_works_with(
    runtime: Runtime, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One that has chosen none would have a context on the first. Of other kinds nothing is asked."""
    asked: list[object] = []
    monkeypatch.setattr(cuda, "_exchange", lambda: lambda mode: asked.append(runtime.current()))
    for device in (torch.device("cuda", 3), torch.device("xpu", 1)):
        thread = threading.Thread(target=cuda.relax_capture, args=(device,))
        thread.start()
        thread.join()
    assert asked == [torch.device("cuda", 3)]


def test_a_snapshot_of_host_memory_asks_nothing_of_the_driver(
    tmp_path: Path, runtime: Runtime, monkeypatch: pytest.MonkeyPatch
) -> None:
    driver = Driver()
    monkeypatch.setattr(cuda, "_exchange", lambda: driver)
    rig = Rig(tmp_path)
    rig.begin({"w": torch.zeros(300, 300)}).wait_sealed(60)
    rig.close()
    assert not driver.relaxed


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
        SimpleNamespace(drive=lambda: None, finish=lambda: ended.append("first") or written_to),
        SimpleNamespace(drive=lambda: None, finish=lambda: ended.append("second") or []),
    ]
    staging = rig.begin(state, go=False)
    staging.device_copies = copies
    if not written_to:
        with torch.no_grad():
            weight.add_(1.0)  # what the host copies is torn
    staging.go()
    with pytest.raises(TornSnapshot, match="w was modified while it was being copied"):
        staging.wait_sealed(60)
    assert ended == ["first", "second"]
    rig.close()


def test_the_copies_of_one_device_have_ended_where_those_of_the_next_could_not_begin(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    rig, ended = Rig(tmp_path), list[str]()

    def begin(devices: Devices, copied: object, spare: bool) -> Iterator[object]:
        yield SimpleNamespace(driven=False, finish=lambda: ended.append("first") or [])
        raise torch.OutOfMemoryError("of the second")

    monkeypatch.setattr(Devices, "begin", begin)
    with held(rig.stager):
        staging = rig.begin({"w": torch.zeros(300, 300)})
        assert (ended, rig.told) == ([], [])
    with pytest.raises(torch.OutOfMemoryError, match="of the second"):
        staging.wait_sealed(60)
    assert (ended, rig.told) == (["first"], [staging])
    rig.close()


def test_memory_of_the_device_is_not_taken_before_the_training_has_shown_its_peak(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A restart keeps what it restored in memory before its first iteration."""
    asked: list[bool] = []
    copy = Stager.copy

    def watched(*args: Any) -> None:
        asked.append(args[4])
        copy(*args)

    monkeypatch.setattr(Stager, "copy", watched)
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


def test_no_snapshot_is_begun_while_all_memory_for_it_is_on_its_way(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It would wait for the link, and the training for it. The other ranks are told, as of a slot."""
    ready = [True]
    monkeypatch.setattr(Devices, "ready", property(lambda devices: ready[0]))
    state, peers = {"w": torch.ones(10)}, Peers(copies=0, every=1, memory="device")
    with ckptlib.Checkpointer(tmp_path / "root", state, every=10**6, peers=peers, arena=tmp_path) as ckpt:
        taken: list[int] = []
        begin = stager_of(ckpt).begin
        monkeypatch.setattr(
            stager_of(ckpt), "begin", lambda *args: taken.append(args[1].header.save.step) or begin(*args)
        )
        for step in range(1, 9):
            ready[0] = not 3 <= step <= 5
            ckpt.after_step(step)
            settle(ckpt, 60)
        ready[0] = True
    # what a rank says in one step counts in the next
    assert taken == [1, 2, 3, 7, 8]
