"""A loop with Accelerate whose checkpoints are ckptlib's: run it again after a kill, and it goes on within the epoch.

    python examples/accelerate_train.py out 40
    torchrun --nproc-per-node 2 examples/accelerate_train.py out 40

One line is there for ckptlib only, and ends with `# ckpt`. It takes the place of `from accelerate import Accelerator`.
"""

import sys
from pathlib import Path

import torch
from accelerate.utils import DataLoaderConfiguration, ProjectConfiguration
from torch.utils.data import DataLoader, TensorDataset

from ckptlib.adapters.accelerate import CkptlibAccelerator as Accelerator  # ckpt

EVERY = 5


class Place:
    """How far the training is."""

    def __init__(self):
        self.step = 0

    def state_dict(self):
        return {"step": self.step}

    def load_state_dict(self, state):
        self.step = state["step"]


out, steps = sys.argv[1], int(sys.argv[2])
project = ProjectConfiguration(out, automatic_checkpoint_naming=True, total_limit=2)
accelerator = Accelerator(
    cpu=True, project_config=project, dataloader_config=DataLoaderConfiguration(use_seedable_sampler=True)
)
torch.manual_seed(1)
model = torch.nn.Sequential(torch.nn.Linear(16, 64), torch.nn.Dropout(0.1), torch.nn.Linear(64, 1))
optim = torch.optim.AdamW(model.parameters(), lr=1e-2)
loader = DataLoader(TensorDataset(torch.randn(32, 16)), batch_size=4, shuffle=True)
model, optim, loader = accelerator.prepare(model, optim, loader)
place = Place()
accelerator.register_for_checkpointing(place)
torch.manual_seed(accelerator.process_index)  # for dropout

batches = loader
if any(Path(out).glob("checkpoints/*checkpoint_*")):
    accelerator.load_state()
    project.iteration = place.step // EVERY
    batches = accelerator.skip_first_batches(loader, (place.step - 1) % len(loader) + 1)  # of the epoch it was in
accelerator.print(f"from step {place.step}")
while place.step < steps:
    for (x,) in batches:
        accelerator.backward(model(x).square().mean())
        optim.step()
        optim.zero_grad()
        place.step += 1
        if place.step % EVERY == 0:
            accelerator.save_state()
        if place.step == steps:
            break
    batches = loader
if accelerator.is_main_process:
    torch.save(accelerator.unwrap_model(model).state_dict(), f"{out}/final.pt")
accelerator.end_training()
