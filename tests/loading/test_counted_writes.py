"""torch counts what a load writes, as it counts what `load_state_dict()` does."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

import ckptlib


@pytest.mark.parametrize("parallel", [False, True], ids=["plain", "tensor parallelism"])
def test_a_backward_does_not_take_loaded_weights_for_those_of_its_forward(
    tmp_path: Path, request: pytest.FixtureRequest, parallel: bool
) -> None:
    """Its gradients would be wrong, and nobody would know. A DTensor has a count of its own, beside its shard's."""
    if parallel:
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
        request.addfinalizer(dist.destroy_process_group)

    def model() -> nn.Module:
        made = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
        if parallel:
            mesh = init_device_mesh("cpu", (1,))
            parallelize_module(made, mesh, {"0": ColwiseParallel(), "1": RowwiseParallel()})
        return made

    ckptlib.save(tmp_path / "root", {"model": model()}, step=1)
    trained = model()
    loss = trained(torch.randn(2, 4)).sum()
    ckptlib.load(tmp_path / "root", {"model": trained})
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()
