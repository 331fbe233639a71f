"""The files for Slurm and Kubernetes: parsed, and their commands run with stand-ins for what no test machine has.

The ranks, torchrun and the saves are real.
"""

from __future__ import annotations

import os
import re
import secrets
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import pytest
import yaml
from helpers.server_process import free_ports
from places import ROOT

import ckptlib

BATCH = ROOT / "examples" / "slurm" / "train.sbatch"
JOB = ROOT / "examples" / "kubernetes" / "job.yaml"
SMALL = ["--every", "1000000", "--layers", "1", "--width", "32", "--heads", "2", "--context", "32", "--batch", "4"]
ENDLESS = 10**6
LIMIT_S = 150
"""That only bounds a failure."""

# As Slurm's, as far as the script uses them: srun becomes what it starts, and scancel signals that.
STANDINS = {
    "torchrun": f'exec {sys.executable} -m torch.distributed.run "$@"',
    "srun": '[[ $1 == --kill-on-bad-exit=1 ]] && shift; echo $$ > "$NOTES/step"; exec "$@"',
    "scancel": '[[ $* == "--signal=TERM 77" ]] && kill -TERM "$(< "$NOTES/step")"',
    "scontrol": """case $* in
        "show hostnames nodes[1-2]") printf 'localhost\\nnode2\\n' ;;
        "requeue 77") echo 77 >> "$NOTES/requeued" ;;
        *) exit 1 ;;
    esac""",
}


@pytest.fixture
def environment(tmp_path: Path) -> dict[str, str]:
    """With the stand-ins first on the path, and no trace of ranks or jobs outside."""
    commands = tmp_path / "commands"
    commands.mkdir()
    for name, script in STANDINS.items():
        (commands / name).write_text(f"#!/usr/bin/env bash\n{script}\n")
        (commands / name).chmod(0o755)
    outer = re.compile("SLURM_|RANK|WORLD_SIZE|LOCAL_|MASTER_|TORCHELASTIC_")
    kept = {name: value for name, value in os.environ.items() if not outer.match(name)}
    return kept | {"PATH": f"{commands}:{os.environ['PATH']}", "NOTES": str(tmp_path), "OMP_NUM_THREADS": "1"}


class Batch:
    """The batch script, as Slurm starts it on one node with two ranks."""

    def __init__(self, directory: Path, environment: dict[str, str]) -> None:
        self.directory, self.environment = directory, environment
        self.losses = directory / "losses"

    @contextmanager
    def start(self, steps: int, restarts: int = 0) -> Iterator[subprocess.Popen[str]]:
        given = {"SLURM_JOB_ID": "77", "SLURM_JOB_NAME": "train", "SLURM_JOB_NODELIST": "nodes[1-2]"}
        given |= {"SLURM_JOB_NUM_NODES": "1", "SLURM_RESTART_COUNT": str(restarts), "PORT": str(free_ports(1)[0])}
        given |= {"RANKS_PER_NODE": "2", "ROOT": str(self.directory / "root")}
        flags = ["--steps", str(steps), "--losses", str(self.losses), *SMALL]
        command = ["bash", str(BATCH), *flags]
        with open(self.directory / "output", "a") as output:
            job = subprocess.Popen(
                command, cwd=ROOT, env=self.environment | given, stdout=output, stderr=output, start_new_session=True
            )
        try:
            yield job
        finally:
            if job.poll() is None:
                os.killpg(job.pid, signal.SIGKILL)
                job.wait()

    def output(self) -> str:
        return (self.directory / "output").read_text()

    def done(self) -> int:
        """Steps, by the losses that the first rank told."""
        return len(self.losses.read_text().splitlines()) if self.losses.exists() else 0

    def await_steps(self, job: subprocess.Popen[str], number: int) -> None:
        end = time.monotonic() + LIMIT_S
        while self.done() < number:
            assert job.poll() is None, self.output()
            assert time.monotonic() < end, self.output()
            time.sleep(0.05)

    def saved(self) -> list[int]:
        return [info.step for info in ckptlib.checkpoints(self.directory / "root")]

    @property
    def requeued(self) -> bool:
        return (self.directory / "requeued").exists()


@pytest.fixture
def batch(tmp_path: Path, environment: dict[str, str]) -> Batch:
    return Batch(tmp_path, environment)


@pytest.mark.timeout(450)
def test_a_batch_job_saves_before_its_limit_and_goes_on_after(batch: Batch) -> None:
    with batch.start(ENDLESS) as job:
        batch.await_steps(job, 5)
        job.send_signal(signal.SIGUSR1)
        assert job.wait(LIMIT_S) != 0, batch.output()
    reached = batch.done()
    assert batch.saved() == [reached], batch.output()
    assert batch.requeued
    (batch.directory / "requeued").unlink()

    with batch.start(reached + 3, restarts=1) as job:
        assert job.wait(LIMIT_S) == 0, batch.output()
    assert batch.saved() == [reached, reached + 3]
    assert batch.done() == reached + 3  # no step was done twice
    assert not batch.requeued


@pytest.mark.timeout(300)
@pytest.mark.slow
def test_a_cancelled_batch_job_saves_and_stays_away(batch: Batch) -> None:
    with batch.start(ENDLESS) as job:
        batch.await_steps(job, 5)
        step = int((batch.directory / "step").read_text())
        for process in (job.pid, step):  # as scancel does: the script, and its steps
            os.kill(process, signal.SIGTERM)
        assert job.wait(LIMIT_S) != 0, batch.output()
    assert batch.saved() == [batch.done()], batch.output()
    assert not batch.requeued


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_a_batch_job_that_fails_is_not_started_for_ever(batch: Batch) -> None:
    (batch.directory / "root").write_text("no directory")
    with batch.start(5) as job:
        assert job.wait(LIMIT_S) not in (0, 75), batch.output()
    assert not batch.requeued


def container(document: dict[str, Any]) -> dict[str, Any]:
    (found,) = document["spec"]["template"]["spec"]["containers"]
    return found


@pytest.fixture(scope="module")
def manifest() -> dict[str, dict[str, Any]]:
    """By kind."""
    return {document["kind"]: document for document in yaml.safe_load_all(JOB.read_text())}


def test_the_manifest_holds_together(manifest: dict[str, dict[str, Any]]) -> None:
    service, job = manifest["Service"], manifest["Job"]
    spec, pod = job["spec"], job["spec"]["template"]["spec"]
    assert pod["subdomain"] == service["metadata"]["name"]
    assert service["spec"]["selector"] == {"job-name": job["metadata"]["name"]}
    assert spec["podFailurePolicy"]["rules"]
    assert pod["restartPolicy"] == "Never"  # that policy wants it

    main = container(job)
    args = dict(arg.removeprefix("--").split("=") for arg in main["args"] if arg.startswith("--"))
    assert int(args["nnodes"]) == spec["completions"] == spec["parallelism"]
    assert args["rdzv-endpoint"].startswith(f"{job['metadata']['name']}-0.{pod['subdomain']}:")
    assert int(args["nproc-per-node"]) == main["resources"]["limits"]["nvidia.com/gpu"]

    variables = {variable["name"]: variable["value"] for variable in main["env"]}
    assert int(variables["TORCH_ELASTIC_SHUTDOWN_TIMEOUT"]) < pod["terminationGracePeriodSeconds"]

    volumes = {volume["name"]: volume for volume in pod["volumes"]}
    mounts = {mount["mountPath"]: volumes[mount["name"]] for mount in main["volumeMounts"]}
    assert mounts["/dev/shm"]["emptyDir"]["medium"] == "Memory"
    assert any(args["root"].startswith(path) for path in mounts)


@pytest.mark.timeout(300)
@pytest.mark.slow
def test_the_manifests_command_trains(
    tmp_path: Path, environment: dict[str, str], manifest: dict[str, dict[str, Any]]
) -> None:
    main = container(manifest["Job"])
    here = {
        "--nnodes=2": "--nnodes=1",
        "--nproc-per-node=8": "--nproc-per-node=2",
        "--rdzv-endpoint=train-0.train:29500": f"--rdzv-endpoint=localhost:{free_ports(1)[0]}",
        "--root=/checkpoints/train": f"--root={tmp_path / 'root'}",
    }
    assert set(here) <= set(main["args"])
    command = [*main["command"], *(here.get(arg, arg) for arg in main["args"]), "--steps", "3", *SMALL]
    variables = {variable["name"]: variable["value"] for variable in main["env"]}
    done = subprocess.run(
        command, cwd=ROOT, env=environment | variables, capture_output=True, text=True, timeout=LIMIT_S
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert [info.step for info in ckptlib.checkpoints(tmp_path / "root")] == [3]


# Says that it is there, and that it was told; ends when it may. Without handlers SIGUSR1 kills, as it does torchrun.
RANK = """
import pathlib, signal, sys, time
here = pathlib.Path(sys.argv[1])
signal.signal(signal.SIGUSR1, lambda *args: (here / "told").touch())
(here / "ready").touch()
while not ((here / "told").exists() and (here / "go").exists()):
    time.sleep(0.01)
sys.exit(75)
"""
LAUNCHER = "import pathlib, sys, time; pathlib.Path(sys.argv[1]).touch(); time.sleep(1000)"


@pytest.mark.skipif(shutil.which("pkill") is None, reason="there is no pkill")
def test_the_hook_before_sigterm_tells_the_ranks_alone_and_waits_for_them(tmp_path: Path) -> None:
    """Under an entry point that is a shell, and beside a launcher that has the program's name among its arguments."""
    page = (ROOT / "docs" / "kubernetes.md").read_text()
    [block] = [text for text in re.findall(r"^```yaml\n(.*?)^```$", page, re.M | re.S) if "preStop" in text]
    shown = yaml.safe_load(block)["lifecycle"]["preStop"]["exec"]["command"]
    name = f"train_{secrets.token_hex(8)}"  # nobody else's is to be told
    program = tmp_path / f"{name}.py"
    program.write_text(RANK)
    hook = [part.replace("train", name) for part in shown]
    assert hook != shown

    def exists(file: str) -> None:
        end = time.monotonic() + LIMIT_S
        while not (tmp_path / file).exists():
            assert time.monotonic() < end, file
            time.sleep(0.01)

    with ExitStack() as started:

        def start(*command: str) -> subprocess.Popen[bytes]:
            process = started.enter_context(subprocess.Popen(command))
            started.callback(process.kill)
            return process

        launcher = start(sys.executable, "-c", LAUNCHER, str(tmp_path / "launched"), f"{name}.py")
        entry = start("sh", "-c", f"{sys.executable} -u {program} {tmp_path}; exit $?")
        exists("launched")
        exists("ready")
        waits = start(*hook)
        exists("told")
        assert waits.poll() is None
        (tmp_path / "go").touch()
        assert waits.wait(LIMIT_S) == 0
        assert entry.wait(LIMIT_S) == 75
        assert launcher.poll() is None


BLOCKS = [
    pytest.param(language, text, id=f"{path.stem}-{number}")
    for path in sorted((ROOT / "docs").glob("*.md"))
    for number, (language, text) in enumerate(re.findall(r"^```(bash|yaml)\n(.*?)^```$", path.read_text(), re.M | re.S))
]


@pytest.mark.parametrize(("language", "text"), [*BLOCKS, pytest.param("bash", BATCH.read_text(), id="train.sbatch")])
def test_what_is_shown_can_be_parsed(language: str, text: str) -> None:
    if language == "yaml":
        assert yaml.safe_load(text)
    else:
        done = subprocess.run(["bash", "-n"], input=text, capture_output=True, text=True, timeout=30)
        assert done.returncode == 0, done.stderr
