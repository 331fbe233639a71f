"""Shards of torch.save with an index: ColossalAI 0.5.0 wrote them (write_colossalai.py), and as transformers did."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from sources import WRITTEN, assert_same_state, refuses
from torch import nn

import ckptlib

COLOSSAL = WRITTEN / "colossalai-0.5.0"


def fresh() -> tuple[nn.Module, torch.optim.Optimizer]:
    model = nn.Sequential(nn.Linear(8, 4), nn.BatchNorm1d(4), nn.Linear(4, 2))
    return model, torch.optim.AdamW(model.parameters(), lr=1.0)


def test_colossalai(tmp_path: Path) -> None:
    assert len(list(COLOSSAL.glob("modeling/*.bin"))) > 1
    truth = torch.load(WRITTEN / "colossalai-0.5.0.truth.pt", weights_only=True)
    model, optimizer = fresh()
    names = [f"model/{name}" for name, _ in model.named_parameters()]
    ckptlib.convert(COLOSSAL, tmp_path / "root", params={"optimizer": names})
    ckptlib.load(tmp_path / "root", {"model": model, "optimizer": optimizer})
    assert_same_state(truth["model"], model.state_dict())
    assert_same_state(truth["optimizer"]["state"], optimizer.state_dict()["state"])
    assert optimizer.param_groups[0]["lr"] == 0.001


def test_parts_of_it_alone(tmp_path: Path) -> None:
    assert ckptlib.convert(COLOSSAL / "modeling", tmp_path / "model").optimizers == ()
    assert ckptlib.convert(COLOSSAL / "optimizer", tmp_path / "optim").optimizers == ("optimizer",)
    together = tmp_path / "together"
    shutil.copytree(COLOSSAL / "modeling", together)
    shutil.copytree(COLOSSAL / "optimizer", together, dirs_exist_ok=True)
    report = ckptlib.convert(together, tmp_path / "both")
    assert (report.optimizers, report.kind) == (("optimizer",), "torch.save in shards")


def test_transformers_before_safetensors(tmp_path: Path) -> None:
    source = tmp_path / "source"
    source.mkdir()
    parts = [{"a.weight": torch.randn(3, 2)}, {"b.weight": torch.randn(4).bfloat16()}]
    places = {}
    for i, part in enumerate(parts):
        torch.save(part, source / f"pytorch_model-{i + 1:05}-of-00002.bin")
        places |= dict.fromkeys(part, f"pytorch_model-{i + 1:05}-of-00002.bin")
    (source / "pytorch_model.bin.index.json").write_text(json.dumps({"metadata": {}, "weight_map": places}))
    ckptlib.convert(source, tmp_path / "root")
    found = ckptlib.read(tmp_path / "root")["model"]
    assert_same_state(parts[0] | parts[1], found)


def write_both(source: Path, torch_shards: int) -> dict[str, torch.Tensor]:
    """A model in safetensors, with both indexes, and as many of the two files that the other one names."""
    source.mkdir()
    tensors = {"a.weight": torch.randn(3, 2), "b.weight": torch.randn(4)}
    for kind, ending in (("pytorch_model", "bin"), ("model", "safetensors")):
        places = {name: f"{kind}-{i + 1:05}-of-00002.{ending}" for i, name in enumerate(tensors)}
        (source / f"{kind}.{ending}.index.json").write_text(json.dumps({"metadata": {}, "weight_map": places}))
        for name, file in places.items():
            if ending == "safetensors":
                save_file({name: tensors[name]}, source / file)
    for i, (name, tensor) in enumerate([*tensors.items()][:torch_shards]):
        torch.save({name: tensor}, source / f"pytorch_model-{i + 1:05}-of-00002.bin")
    return tensors


def test_an_index_whose_files_were_not_fetched(tmp_path: Path) -> None:
    """Whoever fetches *.safetensors and *.json of a model that has both gets it; the import asked for its files."""
    tensors = write_both(tmp_path / "source", torch_shards=0)
    report = ckptlib.convert(tmp_path / "source", tmp_path / "root")
    assert report.kind == "safetensors"
    assert_same_state(tensors, ckptlib.read(tmp_path / "root")["model"])


def test_shards_that_were_fetched_in_part(tmp_path: Path) -> None:
    write_both(tmp_path / "source", torch_shards=1)
    for file in (tmp_path / "source").glob("*.safetensors"):
        file.unlink()
    refuses(tmp_path / "source", tmp_path / "root", "pytorch_model-00002-of-00002.bin")


@pytest.mark.parametrize(
    ("file", "document", "match"),
    [
        ("modeling/pytorch_model.bin.index.json", {"weight_map": {"x": "../../secret.bin"}}, "not inside of it"),
        ("modeling/pytorch_model.bin.index.json", {"weight_map": {"x": "pytorch_model-00001.bin"}}, "does not have it"),
        ("modeling/pytorch_model.bin.index.json", {"weight_map": [1]}, "no weight_map"),
        ("optimizer/pytorch_optim.bin.index.json", {"weight_map": {}, "metadata": {}}, "names no file of param_groups"),
        (
            "optimizer/pytorch_optim.bin.index.json",
            {"weight_map": {}, "metadata": {"param_groups": "/etc/passwd"}},
            "not inside of it",
        ),
    ],
)
def test_an_index_that_cannot_be(tmp_path: Path, file: str, document: object, match: str) -> None:
    shutil.copytree(COLOSSAL, tmp_path / "source")
    (tmp_path / "source" / file).write_text(json.dumps(document))
    refuses(tmp_path / "source", tmp_path / "root", match)


def test_a_shard_that_was_not_copied(tmp_path: Path) -> None:
    shutil.copytree(COLOSSAL, tmp_path / "source")
    (tmp_path / "source" / "optimizer" / "pytorch_optim-00003.bin").unlink()
    refuses(tmp_path / "source", tmp_path / "root", "pytorch_optim-00003.bin")


def test_two_models_in_one_directory(tmp_path: Path) -> None:
    shutil.copytree(COLOSSAL / "modeling", tmp_path / "source")
    shutil.copy(tmp_path / "source" / "pytorch_model.bin.index.json", tmp_path / "source" / "a_model.bin.index.json")
    refuses(tmp_path / "source", tmp_path / "root", r"\(a_model.bin.index.json, pytorch_model.bin")
