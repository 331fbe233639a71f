"""Loops with Lightning's Fabric, killed and resumed: on a disk, in a bucket, on two ranks."""

from __future__ import annotations

import os
import subprocess
import sys
import uuid
from pathlib import Path
from typing import Any

import fabric_job
import pytest
import torch
from helpers.registry import close_sessions
from helpers.servers import ObjectStorage
from launch import environment, fork_one
from places import ROOT, WORKERS

import ckptlib


def train(directory: str, out: Path, *, killed_at: int = -1, devices: int = 1, **variables: str) -> dict[str, Any]:
    """Empty where it was killed."""
    command = [sys.executable, WORKERS / "fabric_job.py", directory, 14, killed_at, out, devices]
    variables |= {**environment(), "PYTHONPATH": os.pathsep.join([str(ROOT), environment()["PYTHONPATH"]])}
    done = subprocess.run([*map(str, command)], env=variables, capture_output=True, text=True, timeout=200)
    assert (done.returncode == 0) == (killed_at < 0), done.stdout + done.stderr
    return torch.load(out, weights_only=True) if killed_at < 0 else {}


def end_of(directory: Path, devices: int) -> dict[str, Any]:
    """Of a run that nobody kills; on one device in this process, which has imported Lightning."""
    out = directory.with_suffix(".pt")
    if devices > 1:
        return train(str(directory), out, devices=devices)
    try:
        fabric_job.main(str(directory), 14, -1, str(out), devices)
    finally:
        close_sessions()
    return torch.load(out, weights_only=True)


def assert_same(first: dict[str, Any], second: dict[str, Any]) -> None:
    assert first["step"] == second["step"] == 14
    assert first["model"].keys() == second["model"].keys()
    assert all(torch.equal(tensor, second["model"][name]) for name, tensor in first["model"].items())


def kill(directory: Path, devices: int) -> None:
    """One process is forked; several are started by Fabric, which runs the program's file again."""
    out = directory.with_suffix(".pt")
    if devices > 1:
        train(str(directory), out, killed_at=11, devices=devices)
        return
    given, log = (directory, 14, 11, out, devices), directory.with_suffix(".log")
    assert fork_one(WORKERS / "fabric_job.py", *given, log=log, timeout_s=200) == -9, log.read_text()


@pytest.mark.timeout(400)
@pytest.mark.parametrize("devices", [1, pytest.param(2, marks=pytest.mark.slow)])
def test_killed_and_resumed_in_mid_epoch(tmp_path: Path, devices: int) -> None:
    whole = end_of(tmp_path / "whole", devices)
    kill(tmp_path / "parted", devices)
    assert ckptlib.read(tmp_path / "parted" / "ckptlib", only="checkpoint/step")["checkpoint"]["step"] == 9
    assert_same(whole, end_of(tmp_path / "parted", devices))


@pytest.mark.slow
@pytest.mark.timeout(400)
def test_in_a_bucket(tmp_path: Path, s3: ObjectStorage) -> None:
    """Lightning and ckptlib find server and keys in the environment, as they would on AWS."""
    secrets = {"AWS_ACCESS_KEY_ID": str(s3.secrets["key"]), "AWS_SECRET_ACCESS_KEY": str(s3.secrets["secret"])}
    variables = {**secrets, "AWS_ENDPOINT_URL": s3.endpoint, "AWS_DEFAULT_REGION": "us-east-1"}
    url = f"s3://{s3.bucket}/{uuid.uuid4().hex}"
    whole = train(str(tmp_path / "whole"), tmp_path / "whole.pt")
    train(url, tmp_path / "parted.pt", killed_at=11, **variables)
    assert_same(whole, train(url, tmp_path / "parted.pt", **variables))
