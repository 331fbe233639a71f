"""What is stored as frames comes back bit for bit: floats by planes, touched rows of tables by patches, integers."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

import ckptlib
from ckptlib.catalog.catalog import Catalog
from ckptlib.format.part import Part
from ckptlib.stores import open_store

STEPS = 5
ROWS, WIDTH = 60_000, 64


def parts(root: Path) -> Iterator[Part]:
    catalog = Catalog(open_store(str(root), {}))
    for save in catalog.saves():
        yield catalog.part(catalog.manifest(save).parts[0])


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


@pytest.mark.parametrize("codec", ["planes", {"sparse/*": "planes", "*": "raw"}])
def test_every_step_comes_back_bit_for_bit(tmp_path: Path, codec: str | dict[str, str]) -> None:
    state, wanted = train(tmp_path, codec)
    for step, values in wanted.items():
        ckptlib.load(tmp_path, state, step=step)
        assert all(map(torch.equal, tensors(state), values)), step
    kinds = [Counter(coding.codec for coding in part.codings.values()) for part in parts(tmp_path)]
    assert kinds[0]["planes"]
    assert not kinds[0]["patch"]
    assert (kinds[0]["zstd"] > 0) == (codec == "planes")
    assert (kinds[-1]["patch"] > 0) == (codec == "planes"), "moments that are mostly 0 are smaller whole"
    sizes = [part.nbytes_put for part in parts(tmp_path)]
    if codec == "planes":
        assert sizes[-1] < sizes[0] / 3, "the rows that were not touched are not stored again"


def test_raw_is_what_a_local_disk_gets(tmp_path: Path) -> None:
    train(tmp_path, "auto")
    assert not any(part.codings for part in parts(tmp_path))
