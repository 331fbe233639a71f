"""Wrote what lies in `written/`: `python write_sources.py torchsnapshot OUT`, where the framework is installed.

They are no dependencies of the tests: each of them brings dozens of packages.
"""

from __future__ import annotations

import sys
from pathlib import Path

import torch


def model() -> torch.nn.Module:
    torch.manual_seed(0)
    return torch.nn.Sequential(torch.nn.Linear(8, 4), torch.nn.BatchNorm1d(4), torch.nn.Linear(4, 2))


def trained() -> tuple[torch.nn.Module, torch.optim.Optimizer]:
    made = model()
    optimizer = torch.optim.AdamW(made.parameters())
    for _ in range(2):
        made(torch.randn(3, 8)).sum().backward()
        optimizer.step()
    return made, optimizer


def torchsnapshot(out: Path) -> None:
    from torchsnapshot import Snapshot, StateDict

    made, optimizer = trained()
    state = {"model": made, "optim": optimizer, "progress": StateDict(step=3, lr=0.5, name="a/b", raw=b"\xff")}
    Snapshot.take(str(out / "torchsnapshot-0.1.0"), state)
    torch.save({"model": made.state_dict(), "optim": optimizer.state_dict()}, out / "torchsnapshot-0.1.0.truth.pt")


def transformers(out: Path) -> None:
    from transformers import GPT2Config, GPT2LMHeadModel

    torch.manual_seed(0)
    config = GPT2Config(n_layer=1, n_embd=8, n_head=2, vocab_size=16, n_positions=4, bos_token_id=0, eos_token_id=1)
    made = GPT2LMHeadModel(config)
    made.save_pretrained(out / "transformers-5.23.0", max_shard_size="2KB")
    torch.save(made.state_dict(), out / "transformers-5.23.0.truth.pt")


def lightning(out: Path) -> None:
    import lightning

    class Module(lightning.LightningModule):
        def __init__(self, width: int = 4) -> None:
            super().__init__()
            self.save_hyperparameters()
            self.net = torch.nn.Linear(8, width)

        def training_step(self, batch: list[torch.Tensor], index: int) -> torch.Tensor:
            return self.net(batch[0]).sum()

        def configure_optimizers(self) -> object:
            optimizer = torch.optim.AdamW(self.parameters())
            return [optimizer], [torch.optim.lr_scheduler.StepLR(optimizer, 1)]

    torch.manual_seed(0)
    data = torch.utils.data.DataLoader(torch.utils.data.TensorDataset(torch.randn(6, 8)), batch_size=2)
    trainer = lightning.Trainer(max_epochs=1, accelerator="cpu", logger=False, enable_progress_bar=False)
    trainer.fit(Module(), data)
    trainer.save_checkpoint(out / "lightning-2.6.6.ckpt")


if __name__ == "__main__":
    globals()[sys.argv[1]](Path(sys.argv[2]))
