"""What a rank that does not commit is told of a step that another one has committed."""

from __future__ import annotations

import os
import socket
from pathlib import Path

import pytest
from helpers.flushed import note_flushes
from support import make_generation, make_root, put_parts, state

from ckptlib.catalog.commit import Committer
from ckptlib.stores.local import LocalStore
from ckptlib.writer.channel import Channel
from ckptlib.writer.commits import Commits
from ckptlib.writer.failures import Failures
from ckptlib.writer.requests import Requests
from ckptlib.writer.trainer import Trainer
from ckptlib.writer.watchdog import Watchdog


def test_it_is_told_of_a_step_whose_name_is_durable(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The name is there a moment before the put returns by which rank 0 has given it."""
    catalog = make_root(LocalStore(str(tmp_path)))
    save, names = put_parts(catalog, make_generation(catalog), 10, state(10), 2)
    Committer(catalog).commit(save, names)
    flushed = note_flushes(monkeypatch)
    left, right = socket.socketpair()
    with left, right:
        channel, trainer = Channel(right), Trainer(os.getpid())
        trainer.deadline_s = 60.0
        watchdog = Watchdog(Requests(), 60.0, lambda work, request: None, lambda work, request: None)
        failures = Failures(channel, catalog.shared, 1, watchdog.slack_s)
        commits = Commits(channel, trainer, watchdog, failures, catalog, 2, None, None)
        commits.put_wait(save, 60.0)
        commits.finish()
        assert [event["event"] for event in Channel(left).receive(0)] == ["committed"]
    assert flushed == {f"{tmp_path}/steps", str(tmp_path)}, "the directory may be as new"
