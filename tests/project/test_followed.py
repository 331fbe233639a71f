"""The documents, typed literally: in an environment that was empty, where an index has the wheel of this tree.

All blocks of a page are typed in their order, in one shell, in a directory of its own; `s3://bucket` is a bucket of a
server here. What is not typed is named below, with the reason.
"""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path

import pytest
import s3fs
from helpers import typed
from helpers.servers import start_seaweedfs
from places import ROOT

STEPS = """
import torch, ckptlib

model = torch.nn.ModuleDict({"h": torch.nn.ModuleList([torch.nn.Linear(8, 8)])})
state = {"model": model, "optim": torch.optim.AdamW(model.parameters())}
keep = ckptlib.Keep(last=100, best="val_loss", mode="min")
with ckptlib.Checkpointer("runs/7", state, every=10**9, keep=keep) as ckpt:
    ckpt.restore()
    for step in (1, 2, 3, 500, 600, 12000):
        ckpt.save(step, metrics={"val_loss": 1 / step}).wait_committed()
"""
SOME_STEPS = f"python - << 'END'\n{STEPS}END\n"
IN_A_BUCKET = SOME_STEPS.replace('"runs/7"', '"s3://bucket/run7"')
LONG_AGO = "find runs -exec touch -d '1 hour ago' {} +\n"
"""Else a rewind asks whether the job still runs."""
TORCH_FILE = """mkdir out
python -c 'import torch; torch.save({"model": torch.nn.Linear(2, 2).state_dict()}, "out/ckpt.pt")'
"""
BUCKET = "pip install -q 'ckptlib[s3]'\n"


@dataclass(frozen=True)
class Page:
    """One that is followed."""

    path: str
    before: str = ""
    """What the page takes for granted, for bash."""
    in_clone: bool = False
    """Typed in a clone; else in an empty directory that has the examples."""
    left_out: Mapping[str, str] = field(default_factory=dict)
    """Why a block, by its first line, or a single other line is not typed."""

    def blocks(self) -> list[typed.Block]:
        """Those that are typed."""
        found = typed.blocks((ROOT / self.path).read_text(encoding="utf-8"))
        lines = {line for block in found for line in block.text.splitlines()}
        assert self.left_out.keys() <= lines, "left out, and not there"
        return [block.without(self.left_out) for block in found if block.first not in self.left_out]


SKETCH = "a part of a program"
LAYOUT = "shows files"
FORMULA = "a formula"
PAGES = [
    Page(
        "README.md",
        in_clone=True,
        left_out={"scripts/test     # the tests": "twenty minutes, and this test is one of them"},
    ),
    Page("docs/quickstart.md", in_clone=True),
    Page(
        "docs/cli.md",
        SOME_STEPS,
        in_clone=True,
        left_out={
            'export CKPTLIB_STORAGE_OPTIONS=\'{"endpoint_url": "https://minio.example:9000"}\'': "no such server",
            "ckptlib plan [URL] [--params COUNT] [--every TIME] [--mtbf TIME] ...": "usage",
            "ckptlib goodput URL": "usage",
            "ckptlib report URL -o report.html": "usage",
            "ckptlib watch URL [--every 5s] [--once]": "usage",
        },
    ),
    Page("docs/before-a-long-run.md", in_clone=True),
    Page("docs/reading.md", SOME_STEPS),
    Page("docs/history.md", SOME_STEPS + LONG_AGO + BUCKET),
    Page("docs/retention.md", SOME_STEPS),
    Page("docs/importing.md", TORCH_FILE + BUCKET),
    Page("docs/inference.md", BUCKET + IN_A_BUCKET),
    Page(
        "docs/goodput.md",
        BUCKET + IN_A_BUCKET,
        left_out={
            "failures: 11, every 7.1 h in the mean": "output",
            "ETTR = (1 - (u0 + dt/2) / MTBF) / (1 + w/dt)": FORMULA,
        },
    ),
    Page("docs/migrating.md"),
    Page("docs/notebooks.md"),
    Page(
        "docs/elastic.md",
        left_out={"torchrun --nnodes 1:4 --nproc-per-node 8 --max-restarts 100 \\": "four hosts; see test_elastic.py"},
    ),
    Page(
        "docs/slurm.md",
        left_out={
            "ROOT=/shared/run7 sbatch examples/slurm/train.sbatch --steps 100000": "Slurm; see test_job_files.py",
            "RANKS_PER_NODE=1 ROOT=/shared/try sbatch --gpus-per-node=0 --time=6 --signal=B:USR1@200 \\": "Slurm",
            "time is nearly up: the ranks save": "output",
        },
    ),
    Page(
        "docs/kubernetes.md",
        "pip install -q kubernetes-validate && kubernetes-validate --strict examples/kubernetes/job.yaml\n",
        left_out={"kubectl apply -f examples/kubernetes/job.yaml": "a cluster; see above, and test_job_files.py"},
    ),
    Page("docs/local-tier.md"),
    Page("docs/data.md", left_out={"step = ckpt.restore().step": SKETCH}),
    Page("docs/peers.md", left_out={"ckptlib.Checkpointer(": SKETCH}),
    Page("docs/policy.md", left_out={"k = max(ceil((T_f - o) / T_i), ceil(o / (p T_i)), 1)": FORMULA}),
    Page(
        "docs/events.md",
        "pip install -q wandb tensorboard prometheus-client opentelemetry-sdk\n",  # as the page says
    ),
    Page("docs/codecs.md"),
    Page("docs/object-storage.md"),
    Page("docs/obstore.md"),
    Page(
        "docs/dcp.md",
        left_out={'future = dcp.async_save(state, checkpoint_id=f"{directory}/step-200", overlap=optim)': SKETCH},
    ),
    Page("docs/lightning.md"),
    Page("docs/huggingface.md", left_out={"out/checkpoint-500/trainer_state.json    as ever": LAYOUT}),
    Page("docs/torchtitan.md"),
    Page("docs/more-frameworks.md", left_out={"def report(url, step, loss):": SKETCH}),
]
NO_GUIDES = {
    *("accelerators", "api", "architecture", "comparison", "conformance", "features", "how-it-works", "limits"),
    "troubleshooting",
}
"""Pages that tell, and have nothing to follow."""


@dataclass(frozen=True)
class Reader:
    """With a clone, and an environment that has nothing."""

    home: Path
    environment: Mapping[str, str]

    def directory(self, page: Page) -> Path:
        directory = self.home / "pages" / Path(page.path).stem
        directory.parent.mkdir(exist_ok=True)
        if page.in_clone:
            shutil.copytree(self.home / "clone", directory)
        else:
            directory.mkdir()
            (directory / "examples").symlink_to(self.home / "clone" / "examples")
        return directory

    def types(self, commands: str, directory: Path, limit_s: float) -> str:
        command = ["bash", "-c", commands]
        with subprocess.Popen(
            command,
            cwd=directory,
            env=dict(self.environment),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            start_new_session=True,
        ) as shell:
            try:
                output, _ = shell.communicate(timeout=limit_s)
            finally:
                if shell.poll() is None:
                    os.killpg(shell.pid, signal.SIGKILL)
        assert shell.returncode == 0, output[-6000:]
        return output


@pytest.fixture(scope="module")
def reader(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Reader]:
    home = tmp_path_factory.mktemp("reader")
    clone = home / "clone"
    listed = subprocess.run(
        ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"],
        cwd=ROOT,
        capture_output=True,
        check=True,
    )
    for name in filter(None, listed.stdout.decode().split("\0")):
        if (ROOT / name).is_file():
            (clone / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(ROOT / name, clone / name)
    build = [sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-d", str(home / "index")]
    subprocess.run(build, cwd=clone, check=True, capture_output=True, timeout=120)
    subprocess.run(["python3", "-m", "venv", home / "empty"], check=True, timeout=120)
    kept = ("PIP_", "SSL_", "REQUESTS_", "LANG", "http_proxy", "https_proxy", "no_proxy")
    environment = {name: value for name, value in os.environ.items() if name.startswith(kept)}
    environment |= {"HOME": str(home), "TERM": "dumb", "OMP_NUM_THREADS": "1"}
    environment["PATH"] = f"{home / 'empty' / 'bin'}:/usr/local/bin:/usr/bin:/bin:/usr/sbin:/sbin"
    environment["PIP_CONSTRAINT"] = str(ROOT / "constraints.txt")
    environment["PIP_FIND_LINKS"] = f"{home / 'index'} {environment.get('PIP_FIND_LINKS', '')}".strip()
    with start_seaweedfs(home) as storage:
        names = {"key": "AWS_ACCESS_KEY_ID", "secret": "AWS_SECRET_ACCESS_KEY"}
        environment |= {names[name]: value for name, value in storage.secrets.items()}
        environment |= {"AWS_ENDPOINT_URL": storage.endpoint, "AWS_DEFAULT_REGION": "us-east-1"}
        s3fs.S3FileSystem(**storage.secrets, endpoint_url=storage.endpoint).mkdir("bucket")
        found = Reader(home, environment)
        found.types("pip install -q 'ckptlib[cli]'", home, 600)
        yield found


@pytest.mark.slow
@pytest.mark.timeout(1300)
@pytest.mark.parametrize("page", [pytest.param(page, id=Path(page.path).stem) for page in PAGES])
def test_followed(reader: Reader, page: Page) -> None:
    reader.types(page.before + typed.script(page.blocks()), reader.directory(page), 1200)


def test_what_is_left_out_is_there() -> None:
    for page in PAGES:
        page.blocks()  # asserts it


def test_no_guide_is_missing() -> None:
    guides = {path.stem for path in (ROOT / "docs").glob("*.md")} - NO_GUIDES
    assert guides == {Path(page.path).stem for page in PAGES} - {"README"}
