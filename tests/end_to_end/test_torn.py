"""No torn snapshot is ever taken for a whole one: behind the fence it is exact, without the fence it is found out."""

from __future__ import annotations

import contextlib
import json
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from helpers.inside import await_room, fence_of, forget_last_save, stager_of
from helpers.stage import held, is_copied, pending_of, replace_pending
from launch import fork_ranks
from workers.torn import (
    IN_PLACE,
    OPTIMIZERS,
    WAIT_S,
    Mutation,
    OpensGate,
    Rig,
    clip_weights,
    fenced_case,
    make_params,
    params_of,
    prepared,
    raw,
    state_of,
    step_with_gradients,
    unfenced_case,
)

import ckptlib
from ckptlib.errors import SaveFailed, TornSnapshot
from ckptlib.staging.pair import OVERLAP_FROM_BYTES

CASES = 12
"""Per optimizer and mutation, of each kind: more than a thousand in all."""


@pytest.fixture
def rig(tmp_path: Path) -> Iterator[Rig]:
    rig = Rig(tmp_path)
    yield rig
    rig.close()


def through_the_fence(rig: Rig, mutate: Mutation) -> Mutation:
    def mutation(optimizer: torch.optim.Optimizer) -> None:
        rig.fence.wait()  # as Checkpointer.updating() does
        mutate(optimizer)

    return mutation


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_the_step_of_an_optimizer(rig: Rig, optimizer: str) -> None:
    found: Counter[str] = Counter()
    for seed in range(3 * CASES):
        made = prepared(optimizer, seed)
        found["fenced " + fenced_case(rig, state_of(made), made, step_with_gradients)] += 1
        found["unfenced " + unfenced_case(rig, state_of(made), made, step_with_gradients)] += 1
    assert found == {"fenced exact": 3 * CASES, "unfenced TornSnapshot": 3 * CASES}


@pytest.mark.parametrize("mutation", IN_PLACE)
@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_writes_that_are_no_step(rig: Rig, optimizer: str, mutation: str) -> None:
    mutate = IN_PLACE[mutation]
    found: Counter[str] = Counter()
    for seed in range(CASES):
        made = prepared(optimizer, seed)
        found["fenced " + fenced_case(rig, state_of(made), made, through_the_fence(rig, mutate))] += 1
        found["unfenced " + unfenced_case(rig, state_of(made), made, mutate)] += 1
    assert found == {"fenced exact": CASES, "unfenced TornSnapshot": CASES}


def assign_data(optimizer: torch.optim.Optimizer) -> None:
    for p in params_of(optimizer):
        p.data = torch.randn(2 * p.numel(), dtype=torch.float64)


def test_assignment_to_data_leaves_the_old_memory_alone(rig: Rig) -> None:
    """What is copied is the memory that the parameter had, of the size that it had."""
    for seed in range(CASES):
        made = prepared("adamw-foreach", seed)
        assert unfenced_case(rig, state_of(made), made, assign_data) == "exact"


class OwnKernel(torch.optim.SGD):
    """A wrapper that never calls the inner step; so no hook fires, and torch cannot know."""

    step: Callable[..., None]


def with_its_own_kernel(params: list[torch.nn.Parameter]) -> torch.optim.Optimizer:
    optimizer = OwnKernel(params, lr=0.1)

    @torch.no_grad()
    def kernel() -> None:
        for p in params:
            p.sub_(torch.randn_like(p))

    optimizer.step = kernel
    return optimizer


def test_nothing_of_an_optimizer_without_hooks_is_overlapped(rig: Rig) -> None:
    for seed in range(CASES):
        optimizer = with_its_own_kernel(make_params(seed))
        for case in (fenced_case, unfenced_case):
            assert case(rig, state_of(optimizer), optimizer, step_with_gradients) == "inline exact"


@pytest.mark.parametrize("kind", [torch.nn.Embedding, torch.nn.EmbeddingBag])
def test_rows_that_an_embedding_scales_in_its_forward_are_saved_as_they_were(
    rig: Rig, kind: Callable[..., torch.nn.Module]
) -> None:
    """With `max_norm` a forward writes to a few rows of a weight that the optimizer owns; no sample may show them."""
    module = kind(OVERLAP_FROM_BYTES // 16, 8, max_norm=1e-3)
    made = torch.optim.SGD([*module.parameters()], lr=0.1)
    state = {"model": torch.nn.Sequential(module), "optim": made}
    assert unfenced_case(rig, state, made, lambda o: module(torch.arange(6).view(2, 3))) == "inline exact"


@torch.no_grad()
def write_one_element(optimizer: torch.optim.Optimizer) -> None:
    params_of(optimizer)[0].view(-1)[-1] += 1.0


@torch.no_grad()
def write_one_moment(optimizer: torch.optim.Optimizer) -> None:
    kept = optimizer.state[params_of(optimizer)[0]]
    kept["momentum_buffer" if "momentum_buffer" in kept else "exp_avg"].view(-1)[0].zero_()


def look_up_rows(optimizer: torch.optim.Optimizer) -> None:
    """Scales these rows, as an embedding with `max_norm` does; but this one is in no module."""
    table = params_of(optimizer)[0].detach()
    torch.nn.functional.embedding(torch.tensor([3, 5]), table.view(-1, 2), max_norm=1e-3)


@pytest.mark.parametrize("write", [write_one_element, write_one_moment, look_up_rows])
@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_a_write_to_few_elements(rig: Rig, optimizer: str, write: Mutation) -> None:
    """Which no sample shows: torch counts it."""
    made = prepared(optimizer, 0)
    assert params_of(made)[0].nbytes >= OVERLAP_FROM_BYTES
    assert unfenced_case(rig, state_of(made), made, write) == "TornSnapshot"
    assert fenced_case(rig, state_of(made), made, through_the_fence(rig, write)) == "exact"


def test_a_write_before_and_one_behind_the_copy_are_none_during_it(rig: Rig) -> None:
    made = prepared("adamw-foreach", 0)
    write_one_element(made)
    assert fenced_case(rig, state_of(made), made, through_the_fence(rig, write_one_element)) == "exact"


def test_rows_that_a_forward_writes_of_a_parameter_without_gradients_are_saved_as_they_were(rig: Rig) -> None:
    """An optimizer of `model.parameters()` gets those, too: codebooks, memory banks, MoCo's momentum encoder."""
    bank = torch.nn.Parameter(torch.randn(OVERLAP_FROM_BYTES // 16, 8), requires_grad=False)
    trained = torch.nn.Parameter(torch.randn(OVERLAP_FROM_BYTES))
    made = torch.optim.SGD([bank, trained], lr=0.1)
    state = {"model": torch.nn.ParameterList([bank, trained]), "optim": made}
    assert unfenced_case(rig, state, made, lambda o: bank[:3].mul_(2)) == "exact"
    assert unfenced_case(rig, state, made, lambda o: trained.detach().mul_(2)) == "TornSnapshot"


def test_a_tensor_that_no_optimizer_owns_is_not_overlapped(rig: Rig) -> None:
    """It is exact without a fence, though moments of the same snapshot are copied later."""
    average = torch.randn(OVERLAP_FROM_BYTES)
    made = prepared("sgd-loop", 0)
    assert unfenced_case(rig, {"average": average, "optim": made}, made, lambda o: average.mul_(2)) == "exact"


def test_all_rows_but_a_few(rig: Rig) -> None:
    """What a sample promises of writes that torch does not count: one to a share x of a tensor is missed with
    (1 - x) ** 2 at most, roughly.

    A few rows of an embedding are likely to be missed; such writers must be optimizers, or use updating(). A write to
    the whole of a tensor is always found, one to nearly all of it nearly always; tensors are sampled on their own, so
    what writes to many is found out by any of them.
    """
    rows, found = 1000, Counter[str]()
    for seed in range(CASES):
        table = torch.nn.Parameter(torch.randn(rows, 64, generator=torch.Generator().manual_seed(seed)))
        made = torch.optim.SGD([table], lr=0.1)

        def write(o: torch.optim.Optimizer, table: torch.Tensor = table) -> None:
            table.data[5:] += 1.0

        found[unfenced_case(rig, state_of(made), made, write)] += 1
    assert found == {"TornSnapshot": CASES}


# With a store


def saved(root: Path) -> dict[int, dict[str, object]]:
    return {info.step: dict(info.metrics) for info in ckptlib.checkpoints(root)}


@pytest.mark.parametrize("mutation", ["step", *IN_PLACE])
def test_checkpointer(tmp_path: Path, mutation: str) -> None:
    """Torn: never listed, and taken again two steps later, inline. Through the fence: listed, and exact."""
    optimizer = prepared("adamw-foreach", 1)
    state = state_of(optimizer)
    mutate = {"step": step_with_gradients, **IN_PLACE}[mutation]
    oracle: dict[int, list[bytes]] = {}

    def body() -> None:
        step_with_gradients(optimizer)

    def after(step: int) -> None:
        oracle[step] = [raw(p) for p in params_of(optimizer)]
        ckpt.after_step(step, {"step": step})

    with ckptlib.Checkpointer(tmp_path, state, every=4, arena=tmp_path) as ckpt:
        for step in (1, 2, 3):
            body()
            after(step)
        body()
        with held(stager_of(ckpt)) as gate:
            after(4)
            torn = ckpt.pending
            guarded = replace_pending(fence_of(ckpt), [])
            mutate(optimizer)  # past the fence
        assert guarded
        with pytest.raises(TornSnapshot):
            torn.wait_staged(60)
        with pytest.raises(SaveFailed):
            torn.wait_committed(60)
        after(5)
        body()
        with held(stager_of(ckpt)) as gate:
            after(6)
            again = ckpt.pending
            assert is_copied(again.staging), "nothing of it was left to the thread"
        again.wait_committed(60)
        body()
        after(7)
        body()
        await_room(ckpt)  # on a busy machine the slots are released late, and step 8 would not be saved
        with held(stager_of(ckpt)) as gate:
            after(8)
            whole = ckpt.pending
            assert not is_copied(whole.staging)
            fence = fence_of(ckpt)
            replace_pending(fence, [OpensGate(gate, fenced) for fenced in pending_of(fence)])
            if mutation == "step":
                mutate(optimizer)
            else:
                with ckpt.updating():
                    mutate(optimizer)
        whole.wait_committed(60)
    assert saved(tmp_path) == {6: {"step": 6}, 8: {"step": 8}}
    for step in (6, 8):
        ckptlib.load(tmp_path, state, step=step)
        assert [raw(p) for p in params_of(optimizer)] == oracle[step]


@pytest.mark.parametrize("peers", [None, ckptlib.Peers(copies=0)], ids=["", "peers"])
def test_who_always_writes_past_the_fence_still_gets_checkpoints(tmp_path: Path, peers: ckptlib.Peers | None) -> None:
    """However often they are due: a torn one is followed by one without overlap, and three torn ones by no other. With
    peers also where snapshots for memory alone come between."""
    optimizer = prepared("adamw-foreach", 1)
    state, oracle = state_of(optimizer), {}
    with ckptlib.Checkpointer(tmp_path, state, every=1, arena=tmp_path, peers=peers) as ckpt:
        oracle[1] = [raw(p) for p in params_of(optimizer)]
        ckpt.save(1).wait_committed(WAIT_S)  # the writer runs: what has failed is told at once
        for step in range(2, 32):
            step_with_gradients(optimizer)
            oracle[step] = [raw(p) for p in params_of(optimizer)]
            with held(stager_of(ckpt)):
                ckpt.after_step(step)
                clip_weights(optimizer)
            if ckpt.pending is not None:
                with contextlib.suppress(SaveFailed):
                    ckpt.pending.wait_committed(WAIT_S)
            await_room(ckpt)
        forget_last_save(ckpt)  # the last one may have been torn, too
    steps = [info.step for info in ckptlib.checkpoints(tmp_path)]
    assert len(steps) >= (20 if peers is None else 10)
    for step in steps:
        ckptlib.load(tmp_path, state, step=step)
        assert [raw(p) for p in params_of(optimizer)] == oracle[step]


def test_two_ranks(tmp_path: Path) -> None:
    """FSDP2's DTensors under every optimizer, and an all-reduce that writes to parameters."""
    fork_ranks("torn.py", 2, tmp_path, 2, timeout_s=120)
    outcomes = json.loads((tmp_path / "outcomes").read_text())
    kinds = {*IN_PLACE, "all_reduce", "one_element", "step"}
    for found in outcomes:
        assert found.keys() == {f"{fence} {kind}" for fence in ("fenced", "unfenced") for kind in kinds}
        for kind, counts in found.items():
            assert counts.keys() == {"exact" if kind.startswith("fenced") else "TornSnapshot"}, (kind, counts)
