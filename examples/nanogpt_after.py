"""The same as nanogpt_before.py with ckptlib: and saves run beside training, are verified, and survive a kill.

    python examples/nanogpt_after.py out train 40; python examples/nanogpt_after.py out eval

Lines that end with `# ckpt` are there for checkpoints only.
"""

import sys

import torch
from nanogpt_model import GPT, Config, batch

import ckptlib  # ckpt

out, task, total = sys.argv[1], sys.argv[2], int(sys.argv[3]) if len(sys.argv) > 3 else 0
config = Config()


torch.manual_seed(1)
model = GPT(config)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
if task == "train":
    state = {"model": model, "optimizer": optimizer, "config": vars(config)}  # ckpt
    export = ckptlib.Export(f"{out}/{{step}}/model.safetensors", only="model", strip="model/")  # ckpt
    with ckptlib.Checkpointer(out, state, every=10, export=export) as ckpt:  # ckpt
        for _ in ckpt.loop(ckpt.restore().step, total):
            loss = model.loss(batch(config))
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
else:
    saved = ckptlib.read(out)  # ckpt
    config = Config(**saved["config"])  # ckpt
    model = GPT(config)  # ckpt
    model.load_state_dict(saved["model"])  # ckpt
    torch.manual_seed(2)
    print(f"loss {model.eval().loss(batch(config)).item():.6f}")
