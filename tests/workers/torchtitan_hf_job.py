"""torchtitan's smallest Llama 3 with its own adapter to Hugging Face's names, and our manager, on FSDP2 over all ranks:

    torchrun torchtitan_hf_job.py <dump folder> <steps> <file> <dtype of the export> [<directory to begin with>]

Gradients are made up: what is looked at is which weights go where. The file has the weights as the run began and ended.
"""

from __future__ import annotations

import sys
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.fsdp import fully_shard
from torchtitan.components.optimizer import LRSchedulersContainer, OptimizersContainer, ParamGroupConfig
from torchtitan.models.llama3 import Llama3StateDictAdapter, llama3_configs

from ckptlib.adapters.torchtitan import CkptlibCheckpointManager


def whole(model: torch.nn.Module) -> dict[str, torch.Tensor]:
    return {
        name: (tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor).clone()
        for name, tensor in model.state_dict().items()
    }


def main(folder: str, steps: int, out: str, dtype: Any, initial: str = "") -> None:
    dist.init_process_group("gloo")
    torch.manual_seed(0 if not initial else 1)
    described = llama3_configs["debugmodel"](attn_backend="flex")
    model = described.build()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.normal_()
    for layer in model.layers.values():
        fully_shard(layer)
    fully_shard(model)
    groups = [ParamGroupConfig(pattern=r".*", optimizer_name="AdamW", optimizer_kwargs={"lr": 1e-2})]
    optimizers = OptimizersContainer.Config(param_groups=groups, implementation="for-loop").build(model_parts=[model])
    schedulers = LRSchedulersContainer.Config(warmup_steps=3).build(optimizers=optimizers, training_steps=20)
    config = CkptlibCheckpointManager.Config(
        enable=True,
        interval=100,
        initial_load_path=initial or None,
        initial_load_in_hf=bool(initial),
        last_save_in_hf=True,
        export_dtype=dtype,
    )
    manager = config.build(
        dataloader=None,
        model_parts=[model],
        optimizers=optimizers,
        lr_schedulers=schedulers,
        states={},
        sd_adapter=Llama3StateDictAdapter(described, None),
        base_folder=folder,
    )
    loaded = manager.load()
    begun = whole(model)
    for step in range(1, steps + 1):
        for parameter in model.parameters():
            parameter.grad = torch.full_like(parameter, step)
        optimizers.step()
        manager.save(step, last_step=step == steps)
    ended = whole(model)
    manager.close()
    if dist.get_rank() == 0:
        torch.save({"loaded": loaded, "begun": begun, "ended": ended}, out)
    dist.destroy_process_group()


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]), *sys.argv[3:])
