"""What names a root is not its URL alone: it may have several spellings, and options may say which store it is in."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path
from typing import NoReturn

import boto3
import pytest
import torch
from helpers.registry import close_sessions
from helpers.s3 import S3_KEYS, s3_options
from helpers.server_process import ServerProcess, answers, free_ports

import ckptlib
from ckptlib.errors import StoreDenied
from ckptlib.saving import registry as registry_module


@pytest.fixture(autouse=True)
def _closed() -> Iterator[None]:
    yield
    close_sessions()


@pytest.fixture
def mirror(tmp_path: Path) -> Iterator[str]:
    """The endpoint of another server, with a bucket of the same name."""
    (port,), logs = free_ports(1), tmp_path / "moto"
    logs.mkdir()
    command = [sys.executable, "-m", "moto.server", "-H", "127.0.0.1", "-p", str(port)]
    with ServerProcess(command, logs, lambda: answers(port), {}):
        endpoint = f"http://127.0.0.1:{port}"
        boto3.client("s3", endpoint_url=endpoint, region_name="us-east-1", **S3_KEYS).create_bucket(Bucket="bucket")
        yield endpoint


@pytest.mark.slow
def test_a_save_goes_to_the_store_that_its_options_name(s3_endpoint: str, mirror: str) -> None:
    url, here, there = "s3://bucket/two-stores", s3_options(s3_endpoint), s3_options(mirror)
    state = {"w": torch.zeros(3)}

    def steps(options: dict[str, object]) -> list[int]:
        return [info.step for info in ckptlib.checkpoints(url, storage_options=options)]

    for step, options in enumerate([here, there, here, there, there], 1):
        state["w"].fill_(step)
        ckptlib.save(url, state, step, storage_options=options)
    assert (steps(here), steps(there)) == ([1, 3], [2, 4, 5])
    there["endpoint_url"] = s3_endpoint  # the very object that the session was made with
    ckptlib.save(url, state, 6, storage_options=there)
    there["endpoint_url"] = mirror
    assert (steps(here), steps(there)) == ([1, 3, 6], [2, 4, 5])
    for step, options in ((3, here), (5, there)):
        ckptlib.load(url, state, step, storage_options=options)
        assert state["w"].tolist() == [step] * 3


def test_a_step_of_another_store_is_no_origin(s3_endpoint: str, mirror: str) -> None:
    """What was loaded from there hides nothing here."""
    url, here, there = "s3://bucket/no-origin", s3_options(s3_endpoint), s3_options(mirror)
    state = {"w": torch.zeros(3)}
    for step in (1, 2):
        ckptlib.save(url, state, step, storage_options=here)
    ckptlib.save(url, state, 1, storage_options=there)
    close_sessions()
    ckptlib.load(url, state, 1, storage_options=there)
    ckptlib.save(url, state, 3, storage_options=here)
    assert [info.step for info in ckptlib.checkpoints(url, storage_options=here)] == [1, 2, 3]


def test_one_root_by_two_spellings(tmp_path: Path) -> None:
    run, same = str(tmp_path / "run"), f"{tmp_path}/x/../run/"
    state = {"w": torch.zeros(3)}
    for step in (1, 2, 3):
        ckptlib.save(run, state, step)
    ckptlib.load(same, state, 1)
    ckptlib.save(run, state, 4)
    ckptlib.save(same, state, 5)
    ckptlib.save(run, state, 6)
    assert [info.step for info in ckptlib.checkpoints(run)] == [1, 4, 5, 6]


def test_fresh_options_are_no_reason_to_go_back(tmp_path: Path) -> None:
    """A step that was loaded to be looked at hid those behind it, where credentials had changed since; and where the
    first try with them had failed. A directory takes no options, so they may be any."""
    state, looked_at = {"w": torch.zeros(3)}, {"w": torch.zeros(3)}

    def save(step: int, key: str) -> None:
        ckptlib.save(tmp_path, state, step, storage_options={"key": key})

    save(1, "a")
    save(2, "a")
    ckptlib.load(tmp_path, looked_at, 1)
    save(3, "b")
    ckptlib.load(tmp_path, looked_at, 1)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(registry_module, "Session", _denied)
        with pytest.raises(StoreDenied):
            save(4, "wrong")
    save(4, "c")
    assert [info.step for info in ckptlib.checkpoints(tmp_path)] == [1, 2, 3, 4]


def _denied(*given: object) -> NoReturn:
    raise StoreDenied("wrong credentials")
