"""Two ranks that have a tensor and a plain value under one name: each gets what it saved itself."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent.parent))

import pytest
import torch
import torch.distributed.checkpoint as dcp
from onerank import Holder, same
from workers.rank_cases import rank, run_cases

import ckptlib

ONES = torch.tensor([0.1, -0.0, float("nan"), 3.0])


def saved() -> dict[str, Any]:
    """On rank 0: tensors, as where one rank gathers what a metric has counted. On rank 1: nothing but plain values."""
    first = rank() == 0
    return {
        "w": torch.ones(2),
        "metric": Holder({"confusion": ONES.clone()} if first else {}),
        "best": ONES * 10 if first else None,
        "more": {"tensor": ONES * 2} if first else {},
    }


def of_all_kinds(of: int) -> dict[str, Any]:
    """What a rank has, without wrappers. Everything that rank 0 has as tensors or entries is a value on rank 1."""
    held, none = {"t": ONES * 3, "n": 3}, None
    return {
        "w": torch.ones(2),
        "holder": [held, {}][of],
        "best": [ONES * 10, none][of],
        "dict": [{"t": ONES * 2}, {}][of],
        "entries": [{"n": 3}, none][of],
        "values": [{}, {"n": {"m": 3}}][of],
        "tensor": [ONES * 4, {"n": {"m": 3}}][of],
        "list": [[ONES, ONES * 2], none][of],
        "object within": [{"o": held}, none][of],
        "value": [none, {"t": ONES}][of],
        "step": torch.ones(1),
    }


def test_a_load_gives_each_rank_its_own(directory: Path) -> None:
    ckptlib.save(directory, saved(), 1)
    fresh = torch.zeros(4)
    state: dict[str, Any] = {
        "w": torch.zeros(2),
        "metric": Holder({}),
        "best": fresh if rank() == 0 else 5,
        "more": {"tensor": torch.zeros(4)} if rank() == 0 else {"n": 1},
    }
    report = ckptlib.load(directory, state)
    expected = saved()
    assert same(state["metric"].content, expected["metric"].content)
    assert same(state["best"], expected["best"])
    assert same(state["more"], expected["more"])
    assert (report.missing, report.unexpected) == ((), ())


def test_a_load_refuses_a_value_for_a_tensor(directory: Path) -> None:
    ckptlib.save(directory, saved(), 1)
    state: dict[str, Any] = {"w": torch.zeros(2), "metric": Holder({}), "best": None, "more": saved()["more"]}
    with pytest.raises(ckptlib.StateMismatch, match=r"best: is a plain value in the state; .* a tensor, float32\[4\]"):
        ckptlib.load(directory, state)
    assert not state["w"].any()


def test_read_gives_what_the_rank_had(directory: Path) -> None:
    state = of_all_kinds(rank())
    state["holder"] = Holder(state["holder"])
    if rank() == 0:
        state["object within"] = {"o": Holder(state["object within"]["o"])}
    ckptlib.save(directory, state, 1)
    for of in (0, 1):
        found = ckptlib.read(directory, rank=of)
        del found["@rng"]
        assert same(found, of_all_kinds(of)), found


def test_an_optimizer_of_each_rank_with_a_list_of_tensors(directory: Path) -> None:
    param = torch.nn.Parameter(torch.ones(2))
    optim = torch.optim.SGD([(f"p{rank()}", param)])
    optim.state[param] = {"seen": [ONES * rank(), 5]}
    ckptlib.save(directory, {"o": ckptlib.PerRank(optim), "w": torch.ones(1)}, 1)
    for of in (0, 1):
        assert same(ckptlib.read(directory, rank=of)["o"]["state"][f"p{of}"], {"seen": [ONES * of, 5]})


def test_an_export_for_dcp_has_the_tensors_of_rank_0(directory: Path) -> None:
    ckptlib.save(directory, saved(), 1)
    if rank() == 0:
        ckptlib.export(directory, directory / "out", format="dcp")
        state: dict[str, Any] = {"best": torch.zeros(4), "metric": {"confusion": torch.zeros(4)}}
        state["more"] = {"tensor": torch.zeros(4)}
        dcp.load(state, checkpoint_id=directory / "out", no_dist=True)
        assert same(state, {"best": ONES * 10, "metric": {"confusion": ONES}, "more": {"tensor": ONES * 2}})


if __name__ == "__main__":
    run_cases(
        [
            test_a_load_gives_each_rank_its_own,
            test_a_load_refuses_a_value_for_a_tensor,
            test_read_gives_what_the_rank_had,
            test_an_optimizer_of_each_rank_with_a_list_of_tensors,
            test_an_export_for_dcp_has_the_tensors_of_rank_0,
        ]
    )
