"""`scripts/gpu-check` where there is no GPU: it says what it would do, and keeps what it was told."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from benchmarks import gpucheck
from benchmarks.gpuchecks import training


def test_a_dry_run_says_what_would_be_done(capsys: pytest.CaptureFixture[str]) -> None:
    assert gpucheck.check(["--dry-run"]) == 0
    said = capsys.readouterr().out.splitlines()
    assert [line.split(".")[0].strip() for line in said] == [str(n) for n in range(1, 11)]


@pytest.mark.skipif(torch.cuda.is_available(), reason="has a GPU")
def test_without_a_gpu_it_fails(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert gpucheck.check(["--out", str(tmp_path / "out.json")]) == 1
    assert "no CUDA device" in capsys.readouterr().err
    assert not (tmp_path / "out.json").exists()


def test_it_goes_on_where_it_was_stopped(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    out, asked = tmp_path / "out.json", list[int]()
    fails = {2, 3}

    def ask(number: int) -> dict[str, object]:
        if number == 5:
            raise KeyboardInterrupt
        asked.append(number)
        return {"ok": number not in fails, "error": "because", "seconds": 1.0}

    monkeypatch.setattr(gpucheck, "_ask", ask)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(training, "machine", dict)
    with pytest.raises(KeyboardInterrupt):
        gpucheck.check(["--out", str(out)])
    assert asked == [1, 2, 3, 4]
    asked.clear()
    fails.clear()
    with pytest.raises(KeyboardInterrupt):
        gpucheck.check(["--out", str(out)])
    assert asked == [2, 3], "what failed is asked again"
    answers = json.loads(out.read_text())
    assert [name for name, found in answers.items() if found.get("ok")] == [c.__name__ for c in gpucheck.CHECKS[:4]]


def test_what_a_check_says_is_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    """From a process of its own; one that dies says why."""
    answer = gpucheck._ask(3)
    if not torch.cuda.is_available():
        assert not answer["ok"]
        assert "CUDA" in answer["error"] or "NVIDIA" in answer["error"]
