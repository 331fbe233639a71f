"""What the writer warns of is in the log of the job."""

from __future__ import annotations

import logging
import socket
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

import ckptlib
from ckptlib.errors import SaveFailed
from ckptlib.stores.testing import write_plan
from ckptlib.writer import told_warnings as module
from ckptlib.writer.channel import Channel, Message
from ckptlib.writer.told_warnings import ALREADY_TOLD, MAX_TEXT, ToldWarnings

PATIENCE_S = 60.0


class Said:
    """A logger whose warnings are told, and what comes out at the other end."""

    def __init__(self) -> None:
        ours, theirs = socket.socketpair()
        self.end = Channel(theirs)
        self.handler = ToldWarnings(Channel(ours))
        self.log = logging.getLogger("ckptlib.told")
        self.log.addHandler(self.handler)

    def heard(self) -> list[Message]:
        return self.end.receive(0)


@pytest.fixture
def said() -> Iterator[Said]:
    said = Said()
    yield said
    said.log.removeHandler(said.handler)


def test_a_warning_is_told_with_its_level_and_logger(said: Said) -> None:
    said.log.info("routine")
    said.log.warning("pack %d of %s", 3, "a\nb")
    said.log.error("x" * 2 * MAX_TEXT)
    first, second = said.heard()
    assert first == {"event": "warned", "logger": "ckptlib.told", "level": logging.WARNING, "text": "pack 3 of a\nb"}
    assert (second["level"], second["text"]) == (logging.ERROR, "x" * MAX_TEXT)


def test_a_line_of_code_is_told_once_in_a_while(said: Said, monkeypatch: pytest.MonkeyPatch) -> None:
    now = [1000.0]
    monkeypatch.setattr(module, "time", SimpleNamespace(monotonic=lambda: now[0]))
    for step in range(6):
        said.log.warning("step %d waits", step)
        now[0] += module.TELL_AGAIN_S / 4
    said.log.warning("another line")
    assert [event["text"] for event in said.heard()] == ["step 0 waits", "step 4 waits", "another line"]


def test_what_the_trainer_hears_in_another_way_is_not_told(said: Said) -> None:
    said.log.error("step 3 failed", extra=ALREADY_TOLD)
    assert said.heard() == []


def test_a_trainer_that_is_gone_is_told_nothing(said: Said) -> None:
    said.end.close()
    said.log.warning("nobody reads this")


def test_a_sweep_that_may_not_delete_is_in_the_log_of_the_job(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    root, plan = tmp_path / "root", tmp_path / "plan.json"
    write_plan(plan, [{"op": "put", "key": "^trash", "action": "denied"}])
    state, keep = {"w": torch.zeros(10)}, ckptlib.Keep(last=1)
    with (
        caplog.at_level(logging.WARNING),
        ckptlib.Checkpointer(f"fault+file://{root}?plan={plan}", state, every=10**9, keep=keep) as ckpt,
    ):
        for step in (1, 2, 3):
            ckpt.save(step).wait_committed(PATIENCE_S)
    found = [r for r in caplog.records if "the writer process of rank 0: old steps could not be removed" in r.message]
    assert [(record.name, record.levelno) for record in found] == [("ckptlib.writer.commits", logging.WARNING)]
    assert [info.step for info in ckptlib.checkpoints(root)] == [1, 2, 3]


def test_a_failure_that_is_an_event_is_not_told_twice(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    root, plan = tmp_path / "root", tmp_path / "plan.json"
    write_plan(plan, [{"op": "commit", "key": "^packs", "action": "full"}])
    url = f"fault+file://{root}?plan={plan}"
    with caplog.at_level(logging.WARNING), ckptlib.Checkpointer(url, {"w": torch.zeros(10)}, every=10**9) as ckpt:
        with pytest.raises(SaveFailed):
            ckpt.save(1).wait_committed(PATIENCE_S)
        write_plan(plan, [])
        ckpt.save(2).wait_committed(PATIENCE_S)
    assert "the writer process of rank 0" not in caplog.text
