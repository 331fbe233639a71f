"""A training of which most is compressed, and much refers to earlier steps: a sparse table and a dense layer."""

from __future__ import annotations

from pathlib import Path

import torch

import ckptlib

STEPS = 5
ROWS, WIDTH = 60_000, 64


def train(root: Path, codec: str | dict[str, str]) -> tuple[dict[str, object], dict[int, list[torch.Tensor]]]:
    """Some steps of a table of which few rows are touched, and of a dense layer; each is saved and committed."""
    torch.manual_seed(0)
    table, dense = torch.nn.Embedding(ROWS, WIDTH, sparse=True), torch.nn.Linear(700, 700)
    sparse, adam = torch.optim.SparseAdam(table.parameters()), torch.optim.AdamW(dense.parameters())
    state: dict[str, object] = {"table": table, "dense": dense, "sparse": sparse, "adam": adam}
    state["ids"] = torch.arange(100_000)
    found: dict[int, list[torch.Tensor]] = {}
    with ckptlib.Checkpointer(root, state, every=ckptlib.Steps(1000), codec=codec) as ckpt:
        ckpt.restore()
        for step in range(1, STEPS + 1):
            ids = torch.randint(0, ROWS, (100,))
            (dense(torch.randn(8, 700)).square().mean() + table(ids).square().sum()).backward()
            sparse.step()
            adam.step()
            ckpt.save(step).wait_committed()
            found[step] = [t.detach().clone() for t in tensors(state)]
    return state, found


def tensors(state: dict[str, object]) -> list[torch.Tensor]:
    found: list[torch.Tensor] = [state["ids"]]  # type: ignore[list-item]
    for model, optimizer in (("table", "sparse"), ("dense", "adam")):
        for parameter in state[model].parameters():  # type: ignore[attr-defined]
            found.append(parameter)
            moments = state[optimizer].state[parameter]  # type: ignore[attr-defined]
            found += [value for value in moments.values() if torch.is_tensor(value)]
    return found
