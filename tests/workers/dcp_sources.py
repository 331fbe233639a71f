"""Two ranks save a model under FSDP2 and its optimizer with torch.distributed.checkpoint, and the whole truth."""

from __future__ import annotations

import sys
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_state_dict
from torch.distributed.checkpoint.state_dict_saver import save as dcp_save
from torch.distributed.fsdp import fully_shard

out = Path(sys.argv[1])
dist.init_process_group("gloo")
torch.manual_seed(0)
model = nn.Sequential(nn.Linear(9, 7), nn.ReLU(), nn.Linear(7, 5))
fully_shard(model)
optimizer = torch.optim.AdamW(model.parameters())
for _ in range(2):
    model(torch.randn(2, 9)).sum().backward()
    optimizer.step()
state, optim = get_state_dict(model, optimizer)
dcp_save({"model": state, "optim": optim, "step": 7}, checkpoint_id=out / "nested")
state, optim = get_state_dict(model, optimizer, options=StateDictOptions(flatten_optimizer_state_dict=True))
dcp_save({**state, "optimizer": optim}, checkpoint_id=out / "flat")
state, optim = get_state_dict(model, optimizer, options=StateDictOptions(full_state_dict=True, cpu_offload=True))
if dist.get_rank() == 0:
    torch.save({"model": state, "optim": optim}, out / "truth.pt")
dist.barrier()
dist.destroy_process_group()
