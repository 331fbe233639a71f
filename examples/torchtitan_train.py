"""torchtitan's containers and FSDP2, with CkptlibCheckpointManager in place of CheckpointManager:

    torchrun --nproc-per-node 2 examples/torchtitan_train.py out 40      # again after a kill: it goes on

The loop is that of torchtitan's Trainer, which itself needs a GPU. In a config for the Trainer, the two lines that end
with `# ckpt` are all there is to change.
"""

import sys

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard
from torchtitan.components.optimizer import LRSchedulersContainer, OptimizersContainer, ParamGroupConfig

from ckptlib.adapters.torchtitan import CkptlibCheckpointManager  # ckpt


class TrainState:
    """What Trainer keeps of itself."""

    def __init__(self):
        self.step = 0

    def state_dict(self):
        return {"step": self.step}

    def load_state_dict(self, state):
        self.step = state["step"]


def main(folder, steps):
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(16, 64), nn.Dropout(0.1), nn.LayerNorm(64), nn.Linear(64, 1))
    for layer in model:
        fully_shard(layer)
    fully_shard(model)
    groups = [ParamGroupConfig(pattern=".", optimizer_name="AdamW", optimizer_kwargs={"lr": 1e-2})]
    optimizers = OptimizersContainer.Config(param_groups=groups, implementation="for-loop").build(model_parts=[model])
    schedulers = LRSchedulersContainer.Config(warmup_steps=3).build(optimizers=optimizers, training_steps=1000)
    state = TrainState()
    config = CkptlibCheckpointManager.Config(enable=True, interval=5, keep_latest_k=2)  # ckpt
    checkpointer = config.build(
        dataloader=None,
        model_parts=[model],
        optimizers=optimizers,
        lr_schedulers=schedulers,
        states={"train_state": state},
        sd_adapter=None,
        base_folder=folder,
    )
    checkpointer.load(step=config.load_step)
    print(f"rank {dist.get_rank()} begins behind step {state.step}", flush=True)
    while state.step < steps:
        state.step += 1
        loss = model(torch.randn(32, 16)).square().mean()
        optimizers.zero_grad()
        loss.backward()
        checkpointer.maybe_wait_for_staging()
        optimizers.step()
        schedulers.step()
        checkpointer.save(state.step, last_step=state.step == steps)
    checkpointer.close()
    weights = {name: tensor.full_tensor() for name, tensor in model.state_dict().items()}
    if dist.get_rank() == 0:
        torch.save(weights, f"{folder}/final.pt")
    dist.destroy_process_group()


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]))
