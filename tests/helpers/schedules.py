"""Random schedules of a training on a simulated device: two optimizers, snapshots, and everything in between.

One call of `run` is one schedule. What it returns says what went wrong: nothing, if all is well. The state's numbers
tell which step they are of, so that a snapshot needs no other oracle.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from helpers.runtime import Runtime
from helpers.stage import end_thread, has_jobs, is_copied, run_job
from helpers.streams import Simulation, Stream
from workers.torn import raw

from ckptlib.devices import cuda
from ckptlib.errors import TornSnapshot
from ckptlib.format.body_layout import body_nbytes, lay_out
from ckptlib.format.box import Box
from ckptlib.format.digests import XXH3
from ckptlib.format.keys import GenerationId, SaveId
from ckptlib.format.layout import Layout, Mesh, Placed, TensorEntry
from ckptlib.format.sharding import Replicate
from ckptlib.saving.assign import assign
from ckptlib.slots.header import SlotHeader
from ckptlib.slots.slot import Slot
from ckptlib.staging import copies, pair, pinned_ring, prepared_copies, spare_memory, windows
from ckptlib.staging.fence import Fence
from ckptlib.staging.pair import CopySource
from ckptlib.staging.spare_memory import Figures
from ckptlib.staging.stager import Content, Stager, Staging

SLOT_BYTES = 1 << 18
NUM_SLOTS = 3


def shrink(monkeypatch: pytest.MonkeyPatch) -> None:
    """Everything a thousand times smaller, so that small tensors show what large ones would."""
    monkeypatch.setattr(cuda, "PIN_BYTES", 8192)
    monkeypatch.setattr(prepared_copies, "MOVE_BYTES", 2048)
    monkeypatch.setattr(prepared_copies, "NUM_WINDOWS", 2)
    monkeypatch.setattr(pinned_ring, "RING_BYTES", 1024)
    monkeypatch.setattr(pair, "OVERLAP_FROM_BYTES", 256)
    monkeypatch.setattr(copies, "PACK_BELOW_BYTES", 1024)
    monkeypatch.setattr(copies, "PACKED_BYTES", 300)
    monkeypatch.setattr(copies, "ROUND_BYTES", 2048)
    monkeypatch.setattr(windows, "SAMPLE_BYTES", 64)


@dataclass(frozen=True)
class Given:
    """What kind of schedule it is to be."""

    memory: str = "host"
    """Of the snapshots: "host" or "device"."""
    pinned: bool = True
    """Whether slots are registered."""
    streams: int = 1
    """How many the optimizers step on."""
    unfenced: bool = False
    """Whether somebody writes past the fence now and then."""
    eager: bool = False
    """Whether training runs as far as it may, and copies run when they must; else chance decides."""
    failing: bool = False
    """Whether the device refuses an operation now and then while copies are begun."""


SIZES = (5, 60, 80, 250, 700, 2300)
"""Numbers of each tensor: small ones, some that are gathered, some that are not, one in several registrations."""


class World:
    """A process with its slots. Kept for many schedules."""

    def __init__(self, directory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.monkeypatch = monkeypatch
        self.slots = [Slot.create(directory, f"slot{n}", SLOT_BYTES) for n in range(NUM_SLOTS)]
        dtypes = [torch.float32, torch.float32, torch.complex64, torch.float64, torch.float32, torch.float32]
        self.specs = list(zip(SIZES, dtypes, strict=True))
        one = Placed(Mesh((1,), (0,)), (Replicate(),), None)
        entries = [TensorEntry(f"t{n}", str(d)[6:], (size,), one) for n, (size, d) in enumerate(self.specs)]
        entries += [TensorEntry(f"{entry.name}.lent", entry.dtype, entry.shape, one) for entry in entries]
        entries += [TensorEntry("host", "float32", (100,), one)]
        self.layout = Layout(1, tuple(assign(entries, {entry.name: one for entry in entries})))
        self.table = lay_out(self.layout, [(entry.name, Box.whole(entry.shape)) for entry in self.layout.tensors])
        self.names = [self.layout.tensors[t].name for t in self.table.tensors]
        self.number = 0

    def content(self) -> Content:
        self.number += 1
        save = SaveId(self.number, GenerationId(1, "00000001"))
        header = SlotHeader("0" * 32, save, 0, 1, self.number, 2 * self.number, body_nbytes(self.table), {})
        return Content(header, self.layout.encoded, self.table, {}, {}, 0.0, XXH3)

    def close(self) -> None:
        for slot in self.slots:
            slot.close()
            slot.unlink()


def run(world: World, given: Given, seed: int, steps: int = 4) -> list[str]:
    """What went wrong in one schedule."""
    runtime = Runtime()
    runtime.patch(world.monkeypatch)
    simulation = Simulation(runtime, seed)
    simulation.patch(world.monkeypatch)
    room = Figures(1 << 30, 0, 0, 0)
    world.monkeypatch.setattr(spare_memory, "figures", lambda device: room)
    world.monkeypatch.setattr(spare_memory, "MARGIN_BYTES", 0)
    if given.pinned:
        for slot in world.slots:
            cuda.pin(slot.address(), slot.capacity, 0)
    schedule = Schedule(world, given, simulation)
    try:
        with simulation:
            for step in range(1, steps + 1):
                schedule.step(step)
            schedule.end()
    finally:
        for slot in world.slots:
            if cuda.is_pinned(slot.address()):
                cuda.unpin(slot.address(), slot.capacity, 0)
    return [*simulation.violations, *schedule.wrong]


class Schedule:
    """The state, the training, and what was seen of its snapshots."""

    def __init__(self, world: World, given: Given, simulation: Simulation) -> None:
        self.world, self.given, self.simulation = world, given, simulation
        self.random = simulation.random
        self.wrong: list[str] = []
        self.num_sealed = self.num_torn = self.num_failed = 0
        self.fence = Fence()
        self.stager = Stager(self.sealed, spare=given.memory == "device")
        end_thread(self.stager)  # its jobs are done here, when chance has it
        self.tensors: dict[str, torch.Tensor] = {}
        self.ramps: dict[str, torch.Tensor] = {}
        for n, (size, dtype) in enumerate(world.specs):
            with simulation.host():
                ramp = torch.arange(size).to(dtype) / 4096 + n
                ramp = ramp * (1 + 2j) if dtype.is_complex else ramp
                made = ramp.clone()
            self.ramps[f"t{n}"] = simulation.to_device(ramp)
            self.tensors[f"t{n}"] = simulation.to_device(made)
        self.host = torch.zeros(100)
        self.streams = [simulation.compute, *(Stream(simulation, f"optimizer {n}") for n in range(given.streams - 1))]
        simulation.streams += self.streams[1:]
        # 2 is complex: it is saved as its conjugate, and nobody's; 3 is a buffer that the forward pass writes to
        self.owned = [["t0", "t4"], ["t1", "t5"]]
        self.sources: dict[str, CopySource] = {}
        for name, tensor in self.tensors.items():
            shown = torch._conj(tensor) if tensor.is_complex() else tensor
            late = any(name in names for names in self.owned)
            self.sources[name] = CopySource(name, shown, late)
        self.sources["host"] = CopySource("host", self.host, False)
        self.free = deque(world.slots)
        self.under_way: dict[int, tuple[Staging, dict[str, bytes]]] = {}
        self.level = dict.fromkeys(self.tensors, 0.0)

    # The training

    def write(self, names: list[str], value: float) -> None:
        """All of them, in two operations, on the current stream."""
        for name in names:
            self.tensors[name].copy_(self.ramps[name])
            self.tensors[name].add_(value)
            self.level[name] = value

    def step(self, step: int) -> None:
        compute = self.simulation.compute
        self.write(["t2", "t3"], step)
        for names, stream in zip(self.owned, self._streams(), strict=True):
            stream.wait_stream(compute)
            with self.simulation.on(stream):
                if self.given.unfenced and self.random.random() < 0.3:
                    pass
                else:
                    self._through_the_fence()
                self.write(names, step)
            self._let_time_pass()
        for stream in self.streams[1:]:
            compute.wait_stream(stream)
        if self.given.eager:
            self.simulation.finish(compute.record_event())
        if self.free and self.stager.ready:
            self._snapshot(step)
        self._let_time_pass()

    def _streams(self) -> list[Stream]:
        chosen = [self.streams[n % len(self.streams)] for n in range(len(self.owned))]
        self.random.shuffle(chosen)
        return chosen

    def _through_the_fence(self) -> None:
        stream = self.simulation._current_stream(None)  # type: ignore[arg-type]
        self._run_jobs_that_are_waited_for()
        self.fence.wait()
        if self.given.memory == "device" and self.given.pinned:
            links = self.simulation.links_before(stream.record_event())
            if links:
                self.wrong.append(f"training waits for the link ({links} copies)")
        if self.given.eager:
            self.simulation.finish(stream.record_event())

    def _run_jobs_that_are_waited_for(self) -> None:
        """Where the fence waits for the staging thread, that does its part meanwhile."""
        while any(not is_copied(staging) for staging, _ in self.under_way.values()):
            self._run_job()

    def _let_time_pass(self) -> None:
        if not self.given.eager:
            self.simulation.tick(self.random.randrange(0, 25))
            if self.random.random() < 0.4:
                self._run_job()

    def _run_job(self) -> None:
        run_job(self.stager)

    # Its snapshots

    def _snapshot(self, step: int) -> None:
        slot = self.free.popleft()
        with self.simulation.host():
            self.host.fill_(step)
            expected = {name: raw(self._value(name)) for name in self.tensors}
            expected["host"] = raw(self.host)
            expected |= {f"{name}.lent": raw(self.ramps[name] + self.level[name]) for name in self.tensors}
        lent = {f"{name}.lent": tensor.clone() for name, tensor in self.tensors.items()}
        sources = self.sources | {name: CopySource(name, t, False, lent=True) for name, t in lent.items()}
        content, blocked = self.world.content(), len(self.simulation.blocked)
        staging = self.stager.begin(slot, content)
        if self.given.failing and self.random.random() < 0.5:
            self.simulation.fails_in = self.random.randrange(40)
        with staging.failing():
            self.stager.copy(staging, [sources[name] for name in self.world.names])
        self.simulation.fails_in = None
        staging.go()
        del lent, sources
        if self.given.pinned and len(self.simulation.blocked) > blocked:
            self.wrong.append(f"after_step holds up the host: {self.simulation.blocked[blocked]}")
        if not self.given.pinned and self.given.memory == "host" and is_copied(staging):
            self.wrong.append("after_step copies all of the state, and waits for it")
        self.fence.guard(staging)
        self.under_way[staging.step] = staging, expected

    def _value(self, name: str) -> torch.Tensor:
        found = self.ramps[name] + self.level[name]
        return found.conj() if found.is_complex() else found

    def sealed(self, staging: Staging) -> None:
        _, expected = self.under_way.pop(staging.step)
        self.free.append(staging.slot)
        if isinstance(staging.error, TornSnapshot):
            self.num_torn += 1
            if not self.given.unfenced:
                self.wrong.append(f"torn: {staging.error}")
        elif isinstance(staging.error, torch.OutOfMemoryError):
            self.num_failed += 1
        elif staging.error is not None:
            self.wrong.append(f"failed: {staging.error!r}")
        else:
            self.num_sealed += 1
            self.wrong += self._differing(staging, expected)

    def _differing(self, staging: Staging, expected: dict[str, bytes]) -> list[str]:
        table = staging.content.table
        sizes = [len(expected[name]) for name in self.world.names]
        wrong = []
        for name, begin in zip(self.world.names, table.begins(sizes), strict=True):
            if bytes(staging.slot.body[begin : begin + len(expected[name])]) != expected[name]:
                wrong.append(f"silently wrong: {name} of step {staging.step}")
        return wrong

    def end(self) -> None:
        while has_jobs(self.stager):
            self._run_job()
        self.simulation.settle()
        if self.under_way:
            self.wrong.append(f"never sealed: {list(self.under_way)}")
        if not (self.num_sealed or self.num_torn or self.num_failed):
            self.wrong.append("no snapshot was taken")
