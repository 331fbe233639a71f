"""Ray Train with checkpoints by ckptlib: `ray.train.report` is given a directory that names a step of the root.

    python examples/ray_train.py out 40           # again after a kill: it goes on
    python examples/ray_train.py out 40 2         # two workers

The workers are ranks of one process group, as under torchrun, and save together. All must see `out`, or a URL.
Lines that end with `# ckpt` are there for ckptlib only.
"""

import sys
import tempfile
from contextlib import suppress  # ckpt
from pathlib import Path

import ray.train
import ray.train.torch
import torch

import ckptlib  # ckpt


def train(given):
    torch.manual_seed(1)
    model = torch.nn.Sequential(torch.nn.Linear(16, 64), torch.nn.Dropout(0.1), torch.nn.Linear(64, 1))
    model = ray.train.torch.prepare_model(model)
    optim = torch.optim.AdamW(model.parameters(), lr=1e-2)
    url = f"{given['out']}/ckptlib"  # ckpt
    with ckptlib.Checkpointer(url, {"model": model, "optim": optim}, every=5) as ckpt:  # ckpt
        reported = start = ckpt.restore().step  # ckpt
        for step in ckpt.loop(start, given["steps"]):  # ckpt
            loss = model(torch.randn(32, 16)).square().mean()
            loss.backward()
            optim.step()
            optim.zero_grad()
            if given.get("fails_at") == step and start == 0:
                raise RuntimeError("as asked")
            done = ckpt.pending  # ckpt
            if done is not None and done.step != reported and (step + 1) % 5 == 4:  # ckpt
                with suppress(ckptlib.SaveFailed):  # ckpt: the next one will do; many in a row end the loop
                    done.wait_committed()  # ckpt: it is by now, mostly
                    reported = done.step
                    report(url, reported, loss)
    report(url, given["steps"], loss) if start < given["steps"] else None
    if ray.train.get_context().get_world_rank() == 0:
        torch.save({k.removeprefix("module."): v for k, v in model.state_dict().items()}, f"{given['out']}/final.pt")


def report(url, step, loss):
    """Collective, as Ray has it: all workers report; rank 0's directory is the checkpoint."""
    if ray.train.get_context().get_world_rank() != 0:
        ray.train.report({"loss": loss.item(), "step": step})
        return
    with tempfile.TemporaryDirectory() as directory:
        Path(directory, "ckptlib.txt").write_text(f"{url} {step}\n")
        ray.train.report({"loss": loss.item(), "step": step}, checkpoint=ray.train.Checkpoint.from_directory(directory))


def main(out, steps, workers=1, **more):
    trainer = ray.train.torch.TorchTrainer(
        train,
        train_loop_config={"out": out, "steps": steps, **more},
        scaling_config=ray.train.ScalingConfig(num_workers=workers),
        run_config=ray.train.RunConfig(
            name="run", storage_path=f"{out}/ray", failure_config=ray.train.FailureConfig(max_failures=1)
        ),
    )
    return trainer.fit()


if __name__ == "__main__":
    result = main(str(Path(sys.argv[1]).absolute()), int(sys.argv[2]), *map(int, sys.argv[3:]))
    print("reported:", Path(result.checkpoint.path, "ckptlib.txt").read_text())
