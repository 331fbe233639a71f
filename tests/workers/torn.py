"""Snapshots held at the staging thread's queue while the state is written to; and what two ranks add to that.

The copy is real and the thread is real: a job in front of it waits for an event, so what would be a race is an order.
Run on two ranks, `torn.py <directory> <times>` does the cases that need two; rank 0 writes <directory>/outcomes.
"""

from __future__ import annotations

import json
import os
import sys
import threading
from collections.abc import Callable, Mapping
from pathlib import Path

import torch
import torch.distributed as dist
from helpers.stage import held, is_copied
from torch.distributed.tensor import DTensor

from ckptlib.format.body_layout import body_nbytes, lay_out
from ckptlib.format.box import Box
from ckptlib.format.digests import XXH3
from ckptlib.format.keys import GenerationId, SaveId
from ckptlib.format.layout import Layout, Mesh, Placed, TensorSpec
from ckptlib.format.sharding import Replicate
from ckptlib.saving.assign import assign
from ckptlib.slots.header import SlotHeader
from ckptlib.slots.slot import Slot
from ckptlib.staging.fence import Fence, Fenced
from ckptlib.staging.pair import OVERLAP_FROM_BYTES, CopySource
from ckptlib.staging.stager import Content, Stager, Staging
from ckptlib.state.flatten import flatten
from ckptlib.state.leaf import Leaf

WAIT_S = 150.0
SLOT_BYTES = 16 << 20


class OpensGate:
    """Lets the copy begin no sooner than somebody waits for it: a fence that does not wait tears for certain."""

    def __init__(self, gate: threading.Event, inner: Fenced) -> None:
        self._gate = gate
        self._inner = inner

    def wait_copied(self) -> None:
        self._gate.set()
        self._inner.wait_copied()

    @property
    def copied(self) -> bool:
        return self._inner.copied

    def wait_done(self, timeout_s: float | None) -> None:
        self._gate.set()
        self._inner.wait_done(timeout_s)


class Rig:
    """One slot, one staging thread, one fence: what a Checkpointer has, without a store."""

    def __init__(self, directory: Path) -> None:
        self.slot = Slot.create(directory, "rig", SLOT_BYTES)
        self.told: list[Staging] = []
        self.stager = Stager(self.told.append)
        self.fence = Fence()
        self._step = 0
        self._oracle: list[bytes] = []

    def close(self) -> None:
        self.fence.remove()
        self.stager.close()
        self.slot.close()
        self.slot.unlink()

    def begin(self, state: Mapping[str, object], go: bool = True) -> Staging:
        """As after_step does: what has earned it is copied behind the fence. Remembers what it must come to hold."""
        flat = flatten(state)
        self.fence.install(flat.optimizers.values())
        leaves = {leaf.name: leaf for leaf in flat.leaves if leaf.pieces}
        content = self._content(list(leaves.values()))
        layout_names = [entry.name for entry in self._layout(list(leaves.values())).tensors]
        ordered = [leaves[layout_names[t]] for t in content.table.tensors]
        sources = [CopySource(f.name, f.pieces[0][1].detach(), self.earned(f), f.outer) for f in ordered]
        self._oracle = [raw(leaf.pieces[0][1]) for leaf in ordered]
        staging = self.stager.begin(self.slot, content)
        with staging.failing():
            self.stager.copy(staging, sources)
        if go:
            staging.go()
        self.fence.forget()
        return staging

    def earned(self, leaf: Leaf) -> bool:
        return leaf.owner is not None and self.fence.fired(leaf.owner)

    def _layout(self, leaves: list[Leaf]) -> Layout:
        """Whatever holds them: to a slot, this rank's piece is a tensor like any other."""
        one = Placed(Mesh((1,), (0,)), (Replicate(),), None)
        tensors = [TensorSpec(leaf.name, leaf.dtype, tuple(leaf.pieces[0][1].shape)) for leaf in leaves]
        return Layout(1, tuple(assign(tensors, {tensor.name: one for tensor in tensors})))

    def _content(self, leaves: list[Leaf]) -> Content:
        layout = self._layout(leaves)
        table = lay_out(layout, [(entry.name, Box.whole(entry.shape)) for entry in layout.tensors])
        self._step += 1
        save = SaveId(self._step, GenerationId(1, "00000001"))
        header = SlotHeader("0" * 32, save, 0, 1, self._step, 2 * self._step, body_nbytes(table), {})
        return Content(header, layout.encoded, table, {}, {}, 0.0, XXH3)

    def holds_the_oracle(self, staging: Staging) -> bool:
        """Whether every shard in the slot is, bit for bit, what the state was when `begin` was called."""
        table = staging.content.table
        for expected, begin in zip(self._oracle, table.begins(map(len, self._oracle)), strict=True):
            if bytes(self.slot.body[begin : begin + len(expected)]) != expected:
                return False
        return True


def raw(tensor: torch.Tensor) -> bytes:
    plain = tensor.detach().resolve_conj().resolve_neg().clone(memory_format=torch.contiguous_format)
    return plain.reshape(-1).view(torch.uint8).numpy().tobytes()


def params_of(optimizer: torch.optim.Optimizer) -> list[torch.Tensor]:
    return [p for group in optimizer.param_groups for p in group["params"]]


def step_with_gradients(optimizer: torch.optim.Optimizer) -> None:
    for p in params_of(optimizer):
        p.grad = torch.randn_like(p) if p.requires_grad else None
    optimizer.step()


# What people do to weights. Each leaves no element of a random tensor as it was.

Mutation = Callable[[torch.optim.Optimizer], None]


@torch.no_grad()
def data_in_place(optimizer: torch.optim.Optimizer) -> None:
    for p in params_of(optimizer):
        p.data.mul_(1.5)


@torch.no_grad()
def copy_from_elsewhere(optimizer: torch.optim.Optimizer) -> None:
    for p in params_of(optimizer):
        p.copy_(torch.randn_like(p))


@torch.no_grad()
def swap_in_average(optimizer: torch.optim.Optimizer) -> None:
    for p in params_of(optimizer):
        average = torch.randn_like(p)
        kept = p.detach().clone()
        p.copy_(average)
        average.copy_(kept)


@torch.no_grad()
def clip_weights(optimizer: torch.optim.Optimizer) -> None:
    torch._foreach_mul_([p.detach() for p in params_of(optimizer)], 0.99)


@torch.no_grad()
def change_moments(optimizer: torch.optim.Optimizer) -> None:
    for entries in optimizer.state.values():
        for value in entries.values():
            if isinstance(value, torch.Tensor) and value.ndim:
                value.add_(1.0)


@torch.no_grad()
def all_reduce(optimizer: torch.optim.Optimizer) -> None:
    for p in params_of(optimizer):
        dist.all_reduce(p.to_local() if hasattr(p, "to_local") else p)


@torch.no_grad()
def change_one_element(optimizer: torch.optim.Optimizer) -> None:
    """By an operation on DTensors: torch counts it, but for the outer tensors, not for the local ones."""
    for p in params_of(optimizer):
        assert isinstance(p, DTensor)
        local = torch.zeros_like(p.to_local())
        local.view(-1)[-1:] = 1.0
        p.add_(DTensor.from_local(local, p.device_mesh, p.placements, shape=p.shape, stride=p.stride()))


IN_PLACE: dict[str, Mutation] = {
    "data_in_place": data_in_place,
    "copy": copy_from_elsewhere,
    "ema_swap": swap_in_average,
    "clip": clip_weights,
    "moments": change_moments,
}

OPTIMIZERS: dict[str, Callable[[list[torch.nn.Parameter]], torch.optim.Optimizer]] = {
    "sgd-foreach": lambda ps: torch.optim.SGD(ps, lr=0.1, momentum=0.9, foreach=True),
    "sgd-fused": lambda ps: torch.optim.SGD(ps, lr=0.1, momentum=0.9, fused=True),
    "sgd-loop": lambda ps: torch.optim.SGD(ps, lr=0.1, momentum=0.9, foreach=False),
    "adamw-foreach": lambda ps: torch.optim.AdamW(ps, lr=0.1, foreach=True),
    "adamw-fused": lambda ps: torch.optim.AdamW(ps, lr=0.1, fused=True),
    "adamw-loop": lambda ps: torch.optim.AdamW(ps, lr=0.1, foreach=False),
}


def make_params(seed: int) -> list[torch.nn.Parameter]:
    """A few, of random sizes and dtypes; at least one large enough to be copied behind the fence."""
    draw = torch.Generator().manual_seed(seed)
    dtypes = [torch.float32, torch.float64]
    large = OVERLAP_FROM_BYTES // 4
    sizes = [large, *torch.randint(1, large, (3,), generator=draw).tolist()]
    return [
        torch.nn.Parameter(torch.randn(n, dtype=dtypes[(seed + i) % 2], generator=draw)) for i, n in enumerate(sizes)
    ]


def state_of(optimizer: torch.optim.Optimizer) -> dict[str, object]:
    return {"weights": torch.nn.ParameterList(params_of(optimizer)), "more": {"optim": optimizer}}


def prepared(name: str, seed: int) -> torch.optim.Optimizer:
    optimizer = OPTIMIZERS[name](make_params(seed))
    step_with_gradients(optimizer)
    return optimizer


def fenced_case(rig: Rig, state: Mapping[str, object], optimizer: torch.optim.Optimizer, mutate: Mutation) -> str:
    """The mutation comes through the fence. "exact" when the snapshot is the state of `begin`, bit for bit."""
    rig.fence.install([optimizer])
    step_with_gradients(optimizer)
    with held(rig.stager) as gate:
        staging = rig.begin(state)
        behind = not is_copied(staging)
        rig.fence.guard(OpensGate(gate, staging))
        mutate(optimizer)
    return _outcome(rig, staging, behind)


def unfenced_case(rig: Rig, state: Mapping[str, object], optimizer: torch.optim.Optimizer, mutate: Mutation) -> str:
    """The same, with the fence taken out after it was seen to work: nothing waits for the copy."""
    rig.fence.install([optimizer])
    step_with_gradients(optimizer)
    with held(rig.stager):
        staging = rig.begin(state)
        behind = not is_copied(staging)
        rig.fence.remove()
        mutate(optimizer)
    return _outcome(rig, staging, behind)


def _outcome(rig: Rig, staging: Staging, behind: bool) -> str:
    """exact, torn, or what must never be: silent damage. "inline" in front where nothing was left to the thread."""
    staging.wait_done(WAIT_S)
    ready = rig.slot.read_header().ready
    if staging.error is not None:
        found = type(staging.error).__name__ if not ready else "torn, yet ready"
    else:
        found = "exact" if ready and rig.holds_the_oracle(staging) else "silent damage"
    return found if behind else f"inline {found}"


# Two ranks: FSDP2's DTensors, and collectives that write to parameters


def main() -> None:
    from torch.distributed.fsdp import fully_shard

    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    torch.manual_seed(rank)
    found: dict[str, dict[str, int]] = {}
    rig = Rig(Path(sys.argv[1]))
    for name, make in OPTIMIZERS.items():
        if name == "sgd-fused":
            continue  # aten._fused_sgd_ has no sharding strategy in torch 2.13
        model = torch.nn.Sequential(torch.nn.Linear(256, 300), torch.nn.Linear(300, 256))
        for layer in model:
            fully_shard(layer)
        fully_shard(model)
        optimizer = make(list(model.parameters()))
        state = {"model": model, "nested": {"optim": optimizer}}
        step_with_gradients(optimizer)
        mutations = {**IN_PLACE, "all_reduce": all_reduce, "one_element": change_one_element}
        for mutation, mutate in mutations.items():

            def through_the_fence(o: torch.optim.Optimizer, mutate: Mutation = mutate) -> None:
                rig.fence.wait()
                mutate(o)

            for _ in range(int(sys.argv[2])):
                for kind, outcome in (
                    (f"fenced {mutation}", fenced_case(rig, state, optimizer, through_the_fence)),
                    ("fenced step", fenced_case(rig, state, optimizer, step_with_gradients)),
                    (f"unfenced {mutation}", unfenced_case(rig, state, optimizer, mutate)),
                    ("unfenced step", unfenced_case(rig, state, optimizer, step_with_gradients)),
                ):
                    found.setdefault(kind, {}).setdefault(outcome, 0)
                    found[kind][outcome] += 1
    rig.close()
    everywhere: list[dict[str, dict[str, int]] | None] = [None] * dist.get_world_size()
    dist.all_gather_object(everywhere, found)
    if rank == 0:
        (Path(sys.argv[1]) / "outcomes").write_text(json.dumps(everywhere))
    dist.barrier()
    os._exit(0)  # gloo's threads may abort an interpreter that ends in the ordinary way (torch 2.13)


if __name__ == "__main__":
    main()
