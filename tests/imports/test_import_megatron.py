"""What Megatron-core 0.16.1 wrote (write_megatron.py): a GPT of two layers, tensor-parallel on two ranks."""

from __future__ import annotations

import argparse
import enum
import random
import shutil
from pathlib import Path

import pytest
import torch
from sources import WRITTEN, read, refuses, same, whole

import ckptlib

HOME = WRITTEN / "megatron-core-0.16.1"
ITERATION = HOME / "iter_0000007"
ROWS = ("embedding.word_embeddings.weight", "output_layer.weight", "linear_qkv.weight", "linear_qkv.bias", "linear_fc1")
COLUMNS = ("linear_proj.weight", "linear_fc2.weight")
STORED_AS = {
    "input_layernorm.": "self_attention.linear_qkv.layer_norm_",
    "pre_mlp_layernorm.": "mlp.linear_fc1.layer_norm_",
}
"""What a model of local layers has apart is stored as layers of Transformer Engine have it."""


class Kind(enum.Enum):
    ONE = 1


def expected(kind: str) -> dict[str, torch.Tensor]:
    """Of both ranks' own tensors: joined where they are parallel, layers stacked."""
    ranks = [torch.load(HOME / f"tp2.truth{rank}.pt", weights_only=True)[kind] for rank in range(2)]
    made: dict[str, torch.Tensor] = {}
    for name, first in ranks[0].items():
        parts = [rank[name] for rank in ranks]
        if any(part in name for part in COLUMNS):
            joined = torch.cat(parts, dim=1)
        elif any(part in name for part in ROWS):
            joined = torch.cat(parts, dim=0)
        else:
            assert same(*parts)
            joined = first
        for own, stored in STORED_AS.items():
            name = name.replace(own, stored)
        if name.startswith("decoder.layers."):
            number, _, rest = name.removeprefix("decoder.layers.").partition(".")
            name, joined = f"decoder.layers.{rest}", joined[None]
            if int(number):
                joined = torch.cat([made[name], joined])
        made[name] = joined
    return made


@pytest.mark.parametrize("source", [HOME, ITERATION], ids=["root", "iteration"])
def test_a_tensor_parallel_model(tmp_path: Path, source: Path) -> None:
    report = ckptlib.convert(source, tmp_path / "root")
    assert (report.kind, report.step) == ("Megatron-core", 7)
    found = ckptlib.read(tmp_path / "root", only="model")["model"]
    truth = expected("model")
    assert found.keys() == truth.keys()
    assert all(same(found[name], tensor) for name, tensor in truth.items())
    assert any("_extra_state" in note for note in report.notes)


def test_its_optimizer_by_name(tmp_path: Path) -> None:
    """Loads into one that trains tensors of the checkpoint's names and shapes."""
    ckptlib.convert(HOME, tmp_path / "root")
    truth = expected("exp_avg")
    model = {name: torch.nn.Parameter(torch.zeros_like(tensor)) for name, tensor in truth.items()}
    optimizer = torch.optim.AdamW(model.values())
    ckptlib.load(tmp_path / "root", {"model": model, "optimizer": optimizer}, strict=False)
    for name, param in model.items():
        assert same(optimizer.state[param]["exp_avg"], truth[name]), name
        assert float(optimizer.state[param]["step"]) == 1
        assert same(param.data, expected("model")[name])
    options = ckptlib.read(tmp_path / "root", only="optimizer_options")["optimizer_options"]
    assert [group["wd_mult"] for group in options] == [1.0, 0.0]


def copied(tmp_path: Path) -> Path:
    shutil.copytree(ITERATION, tmp_path / "source")
    return tmp_path / "source"


def test_arguments_and_buckets(tmp_path: Path) -> None:
    """`args` is a Namespace with objects within, which are left out by name."""
    source = copied(tmp_path)
    common = torch.load(source / "common.pt", weights_only=False)
    common["args"] = argparse.Namespace(lr=0.1, kind=Kind.ONE, dtype=torch.bfloat16, nested={"kind": Kind.ONE, "n": 1})
    torch.save(common, source / "common.pt")
    report = ckptlib.convert(source, tmp_path / "root")
    args = ckptlib.read(tmp_path / "root", only="args")["args"]
    assert (args["lr"], args["nested"]) == (0.1, {"n": 1})
    assert any("args/kind" in note and "args/nested/kind" in note for note in report.notes)


@pytest.mark.parametrize("gone", ["__1_0.distcp", "__0_1.distcp"])
def test_a_file_that_was_not_copied(tmp_path: Path, gone: str) -> None:
    source = copied(tmp_path)
    (source / gone).unlink()
    refuses(source, tmp_path / "root", gone)


def test_common_that_is_something_else(tmp_path: Path) -> None:
    source = copied(tmp_path)
    torch.save([1], source / "common.pt")
    refuses(source, tmp_path / "root", "expected the dict")


@pytest.mark.parametrize("latest", ["../iter_0000007", "-7", "8", "", "9" * 5000])
def test_a_latest_iteration_that_is_none(tmp_path: Path, latest: str) -> None:
    shutil.copytree(ITERATION, tmp_path / "source" / "iter_0000007")
    (tmp_path / "source" / "latest_checkpointed_iteration.txt").write_text(latest)
    refuses(tmp_path / "source", tmp_path / "root", "is of no format")


@pytest.mark.slow
def test_any_byte_of_the_metadata(tmp_path: Path) -> None:
    rng = random.Random(7)
    shapes = {name: tensor.shape for name, tensor in whole(read(ITERATION)).items()}
    source = copied(tmp_path)
    data = (ITERATION / ".metadata").read_bytes()
    refused = 0
    for _ in range(200):
        damaged = bytearray(data)
        damaged[rng.randrange(len(data))] ^= 1 << rng.randrange(8)
        (source / ".metadata").write_bytes(damaged)
        try:
            found = whole(read(source))
            assert all(found[name].shape == shape for name, shape in shapes.items() if name in found)
        except ckptlib.CkptError:
            refused += 1
    assert refused > 40
