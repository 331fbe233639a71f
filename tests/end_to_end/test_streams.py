"""Snapshots of a device under thousands of schedules: none is wrong unseen, none reads what is free, none holds up."""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import replace
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers import stage
from helpers.runtime import Runtime
from helpers.schedules import NUM_SLOTS, SIZES, SLOT_BYTES, Given, Schedule, World, run, shrink
from helpers.streams import Event, Simulation, Stream

from ckptlib.devices import accelerator
from ckptlib.slots.slot import Slot
from ckptlib.staging import copies, device_copies, prepared_copies, spare_memory, stager
from ckptlib.staging.device_copies import Copied, Devices, Lane
from ckptlib.staging.fence import Fence
from ckptlib.staging.known_copies import KnownPairs
from ckptlib.staging.pair import CopySource
from ckptlib.staging.spare_memory import Figures, Spare
from ckptlib.staging.stager import CopyJob, Stager
from ckptlib.staging.watch import Watch

SCHEDULES = int(os.environ.get("CKPTLIB_SCHEDULES", "192"))
"""In all; a device's order is one in very many, so more are tried where the copies change."""

KINDS = [
    Given(memory, pinned, streams, unfenced, eager)
    for memory, pinned, streams, unfenced, eager in product(
        ["host", "device"], [True, False], [1, 2, 3], [False, True], [False, True]
    )
]


@pytest.fixture
def world(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[World]:
    shrink(monkeypatch)
    made = World(tmp_path, monkeypatch)
    yield made
    made.close()


def test_random_schedules(world: World) -> None:
    found = {}
    for seed in range(SCHEDULES):
        given = KINDS[seed % len(KINDS)]
        wrong = run(world, given, seed)
        if wrong:
            found[seed, given] = wrong
            break
    assert not found


def test_copies_that_cannot_be_begun_leave_nothing_behind(world: World) -> None:
    """Those that were begun before have ended when their slot, and memory, are free: other snapshots take them."""
    kinds = product(["host", "device"], [True, False], [False, True])
    given = [Given(memory, pinned, eager=eager, failing=True) for memory, pinned, eager in kinds]
    assert first_wrong(world, given, 96) == ""


def first_wrong(world: World, given: list[Given], schedules: int = 60) -> str:
    """Of the schedules that are tried, the first thing that went wrong; "" if nothing did."""
    for seed in range(schedules):
        try:
            wrong = run(world, given[seed % len(given)], seed)
        except RuntimeError as error:
            return str(error)
        if wrong:
            return wrong[0]
    return ""


# What was wrong once, put back, is found


def test_a_copy_over_two_registrations(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(prepared_copies, "MOVE_BYTES", 1 << 30)
    assert "invalid argument" in first_wrong(world, [Given()])


def test_one_stream_for_the_copy_and_the_link(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    def one(copy: object, link: object, *rings: Any) -> Lane:
        return Lane(copy, copy, *rings)  # type: ignore[arg-type]

    monkeypatch.setattr(device_copies, "Lane", one)
    assert "training waits for the link" in first_wrong(world, [Given("device"), Given("device", eager=True)])


def test_one_spare_that_is_taken_while_it_is_busy(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing orders the next copy into it behind the link of the one before."""

    class Idle(Spare):
        busy = property(lambda self: False, lambda self, busy: None)  # type: ignore[assignment]

    monkeypatch.setattr(spare_memory, "Spare", Idle)
    monkeypatch.setattr(spare_memory, "NUM_SPARES", 1)
    assert first_wrong(world, [Given("device"), Given("device", eager=True)])


def test_only_the_first_that_comes_to_the_fence_waits(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    def wait(fence: Fence) -> None:
        for copy in stage.pending_of(fence):
            copy.wait_copied()
        stage.pending_of(fence).clear()

    monkeypatch.setattr(Fence, "wait", wait)
    assert first_wrong(world, [Given(streams=1), Given(streams=1, eager=True)], 8) == ""
    assert first_wrong(world, [Given(streams=2), Given(streams=3, eager=True)]).startswith("torn: ")


def test_a_conjugate_is_left_to_copy(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    def moves(across: prepared_copies.Across) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        yield from stage.alike(across)
        for target, source in stage.odd(across):
            yield target.view(source.dtype), source

    monkeypatch.setattr(prepared_copies.Across, "moves", moves)
    monkeypatch.setattr(copies, "PACK_BELOW_BYTES", 0)
    monkeypatch.setattr(prepared_copies, "MOVE_BYTES", 8192)
    assert first_wrong(world, [Given()]).startswith("silently wrong: t2")


# And what never was


def test_a_few_elements_are_written_past_the_fence(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    """Torch counts them as they are ordered, whatever the device has done by then; samples miss nearly all."""
    snapshot = Schedule._snapshot

    def then_write(schedule: Schedule, step: int) -> None:
        snapshot(schedule, step)
        schedule.tensors["t5"][:1].add_(1.0)

    monkeypatch.setattr(Schedule, "_snapshot", then_write)
    for memory, pinned, eager in product(["host", "device"], [True, False], [False, True]):
        assert first_wrong(world, [Given(memory, pinned, eager=eager)], 1).startswith("torn: "), (memory, pinned, eager)


def test_writes_are_counted_up_to_the_end_of_the_copy(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    """Instead of up to the fence: those of the optimizer behind it are among them."""

    class Late(Watch):
        def look(self) -> None:
            pass

        @property
        def written(self) -> list[str]:
            super().look()
            return super().written

    monkeypatch.setattr(stager, "Watch", Late)
    assert first_wrong(world, [Given(), Given("device")]).startswith("torn: ")


def test_what_is_not_waited_for(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(accelerator, "wait", lambda event: None)
    with monkeypatch.context() as patch:
        patch.setattr(Simulation, "_wait", lambda simulation, event: None)
        assert first_wrong(world, [Given()])


def test_training_that_does_not_wait_for_what_is_copied_at_once(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    wait_event = Stream.wait_event

    def wait(stream: Stream, event: Event) -> None:
        if not (stream.name == "compute" and event.stream.name.startswith("stream")):
            wait_event(stream, event)

    monkeypatch.setattr(Stream, "wait_event", wait)
    assert first_wrong(world, [Given(), Given(eager=True)])


def test_a_source_that_is_let_go_before_it_is_read(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    begin = Devices.begin

    def forgetful(devices: Devices, lots: list[Copied], spare: bool) -> Any:
        found = [*begin(devices, lots, spare)]
        for lot in lots:
            lot.pairs.clear()
        for copied in found:
            stage.forget_copies_without_samples(copied)
        return found

    monkeypatch.setattr(Devices, "begin", forgetful)
    assert "that is free" in first_wrong(world, [Given(), Given("device")])


# What a schedule leaves behind


@pytest.mark.parametrize("memory", ["host", "device"])
def test_what_was_made_for_a_snapshot_goes_with_it(world: World, monkeypatch: pytest.MonkeyPatch, memory: str) -> None:
    """However many slots there are, no more of the device's memory is in use after each than after the first."""
    alive: list[int] = []
    end = Schedule.end

    def counted(schedule: Schedule) -> None:
        end(schedule)
        schedule.under_way.clear()
        alive.append(schedule.simulation.nbytes_alive())

    monkeypatch.setattr(Schedule, "end", counted)
    for steps in (NUM_SLOTS, 3 * NUM_SLOTS):
        assert run(world, Given(memory, eager=True), 1, steps) == []
    assert alive[0] == alive[1]
    kept = alive[0]
    alive.clear()
    monkeypatch.setattr(
        KnownPairs,
        "pairs_of",
        lambda known, rank, slot, sources, offsets: [known._kept(rank, slot, list(sources), offsets, offsets)],
    )
    monkeypatch.setattr(KnownPairs, "_forget", lambda known, rank, sources: None)
    assert run(world, Given(memory, eager=True), 1, 3 * NUM_SLOTS) == []
    assert alive[0] >= kept + 2 * 4 * SIZES[4], "each slot would keep one"


def with_memory_to_spare(monkeypatch: pytest.MonkeyPatch) -> Simulation:
    """Of a device that has room for all that snapshots go by."""
    runtime = Runtime()
    runtime.patch(monkeypatch)
    simulation = Simulation(runtime)
    simulation.patch(monkeypatch)
    monkeypatch.setattr(spare_memory, "figures", lambda device: Figures(1 << 30, 0, 0, 0))
    monkeypatch.setattr(spare_memory, "MARGIN_BYTES", 0)
    return simulation


def test_what_is_let_go_of_between_two_snapshots(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    """The memory that snapshots went by, too: who drains wants it, and the next snapshot takes it anew."""
    simulation = with_memory_to_spare(monkeypatch)
    alive: list[int] = []
    with simulation:
        made = Stager(lambda staging: None, spare=True)
        shards = {e.name: torch.ones(e.shape, dtype=getattr(torch, e.dtype)) for e in world.layout.tensors}
        sources = [CopySource(name, simulation.to_device(shards[name]), False) for name in world.names]
        before = simulation.nbytes_alive()
        for slot in world.slots[:2]:
            staging = made.begin(slot, world.content())
            made.copy(staging, sources, [])
            staging.go()
            staging.wait_sealed(60)
            alive.append(simulation.nbytes_alive())
            del staging
            made.forget_tensors()
            alive.append(simulation.nbytes_alive())
        made.close()
    assert alive[1::2] == [before, before]
    assert min(alive[::2]) > before


def nbytes_with_a_twin(world: World, monkeypatch: pytest.MonkeyPatch, num_alone: int) -> int:
    """Of the device's memory, once another rank's snapshots are copied beside this one's; as many were not before."""
    simulation = with_memory_to_spare(monkeypatch)
    twin = Slot.create(world.slots[0].path.parent, "twin", SLOT_BYTES)
    with simulation:
        made = Stager(lambda staging: None, spare=True)
        shards = {e.name: torch.ones(e.shape, dtype=getattr(torch, e.dtype)) for e in world.layout.tensors}
        sources = [CopySource(name, simulation.to_device(shards[name]), False) for name in world.names]
        alike = [source for source in sources if source.tensor.nbytes > 2000]
        places = tuple(1 << 15 | n << 14 for n in range(len(alike)))
        for n in range(num_alone + 2 * NUM_SLOTS):
            content = world.content()
            header = replace(content.header, rank=1, sequence=content.header.sequence - 1, body_nbytes=SLOT_BYTES // 2)
            jobs = [CopyJob(twin, header, alike, places)] if n >= num_alone else []
            staging = made.begin(world.slots[n % NUM_SLOTS], content)
            made.copy(staging, sources, jobs)
            staging.go()
            staging.wait_sealed(60)
        found = simulation.nbytes_alive()
        made.close()
    twin.close()
    twin.unlink()
    return found


def test_memory_that_is_given_back_is_nobodys(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    """Spare memory for one rank's snapshots, once there is some for those of two."""
    assert nbytes_with_a_twin(world, monkeypatch, 2) == nbytes_with_a_twin(world, monkeypatch, 0)
