"""The examples do what they say: a run that was stopped or killed ends with the bits of one that was not."""

from __future__ import annotations

import argparse
import json
import os
import re
import runpy
import subprocess
import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace
from urllib.parse import quote

import pytest
import torch
import train_gpt
from helpers.same import same
from launch import forked
from places import ROOT

import ckptlib
from ckptlib.errors import EXIT_PREEMPTED
from ckptlib.stores.testing import write_plan

EXAMPLES = ROOT / "examples"
STEPS = 12
BATCH = 4
STOP_AT = 5
"""The step in whose body the last rank is told to stop."""

# The trainer as it is, but for one rank that gets a SIGTERM in the middle of a certain step.
STOPPED = f"""
import itertools, os, signal, sys
sys.path.insert(0, {str(EXAMPLES)!r})
import train_gpt

forward, steps = train_gpt.GPT.forward, itertools.count()

def stopped(self, x, y):
    last = int(os.environ.get("RANK", 0)) == int(os.environ.get("WORLD_SIZE", 1)) - 1
    if next(steps) == {STOP_AT} and last:
        os.kill(os.getpid(), signal.SIGTERM)
    return forward(self, x, y)

train_gpt.GPT.forward = stopped
train_gpt.main()
"""


class Run:
    """One training job with a directory of its own, started any number of times."""

    def __init__(self, directory: Path) -> None:
        directory.mkdir()
        self.root, self.losses_file, self.final_file = (directory / name for name in ("root", "losses", "final"))

    def fork(self, ranks: int, parallel: str, script: Path = EXAMPLES / "train_gpt.py", status: int = 0) -> str:
        """Returns what it printed. The demo starts it as a person does, by torchrun."""
        codes, output = forked(script, ranks, *self.flags(parallel), timeout_s=100)
        assert codes == [status] * ranks, output
        return output

    def flags(self, parallel: str) -> list[str]:
        sizes = f"--steps {STEPS} --every 3 --layers 1 --width 32 --heads 2 --context 32 --batch {BATCH}".split()
        files = [f"--root={self.root}", f"--losses={self.losses_file}", f"--final={self.final_file}"]
        return ["--parallel", parallel, *sizes, *files]

    def losses(self) -> list[tuple[int, str]]:
        lines = [json.loads(line) for line in self.losses_file.read_text().splitlines()]
        return [(line["step"], line["loss"]) for line in lines]

    def final(self) -> dict[str, object]:
        found: dict[str, object] = json.loads(self.final_file.read_text())
        return found


def environment() -> dict[str, str]:
    outer = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
    return {name: value for name, value in os.environ.items() if name not in outer} | {"OMP_NUM_THREADS": "1"}


@pytest.fixture
def stopped(tmp_path: Path) -> Path:
    script = tmp_path / "stopped.py"
    script.write_text(STOPPED)
    return script


@pytest.mark.timeout(240)
@pytest.mark.parametrize(("ranks", "parallel"), [pytest.param(1, "none", marks=pytest.mark.slow), (2, "ddp")])
def test_stopped_run_goes_on_as_if_nothing_had_happened(
    tmp_path: Path, stopped: Path, ranks: int, parallel: str
) -> None:
    whole, parted = Run(tmp_path / "whole"), Run(tmp_path / "parted")
    whole.fork(ranks, parallel)

    assert "run the same command again" in parted.fork(ranks, parallel, stopped, EXIT_PREEMPTED)
    reached = len(parted.losses())
    assert STOP_AT < reached < STEPS
    assert not parted.final_file.exists()
    parted.fork(ranks, parallel)

    assert whole.losses() == parted.losses()  # the stop was saved: no step was repeated
    assert [step for step, _ in whole.losses()] == list(range(STEPS))
    assert whole.final() == parted.final()


@pytest.mark.timeout(240)
def test_another_number_of_ranks_goes_on_with_the_same_data(tmp_path: Path, stopped: Path) -> None:
    run = Run(tmp_path / "run")
    run.fork(2, "fsdp", stopped, EXIT_PREEMPTED)
    assert len(run.losses()) < STEPS
    run.fork(1, "none")
    assert [step for step, _ in run.losses()] == list(range(STEPS))
    (place,) = run.final()["place in the data"]  # type: ignore[misc]
    assert (place["epoch"], place["consumed"]) == (0, STEPS * BATCH)


@pytest.mark.timeout(240)
def test_demo() -> None:
    """It compares by itself; every difference makes it fail."""
    command = [sys.executable, EXAMPLES / "demo.py", "--quick"]
    done = subprocess.run(command, env=environment(), capture_output=True, text=True, timeout=200)
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.parametrize(("gpus", "ranks", "device"), [(0, 1, "cpu"), (1, 1, "cuda"), (1, 2, "cpu"), (2, 2, "cuda")])
def test_ranks_train_on_gpus_where_each_has_one(
    monkeypatch: pytest.MonkeyPatch, gpus: int, ranks: int, device: str
) -> None:
    chosen: list[torch.device] = []
    monkeypatch.setenv("LOCAL_WORLD_SIZE", str(ranks))
    monkeypatch.setenv("LOCAL_RANK", str(ranks - 1))
    monkeypatch.setattr(torch.cuda, "is_available", lambda: gpus > 0)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: gpus)
    monkeypatch.setattr(torch.cuda, "set_device", chosen.append)
    for changed in (torch.use_deterministic_algorithms, torch.set_num_threads):
        monkeypatch.setattr(torch, changed.__name__, lambda value: None)
    *_, found = train_gpt.set_up(argparse.Namespace(parallel="none"))
    assert found.type == device
    assert chosen == ([torch.device("cuda", ranks - 1)] if device == "cuda" else [])


def launcher(ranks: int) -> list[str]:
    """Arguments of Python before those of a script."""
    return ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks)] if ranks > 1 else []


def run_whole_and_parted(tmp_path: Path, example: Path, killing: str, ranks: int = 1) -> None:
    """One run of 12 steps that nobody disturbs, and one that `killing` ends, which goes on."""
    script = tmp_path / "killed.py"
    script.write_text(killing)
    killed = -9 if ranks == 1 else 1  # torchrun's own
    for name, what, status in (("whole", example, 0), ("parted", script, killed), ("parted", example, 0)):
        (tmp_path / name).mkdir(exist_ok=True)
        command = [sys.executable, *launcher(ranks), what, tmp_path / name, "12"]
        variables = {**environment(), "PYTHONPATH": str(ROOT)}
        done = subprocess.run([*map(str, command)], env=variables, capture_output=True, text=True, timeout=200)
        assert done.returncode == status, done.stdout + done.stderr


# The script as it is, but for a SIGKILL in the middle of a certain step.
KILLED = f"""
import itertools, os, runpy, signal, sys
from transformers import Trainer

step, steps = Trainer.training_step, itertools.count()

def killed(self, *args, **kwargs):
    if next(steps) == 8:
        os.kill(os.getpid(), signal.SIGKILL)
    return step(self, *args, **kwargs)

Trainer.training_step = killed
runpy.run_path({str(EXAMPLES / "hf_trainer.py")!r}, run_name="__main__")
"""


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_trainer_is_killed_and_goes_on(tmp_path: Path) -> None:
    pytest.importorskip("transformers", reason="transformers is not installed: it needs Python 3.11")
    run_whole_and_parted(tmp_path, EXAMPLES / "hf_trainer.py", KILLED)
    for name in ("final", "checkpoint-12"):
        assert (tmp_path / "parted" / name).is_dir()
    weights = [(tmp_path / name / "final" / "model.safetensors").read_bytes() for name in ("whole", "parted")]
    assert weights[0] == weights[1]


KILLED_LIGHTNING = f"""
import itertools, os, runpy, signal
from ckptlib.adapters.lightning import CkptlibCallback

end, steps = CkptlibCallback.on_train_batch_end, itertools.count()

def killed(self, *args, **kwargs):
    if next(steps) == 8:
        os.kill(os.getpid(), signal.SIGKILL)
    return end(self, *args, **kwargs)

CkptlibCallback.on_train_batch_end = killed
runpy.run_path({str(EXAMPLES / "lightning_trainer.py")!r}, run_name="__main__")
"""


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("ranks", [1, 2])
def test_lightning_is_killed_and_goes_on(tmp_path: Path, ranks: int) -> None:
    run_whole_and_parted(tmp_path, EXAMPLES / "lightning_trainer.py", KILLED_LIGHTNING, ranks)
    weights = [torch.load(tmp_path / name / "final.pt", weights_only=True) for name in ("whole", "parted")]
    assert same(*weights)


@pytest.mark.parametrize("example", ["ray_train.py", "torchft_train.py", "nvrx_train.py"])
def test_the_lines_for_ckptlib_are_those_of_the_table(example: str) -> None:
    page = (ROOT / "docs" / "more-frameworks.md").read_text()
    (section,) = [
        section for section in page.split("\n## ") if f"[examples/{example}]" in section and "before" in section
    ]
    told = re.findall(r"^\|[^|]*\|[^|]*\| `(.+)` \|$", section, re.M)
    assert told == re.findall(r"^ *(\S.*?)  # ckpt", (EXAMPLES / example).read_text(), re.M)


def test_a_worker_of_rays_outlives_a_save_that_fails(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Ray's part is played here: it has one worker. The first save meets a full disk."""
    reported = []

    def report(metrics: dict[str, float], checkpoint: str) -> None:
        reported.append((metrics["step"], checkpoint))

    ray, train, torchs = (ModuleType(name) for name in ("ray", "ray.train", "ray.train.torch"))
    ray.train, train.torch, train.report = train, torchs, report  # type: ignore[attr-defined]
    train.get_context = lambda: SimpleNamespace(get_world_rank=lambda: 0)  # type: ignore[attr-defined]
    train.Checkpoint = SimpleNamespace(  # type: ignore[attr-defined]
        from_directory=lambda directory: Path(directory, "ckptlib.txt").read_text()
    )
    torchs.prepare_model = lambda model: model  # type: ignore[attr-defined]
    for module in (ray, train, torchs):
        monkeypatch.setitem(sys.modules, module.__name__, module)
    plan = tmp_path / "plan.json"
    write_plan(plan, [{"op": "commit", "key": "^packs/000000000005-", "action": "full"}])
    made = ckptlib.Checkpointer
    monkeypatch.setattr(
        ckptlib,
        "Checkpointer",
        lambda url, *args, **kwargs: made(f"fault+file://{url}?plan={quote(str(plan))}", *args, **kwargs),
    )
    runpy.run_path(str(EXAMPLES / "ray_train.py"))["train"]({"out": str(tmp_path), "steps": 20})
    assert reported == [(step, f"{tmp_path}/ckptlib {step}\n") for step in (10, 15, 20)]
    assert [info.step for info in ckptlib.checkpoints(tmp_path / "ckptlib")] == [10, 15, 20]


# Any loop with AdamW, but for a SIGKILL of all ranks in the ninth step, once a checkpoint is there.
KILLED_LOOP = """
import itertools, os, runpy, signal, sys, time
from pathlib import Path
import torch

step, steps = torch.optim.AdamW.step, itertools.count()

def killed(self, *args, **kwargs):
    if next(steps) == 8:
        deadline = time.monotonic() + 100
        while not Path(sys.argv[1], {checkpoint!r}).exists() and time.monotonic() < deadline:
            time.sleep(0.05)
        os.kill(os.getpid(), signal.SIGKILL)
    return step(self, *args, **kwargs)

torch.optim.AdamW.step = killed
runpy.run_path({example!r}, run_name="__main__")
"""


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.parametrize(
    ("package", "name", "checkpoint"),
    [
        ("accelerate", "accelerate_train.py", "checkpoints/checkpoint_0"),
        ("lightning", "fabric_train.py", "last.ckpt"),
    ],
)
def test_loop_is_killed_and_goes_on_within_the_epoch(
    tmp_path: Path, package: str, name: str, checkpoint: str, ranks: int
) -> None:
    pytest.importorskip(package)
    example, killed = EXAMPLES / name, tmp_path / "killed.py"
    killed.write_text(KILLED_LOOP.format(checkpoint=checkpoint, example=str(example)))
    told = []
    for script, directory in ((example, "whole"), (killed, "parted"), (example, "parted")):
        (tmp_path / directory).mkdir(exist_ok=True)
        command = [sys.executable, *launcher(ranks), script, tmp_path / directory, "12"]
        variables = {**environment(), "PYTHONPATH": str(ROOT)}
        done = subprocess.run([*map(str, command)], env=variables, capture_output=True, text=True, timeout=180)
        assert (done.returncode == 0) == (script == example), done.stdout + done.stderr
        told += [line for line in done.stdout.splitlines() if line.startswith("from step ")]
    assert told[0] == "from step 0"
    assert told[-1] == "from step 5"
    whole, parted = (torch.load(tmp_path / which / "final.pt", weights_only=True) for which in ("whole", "parted"))
    assert same(whole, parted)
