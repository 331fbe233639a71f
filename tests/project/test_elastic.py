"""docs/elastic.md: a node that is told to leave, and another one that takes its place, cost no step."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from helpers.server_process import free_ports
from places import ROOT

import ckptlib

LIMIT_S = 120
SMALL = ["--steps=1000000", "--every=1000000", "--layers=1", "--width=32", "--heads=2", "--context=32", "--batch=4"]

Start = Callable[[str, bool], "subprocess.Popen[bytes]"]


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Start]:
    """Starts a torchrun of one rank; whether it keeps the store of the rendezvous is the second argument."""
    port = free_ports(1)[0]
    outer = re.compile("RANK|WORLD_SIZE|LOCAL_|MASTER_|TORCHELASTIC_")
    kept = {name: value for name, value in os.environ.items() if not outer.match(name)}
    environment = kept | {"OMP_NUM_THREADS": "1", "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"}
    nodes = []

    def begin(name: str, keeps_store: bool) -> subprocess.Popen[bytes]:
        rendezvous = ["--rdzv-backend=c10d", f"--rdzv-endpoint=localhost:{port}", f"--rdzv-conf=is_host={keeps_store}"]
        launcher = ["-m", "torch.distributed.run", "--nnodes=2", "--nproc-per-node=1", "--max-restarts=5", *rendezvous]
        program = [ROOT / "examples" / "train_gpt.py", f"--root={tmp_path / 'root'}", f"--losses={tmp_path / 'losses'}"]
        with open(tmp_path / f"{name}.log", "w") as log:
            command = [sys.executable, *launcher, *program, *SMALL]
            nodes.append(subprocess.Popen(command, env=environment, stdout=log, stderr=log, start_new_session=True))
        return nodes[-1]

    yield begin
    for node in nodes:
        if node.poll() is None:
            os.killpg(node.pid, signal.SIGKILL)
            node.wait()


def steps(directory: Path) -> list[int]:
    """Done, by the losses that the first rank told."""
    losses = directory / "losses"
    return [json.loads(line)["step"] for line in losses.read_text().splitlines()] if losses.exists() else []


def await_steps(directory: Path, number: int) -> None:
    end = time.monotonic() + LIMIT_S
    while len(steps(directory)) < number:
        logs = "\n".join(path.read_text() for path in sorted(directory.glob("*.log")))
        assert time.monotonic() < end, logs
        time.sleep(0.1)


@pytest.mark.slow
@pytest.mark.timeout(400)
def test_a_node_is_replaced(tmp_path: Path, start: Start) -> None:
    stays, leaves = start("stays", True), start("leaves", False)
    await_steps(tmp_path, 5)
    leaves.send_signal(signal.SIGTERM)
    assert leaves.wait(LIMIT_S) == 1
    reached = len(steps(tmp_path))
    assert [info.step for info in ckptlib.checkpoints(tmp_path / "root")] == [reached]

    comes = start("comes", False)
    await_steps(tmp_path, reached + 5)
    for node in (stays, comes):
        node.send_signal(signal.SIGTERM)
    for node in (stays, comes):
        assert node.wait(LIMIT_S) == 1
    done = steps(tmp_path)
    assert done == list(range(len(done)))
    assert [info.step for info in ckptlib.checkpoints(tmp_path / "root")] == [reached, len(done)]
