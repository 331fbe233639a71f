"""Benchmarks run at toy size: their figures mean nothing then, but they are all there."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
from helpers.benchmark_ranks import fork_all_ranks
from places import ROOT

from benchmarks import figures, stall
from benchmarks.__main__ import questions
from benchmarks.common import filesystem, machine, spread, table
from benchmarks.figures import Figures, Options


def run(*arguments: object) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "benchmarks", *map(str, arguments)]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=240)


def test_every_benchmark_says_its_question() -> None:
    done = run()
    assert done.returncode == 0
    found = questions()
    assert "stall" in found
    for name, question in found.items():
        assert name in done.stdout
        assert question.endswith("?") or "?" in question, f"{name}: a benchmark answers a question"
    assert "no benchmark is called 'nothing'" in run("nothing").stderr


CASES = {
    "two ranks": ("ckptlib", "ckptlib.dcp", "DCP async thread", "DCP", "torch.save+fsync"),
    "four ranks": ("ckptlib", "DCP async thread"),
}


@pytest.mark.slow
def test_stall(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "stall.jsonl"
    fork_all_ranks(monkeypatch)
    stall.main(["--toy", "--out", str(out), "--directory", str(tmp_path)])
    shown = capsys.readouterr().out
    first, *lines = [json.loads(line) for line in out.read_text().splitlines()]
    assert first["kind"] == "machine"
    assert first["settings"]["toy"] is True
    assert {"torch", "ckptlib", "python"} <= first["versions"].keys()
    assert not [line for line in lines if line["kind"] == "failure"]
    for case, subjects in CASES.items():
        assert case in shown, "the table"
        found = {(line["subject"], line["what"]): line for line in lines if line["case"] == case}
        for subject in subjects:
            figure = found[subject, "stall per checkpoint"]
            assert 0 < figure["low"] <= figure["median"] <= figure["high"]
            assert figure["n"] == 2
            assert found[subject, "turn with / without"]["median"] > 0
            assert subject in shown, "the table"
        num_tensors = found["ckptlib", "stall per checkpoint"]["tensors"]
        aim = found["ckptlib", "target (1 ms + 10 us per tensor)"]
        assert aim["median"] == pytest.approx(0.001 + 1e-5 * num_tensors)
        assert found["ckptlib", "writer's own memory"]["median"] > 1
        assert found["no checkpoints", "iteration"]["n"] == sum(what == "stall per checkpoint" for _, what in found)
    assert [path.name for path in tmp_path.iterdir()] == ["stall.jsonl"], "nothing is left behind"


@pytest.mark.parametrize("error", [KeyboardInterrupt(), OSError("no space left")], ids=["interrupted", "failed"])
def test_a_run_that_ends_early_keeps_what_it_measured(tmp_path: Path, error: BaseException) -> None:
    def measure(options: Options, directory: Path, found: Figures) -> None:
        found.add("first case", "ckptlib", "stall", "s", [1.0, 3.0])
        raise error

    out = tmp_path / "lines"
    with pytest.raises(type(error)):
        figures.run(["--out", str(out), "--directory", str(tmp_path)], "stall", measure, gb=0.0)
    machine, figure, failure = map(json.loads, out.read_text().splitlines())
    assert machine["kind"] == "machine"
    assert (figure["kind"], figure["case"], figure["median"], figure["n"]) == ("figure", "first case", 2.0, 2)
    assert (failure["kind"], failure["why"]) == ("failure", repr(error))


def test_spread() -> None:
    assert spread([3.0, 1.0, 2.0]) == {"median": 2.0, "low": 1.0, "high": 3.0, "n": 3}
    assert spread([2.0, 1.0]) == {"median": 1.5, "low": 1.0, "high": 2.0, "n": 2}
    assert spread([5.0]) == {"median": 5.0, "low": 5.0, "high": 5.0, "n": 1}


def test_machine(tmp_path: Path) -> None:
    found = machine(tmp_path)
    assert found["cores"] >= 1
    assert found["filesystem"] == filesystem(tmp_path)
    assert json.loads(json.dumps(found)) == found


def test_table() -> None:
    text = table([{"a": 1, "long name": "x"}, {"a": "wide", "long name": ""}])
    assert text.splitlines() == ["a     long name", "----  ---------", "1     x", "wide"]
    assert table([]) == ""
