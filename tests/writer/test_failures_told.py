"""A save that fails where the store has no room even for a word about that, or is away: the trainer need not wait for
it, and the other ranks are told once the store takes it."""

from __future__ import annotations

import os
import socket
import threading
from pathlib import Path

import pytest
from helpers.tmpfs import tmpfs

from ckptlib.catalog.shared_documents import SharedDocuments
from ckptlib.errors import StoreError, StoreFull
from ckptlib.format.keys import SaveId, parse_save
from ckptlib.stores import open_store
from ckptlib.stores.local import LocalStore
from ckptlib.stores.testing import write_plan
from ckptlib.writer import failures
from ckptlib.writer.channel import Channel
from ckptlib.writer.failures import Failures
from ckptlib.writer.trainer import Trainer

SAVE: SaveId = parse_save("000000000002-000001-95a68bba")
LONG_S = 300.0


def test_it_is_told_before_there_is_room_to_publish_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(failures, "PAUSES_S", (0.01,) * 30_000)
    left, right = socket.socketpair()
    with tmpfs(tmp_path / "disk", 1 << 20) as disk, left, right:
        store = LocalStore(str(disk))
        store.put("there", b"something")
        fill(disk / "fill")
        told = Failures(Channel(right), SharedDocuments(store), 1, slack_s=LONG_S, trainer=trainer())
        giving_up = threading.Thread(target=told.give_up, args=(SAVE, StoreFull("no room")))
        giving_up.start()
        [event] = Channel(left).receive(LONG_S / 2)
        assert (event["event"], event["save"], event["error"]) == ("failed", str(SAVE), "no room")
        assert not any(str(SAVE) in entry.key for entry in store.scan(""))
        (disk / "fill").unlink()
        giving_up.join(LONG_S)
        assert any(str(SAVE) in entry.key for entry in store.scan(""))


def test_a_full_store_is_left_alone_some_time_after_the_trainer_is_gone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whoever finishes the save may have begun."""
    monkeypatch.setattr(failures, "PAUSES_S", (0.01, 0.02))
    left, right = socket.socketpair()
    with tmpfs(tmp_path / "disk", 1 << 20) as disk, left, right:
        store = LocalStore(str(disk))
        store.put("there", b"something")
        fill(disk / "fill")
        own = trainer()
        own.leave()
        publishing = threading.Thread(
            target=Failures(Channel(right), SharedDocuments(store), 1, LONG_S, own).publish, args=(SAVE, "no room")
        )
        publishing.start()
        publishing.join(LONG_S / 2)
        assert not publishing.is_alive()


@pytest.mark.parametrize("ends", ["not", "leaves", "is-killed"])
def test_it_is_published_when_the_store_is_back(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, ends: str) -> None:
    """Else rank 0 waits for the part until the deadline of the save, and commits no later step meanwhile. Not if the
    trainer is gone: whoever finishes the save may have begun. A trainer that is killed in its `close` counts as gone
    before its writer has finished its other orders."""
    monkeypatch.setattr(failures, "PAUSES_S", (0.01,))
    plan, left, right = tmp_path / "plan.json", *socket.socketpair()
    write_plan(plan, [{"op": "put", "action": "error"}])
    with left, right:
        store = open_store(f"fault+file://{tmp_path}/root?plan={plan}")
        own, before = trainer(), {*threading.enumerate()}
        told = Failures(Channel(right), SharedDocuments(store), 1, LONG_S, own)
        told.give_up(SAVE, StoreError("away"))  # returns while it is away
        [event] = Channel(left).receive(LONG_S / 2)
        assert (event["event"], event["save"], event["error"]) == ("failed", str(SAVE), "away")
        assert not any(str(SAVE) in entry.key for entry in store.scan(""))
        [publishing] = {*threading.enumerate()} - before
        if ends == "leaves":
            own.leave()
        elif ends == "is-killed":
            monkeypatch.setattr(Trainer, "dead", True)
        if ends != "not":
            publishing.join(LONG_S)
        write_plan(plan, [])
        publishing.join(LONG_S)
        assert not publishing.is_alive()
        assert any(str(SAVE) in entry.key for entry in store.scan("")) is (ends == "not")


def trainer() -> Trainer:
    found = Trainer(os.getppid())  # which lives, and is the parent, as a writer's trainer is
    found.deadline_s = LONG_S
    return found


def fill(path: Path) -> None:
    with path.open("wb", buffering=0) as file:
        try:
            while True:
                file.write(bytes(4096))
        except OSError:
            pass
