"""What `save` and `load` keep for a process group goes with it: a process may make another one, time and again."""

from __future__ import annotations

import gc
import os
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path
from urllib.parse import quote

import pytest
import torch
import torch.distributed as dist
from helpers.registry import close_sessions, writers

import ckptlib
from ckptlib.saving.session import Session
from ckptlib.testing import write_plan

STATE = {"w": torch.arange(4.0)}


@contextmanager
def world() -> Iterator[None]:
    """Of this process alone."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        yield
    finally:
        dist.destroy_process_group()


@pytest.fixture(autouse=True)
def _closed() -> Iterator[None]:
    yield
    close_sessions()


def open_slots() -> int:
    gc.collect()  # what a closed session had goes with it, whenever that is collected
    links = (Path("/proc/self/fd", fd) for fd in os.listdir("/proc/self/fd"))
    return sum(link.is_symlink() and ".slot" in os.readlink(link) for link in links)


def steps(url: object) -> list[int]:
    return [info.step for info in ckptlib.checkpoints(str(url))]


def test_only_the_newest_has_a_writer_and_slots(tmp_path: Path) -> None:
    before, slots = writers(), open_slots()
    for step in (1, 2, 3):
        with world():
            ckptlib.save(tmp_path, STATE, step)
            assert ckptlib.load(tmp_path, STATE, strict=False).step == step
        assert len(writers() - before) == 1
        assert open_slots() - slots <= 2
    assert steps(tmp_path) == [1, 2, 3]


def test_a_process_that_has_one_for_a_while(tmp_path: Path) -> None:
    """The sessions of a process without a process group are closed, too: they would be superseded when it has none
    again."""
    ckptlib.save(tmp_path, STATE, 1)
    with world():
        ckptlib.save(tmp_path, STATE, 2)
    ckptlib.save(tmp_path, STATE, 3)
    assert steps(tmp_path) == [1, 2, 3]


def test_a_save_that_is_under_way_is_waited_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The next session would supersede it."""
    plan, close = tmp_path / "plan", Session.close
    url = f"fault+file://{tmp_path / 'root'}?plan={quote(str(plan))}"

    def let_go_on(session: Session, timeout: timedelta, clean: bool) -> None:
        write_plan(plan, [])
        close(session, timeout, clean)

    with world():
        write_plan(plan, [{"op": "commit", "key": "^packs/[0-9]+-000001-", "action": "hold"}])
        pending = ckptlib.save_async(url, STATE, 1)
    monkeypatch.setattr(Session, "close", let_go_on)
    with world():
        ckptlib.save(url, STATE, 2)
    write_plan(plan, [])
    pending.wait_committed()
    assert steps(tmp_path / "root") == [1, 2]
