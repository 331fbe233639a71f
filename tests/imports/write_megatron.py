"""Wrote `written/megatron-core-0.16.1`, with Megatron-core itself on two gloo ranks, tensor-parallel:

    torchrun --nproc-per-node 2 write_megatron.py OUT

Megatron-core asks for CUDA in a few places; here it gets the CPU, and gradients are random.
"""

from __future__ import annotations

import sys
from pathlib import Path

import torch
import torch.distributed as dist


def main(out: Path) -> None:
    from megatron.core import dist_checkpointing, parallel_state
    from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
    from megatron.core.models.gpt.gpt_model import GPTModel
    from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer
    from megatron.core.transformer.transformer_config import TransformerConfig

    torch.cuda.current_device = lambda: torch.device("cpu")
    torch.cuda.synchronize = lambda *_: None
    tensor = torch.tensor
    torch.tensor = lambda *given, device=None, **options: tensor(*given, **options)
    dist.init_process_group("gloo")
    parallel_state.initialize_model_parallel(2, 1)
    torch.manual_seed(0)
    config = TransformerConfig(num_layers=2, hidden_size=8, num_attention_heads=2, use_cpu_initialization=True)
    spec = get_gpt_layer_local_spec()
    model = GPTModel(config=config, transformer_layer_spec=spec, vocab_size=32, max_sequence_length=4)
    ddp = DistributedDataParallel(config, DistributedDataParallelConfig(), model)
    optimizer = get_megatron_optimizer(OptimizerConfig(lr=0.01), [ddp])
    state = {"model": model.sharded_state_dict(prefix=""), "iteration": 7, "checkpoint_version": 3.0}
    for param in optimizer.get_parameters():
        param.grad = torch.randn_like(param)
    optimizer.optimizer.step()
    state["optimizer"] = optimizer.sharded_state_dict(state["model"])
    out.mkdir(exist_ok=True, parents=True)
    dist_checkpointing.save(state, str(out))
    held = {name: t for name, t in model.state_dict().items() if isinstance(t, torch.Tensor)}
    moments = {name: optimizer.optimizer.state[param]["exp_avg"] for name, param in model.named_parameters()}
    torch.save({"model": held, "exp_avg": moments}, f"{out}.truth{dist.get_rank()}.pt")
    dist.barrier()


if __name__ == "__main__":
    main(Path(sys.argv[1]))
