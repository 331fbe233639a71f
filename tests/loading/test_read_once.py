"""Which rank reads what all ranks want: they agree on it, wherever each of them keeps its tensors."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
from rankthreads import run_ranks

from ckptlib.format.box import Box
from ckptlib.loading.read_once import Shares, share_out
from ckptlib.ranks.group import Group
from ckptlib.reading.reader import Want

Names = list[str]


def names_of(wants: list[Want[torch.Tensor]]) -> Names:
    return [want.name for want in wants]


def shared(*devices: tuple[str, ...]) -> list[tuple[Names, list[tuple[int, Names]]]]:
    """Of each rank, what it reads, and what comes from whom. `devices`: of each rank, those of its tensors."""

    def on_rank(group: Group) -> Shares:
        wants = []
        for n, device in enumerate(devices[group.rank]):
            tensor: Any = SimpleNamespace(dtype=torch.float32, device=torch.device(device), nbytes=400 * (n + 1))
            piece = Box.whole((100 * (n + 1),)), cast(torch.Tensor, tensor)  # of a device that is not there
            wants.append(Want(f"t{n}", (piece,), everywhere=True))
        return share_out(wants, group, lambda want: None)

    found = run_ranks(len(devices), on_rank)
    return [(names_of(reads), [(owner, names_of(wants)) for owner, wants in buckets]) for reads, buckets in found]


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
