"""The conformance suite at toy size, and whether it sees what it is there to see."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest
import torch
from places import ROOT

from benchmarks.conformance import FAULTS, tracer
from benchmarks.conformance.content import NEVER_SAVED, Content
from benchmarks.conformance.libraries import LIBRARIES
from benchmarks.conformance.page import page, tables

CONTENT = Content(4)
STEPS = range(1, 3)
LOCAL = ["no fault", "killed before a call", "one bit flipped", "file cut or gone", "files limited"]
TRIED = ["ckptlib.save", "ckptlib.Checkpointer", "DCP save", "torch.save"]


@pytest.mark.slow
def test_toy(tmp_path: Path) -> None:
    out = tmp_path / "lines.jsonl"
    command = [sys.executable, "-m", "benchmarks", "conformance", "--toy", "--out", str(out), "--directory"]
    command += [str(tmp_path), "--libraries", *TRIED, "--faults", *LOCAL]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=280)
    assert done.returncode == 0, done.stderr
    first, *lines, last = [json.loads(line) for line in out.read_text().splitlines()]
    assert (first["kind"], last["kind"]) == ("machine", "end")
    if any("ptrace" in line.get("why", "") for line in lines):
        pytest.skip("ptrace is forbidden here")
    assert [line["why"] for line in lines if line["kind"] != "trial"] == []
    found = Counter((line["library"], line["fault"], line["found"]) for line in lines)
    assert {(library, fault) for library, fault, _ in found} == {(one, fault) for one in TRIED for fault in LOCAL}
    for library in TRIED:
        assert found[library, "no fault", "new"] == 1, "what is found without a fault is the suite's own doing"
    ours = {(fault, what) for library, fault, what in found if library.startswith("ckptlib")}
    assert not {what for _, what in ours} & {"wrong", "nothing", "hang", "died"}
    assert {what for fault, what in ours if fault in ("killed before a call", "files limited")} <= {"new", "before"}
    assert found["torch.save", "one bit flipped", "wrong"], "it has no digests, so the oracle must see what it does not"
    text = out.with_suffix(".md").read_text()
    assert all(f"| {library} |" in text for library in TRIED)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["lines.jsonl", "lines.md"], "nothing is left behind"


def test_the_oracle_knows_each_step_and_no_mixture() -> None:
    for step in (*STEPS, NEVER_SAVED):
        assert CONTENT.judge(CONTENT.tensors(step, 0), 0, STEPS).step == step
    loaded = CONTENT.tensors(2, 0)
    assert CONTENT.judge(loaded, 1, STEPS).step is None, "another rank's"
    assert CONTENT.judge({**loaded, "counts": CONTENT.tensors(1, 0)["counts"]}, 0, STEPS).step is None
    assert CONTENT.judge({name: t for name, t in loaded.items() if name != "counts"}, 0, STEPS).step is None
    loaded["embedding"].view(torch.uint8)[1, 3] ^= 4
    found = CONTENT.judge(loaded, 0, STEPS)
    assert found.step is None
    assert "no step: embedding" in found.detail


def test_contents_differ_and_are_finite() -> None:
    one, two = CONTENT.tensors(1, 0), CONTENT.tensors(2, 0)
    assert {str(tensor.dtype) for tensor in one.values()} == {
        *("torch.bfloat16", "torch.float32", "torch.int64", "torch.uint8")
    }
    for name, tensor in one.items():
        assert not torch.equal(tensor, two[name])
        assert tensor.double().isfinite().all()


SCRIPT = """
import os, sys, threading
here = sys.argv[1]
sys.stdin.readline()
def write(name):
    with open(os.path.join(here, name), "w") as file:
        file.write("x")
write("a")
thread = threading.Thread(target=write, args=("b",))
thread.start(); thread.join()
os.rename(os.path.join(here, "a"), os.path.join(here, "c"))
write("/tmp/elsewhere-" + str(os.getpid())); os.unlink("/tmp/elsewhere-" + str(os.getpid()))
child = os.fork()
if not child:
    write("d"); os._exit(0)
os.waitpid(child, 0)
"""
"""Seven calls in its directory, by two threads and two processes."""
LEFT = {1: set(), 2: {"a"}, 3: {"a"}, 4: {"a", "b"}, 5: {"a", "b"}, 6: {"c", "b"}, 7: {"c", "b", "d"}}
"""What is there before each of them."""


@pytest.mark.parametrize("kill_at", [None, *LEFT])
def test_tracer_kills_before_the_call(kill_at: int | None, tmp_path: Path) -> None:
    here = tmp_path / "here"
    here.mkdir()
    with subprocess.Popen([sys.executable, "-c", SCRIPT, str(here)], stdin=subprocess.PIPE) as process:
        asked = [] if kill_at is None else ["--kill-at", str(kill_at)]
        command = [sys.executable, "-I", tracer.__file__, "--pid", str(process.pid), "--prefix", str(here), *asked]
        with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as watch:
            assert watch.stdout is not None
            if watch.stdout.readline() != "watching\n":
                process.kill()
                pytest.skip("ptrace is forbidden here")
            process.communicate(b"go\n", timeout=150)
            said = json.loads(watch.stdout.readline())
    left = set(os.listdir(here))
    if kill_at is None:
        assert (process.returncode, said, left) == (0, {"calls": 7, "before": None}, {"b", "c", "d"})
    else:
        assert (process.returncode, said["calls"], left) == (-9, kill_at, LEFT[kill_at])


MACHINE = {
    "kind": "machine",
    "cpu": "c",
    "cores": 2,
    "memory_bytes": 1 << 30,
    "kernel": "6",
    "filesystem": "ext4",
    "at": "now",
    "versions": {"torch": "2"},
    "settings": {"command": ["conformance", "--faults", "no fault"]},
}
FULL = {"kind": "trial", "fault": "disk full", "library": "torch.save", "point": "", "detail": ""}


def test_page_counts() -> None:
    lines = [
        MACHINE,
        {**FULL, "said": "done", "found": "before"},
        {**FULL, "said": "error", "found": "wrong"},
        {**FULL, "fault": "no fault", "said": "done", "found": "new"},
        {"kind": "left out", "fault": "disk full", "library": "NVRx local", "why": "is not installed"},
        {"kind": "end", "seconds": 90.0},
    ]
    text = page(lines)
    assert "`python -m benchmarks conformance --faults 'no fault'`" in text
    assert "\n3 trials in 1.5 minutes.\n" in text
    assert text.index("## No fault") < text.index("## Disk full"), "in the order of the suite, whichever ended first"
    assert "| torch.save | 2 | 1 |  |  | 1 |  | 1 |" in text, "the control does not count; one save lied"
    assert "- NVRx local (disk full): is not installed" in text


def test_published_tables_are_those_of_the_published_lines() -> None:
    results = ROOT / "benchmarks" / "results"
    lines = [json.loads(line) for line in (results / "conformance.jsonl").read_text().splitlines()]
    assert (results / "conformance.md").read_text() == page(lines)
    documented = (ROOT / "docs" / "conformance.md").read_text()
    assert "\n".join(tables(lines)) in documented
    trials = [line for line in lines if line["kind"] == "trial"]
    assert {line["library"] for line in trials} == set(LIBRARIES)
    assert {line["fault"] for line in trials} == set(FAULTS)
