"""`ckptlib export`: what it prints, and how it ends."""

from __future__ import annotations

from pathlib import Path

from helpers.commands import Ckptlib
from safetensors.numpy import load_file
from support import state

from ckptlib.stores.local import LocalStore


def test_it_writes_and_tells(ckptlib: Ckptlib, made: LocalStore, tmp_path: Path) -> None:
    out = tmp_path / "out" / "x.safetensors"
    found = ckptlib("export", made.url, out, "--step", 2, "--only", "w", "--map", "w=weight", "--json").json
    assert (found["step"], found["num_tensors"], found["files"]) == (2, 1, [str(out)])
    assert (load_file(out)["weight"] == state(2)["w"]).all()
    shown = ckptlib("export", made.url, tmp_path / "hf", "--format", "hf", "--max-shard-size", "100")
    assert f"{tmp_path / 'hf'} (3 files): 3 tensors, 144 B" in shown.out
    assert (shown.code, shown.err) == (0, "")


def test_it_refuses(ckptlib: Ckptlib, made: LocalStore, tmp_path: Path) -> None:
    out = tmp_path / "x"
    for more, code, text in (
        (["--only", "nothing"], 1, "no tensor for 'nothing'"),
        (["--step", "77"], 1, "77"),
        (["--dtype", "int3"], 2, "expected bf16"),
        (["--map", "w"], 2, "expected old=new"),
        (["--format", "onnx"], 2, "onnx"),
        (["--max-shard-size", "x"], 2, "expected a number of bytes"),
    ):
        found = ckptlib("export", made.url, out, *more)
        assert (found.code, text in found.err) == (code, True), (more, found.err)
        assert not out.exists()
    assert ckptlib("export", made.url, "s3://bucket/x").code == 2
    assert "give format torch" in ckptlib("export", made.url, tmp_path / "x.pt").err
