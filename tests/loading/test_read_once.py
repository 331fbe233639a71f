"""Which rank reads what all ranks want: they agree on it, wherever each of them keeps its tensors."""

from __future__ import annotations

import threading
from collections.abc import Collection
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest
import torch
from rankthreads import run_ranks
from support import make_generation, make_root, make_save
from typing_extensions import override

from ckptlib.checkpoint import LoadOrder, load_step
from ckptlib.devices import accelerator
from ckptlib.errors import ObjectUnreadable
from ckptlib.format.box import Box
from ckptlib.loading.read_once import Shares, share_out
from ckptlib.ranks.group import Group
from ckptlib.reading.committed import Committed
from ckptlib.reading.reader import Want
from ckptlib.stores.memory import MemoryStore

Names = list[str]


def names_of(wants: list[Want[torch.Tensor]]) -> Names:
    return [want.name for want in wants]


def want(number: int, device: str) -> Want[torch.Tensor]:
    """Of a tensor on a device that is not there."""
    tensor: Any = SimpleNamespace(dtype=torch.float32, device=torch.device(device), nbytes=400 * (number + 1))
    return Want(f"t{number}", ((Box.whole((100 * (number + 1),)), cast(torch.Tensor, tensor)),), everywhere=True)


def shared(*devices: tuple[str, ...]) -> list[tuple[Names, list[tuple[int, Names]]]]:
    """Of each rank, what it reads, and what comes from whom. `devices`: of each rank, those of its tensors."""

    def on_rank(group: Group) -> Shares:
        return share_out([want(n, device) for n, device in enumerate(devices[group.rank])], group, lambda _: None)

    found = run_ranks(len(devices), on_rank)
    return [(names_of(reads), [(owner, names_of(wants)) for owner, wants in buckets]) for reads, buckets, _ in found]


@pytest.mark.parametrize(
    "devices",
    [
        (("cuda:0", "cuda:0", "cuda:0"), ("cuda:1", "cuda:0", "cuda:1")),
        (("cuda:0", "cuda:1", "cuda:1"), ("cuda:0", "cuda:0", "cuda:1")),
        (("cuda:0", "cpu", "cuda:0"), ("cuda:0", "cpu", "cuda:1")),
    ],
)
def test_ranks_that_spread_tensors_over_devices_in_other_ways_read_their_own(
    devices: tuple[tuple[str, ...], ...],
) -> None:
    assert shared(*devices) == [(["t0", "t1", "t2"], [])] * 2


@pytest.mark.parametrize(
    ("devices", "cuts"),
    [
        ((("cuda:0", "cuda:0", "cuda:0"), ("cuda:1", "cuda:1", "cuda:1")), [["t0", "t1", "t2"]]),
        ((("cuda:0", "cuda:0", "cuda:1"), ("cuda:2", "cuda:2", "cuda:0")), [["t0", "t1"], ["t2"]]),
        ((("cuda:0", "cpu", "cpu"), ("cuda:1", "cpu", "cpu")), [["t0"], ["t1", "t2"]]),
    ],
)
def test_the_numbers_of_devices_do_not_matter(devices: tuple[tuple[str, ...], ...], cuts: list[Names]) -> None:
    first, second = shared(*devices)
    assert first[1] == second[1] == [(n, names) for n, names in enumerate(cuts)]
    assert [first[0], second[0]] == [cuts[0], cuts[1] if len(cuts) > 1 else []]


@pytest.mark.parametrize(
    ("devices", "by_links"),
    [
        ([("cuda:0", "cuda:0"), ("cuda:1", "cuda:1")], True),
        ([("cuda:0", "cuda:0"), ("cuda:0", "cuda:0")], False),  # helpers on the first device of the host
        ([("cuda:0", "cuda:1"), ("cuda:1", "cuda:0")], False),
        ([("cpu", "cpu"), ("cpu", "cpu")], True),
    ],
)
def test_devices_send_by_links_where_each_rank_has_its_own(
    monkeypatch: pytest.MonkeyPatch, devices: list[tuple[str, ...]], by_links: bool
) -> None:
    chosen = threading.local()
    monkeypatch.setattr(accelerator, "is_chosen", lambda device: device in (torch.device("cpu"), chosen.device))

    def on_rank(group: Group) -> Shares:
        chosen.device = torch.device(f"cuda:{group.rank}")
        return share_out([want(n, device) for n, device in enumerate(devices[group.rank])], group, lambda _: None)

    assert [shares.by_links for shares in run_ranks(2, on_rank)] == [by_links] * 2


class Asked(Committed):
    """Knows how often it was asked who is near."""

    num = 0

    @override
    def near(self, ranks: Collection[int]) -> None:
        Asked.num += 1


def test_who_is_near_is_asked_once_for_all_that_the_same_ranks_saved(monkeypatch: pytest.MonkeyPatch) -> None:
    """A source looks through all ranks for it."""
    monkeypatch.setattr(Asked, "num", 0)
    catalog = make_root(MemoryStore())
    arrays = {f"t{i}": np.full(4, i, np.float32) for i in range(20)}
    save = make_save(catalog, make_generation(catalog), 1, arrays)

    def on_rank(group: Group) -> dict[str, torch.Tensor]:
        tensors = {name: torch.zeros(4) for name in arrays}
        load_step(group, Asked(catalog, catalog.manifest(save)), LoadOrder(tensors))
        return tensors

    for found in run_ranks(2, on_rank):
        assert all(np.array_equal(found[name].numpy(), array) for name, array in arrays.items())
    assert Asked.num == 2


def test_what_a_rank_reads_is_told_to_those_that_wait_for_it() -> None:
    """The path, beside its rank and host: it may be of a disk that hangs."""
    catalog = make_root(MemoryStore())
    save = make_save(catalog, make_generation(catalog), 1, {"t": np.zeros(4, np.float32)})

    class Refuses(Committed):
        @override
        def read_into(self, pack: str, offset: int, buffer: memoryview) -> None:
            raise ObjectUnreadable("no answer")

    def on_rank(group: Group) -> str:
        source = Refuses(catalog, catalog.manifest(save))
        source.where = "the disk"
        with pytest.raises(ObjectUnreadable) as raised:
            load_step(group, source, LoadOrder({"t": torch.zeros(4)}))
        return str(raised.value)

    told, own = sorted(run_ranks(2, on_rank))
    assert own == "no answer"
    assert told.startswith("loading step 1 from the disk failed on 1 of 2 ranks; on rank ")
