"""Wrote `written/deepspeed-0.19.8`, with DeepSpeed itself on CPUs:

    DS_ACCELERATOR=cpu torchrun --nproc-per-node N write_deepspeed.py OUT/NAME STAGE DTYPE [OPTION...]
    python -m deepspeed.checkpoint.ds_to_universal --input_folder OUT/NAME/global_step3 --output_folder ...

`zero0 0 fp32` and `zero2 2 fp32 elastic` on two ranks, `zero1 1 bf16 round_robin` on two, `zero3 3 bf16 small_groups`
on three; `zero1-universal` and `zero3-universal` of those. The scripts that DeepSpeed copies beside are left out.
"""

from __future__ import annotations

import os
import sys

import deepspeed
import torch
from deepspeed.utils import safe_get_full_fp32_param
from torch import nn


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.emb = nn.Embedding(11, 8)
        self.norm = nn.LayerNorm(8)
        self.up = nn.Linear(8, 5)
        self.down = nn.Linear(5, 8, bias=False)
        self.head = nn.Linear(8, 11, bias=False)
        self.head.weight = self.emb.weight
        self.register_buffer("count", torch.arange(3))
        self.conv = nn.Conv1d(4, 3, 2)
        self.frozen = nn.Linear(3, 3).requires_grad_(False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = self.norm(self.emb(x)) + self.conv(self.emb(x)).mean()
        h = h + self.down(self.up(h).relu())
        return self.head(h).float().sum(-1).pow(2).mean()


def main(out: str, stage: int, dtype: str, *options: str) -> None:
    torch.manual_seed(0)
    net = Net()
    trained = [p for p in net.parameters() if p.requires_grad]
    groups = [
        {"params": [p for p in trained if p.ndim > 1], "weight_decay": 0.1},
        {"params": [p for p in trained if p.ndim <= 1], "weight_decay": 0.0},
    ]
    optimizer = torch.optim.AdamW(groups, lr=1e-2)
    zero = {
        "stage": stage,
        "elastic_checkpoint": "elastic" in options,
        "round_robin_gradients": "round_robin" in options,
        "sub_group_size": 10 if "small_groups" in options else int(1e9),
    }
    config = {
        "train_batch_size": 2 * int(os.environ["WORLD_SIZE"]),
        "zero_allow_untested_optimizer": True,
        "zero_optimization": zero,
        "bf16": {"enabled": dtype == "bf16"},
    }
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 / (1 + step))
    engine, *_ = deepspeed.initialize(model=net, optimizer=optimizer, config=config, lr_scheduler=scheduler)
    rank = torch.distributed.get_rank()
    for step in range(3):
        torch.manual_seed(100 * step + rank)
        engine.backward(engine(torch.randint(0, 11, (2, 4))))
        engine.step()
    client = {"seen": 12, "note": "x", "universal_checkpoint_info": {"universal_checkpoint_version": 0.2}}
    engine.save_checkpoint(out, tag="global_step3", client_state=client)
    truth = {}
    for name, param in engine.module.named_parameters():
        if stage and param.requires_grad:
            truth[name] = safe_get_full_fp32_param(param)
        else:
            with deepspeed.zero.GatheredParameters([param], enabled=stage == 3):
                truth[name] = param.data.clone()
    if rank == 0:
        torch.save(truth, out + ".truth.pt")


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]), *sys.argv[3:])
