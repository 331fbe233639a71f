"""What the oldest torch that ckptlib works with does not do, for the tests that ask it of torch."""

from __future__ import annotations

from collections.abc import Iterable
from inspect import signature
from typing import Any

import pytest
import torch
from torch import optim
from torch.distributed.tensor import distribute_tensor
from torch.distributed.tensor._dtensor_spec import DTensorSpec
from torch.optim import swa_utils

FSDP2_ON_THE_HOST = hasattr(torch.cpu.Stream, "record_event")
"""Else FSDP2 gathers parameters on accelerators only."""

fsdp2_on_the_host = pytest.mark.skipif(
    not FSDP2_ON_THE_HOST, reason="FSDP2 of this torch gathers parameters on accelerators only"
)

has_float4 = pytest.mark.skipif(not hasattr(torch, "float4_e2m1fn_x2"), reason="before torch 2.8")

cuts_by_itself = pytest.mark.skipif(
    "src_data_rank" not in signature(distribute_tensor).parameters,
    reason="a rank of this torch does not cut a DTensor without the others",
)

tells_order = pytest.mark.skipif(
    not hasattr(DTensorSpec, "_maybe_convert_StridedShard_to_shard_order"),
    reason="distribute_tensor of this torch cuts uneven dims by a _StridedShard otherwise than fully_shard does",
)

plain_swalr = pytest.mark.skipif(
    "anneal_func" in swa_utils.SWALR(optim.SGD([torch.zeros(1)], lr=0.1), swa_lr=0.1).state_dict(),
    reason="the state of this torch's SWALR has a function in it, which is refused",
)

adamw_is_adam = pytest.mark.skipif(
    not issubclass(optim.AdamW, optim.Adam), reason="AdamW of this torch is no Adam, and has no option that tells so"
)


def marked(names: Iterable[str], which: str, mark: pytest.MarkDecorator) -> list[Any]:
    """Returns parameters of a test, of which those whose names contain `which` have the mark."""
    return [pytest.param(name, marks=mark) if which in name else name for name in names]
