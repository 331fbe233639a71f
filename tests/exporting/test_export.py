"""Exports, read by the libraries that they are for: safetensors' own, torch.load, transformers."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from onerank import Root, bits
from places import DATA, ROOT
from safetensors import safe_open
from safetensors.torch import load_file, load_model
from torch import nn

import ckptlib
from ckptlib.exporting import stream
from ckptlib.exporting.files import parse_size
from ckptlib.exporting.names import Naming

KEPT = sorted(DATA.glob("written-by-*"))


def described(tensor: torch.Tensor) -> list[object]:
    return [str(tensor.dtype).removeprefix("torch."), list(tensor.shape), bits(tensor).hex()]


@pytest.mark.parametrize("kept", KEPT, ids=lambda path: path.name)
@pytest.mark.parametrize("form", ["safetensors", "hf", "torch"])
def test_what_two_ranks_saved(kept: Path, form: str, tmp_path: Path) -> None:
    expected = json.loads((kept / "expected.json").read_text())
    out = tmp_path / "out"
    report = ckptlib.export(kept / "root", out, format=form, only=["model", "optim"])
    if form == "torch":
        found = torch.load(out, weights_only=True)
    else:
        found = load_file(report.files[0])
    assert {name: described(found[name]) for name in expected} == expected
    assert report.num_tensors == len(found) == len(expected)


def test_tensors_of_all_kinds_in_many_pieces(root: Root, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stream, "BATCH_BYTES", 4096)
    torch.manual_seed(0)
    state = {
        "large": torch.randn(70, 90, 3),
        "half": torch.randn(5000).to(torch.bfloat16),
        "fp8": torch.randn(50, 50).to(torch.float8_e4m3fn),
        "byte": torch.arange(255, dtype=torch.uint8),
        "flags": torch.rand(77) < 0.5,
        "empty": torch.zeros(0, 4),
        "scalar": torch.tensor(3.5, dtype=torch.float64),
        "complex": torch.randn(600, dtype=torch.complex64),
    }
    root.save(state)
    report = ckptlib.export(root.url, tmp_path / "x.safetensors")
    found = load_file(tmp_path / "x.safetensors")
    assert {name: described(t) for name, t in found.items()} == {name: described(t) for name, t in state.items()}
    assert report.nbytes == sum(tensor.nbytes for tensor in state.values())
    ckptlib.export(root.url, tmp_path / "x.pt", format="torch")
    loaded = torch.load(tmp_path / "x.pt", weights_only=True)
    assert {name: described(t) for name, t in loaded.items()} == {name: described(t) for name, t in state.items()}
    assert sorted(path.name for path in tmp_path.iterdir()) == ["x.pt", "x.safetensors"]


def test_no_chunk_is_read_twice(root: Root, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A tensor is read in parts; one that ended in the middle of a chunk had that chunk read again by the next."""
    monkeypatch.setattr(stream, "BATCH_BYTES", 1 << 20)
    weight = torch.randn(611, 1024)
    root.save({"weight": weight})
    report = ckptlib.export(root.url, tmp_path / "x.safetensors")
    assert weight.nbytes <= report.nbytes_read <= weight.nbytes + 64 * 1024
    assert bits(load_file(tmp_path / "x.safetensors")["weight"]) == bits(weight)


def tied() -> nn.Sequential:
    model = nn.Sequential(nn.Embedding(50, 8), nn.Linear(8, 8), nn.Linear(8, 50, bias=False))
    model[2].weight = model[0].weight
    return model


def test_tied_weights_are_written_once(root: Root, tmp_path: Path) -> None:
    model = tied()
    root.save({"model": model})
    report = ckptlib.export(root.url, tmp_path / "m.safetensors", only="model", strip="model/")
    assert report.ties == {"2.weight": "0.weight"}
    assert load_file(tmp_path / "m.safetensors").keys() == {"0.weight", "1.weight", "1.bias"}
    other = tied()
    load_model(other, tmp_path / "m.safetensors")
    assert bits(other[2].weight) == bits(model[2].weight)
    ckptlib.export(root.url, tmp_path / "m.pt", format="torch", only="model", strip="model/")
    found = torch.load(tmp_path / "m.pt", weights_only=True)
    assert found["0.weight"].data_ptr() == found["2.weight"].data_ptr()
    assert (tmp_path / "m.pt").stat().st_size < 8000
    alone = ckptlib.export(root.url, tmp_path / "head.safetensors", only="model/2.weight")
    assert (alone.ties, alone.num_tensors) == ({}, 1)
    assert bits(load_file(tmp_path / "head.safetensors")["model/2.weight"]) == bits(model[0].weight)


def test_shards_and_their_index(root: Root, tmp_path: Path) -> None:
    state = {f"w{i}": torch.full((1000,), float(i)) for i in range(5)} | {"huge": torch.ones(9000)}
    root.save({"model": state})
    report = ckptlib.export(root.url, tmp_path / "hf", format="hf", strip="model/", max_shard_size="8kB")
    index = json.loads((tmp_path / "hf" / "model.safetensors.index.json").read_text())
    assert index["metadata"] == {"total_size": 56_000}
    assert report.files[-1].name == "model.safetensors.index.json"
    names = [path.name for path in report.files[:-1]]
    assert names == [f"model-{i:05d}-of-00004.safetensors" for i in range(1, 5)]
    assert {*index["weight_map"].values()} == {*names}
    for name, file in index["weight_map"].items():
        with safe_open(tmp_path / "hf" / file, "pt") as found:
            assert bits(found.get_tensor(name)) == bits(state[name])
            assert found.metadata() == {"format": "pt", "ckptlib.step": str(root.step), "ckptlib.name": _name(root)}
    assert {path.name for path in (tmp_path / "hf").iterdir()} == {*names, "model.safetensors.index.json"}


def _name(root: Root) -> str:
    *_, newest = ckptlib.checkpoints(root.url)
    return newest.name


@pytest.mark.parametrize("dtype", ["bf16", "fp16", "fp32"])
def test_converted_as_torch_does(root: Root, tmp_path: Path, dtype: str) -> None:
    torch.manual_seed(0)
    random = torch.randint(0, 2**32, (50_000,), dtype=torch.int64).to(torch.uint32).view(torch.float32)
    kinds = {"float32": random, "bfloat16": random.to(torch.bfloat16), "float64": torch.randn(1000).double()}
    kinds["float16"] = torch.randint(0, 2**16, (50_000,)).to(torch.uint16).view(torch.float16)
    target = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}[dtype]
    state = {}
    for name, values in kinds.items():
        fits = values.isinf() | values.isnan() | values.to(target).isfinite()
        state[name] = values[fits]
    state |= {"ints": torch.arange(5), "fp8": torch.ones(3).to(torch.float8_e5m2)}
    root.save(state)
    ckptlib.export(root.url, tmp_path / "x.safetensors", dtype=dtype)
    found = load_file(tmp_path / "x.safetensors")
    for name, values in state.items():
        expected = values.to(target) if name in kinds else values
        assert found[name].dtype == expected.dtype
        nan = expected.isnan() if name in kinds else torch.zeros(values.shape, dtype=torch.bool)
        assert nan.equal(found[name].isnan() if name in kinds else nan)
        if name in kinds:
            assert bits(found[name][~nan]) == bits(expected[~nan])
        else:
            assert bits(found[name]) == bits(expected)


def test_a_number_that_would_become_infinite(root: Root, tmp_path: Path) -> None:
    root.save({"fine": torch.ones(3), "wide": torch.tensor([1.0, 70000.0, float("inf")])})
    with pytest.raises(ckptlib.UnsupportedState, match="wide: has numbers that float16 has none for"):
        ckptlib.export(root.url, tmp_path / "x.safetensors", dtype="fp16")
    assert [*tmp_path.iterdir()] == []


def test_names(root: Root, tmp_path: Path) -> None:
    tensors = {"model": {"gpt.h.0.w": torch.ones(1), "gpt.h.10.w": torch.ones(2)}, "ema": {"gpt.h.0.w": torch.zeros(1)}}
    root.save(tensors)

    def names(**options: object) -> set[str]:
        out = tmp_path / "x.safetensors"
        out.unlink(missing_ok=True)
        ckptlib.export(root.url, out, **options)  # type: ignore[arg-type]
        return {*load_file(out)}

    assert names() == {"model/gpt.h.0.w", "model/gpt.h.10.w", "ema/gpt.h.0.w"}
    assert names(only="model", strip="model/") == {"gpt.h.0.w", "gpt.h.10.w"}
    assert names(only="model", strip="model/", map={"gpt": "transformer", "gpt.h.0": "first"}) == {
        "first.w",
        "transformer.h.10.w",
    }
    assert names(map={"model/gpt.": "", "ema": "average"}) == {"h.0.w", "h.10.w", "average/gpt.h.0.w"}
    for wrong, error in (
        ({"only": "modle"}, "no tensor for 'modle'.*its top are @rng, ema, model"),
        ({"strip": "x/"}, "'strip x/'"),
        ({"map": {"gpt": "x"}}, "'map gpt'"),
        ({"map": {"model/gpt.h.1": "x"}}, "'map model/gpt.h.1'"),
    ):
        with pytest.raises(ckptlib.StateMismatch, match=error):
            names(**wrong)
    with pytest.raises(ckptlib.UnsupportedState, match=r"would be called 'x/gpt\.h\.0\.w', as "):
        names(map={"model": "x", "ema": "x"})
    for new in ("", "__metadata__"):
        with pytest.raises(ckptlib.UnsupportedState, match="which no tensor of a file can be"):
            names(only="ema", map={"ema/gpt.h.0.w": new})


FRUGAL = """
import sys, ckptlib
ckptlib.export(sys.argv[1], sys.argv[2], dtype="bf16")
peak_kb = int(open("/proc/self/status").read().split("VmHWM:")[1].split()[0])
assert peak_kb < 220_000, peak_kb
assert "torch" not in sys.modules
"""


def test_memory_is_that_of_some_buffers(root: Root, tmp_path: Path) -> None:
    """A tensor of 256 MB, converted on the way, in a process without torch."""
    large = torch.arange(64 << 20, dtype=torch.float32)
    root.save({"large": large})
    out = tmp_path / "x.safetensors"
    command = [sys.executable, "-c", FRUGAL, root.url, str(out)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=250)
    assert done.returncode == 0, done.stderr
    assert load_file(out)["large"].equal(large.to(torch.bfloat16))


def test_sizes() -> None:
    assert [parse_size(text) for text in ("5GB", "1.5 MiB", 1000, "7")] == [5 * 10**9, 3 << 19, 1000, 7]
    for wrong in ("", "5 apples", "-1", "0", "GB"):
        with pytest.raises(ValueError, match="expected a number of bytes"):
            parse_size(wrong)


class Name(str):
    looks = 0

    def startswith(self, *arguments: Any) -> bool:
        Name.looks += 1
        return super().startswith(*arguments)


def test_thousands_of_names_are_not_compared_with_one_another() -> None:
    names = [Name(f"model/{i}.weight") for i in range(200)]
    chosen = Naming([*map(str, names)], "model/", {}).choose(names, {}, "here")
    assert [one.saved for one in chosen] == names
    assert Name.looks < 10 * 200
