"""Loads into a device that is not there: whatever its order, each target ends up with what was saved."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

import pytest
import torch
from helpers.runtime import Runtime
from helpers.streams import DEVICE, Event, Simulation
from onerank import Root, bits, opened

import ckptlib
from ckptlib import checkpoint
from ckptlib.devices import accelerator
from ckptlib.format.box import Box
from ckptlib.loading import read_once
from ckptlib.loading.landing import Landing
from ckptlib.ranks.group import Group
from ckptlib.reading import committed, reader
from ckptlib.reading.hands import Hands
from ckptlib.reading.reader import Want
from ckptlib.stores.io_limits import IoLimits


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Root]:
    with opened(tmp_path_factory.mktemp("root")) as made:
        made.save(saved())
        yield made


@contextmanager
def simulated(monkeypatch: pytest.MonkeyPatch, seed: int) -> Iterator[Simulation]:
    simulation = Simulation(Runtime(), seed)
    simulation.patch(monkeypatch)
    monkeypatch.setattr(reader, "Hands", lambda _: Hands(1))  # its threads are the caller's
    with simulation:
        yield simulation


def saved() -> dict[str, torch.Tensor]:
    torch.manual_seed(1)
    state = {
        "large": torch.randn(1200, 1300),
        "cut": torch.randn(40, 50),
        "strided": torch.randn(30, 20),
        "cast": torch.randn(1000),
        "byte": torch.arange(7, dtype=torch.uint8),
        "half": torch.randn(33).to(torch.bfloat16),
        "scalar": torch.tensor(3.5),
        "conj": torch.randn(9, dtype=torch.complex64),
        "host": torch.randn(10),
    }
    state |= {f"small{n}": torch.randn(n, dtype=[torch.float32, torch.float64][n % 2]) for n in range(1, 30)}
    return state


def targets(simulation: Simulation, state: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """What is written to them before is still to come when the load begins."""
    found = {}
    for name, tensor in state.items():
        with simulation.host():
            made = torch.empty_like(tensor)
            if name == "strided":
                made = torch.empty(20, 30).t()
            if name == "cast":
                made = made.to(torch.float64)
            if name == "conj":
                made = made.conj()
        found[name] = made if name == "host" else simulation.to_device(made)
        found[name].fill_(7)
    return found


def differing(simulation: Simulation, found: dict[str, torch.Tensor], state: dict[str, torch.Tensor]) -> list[str]:
    with simulation.host():
        return [name for name, tensor in found.items() if bits(tensor.to(state[name].dtype)) != bits(state[name])]


def load(root: Root, monkeypatch: pytest.MonkeyPatch, seed: int) -> list[str]:
    """What is wrong after a load, before the device is waited for by anybody else."""
    state = saved()
    with monkeypatch.context() as patch, simulated(patch, seed) as simulation:
        found = targets(simulation, state)
        wait = simulation.finish

        def late(event: Event) -> None:
            simulation.tick(simulation.random.randrange(4))
            wait(event)

        patch.setattr(simulation, "finish", late)
        ckptlib.load(root.url, found, cast=True)
        wrong = differing(simulation, found, state)
        simulation.settle()
        return [*wrong, *differing(simulation, found, state), *simulation.violations]


def test_all_is_there_when_the_load_returns(root: Root, monkeypatch: pytest.MonkeyPatch) -> None:
    for seed in range(10):
        assert load(root, monkeypatch, seed) == []


def test_no_copy_holds_up_its_thread(root: Root, monkeypatch: pytest.MonkeyPatch) -> None:
    state = saved()
    with simulated(monkeypatch, 0) as simulation:
        found = targets(simulation, state)
        ckptlib.load(root.url, found, cast=True)
        assert simulation.blocked == []


def test_what_was_written_before_is_not_waited_for(root: Root, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(checkpoint.accelerator, "work_so_far", lambda tensors: lambda: None)
    assert any(load(root, monkeypatch, seed) for seed in range(10))


def test_the_thread_that_reads_has_streams_of_its_own(root: Root, monkeypatch: pytest.MonkeyPatch) -> None:
    """As where there are several ranks: it reads nothing before those of the thread that loads have come so far."""

    def elsewhere(group: Group, what: str, call: Callable[[], None]) -> None:
        with accelerator.on(accelerator.new_stream(DEVICE)):
            call()

    monkeypatch.setattr(checkpoint, "together_at_length", elsewhere)
    for seed in range(10):
        assert load(root, monkeypatch, seed) == []


def test_a_buffer_is_filled_again_too_early(root: Root, monkeypatch: pytest.MonkeyPatch) -> None:
    buffer = Landing.buffer

    def hasty(self: Landing, nbytes: int, device: torch.device) -> memoryview:
        berth = self._berth()
        kept, berth.busy = berth.busy, [[], []]
        found = buffer(self, nbytes, device)
        berth.busy = kept
        return found

    monkeypatch.setattr(Landing, "buffer", hasty)
    monkeypatch.setattr(committed, "NEAR", IoLimits(most=1 << 18))
    assert any(load(root, monkeypatch, seed) for seed in range(10))


def test_a_load_that_does_not_wait(root: Root, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Landing, "close", lambda self: None)
    assert any(load(root, monkeypatch, seed) for seed in range(10))


class Ranks:
    """Of a group of two, the one that is told of, with what the other gave."""

    size = 2

    def __init__(self, rank: int, links: bool) -> None:
        self.rank, self.links = rank, links
        self.sent: dict[str, bytes] = {}
        self.wait: Callable[[], None] = lambda: None
        """For what the device has to do first."""

    def broadcast_from(self, rank: int, buffer: torch.Tensor) -> None:
        self._exchange("host", buffer)

    def broadcast_there(self, rank: int, buffer: torch.Tensor, device: torch.device) -> bool:
        if self.links:
            self._exchange("device", buffer)
        return self.links

    def _exchange(self, where: str, buffer: torch.Tensor) -> None:
        if self.rank == 0:
            self.wait()
            self.sent[where] = bits(buffer)
        else:
            buffer.copy_(torch.frombuffer(bytearray(self.sent[where]), dtype=torch.uint8))


@pytest.mark.parametrize(("links", "by_links"), [(False, True), (True, True), (True, False)])
def test_what_one_rank_read_is_spread_to_devices(monkeypatch: pytest.MonkeyPatch, links: bool, by_links: bool) -> None:
    state = {
        "a": torch.randn(40, 50),
        "b": torch.randn(33).to(torch.bfloat16),
        "conj": torch.randn(9, dtype=torch.complex64),
        "t": torch.randn(6, 5),
        "large": torch.randn(5 << 20),
        "host": torch.randn(7),
    }
    sent: list[dict[str, bytes]] = []
    for rank in (0, 1):
        group = Ranks(rank, links)
        with monkeypatch.context() as patch, simulated(patch, rank) as simulation:
            with simulation.host():
                found = {name: t.clone() if rank == 0 else torch.zeros_like(t) for name, t in state.items()}
                found["t"] = found["t"].t().contiguous().t()
                shown = {**found, "conj": found["conj"].conj()}
            for name in found:
                if name != "host":
                    simulation.to_device(found[name])
            group.wait = simulation.settle
            wants = [Want(name, ((Box.whole(t.shape), t),), everywhere=True) for name, t in shown.items()]
            together = ("a", "b", "conj", "t"), ("large",), ("host",)
            buckets = [[want for want in wants if want.name in names] for names in together]
            for n, bucket in enumerate(buckets):
                if rank == 1:
                    group.sent = sent[n]
                read_once.spread([read_once.Bucket(0, bucket)], group, by_links)
                if rank == 0:
                    simulation.settle()
                    sent.append(group.sent)
                    group.sent = {}
            simulation.settle()
            with simulation.host():
                wrong = [name for name, t in found.items() if bits(t) != bits(state[name])]
            assert (wrong, simulation.violations) == ([], [])
    way = "device" if links and by_links else "host"
    assert [{*found} for found in sent] == [{way}, {way}, {"host"}]
