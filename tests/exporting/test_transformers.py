"""Exports of format hf, loaded by transformers itself; skipped where that is not installed."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import torch
from onerank import opened

import ckptlib

transformers = pytest.importorskip("transformers", reason="transformers is not installed: pip install transformers")


@pytest.mark.parametrize("size", ["5GB", "20kB"])
@pytest.mark.parametrize("kind", ["gpt2", "llama"])
def test_equal_logits(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str, size: str) -> None:
    monkeypatch.setitem(os.environ, "HF_HUB_OFFLINE", "1")
    torch.manual_seed(0)
    if kind == "gpt2":
        config = transformers.GPT2Config(vocab_size=99, n_positions=16, n_embd=32, n_layer=2, n_head=2)
        model = transformers.GPT2LMHeadModel(config).eval()
    else:
        config = transformers.LlamaConfig(
            vocab_size=99,
            hidden_size=32,
            intermediate_size=40,
            num_hidden_layers=2,
            num_attention_heads=2,
            tie_word_embeddings=False,
        )
        model = transformers.LlamaForCausalLM(config).eval()
    with opened(tmp_path / "root") as root:
        root.save({"model": model, "optim": torch.optim.AdamW(model.parameters())})
    out = tmp_path / "hf"
    report = ckptlib.export(tmp_path / "root", out, format="hf", only="model", strip="model/", max_shard_size=size)
    assert report.ties == ({"lm_head.weight": "transformer.wte.weight"} if kind == "gpt2" else {})
    assert (len(report.files) > 2) == (size == "20kB")
    config.save_pretrained(out)
    loaded, told = type(model).from_pretrained(out, output_loading_info=True)
    assert not told["missing_keys"]
    assert not told["unexpected_keys"]
    tokens = torch.arange(10)[None]
    with torch.no_grad():
        assert torch.equal(loaded.eval()(tokens).logits, model(tokens).logits)
