"""Every benchmark runs at toy size, so that none rots; their figures mean nothing here."""

from __future__ import annotations

import importlib
import importlib.util
import json
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers.benchmark_ranks import fork_all_ranks, fork_benchmark
from launch import fork_one
from places import ROOT

from benchmarks import codecs, hog, lossy, plan, recover

SUBJECTS = {
    "object_store": {"ckptlib, s3", "ckptlib, fsspec", "ckptlib, obstore", "obstore, bare"},
    "bucket_job": {"ckptlib, s3fs"},
    "bucket_faults": {"ckptlib, s3fs"},
    "limits": {"direct write", "direct read", "direct reads, 8 under way", "copy", "digest"},
    "save": {"ckptlib", "DCP", "torch.save+fsync", "safetensors+fsync", "bare direct write"},
    "load": {"ckptlib", "DCP", "torch.load", "safetensors", "bare direct read", "bare direct reads, 8 under way"},
    "reshard": {"ckptlib"},
    "small_tensors": {"ckptlib", "DCP", "torch.load", "safetensors"},
    "many_tensors": {"ckptlib", "DCP async thread"},
    "memory": {"ckptlib", "DCP"},
    "beat": {"ckptlib"},
    "replicas": {"ckptlib", "DCP async thread"},
    "link": {"raw", "optimizer"},
    "slowdown": {"ckptlib"},
    "overhead": {"ckptlib"},
    "hog": {hog.OURS, hog.ONLY_UP, hog.FIXED},
    "scale": {"ckptlib"},
    "requests": {"ckptlib"},
    "lossy": {lossy.EXACT, *lossy.NOISE, *lossy.LOSSY, lossy.NOTHING},
    "gpu": {
        "ckptlib",
        "ckptlib, every iteration, memory='host'",
        "ckptlib, every iteration, memory='device'",
        "no checkpoints",
        "DCP async thread",
    },
    "sparse": {
        "patch",
        "zstd-1",
        "unchanged chunks of 64 KiB",
        "unchanged chunks of 1 MiB",
        "unchanged chunks of 4 MiB",
    },
    "smaller": {"ckptlib", "ckptlib, planes", "DCP", "DCP + its zstd"},
    "throttled": {"ckptlib"},
    "tier": {"ckptlib, straight", "ckptlib, local tier", "bare direct write"},
    "restore_increments": {"ckptlib"},
    "open_one": {"ckptlib", "bare read"},
    "exports": {"ckptlib", "bare direct read", "bare direct copy", "bare copy through the page cache"},
    "codecs": {"planes", "zstd", "memcpy"},
    "plan": {plan.BEFORE, plan.RUN, plan.AFTER},
    "recover": {
        *("ckptlib", "bare copy", "bare read of /dev/shm", "bare read and digest"),
        *("bare gloo", "bare gloo beside a read"),
    },
}
"""Who must show up in the figures of each."""


def _run(*arguments: str) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "benchmarks", *arguments], cwd=ROOT, capture_output=True, text=True, timeout=240
    )
    assert done.returncode == 0, done.stdout + done.stderr


def _fork(name: str, directory: Path) -> None:
    """One that trains in its own process, without the import of torch."""
    log, given = directory / "log", ("--toy", "--out", directory / "out.jsonl", "--directory", directory)
    assert fork_one("benchmarks", name, *given, log=log, timeout_s=240) == 0, log.read_text()


def _lines(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


BY_COMMAND = {"limits", "beat", "open_one"}
"""Run as a person runs them; of the others, what they measure runs in this process and their ranks are forked."""


LONG = {
    *("beat", "hog", "recover", "object_store", "bucket_faults", "bucket_job", "replicas", "link"),
    *("many_tensors", "overhead", "restore_increments", "save", "smaller", "throttled", "tier"),
}


@pytest.mark.parametrize("name", [pytest.param(n, marks=pytest.mark.slow) if n in LONG else n for n in SUBJECTS])
def test_runs(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    out = tmp_path / "out.jsonl"
    arguments = ["--toy", "--out", str(out), "--directory", str(tmp_path)]
    if name in BY_COMMAND:
        _run(name, *arguments)
    else:
        fork_all_ranks(monkeypatch)
        importlib.import_module(f"benchmarks.{name}").main(arguments)
    first, *lines = _lines(out)
    assert first["kind"] == "machine"
    assert first["versions"]["torch"]
    assert [line["why"] for line in lines if line["kind"] == "failure"] == []
    assert {line["subject"] for line in lines} == SUBJECTS[name]
    assert all(line["low"] <= line["median"] <= line["high"] for line in lines)
    assert [path.name for path in tmp_path.iterdir()] == ["out.jsonl"], "it left files behind"


def test_every_benchmark_that_compares_is_run_here() -> None:
    compares = {
        path.stem for path in (ROOT / "benchmarks").glob("*.py") if "from benchmarks.figures import" in path.read_text()
    }
    assert compares == {*SUBJECTS, "stall"}, "stall has a test of its own"


def test_trainer(tmp_path: Path) -> None:
    if importlib.util.find_spec("transformers") is None:
        pytest.skip("transformers is not installed; it is in the extra called huggingface")
    _fork("hf_trainer", tmp_path)
    found = {(line.get("subject"), line.get("what")) for line in _lines(tmp_path / "out.jsonl")[1:]}
    assert found == {("Trainer", "stall"), ("ckptlib", "stall"), ("ckptlib", "fence")}


def test_accelerate(tmp_path: Path) -> None:
    if importlib.util.find_spec("accelerate") is None:
        pytest.skip("accelerate is not installed; it is in the extra called huggingface")
    _fork("accelerate_stall", tmp_path)
    found = [(line.get("subject"), line.get("what"), line.get("n")) for line in _lines(tmp_path / "out.jsonl")[1:]]
    assert found == [("Accelerator", "stall", 4), ("CkptlibAccelerator", "stall", 4)]


@pytest.mark.slow
def test_lightning(tmp_path: Path) -> None:
    _fork("lightning_stall", tmp_path)
    found = {line.get("subject") for line in _lines(tmp_path / "out.jsonl")[1:]}
    assert found == {"ModelCheckpoint", "AsyncCheckpointIO", "CkptlibCheckpointIO", "CkptlibCallback"}


def test_torchtitan(tmp_path: Path) -> None:
    if importlib.util.find_spec("torchtitan") is None:
        pytest.skip("torchtitan is not installed: it brings dozens of packages")
    _run("torchtitan_stall", "--toy", "--out", str(tmp_path / "out.jsonl"), "--directory", str(tmp_path))
    assert {line.get("subject") for line in _lines(tmp_path / "out.jsonl")[1:]} == {"disabled", "async", "ckptlib"}


def test_report_says_what_was_met_and_what_was_not(tmp_path: Path) -> None:
    if importlib.util.find_spec("matplotlib") is None:
        pytest.skip("matplotlib is not installed; it is in the extra called bench")
    figure = {"kind": "figure", "case": "c", "what": "load", "unit": "s", "low": 1.0, "high": 3.0, "n": 3}
    lines = [
        {**figure, "subject": "bare direct read", "median": 1.0},
        {**figure, "subject": "ckptlib", "median": 1.25},
        {**figure, "subject": "DCP", "median": 5.0},
        {"kind": "failure", "case": "c", "subject": "other", "why": "it hung"},
    ]
    (tmp_path / "load.jsonl").write_text("".join(json.dumps({"benchmark": "load", **line}) + "\n" for line in lines))
    _run("report", "--write-only", "--out", str(tmp_path))
    page = (tmp_path / "RESULTS.md").read_text()
    assert "| load from a cold disk, of the bare direct read | >= 0.9 | 0.8 | **missed** |" in page
    assert "| load, times DCP | >= 2 | 4 | met |" in page
    assert "| construction | <= 0.1 s |  | not measured |" in page
    assert "- c, other: it hung" in page
    assert (tmp_path / "load.png").stat().st_size > 0


@pytest.mark.parametrize(
    "module", ["torch_checkpointing", "torchsnapshot", pytest.param("lightning", marks=pytest.mark.slow)]
)
def test_peer_saves(module: str, tmp_path: Path) -> None:
    if importlib.util.find_spec(module) is None:
        pytest.skip(f"{module} is not installed; it is in the extra called bench")
    script = (
        "import sys; from pathlib import Path; from benchmarks import peers, states\n"
        "for name, peer in peers.PEERS.items():\n"
        f"    if peer.needs == {module!r}:\n"
        "        one = peer(); one.begin(states.make_state(65536, 3), Path(sys.argv[1]), 1)(); one.close()\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", script, str(tmp_path)], cwd=ROOT, capture_output=True, text=True, timeout=240
    )
    assert done.returncode == 0, done.stderr
    assert sum(path.stat().st_size for path in tmp_path.rglob("*") if path.is_file()) >= 3 * 5 * 4096


@pytest.mark.parametrize("peer", [codecs.ZipNN, codecs.Blosc2])
def test_peer_of_the_codecs_gives_everything_back(peer: type[codecs.Subject]) -> None:
    assert peer.needs is not None
    if importlib.util.find_spec(peer.needs) is None:
        pytest.skip(f"{peer.needs} is not installed; it is in the extra called bench")
    for chunk in codecs.chunks({"w": torch.randn(300, 200), "b": torch.randn(5000, dtype=torch.bfloat16)}):
        frame = peer().encode(chunk)
        assert len(frame) < 0.9 * len(chunk.raw)
        assert peer().decode(frame, chunk, bytearray(len(chunk.raw))) == chunk.raw


def test_nvrx_restores_what_it_kept(tmp_path: Path) -> None:
    if importlib.util.find_spec("nvidia_resiliency_ext") is None:
        pytest.skip("nvidia-resiliency-ext is not installed; it is in the extra called bench")
    given = {"subject": recover.NVRX, "nbytes": 100_000, "url": "", "memory": str(tmp_path), "options": {}}
    saved = fork_benchmark("benchmarks.recover", 2, {**given, "doing": "train"}, 120)
    for lost in ("host0", "host1", None):
        restored = fork_benchmark("benchmarks.recover", 2, {**given, "doing": "restore"}, 120)
        assert [line["digest"] for line in restored] == [line["digest"] for line in saved]
        if lost is not None:
            shutil.rmtree(tmp_path / lost)
