"""nanoGPT's way with checkpoints, on a small model: resume, export and evaluation by hand. See nanogpt_after.py.

    python examples/nanogpt_before.py out train 40; python examples/nanogpt_before.py out eval

Lines that end with `# ckpt` are there for checkpoints only.
"""

import os  # ckpt
import sys

import torch
from nanogpt_model import GPT, Config, batch

out, task, total = sys.argv[1], sys.argv[2], int(sys.argv[3]) if len(sys.argv) > 3 else 0
config = Config()
path = os.path.join(out, "ckpt.pt")  # ckpt


def save(step: int) -> None:  # ckpt
    os.makedirs(out, exist_ok=True)  # ckpt
    state = {  # ckpt
        "model": model.state_dict(),  # ckpt
        "optimizer": optimizer.state_dict(),  # ckpt
        "config": vars(config),  # ckpt
        "iter_num": step,  # ckpt
        "rng": torch.get_rng_state(),  # ckpt
    }  # ckpt
    torch.save(state, path + ".tmp")  # ckpt
    os.replace(path + ".tmp", path)  # ckpt


def unwrapped(state: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:  # ckpt
    prefix = "_orig_mod."  # ckpt
    return {name.removeprefix(prefix): tensor for name, tensor in state.items()}  # ckpt


torch.manual_seed(1)
model = GPT(config)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
if task == "train":
    start = 0  # ckpt
    if os.path.exists(path):  # ckpt
        saved = torch.load(path, weights_only=True)  # ckpt
        model.load_state_dict(unwrapped(saved["model"]))  # ckpt
        optimizer.load_state_dict(saved["optimizer"])  # ckpt
        torch.set_rng_state(saved["rng"])  # ckpt
        start = saved["iter_num"]  # ckpt
        del saved  # ckpt
    for step in range(start, total):
        loss = model.loss(batch(config))
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        if (step + 1) % 10 == 0 or step + 1 == total:  # ckpt
            save(step + 1)  # ckpt
    from safetensors.torch import save_model  # ckpt

    save_model(model, os.path.join(out, "model.safetensors"))  # ckpt
else:
    saved = torch.load(path, weights_only=True)  # ckpt
    config = Config(**saved["config"])  # ckpt
    model = GPT(config)  # ckpt
    model.load_state_dict(unwrapped(saved["model"]))  # ckpt
    torch.manual_seed(2)
    print(f"loss {model.eval().loss(batch(config)).item():.6f}")
