"""safetensors of Hugging Face, and torchsnapshot: directories that the libraries themselves wrote."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from sources import WRITTEN, assert_same_state, read, refuses, same, whole
from torch import nn

import ckptlib
from ckptlib.errors import FormatError
from ckptlib.stores.testing import write_plan


def test_transformers(tmp_path: Path) -> None:
    """Written by transformers 5.23.0, in shards; its `lm_head` is tied and in no file."""
    source = WRITTEN / "transformers-5.23.0"
    assert len(list(source.glob("*.safetensors"))) > 1
    truth = torch.load(WRITTEN / "transformers-5.23.0.truth.pt", weights_only=True)
    tie = {"model/lm_head.weight": "model/transformer.wte.weight"}
    report = ckptlib.convert(source, tmp_path / "root", tie=tie)
    assert report.aliases == tie
    targets = {name: torch.zeros_like(tensor) for name, tensor in truth.items()}
    targets["lm_head.weight"] = targets["transformer.wte.weight"]  # tied here, too
    ckptlib.load(tmp_path / "root", {"model": targets})
    assert_same_state(truth, targets)


def test_tied_to_what_is_not_there(tmp_path: Path) -> None:
    save_file({"wte": torch.ones(2), "b": torch.zeros(1)}, tmp_path / "one.safetensors")
    source, tie = tmp_path / "one.safetensors", {"model/head": "model/wteX"}
    with pytest.raises(FormatError, match=r"tie= names 'model/wteX', to which 'model/head' is to be tied"):
        ckptlib.convert(source, tmp_path / "root", tie=tie)
    assert not (tmp_path / "root").exists()
    report = ckptlib.convert(source, tmp_path / "root", tie={"model/head": "model/wte"}, skip="model/wte")
    assert (report.tensors, report.aliases) == (1, {})


def test_one_file_and_a_directory_without_index(tmp_path: Path) -> None:
    tensors = {"a": torch.randn(3, 4).bfloat16(), "b": torch.arange(5), "e": torch.empty(0, 2), "s": torch.tensor(1.0)}
    words = torch.arange(256).to(torch.uint8)
    tensors |= {name: words.clone().view(getattr(torch, name)) for name in ("float8_e4m3fnuz", "float8_e5m2fnuz")}
    save_file(tensors, tmp_path / "one.safetensors", metadata={"format": "pt"})
    for source in (tmp_path / "one.safetensors", tmp_path):
        found = whole(read(source))
        assert found.keys() == {f"model/{name}" for name in tensors}
        assert all(same(found[f"model/{name}"], tensor) for name, tensor in tensors.items())
    save_file({"a": tensors["a"]}, tmp_path / "two.safetensors")
    refuses(tmp_path, tmp_path / "root", "which another file of .* has as well")


def test_what_an_earlier_save_has_left_beside_the_model(tmp_path: Path) -> None:
    """transformers' save_pretrained removes the shards of an earlier save, and neither their index nor shards of
    torch.save; from_pretrained takes `new` of each of these."""
    source, new, old = tmp_path / "source", {"w": torch.ones(2)}, {"w": torch.zeros(2)}
    source.mkdir()
    save_file(new, source / "model.safetensors")
    for shard in ("model-00001-of-00001.safetensors", "pytorch_model-00001-of-00001.bin"):
        whole_name = re.sub("-00001-of-00001", "", shard)
        (source / f"{whole_name}.index.json").write_text(json.dumps({"weight_map": {"w": shard}}))
    torch.save(old, source / "pytorch_model-00001-of-00001.bin")
    assert same(whole(read(source))["model/w"], new["w"])
    save_file(old, source / "model-00001-of-00001.safetensors")
    refuses(source, tmp_path / "root", "has model.safetensors, and the files of model.safetensors.index.json")
    (source / "model.safetensors").rename(source / "model-00001-of-00001.safetensors")
    assert same(whole(read(source))["model/w"], new["w"])


def test_a_set_of_files_without_an_index_must_be_whole(tmp_path: Path) -> None:
    source = tmp_path / "source"
    source.mkdir()
    for number in (1, 3):
        save_file({f"w{number}": torch.ones(2)}, source / f"model-{number:05d}-of-00003.safetensors")
    refuses(source, tmp_path / "root", "is one of 3 files, and number 2 is not there")
    save_file({"w2": torch.ones(2)}, source / "model-00002-of-00003.safetensors")
    ckptlib.convert(source, tmp_path / "root")
    assert {*ckptlib.read(tmp_path / "root")["model"]} == {"w1", "w2", "w3"}


def test_torchsnapshot(tmp_path: Path) -> None:
    """Written by torchsnapshot 0.1.0."""
    truth = torch.load(WRITTEN / "torchsnapshot-0.1.0.truth.pt", weights_only=True)
    ckptlib.convert(WRITTEN / "torchsnapshot-0.1.0", tmp_path / "root")
    model = nn.Sequential(nn.Linear(8, 4), nn.BatchNorm1d(4), nn.Linear(4, 2))
    optimizer = torch.optim.AdamW(model.parameters())
    ckptlib.load(tmp_path / "root", {"model": model}, only="model")
    ckptlib.load(tmp_path / "root", {"optim": optimizer}, strict=False)
    assert ckptlib.read(tmp_path / "root", only="progress")["progress"] == {
        "step": 3,
        "lr": 0.5,
        "name": "a/b",
        "raw": b"\xff",
    }
    assert_same_state(truth["model"], model.state_dict())
    assert_same_state(truth["optim"]["state"], optimizer.state_dict()["state"])
    assert truth["optim"]["param_groups"] == optimizer.state_dict()["param_groups"]


def test_torchsnapshot_in_shards_of_two_ranks(tmp_path: Path) -> None:
    """By the layout that it documents: no process group of this machine's wrote it."""
    base = torch.arange(12, dtype=torch.float32).view(4, 3)
    manifest: dict[str, object] = {}
    for rank, rows in ((0, slice(0, 2)), (1, slice(2, 4))):
        (tmp_path / f"{rank}").write_bytes(base[rows].numpy().tobytes())
        tensor = {
            "type": "Tensor",
            "location": str(rank),
            "serializer": "buffer_protocol",
            "dtype": "torch.float32",
            "shape": [2, 3],
            "replicated": False,
        }
        manifest[f"{rank}/model"] = {"type": "dict", "keys": ["w"]}
        shard = {"offsets": [rows.start, 0], "sizes": [2, 3], "tensor": tensor}
        manifest[f"{rank}/model/w"] = {"type": "ShardedTensor", "shards": [shard]}
    document = {"version": "0.1.0", "world_size": 2, "manifest": manifest}
    (tmp_path / ".snapshot_metadata").write_text(json.dumps(document))
    assert same(whole(read(tmp_path))["model/w"], base)
    document["manifest"] = {path: entry for path, entry in manifest.items() if path.startswith("0/")}
    document["manifest"]["0/model/w"]["shape"] = [4, 3]
    (tmp_path / ".snapshot_metadata").write_text(json.dumps(document))
    refuses(tmp_path, tmp_path / "root", "has 6 of its 12 elements")
    manifest["0/model/w"]["shards"][0]["tensor"]["location"] = "../secret"
    (tmp_path / ".snapshot_metadata").write_text(json.dumps(document))
    refuses(tmp_path, tmp_path / "root", "not inside of it")


def test_torchsnapshot_in_chunks_of_each_ranks_own(tmp_path: Path) -> None:
    """By the layout that it documents: what is not replicated is rank 0's, as a tensor without chunks is."""
    base = [torch.arange(4.0), torch.arange(4.0) + 100]
    manifest: dict[str, object] = {}
    for rank, values in enumerate(base):
        manifest[f"{rank}/model"] = {"type": "dict", "keys": ["w"]}
        told = {"dtype": "torch.float32", "replicated": False}
        chunks = []
        for at in (0, 2):
            (tmp_path / f"{rank}.{at}").write_bytes(values[at : at + 2].numpy().tobytes())
            tensor = {"type": "Tensor", "location": f"{rank}.{at}", "serializer": "buffer_protocol", "shape": [2]}
            chunks.append({"offsets": [at], "sizes": [2], "tensor": tensor | told})
        manifest[f"{rank}/model/w"] = {"type": "ChunkedTensor", "shape": [4], "chunks": chunks, **told}
    document = {"version": "0.1.0", "world_size": 2, "manifest": manifest}
    (tmp_path / ".snapshot_metadata").write_text(json.dumps(document))
    assert same(whole(read(tmp_path))["model/w"], base[0])


def test_killed_at_any_moment(tmp_path: Path) -> None:
    """No step, or the whole one; and the same command again gives it. It is killed when its copy has begun."""
    save_file({f"w{i}": torch.randn(1024, 1024) for i in range(16)}, tmp_path / "big.safetensors")
    scratch = tmp_path / "scratch"
    scratch.mkdir()
    plan, source = tmp_path / "plan.json", str(tmp_path / "big.safetensors")
    write_plan(plan, [{"op": "put", "key": "^steps/", "action": "hold"}])  # so that it is never too late
    root = f"fault+file://{tmp_path}/root?plan={plan}"
    command = [sys.executable, "-m", "ckptlib.cli", "import", source, root]
    process = subprocess.Popen([*command, "--scratch", str(scratch)], stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
    while not list(scratch.iterdir()) and process.poll() is None:
        time.sleep(0.001)
    os.kill(process.pid, signal.SIGKILL)
    process.communicate(timeout=150)
    assert process.returncode == -signal.SIGKILL
    plan.unlink()
    assert [info.step for info in ckptlib.checkpoints(tmp_path / "root")] == []
    done = subprocess.run([*command, "--scratch", str(scratch), "--json"], capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["tensors"] == 16
    assert [info.step for info in ckptlib.checkpoints(tmp_path / "root")] == [0]
    verified = subprocess.run([*command[:3], "verify", str(tmp_path / "root")], capture_output=True, timeout=300)
    assert verified.returncode == 0
