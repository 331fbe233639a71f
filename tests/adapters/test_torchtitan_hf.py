"""torchtitan's last_save_in_hf and initial_load_in_hf, with its own Llama 3 and adapter; read by safetensors alone."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from launch import environment
from places import ROOT, WORKERS
from safetensors.torch import load_file, save_file

pytest.importorskip("torchtitan", reason="brings dozens of packages")
pytest.importorskip("triton", reason="torchtitan's models import it")

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]

HEADS = 16


def run(
    folder: Path, initial: Path | None = None, dtype: str = "float32", steps: int = 3
) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", 2]
    job = [WORKERS / "torchtitan_hf_job.py", folder, steps, folder / "told.pt", dtype, *([initial] if initial else [])]
    variables = {**environment(), "PYTHONPATH": os.pathsep.join([str(ROOT), *sys.path])}
    folder.mkdir(exist_ok=True)
    return subprocess.run([*map(str, [*command, *job])], env=variables, capture_output=True, text=True, timeout=200)


def told(folder: Path, **options: Any) -> dict[str, Any]:
    done = run(folder, **options)
    assert done.returncode == 0, done.stdout + done.stderr
    return dict(torch.load(folder / "told.pt", weights_only=True))


def exported(folder: Path, step: int = 3) -> dict[str, torch.Tensor]:
    """By the index, as transformers reads it."""
    out = folder / "checkpoint-export" / f"final-step-{step}"
    index = json.loads((out / "model.safetensors.index.json").read_text())["weight_map"]
    return {name: load_file(out / file)[name] for name, file in index.items()}


def as_hugging_face_has_it(ours: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """By the table of its documents: each layer's name, and query and key with the halves of each head apart."""
    names = {
        "tok_embeddings.weight": "model.embed_tokens.weight",
        "norm.weight": "model.norm.weight",
        "lm_head.weight": "lm_head.weight",
        "attention.qkv_linear.wq.weight": "self_attn.q_proj.weight",
        "attention.qkv_linear.wk.weight": "self_attn.k_proj.weight",
        "attention.qkv_linear.wv.weight": "self_attn.v_proj.weight",
        "attention.wo.weight": "self_attn.o_proj.weight",
        "feed_forward.w1.weight": "mlp.gate_proj.weight",
        "feed_forward.w2.weight": "mlp.down_proj.weight",
        "feed_forward.w3.weight": "mlp.up_proj.weight",
        "attention_norm.weight": "input_layernorm.weight",
        "ffn_norm.weight": "post_attention_layernorm.weight",
    }
    found = {}
    for name, tensor in ours.items():
        layer = re.match(r"layers\.(\d+)\.(.*)", name)
        if layer is None:
            found[names[name]] = tensor
            continue
        theirs = names[layer[2]]
        if "q_proj" in theirs or "k_proj" in theirs:
            head = len(tensor) // HEADS
            tensor = tensor[
                [h * head + 2 * i + half for h in range(HEADS) for half in (0, 1) for i in range(head // 2)]
            ]
        found[f"model.layers.{layer[1]}.{theirs}"] = tensor
    return found


def assert_same(first: dict[str, torch.Tensor], second: dict[str, torch.Tensor]) -> None:
    assert sorted(first) == sorted(second)
    assert all(torch.equal(tensor, second[name]) for name, tensor in first.items())


def test_out_and_in_again(tmp_path: Path) -> None:
    first = told(tmp_path / "first")
    assert not first["loaded"]
    assert_same(exported(tmp_path / "first"), as_hugging_face_has_it(first["ended"]))
    where = tmp_path / "first" / "checkpoint-export"
    assert [path.name for path in where.iterdir()] == ["final-step-3"]
    second = told(tmp_path / "second", initial=where / "final-step-3", dtype="bfloat16")
    assert second["loaded"]
    assert_same(second["begun"], first["ended"])
    wanted = {name: tensor.bfloat16() for name, tensor in as_hugging_face_has_it(second["ended"]).items()}
    assert_same(exported(tmp_path / "second"), wanted)
    resumed = told(tmp_path / "second", initial=tmp_path / "nowhere", dtype="bfloat16", steps=0)
    assert_same(resumed["begun"], second["ended"])  # the run's own step, wherever it has begun


def test_a_run_that_comes_to_its_end_again(tmp_path: Path) -> None:
    """As behind a kill between the files and the commit of the last step: its files are replaced."""
    told(tmp_path / "run")
    for path in (tmp_path / "run" / "checkpoint" / "steps").iterdir():
        path.unlink()
    out = tmp_path / "run" / "checkpoint-export" / "final-step-3"
    (out / "left.safetensors").write_bytes(b"of the run before")
    again = told(tmp_path / "run")
    assert_same(exported(tmp_path / "run"), as_hugging_face_has_it(again["ended"]))
    assert not (out / "left.safetensors").exists()
    assert [path.name for path in out.parent.iterdir()] == [out.name]


def test_what_lacks_a_tensor_or_is_damaged(tmp_path: Path) -> None:
    told(tmp_path / "run")
    tensors = exported(tmp_path / "run")
    for name, text in {
        "empty": "has no safetensors",
        "lacks": "lm_head.weight",
        "cut": "cannot be read as a model of Hugging Face",
    }.items():
        (tmp_path / name).mkdir()
        if name != "empty":
            kept = {key: tensor for key, tensor in tensors.items() if name == "cut" or key != "lm_head.weight"}
            save_file(kept, tmp_path / name / "model.safetensors")
        if name == "cut":
            os.truncate(tmp_path / name / "model.safetensors", 1 << 20)
        done = run(tmp_path / f"from-{name}", initial=tmp_path / name)
        assert done.returncode != 0
        assert text in done.stderr
        assert not [*(tmp_path / f"from-{name}").glob("checkpoint/steps/*")]


def test_the_step_is_committed_where_the_files_cannot_be_written(tmp_path: Path) -> None:
    """A file is where their directory goes."""
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "checkpoint-export").write_text("mine")
    done = run(tmp_path / "run")
    assert done.returncode != 0
    assert "checkpoint-export" in done.stderr
    assert len([*(tmp_path / "run").glob("checkpoint/steps/*")]) == 1
