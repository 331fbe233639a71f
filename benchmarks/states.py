"""The states that benchmarks save and load: made, changed, cleared, and told apart, each rank its own share."""

from __future__ import annotations

import torch
import torch.distributed as dist
import xxhash
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard

State = dict[str, torch.Tensor]
"""A flat dict of tensors, DTensors where there are several ranks."""


def rank() -> int:
    """This process's place among them."""
    return dist.get_rank() if dist.is_initialized() else 0


def local(state: State) -> State:
    """What this rank holds, as plain tensors."""
    return {name: t.to_local() if isinstance(t, DTensor) else t for name, t in state.items()}


def make_state(nbytes: int, num_tensors: int) -> State:
    """This rank's share of a state, `nbytes` of random float32, as an AdamW of `num_tensors` / 3 parameters holds it.

    DTensors cut along dim 0 over all ranks, or plain tensors where there is one.
    """
    rows = max(nbytes // num_tensors // 4096, 1)
    generator = torch.Generator().manual_seed(rank())
    state: State = {}
    mesh = init_device_mesh("cpu", (dist.get_world_size(),)) if dist.is_initialized() else None
    for i in range(num_tensors):
        mine = torch.empty(rows, 1024).uniform_(generator=generator)
        name = f"{('model', 'optim/exp_avg', 'optim/exp_avg_sq')[i % 3]}/layers.{i // 3}.weight"
        state[name] = mine if mesh is None else DTensor.from_local(mine, mesh, [Shard(0)], run_check=False)
    return state


def nbytes_local(state: State) -> int:
    """Bytes that this rank holds."""
    return sum(tensor.nbytes for tensor in local(state).values())


def change(state: State) -> None:
    """What an optimizer's step does to it: no element stays."""
    for tensor in local(state).values():
        tensor.add_(1.0)


def clear(state: State) -> None:
    """Zeroes, so that nothing but a load puts the bytes there; the memory stays touched."""
    for tensor in local(state).values():
        tensor.zero_()


def digest(state: State) -> str:
    """Of this rank's bytes."""
    hasher = xxhash.xxh3_128()
    for tensor in local(state).values():
        hasher.update(tensor.detach().reshape(-1).view(torch.uint8).numpy().data)
    return hasher.hexdigest()
