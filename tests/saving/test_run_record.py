"""What a job records of itself: bounded, without secrets, and without running anything or waiting for it."""

from __future__ import annotations

import os
import subprocess
import time
from pathlib import Path

import pytest
import torch

import ckptlib
from ckptlib.catalog.catalog import Catalog
from ckptlib.errors import UnsupportedState
from ckptlib.saving import run_record
from ckptlib.saving.run_record import HIDDEN, MAX_CONFIG_BYTES, _argv, encode_config, revision
from ckptlib.stores.local import LocalStore


def git(directory: Path, *arguments: str) -> str:
    identity = ("-c", "user.name=x", "-c", "user.email=x@example.org")
    return subprocess.run(
        ["git", "-C", str(directory), *identity, *arguments], check=True, capture_output=True, text=True
    ).stdout.strip()


@pytest.fixture
def repository(tmp_path: Path) -> Path:
    path = tmp_path / "code"
    path.mkdir()
    git(path, "init", "-q")
    (path / "train.py").write_text("print(1)")
    git(path, "add", ".")
    git(path, "commit", "-qm", "first")
    return path


def test_a_revision(repository: Path, tmp_path: Path) -> None:
    commit = git(repository, "rev-parse", "HEAD")
    assert revision(repository) == {"commit": commit, "dirty": False}
    (repository / "checkpoint.bin").write_text("untracked")
    assert revision(repository) == {"commit": commit, "dirty": False}
    (repository / "train.py").write_text("print(2)")
    assert revision(repository) == {"commit": commit, "dirty": True}
    assert revision(tmp_path) is None, "no repository"
    assert revision(tmp_path / "nothing") is None
    git(repository, "init", "-q", str(tmp_path / "empty"))
    assert revision(tmp_path / "empty") is None, "no commit"


def test_nothing_of_the_repository_is_run(repository: Path, tmp_path: Path) -> None:
    hook = repository / ".git" / "hooks" / "post-index-change"
    for path in (hook, tmp_path / "monitor"):
        path.write_text(f"#!/bin/sh\ntouch {tmp_path}/ran\n")
        path.chmod(0o755)
    git(repository, "config", "core.fsmonitor", str(tmp_path / "monitor"))
    (repository / "train.py").touch()
    before = (repository / ".git" / "index").read_bytes()
    assert revision(repository) is not None
    assert not (tmp_path / "ran").exists()
    assert (repository / ".git" / "index").read_bytes() == before
    git(repository, "status")
    assert (tmp_path / "ran").exists(), "it would have been"


def test_a_git_that_hangs_is_not_waited_for(
    repository: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    slow = tmp_path / "bin" / "git"
    slow.parent.mkdir()
    slow.write_text(f"#!/bin/sh\nsleep 1000 &\necho $! > {tmp_path}/child\nsleep 1000\n")
    slow.chmod(0o755)
    monkeypatch.setenv("PATH", f"{slow.parent}:{os.environ['PATH']}")
    monkeypatch.setattr(run_record, "GIT_S", 0.2)
    told, deadline = tmp_path / "child", time.monotonic() + 150
    while not (told.exists() and told.read_text()):  # a busy machine may end it before it has begun
        began = time.monotonic()
        assert revision(repository) is None
        assert time.monotonic() - began < 150, "it would take 1000 s"
        assert time.monotonic() < deadline
    assert "took longer than" in caplog.text
    child = int(told.read_text())
    while _lives(child):
        assert time.monotonic() < deadline, "its child lives on"
        time.sleep(0.01)
    monkeypatch.setenv("PATH", str(tmp_path))
    assert revision(repository) is None, "no git at all"


def _lives(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().split()[2] != "Z"
    except (FileNotFoundError, ProcessLookupError):  # it went before it was opened, or before it was read
        return False


def test_secrets_are_left_out(caplog: pytest.LogCaptureFixture) -> None:
    config = {
        "lr": 0.1,
        "tokenizer": "gpt2-with-a-long-name",
        "pad_token": "<|endoftext|>",
        "max_tokens": 4096,
        "wandb_api_key": "0123456789abcdef",
        "store": {"secret": "aws/secret/value", "url": "https://me:hunter2@example.org/"},
        "callbacks": ["plain", "hf_" + "a" * 30],
    }
    found = encode_config(config)
    assert found == {
        **config,
        "wandb_api_key": HIDDEN,
        "store": {"secret": HIDDEN, "url": HIDDEN},
        "callbacks": ["plain", HIDDEN],
    }
    warned = "config.wandb_api_key, config.store.secret, config.store.url, config.callbacks[1]: looks like a secret"
    assert warned in caplog.text
    assert "0123456789abcdef" not in caplog.text
    told = _argv(["train.py", "--lr=0.1", "--hf-token=abcdefghij", "--password", "abcdefghij", "--name", "run"])
    assert told == ["train.py", "--lr=0.1", f"--hf-token={HIDDEN}", "--password", HIDDEN, "--name", "run"]


def test_passwords_are_left_out_however_they_look_and_wherever_they_stand() -> None:
    config = {"password": "hunter2", "db": {"password": "correct horse, battery!"}, "hub_token": "a%20token$"}
    words = {"pad_token": "!", "mask_token": "[MASK-OF-A-LONG-NAME]", "api_key": "", "auth_token": True}
    words |= {"n_credentials": 3, "num_secret": 2}
    assert encode_config({**config, **words}) == {
        "password": HIDDEN,
        "db": {"password": HIDDEN},
        "hub_token": HIDDEN,
        **words,
    }
    several = {"password": 12345678, "api_key": ["one", "two"], "credentials": {"user": "me", "phrase": "hunter2"}}
    assert encode_config({"run": several}) == {"run": dict.fromkeys(several, HIDDEN)}
    told = _argv(["--password", "p@ss=word", "--fp16", "wandb.api_key=0123", "lr=0.1", "s3://me:pw@host/?a=b", "a=b"])
    assert told == ["--password", HIDDEN, "--fp16", f"wandb.api_key={HIDDEN}", "lr=0.1", HIDDEN, "a=b"]


def test_what_is_recorded_is_bounded() -> None:
    encode_config({"x": "y" * (MAX_CONFIG_BYTES - 100)})
    with pytest.raises(ValueError, match=r"config= has .* at most 65,536 are recorded"):
        encode_config({"x": "y" * MAX_CONFIG_BYTES})
    with pytest.raises(UnsupportedState, match="config"):
        encode_config({"x": torch.nn.Linear(1, 1)})
    with pytest.raises(TypeError, match="expected a dict"):
        encode_config([1])  # type: ignore[arg-type]
    shown = _argv(["train.py", *["x" * 1000] * 100])
    assert sum(map(len, shown)) < 20_000
    assert shown[-1] == "... and 84 more"


def test_a_job_records_what_it_is_told_to(tmp_path: Path) -> None:
    def record(root: Path, **options: object) -> object:
        with ckptlib.Checkpointer(root, {"w": torch.zeros(3)}, every=1, **options) as ckpt:  # type: ignore[arg-type]
            ckpt.save(1).wait_committed()
        (found,) = Catalog(LocalStore(str(root))).generations.records([])[0].values()
        return found.run if "tags" not in options else found.tags

    assert record(tmp_path / "tags", tags={"hf_token": "0123456789", "name": "a"}) == {"hf_token": HIDDEN, "name": "a"}
    assert record(tmp_path / "none") == {}
    assert record(tmp_path / "config", config={"lr": 0.1, "layers": (1, 2)}) == {
        "config": {"lr": 0.1, "layers": {"$tuple": [1, 2]}}
    }
    both = record(tmp_path / "code", config={}, record_code=True)
    assert isinstance(both, dict)
    assert both["argv"]
    assert both["config"] == {}
